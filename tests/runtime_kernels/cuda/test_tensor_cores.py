# SPDX-License-Identifier: Apache-2.0
"""Codes that tensor cores rotate (tensor_cores.cuh), requantized: the reference's bits where all
sums are exact, where they just are not, and of columns of zeros; in emulation, whose products add
up in double and in another order, and on a GPU."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import q2compile.runtime_kernels as runtime_kernels
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import (
    SOURCES,
    RotatingKernel,
    rotate_launch,
)
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, get_scheme
from q2compile.runtime_kernels.numerics.transforms import get_transform, signs_of
from q2compile.runtime_kernels.ops.table import QuantizerCall
from q2compile.runtime_kernels.registry import CUDA, REFERENCE, select
from tests.support import disassemble
from tests.support import quantizer_calls as calls
from tests.support.emulation.on_cpu import assert_same_bits, launches_on_cpu
from tests.support.nonfinite import assert_same
from tests.support.pairwise import pairwise

assert runtime_kernels  # importing it registers the ops

EDEN, RTN, SOURCE = "nvfp4_ms_eden_pow2", "nvfp4_pow2", "nvfp4_46_pow2"
SEED = torch.tensor(-1234567890123456789)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
# Schemes and rotations: chunks of one, two, four and eight blocks.
WAYS = [
    (EDEN, "rht128"),
    (EDEN + DEQUANTIZED, "rht128"),
    (RTN, "rht64"),
    (EDEN, "h32"),
    (RTN, "rht16"),
]
# Bytes of scales: the least and the largest. Products serve to a distance of 64, a factor of 2^8.
FARTHEST = 64
RANGES = [(1, 1), (1, 65), (1, 66), (40, 104), (40, 105), (20, 110), (60, 126), (8, 126)]


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
    scales = scales.to(torch.uint8).view(torch.float8_e4m3fn)
    return codes, scales, torch.tensor(2.0**-3)


def requantizing(parts: Sequence[Tensor], scheme: str, transform: str) -> QuantizerCall:
    return calls.again(*parts, SEED, SOURCE, scheme, transform, 80, 1)


def by_kernel(name: str, call: QuantizerCall) -> list[Tensor]:
    args = call.positional
    return select("requantize", args, name)(*args)


@needs_compiler
def test_in_emulation(monkeypatch) -> None:
    launches_on_cpu(monkeypatch, "sm_90a")
    for (least, largest), (scheme, transform) in pairwise(RANGES, WAYS):
        call = requantizing(operand(least, largest), scheme, transform)
        assert_same_bits(calls.launched(call), by_kernel(REFERENCE, call))


@needs_compiler
def test_scales_that_are_not_numbers(monkeypatch) -> None:
    launches_on_cpu(monkeypatch, "sm_90a")
    codes, scales, global_scale = operand(60, 100)
    scales.view(torch.uint8)[7] = 0x7F
    call = requantizing((codes, scales, global_scale), EDEN, "rht128")
    assert_same(calls.launched(call), by_kernel(REFERENCE, call), EDEN)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    for (least, largest), (scheme, transform) in pairwise(RANGES, WAYS):
        parts = [part.cuda() for part in operand(least, largest)]
        call = requantizing(parts, scheme, transform).replace(columnwise_seed=SEED.cuda())
        assert_same_bits(by_kernel(CUDA, call), by_kernel(REFERENCE, call))


def test_sums_of_scales_so_far_apart_are_exact() -> None:
    """In 23 bits, of the 24 that a sum has: of 128 elements of 6 times the largest, in units of the
    last bit of half the least. (What is lost where they are not changes few codes, if any: the
    tests above would hardly see it.)"""
    e4m3 = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    last_bit = 2.0 ** (e4m3.log2().floor().clamp(min=-6) - 3) / 2
    assert (128 * 6 * e4m3[FARTHEST:] / last_bit[:-FARTHEST]).max() < 2**23


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("rotation, products", [("rht128", 16), ("none", 0)])
def test_products(rotation, products, architecture) -> None:
    """Counts of 16x16 and 16x8 products: for each of two groups of four blocks of 16 columns, and
    for each four elements of their blocks, two pairs of the results."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings", exc_type=ImportError)
    transform = get_transform(rotation)
    kernel = RotatingKernel(SOURCES["nvfp4"], transform, get_scheme(EDEN), False, True)
    launch = rotate_launch(kernel)
    try:
        code = disassemble.disassemble(nvrtc.cubin(launch.variant, architecture))
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert code.count("HMMA.16816") == products
