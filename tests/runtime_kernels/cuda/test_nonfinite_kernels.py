# SPDX-License-Identifier: Apache-2.0
"""CUDA kernels on a GPU with NaN and Inf, against the torch reference on the CPU: the same bits,
but for the codes of poisoned blocks. test_nonfinite_emulated.py has the same without a GPU."""

from __future__ import annotations

import pytest
import torch

import q2compile.runtime_kernels as runtime_kernels
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SWIZZLED
from q2compile.runtime_kernels.ops.table import QuantizerCall
from q2compile.runtime_kernels.registry import CUDA, REFERENCE, select
from tests.support import quantizer_calls as calls
from tests.support.nonfinite import VALUES, assert_same, with_bad
from tests.support.quantizer_calls import SEEDS

assert runtime_kernels  # importing it registers the ops
q2 = torch.ops.q2
pytestmark = pytest.mark.gpu
each_value = pytest.mark.parametrize("value", VALUES)

EDEN, FORWARD = "nvfp4_ms_eden_pow2", "nvfp4_46_pow2"


def agree(call: QuantizerCall) -> None:
    """The kernel's results on the GPU and the reference's on the CPU."""
    name, args = call.spec.name, call.positional
    on_gpu = [a.cuda() if isinstance(a, torch.Tensor) else a for a in args]
    got = select(name, on_gpu, CUDA)(*on_gpu)
    assert_same([t.cpu() for t in got], select(name, args, REFERENCE)(*args), call.scheme.name)


def matrix(value: float) -> torch.Tensor:
    x = torch.randn((300, 200), generator=torch.Generator().manual_seed(7)).bfloat16()
    return with_bad(x, value)


@each_value
def test_both_directions(value) -> None:
    for scheme, transform in [
        *((EDEN + form, "rht128") for form in ("", DEQUANTIZED, SWIZZLED)),
        *((scheme, "rht16") for scheme in ("nvfp4_sr_pow2", "nvfp4_sr", "nvfp4_sr" + DEQUANTIZED)),
        *((scheme, "rht64") for scheme in ("mxfp4_sr", "mxfp4_sr" + DEQUANTIZED)),
        *((scheme, "none") for scheme in ("nvfp4_ms_eden", FORWARD)),
    ]:
        agree(calls.both(matrix(value), *SEEDS, scheme, transform, 3))


@each_value
@pytest.mark.parametrize("scheme", [FORWARD, "mxfp4_rtn34", FORWARD + DEQUANTIZED, "nvfp4"])
def test_quantize(scheme, value) -> None:
    x = matrix(value)
    agree(calls.plain(x, q2.amax(x) if scheme == "nvfp4" else None, None, scheme))


@each_value
def test_quantize_masked(value) -> None:
    agree(calls.masked(matrix(value), "mxfp4_quest", "h32"))


@each_value
@pytest.mark.parametrize("scheme", [EDEN, EDEN + DEQUANTIZED])
@pytest.mark.parametrize("source", [FORWARD, FORWARD + SWIZZLED])
def test_requantize(source, scheme, value) -> None:
    x = matrix(value)
    packed = calls.plain(x, None, None, source, 0)()
    args = (SEEDS[0], source, scheme, "rht128")
    agree(calls.again(*packed, *args, 200, 1))
    agree(calls.by_scales(x, *packed[1:], *args, 1))


@each_value
@pytest.mark.parametrize("scheme", [EDEN, EDEN + DEQUANTIZED])
def test_groups(scheme, value) -> None:
    offs = torch.tensor([3, 20, 20, 170, 230, 290], dtype=torch.int32)
    groups = offs, q2.padded_ends(offs)
    args = (matrix(value), *groups, *SEEDS, scheme, "rht128", 3)
    agree(calls.grouped_both(*args))


def test_split_scales() -> None:
    """The byte of a NaN scale, whatever its sign and payload."""
    bits = torch.tensor([[0x3F800000, 0x7FFFFFFF], [-1, 0x40000000]], dtype=torch.int32)
    raw = bits.view(torch.float32)
    scales, unit = (t.cpu() for t in q2.split_scales(raw.cuda(), FORWARD))
    assert torch.equal(scales.view(torch.uint8) == 0x7F, raw.isnan()) and unit == 2.0**-7
