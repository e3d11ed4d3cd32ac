# SPDX-License-Identifier: Apache-2.0
"""Codes whose scales are extreme, requantized: subnormal scales, the largest ones, and columns of
zeros; the reference's bits in emulation and on a GPU."""

from __future__ import annotations

import shutil

import pytest
import torch

import q2compile.runtime_kernels as runtime_kernels
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED
from q2compile.runtime_kernels.numerics.transforms import get_transform, signs_of
from q2compile.runtime_kernels.registry import CUDA, REFERENCE, select
from tests.support import quantizer_calls as calls
from tests.support.emulation.on_cpu import assert_same_bits, launches_on_cpu
from tests.support.pairwise import pairwise

assert runtime_kernels  # importing it registers the ops

EDEN, RTN, SOURCE = "nvfp4_ms_eden_pow2", "nvfp4_pow2", "nvfp4_46_pow2"
SEED = torch.tensor(-1234567890123456789)
# Schemes and rotations: chunks of one, two, four and eight blocks.
WAYS = [
    (EDEN, "rht128"),
    (EDEN + DEQUANTIZED, "rht128"),
    (RTN, "rht64"),
    (EDEN, "h32"),
    (RTN, "rht16"),
]
RANGES = [(1, 1), (1, 65), (40, 104), (8, 126)]  # bytes of scales: the least and the largest


def operand(least: int, largest: int) -> tuple[torch.Tensor, ...]:
    """Codes of three tiles by five blocks, with scales of that range, both ends of it in each block
    of columns; columns of zeros alone, some of them negative; and 16 whose sums are as large as can
    be, of elements that the signs make positive, with some of the least scale between them."""
    generator = torch.Generator().manual_seed(least * 127 + largest)
    codes = torch.randint(0, 256, (300, 40), dtype=torch.uint8, generator=generator)
    scales = torch.randint(least, largest + 1, (300, 5), generator=generator)
    scales[::128] = least
    scales[1::128] = largest
    negative = signs_of(get_transform("rht128"), SEED, SEED.device) < 0
    codes[:, :8] = torch.where(negative.repeat(3)[:300, None], 0xFF, 0x77)  # 6
    few = torch.rand(300, generator=generator) < 0.1
    codes[few, :8] = codes[few, 8:16]
    scales[:, 0] = torch.where(few, least, largest)
    codes[:, 16:20] = 0x80  # 0 and -0
    scales[5:9, 3] = 0
    return codes, scales.to(torch.uint8).view(torch.float8_e4m3fn), torch.tensor(2.0**-3)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_in_emulation(monkeypatch) -> None:
    launches_on_cpu(monkeypatch, "sm_90a")
    for (least, largest), (scheme, transform) in pairwise(RANGES, WAYS):
        call = calls.again(*operand(least, largest), SEED, SOURCE, scheme, transform, 80, 1)
        args = call.positional
        assert_same_bits(calls.launched(call), select("requantize", args, REFERENCE)(*args))


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    for (least, largest), (scheme, transform) in pairwise(RANGES, WAYS):
        parts = [part.cuda() for part in operand(least, largest)]
        args = calls.again(*parts, SEED.cuda(), SOURCE, scheme, transform, 80, 1).positional
        got, want = (select("requantize", args, name)(*args) for name in (CUDA, REFERENCE))
        assert_same_bits(got, want)
