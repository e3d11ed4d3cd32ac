# SPDX-License-Identifier: Apache-2.0
"""The PTX of the kernels for Blackwell, run on a CPU (tests/support/ptx), against the torch
reference, bit by bit. test_ptx_training.py has the kernels that training a linear launches; here
are the others, other dtypes and other rows.

One shape for each kernel and kind of operand: rows and columns end within a tile, and one thread
block loops over all tiles. The tests of the emulation have more shapes and schemes; this runs them
all on PTX, in some 20 minutes:

    Q2_TEST_PTX=1 python -m pytest tests/runtime_kernels/cuda/test_cuda_emulated.py \\
        tests/runtime_kernels/cuda/test_*_emulated.py tests/runtime_kernels/cuda/test_dbias.py \\
        tests/runtime_kernels/cuda/test_grouped_launch.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from q2compile.runtime_kernels.cuda import other_ops
from q2compile.runtime_kernels.cuda.calls import BoundCall, tensors_of
from q2compile.runtime_kernels.cuda.gemm import grouped_mm
from q2compile.runtime_kernels.cuda.gemm.swizzle import swizzled
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.runtime_kernels.cuda.quantize import plan, quantizers
from q2compile.runtime_kernels.cuda.quantize.grouped_launch import grouped_plan
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SWIZZLED, get_scheme
from q2compile.runtime_kernels.numerics.swizzle import swizzle_32x4x4
from q2compile.runtime_kernels.ops.gemm import Factor
from q2compile.runtime_kernels.ops.table import QuantizerCall
from tests.support import ptx
from tests.support import quantizer_calls as calls
from tests.support.emulation.on_cpu import assert_same_bits, matrix, pretend_device
from tests.support.emulation.random_bits import close_to_their_random_bits
from tests.support.planted_faults import FAULTS
from tests.support.quantizer_calls import SEEDS

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings", exc_type=ImportError)

q2 = torch.ops.q2
EDEN, EXACT_EDEN, FORWARD = "nvfp4_ms_eden_pow2", "nvfp4_ms_eden", "nvfp4_46_pow2"
BLACKWELL = "sm_100a"


@pytest.fixture(autouse=True)
def one_thread_block(monkeypatch) -> None:
    """One thread block for each kernel that loops over tiles."""
    ptx.serve(monkeypatch, BLACKWELL)
    pretend_device(monkeypatch, room=228 * 1024, multiprocessors=1)
    shape = plan.thread_shape
    monkeypatch.setattr(plan, "thread_shape", lambda spec, rows: (shape(spec, rows)[0], 1))


def agree(call: QuantizerCall) -> None:
    assert_same_bits(calls.launched(call), call())


@pytest.mark.parametrize(
    "scheme, transform, dtype",
    [
        (EDEN + SWIZZLED, "rht128", torch.float16),
        (EXACT_EDEN, "rht128", torch.float32),
        (EDEN + DEQUANTIZED, "rht128", torch.bfloat16),
        ("nvfp4_sr_pow2" + SWIZZLED, "rht128", torch.bfloat16),
        ("nvfp4_sr", "rht16", torch.bfloat16),
        ("nvfp4_pow2", "rht16", torch.float16),
        ("mxfp4_rtn34", "rht32", torch.float32),
        ("nvfp4_sr_clip_pow2", "rht32_fixed", torch.bfloat16),
    ],
)
def test_rowwise_and_columnwise(scheme, transform, dtype) -> None:
    """The operands that a backward pass quantizes afresh."""
    agree(calls.both(matrix(140, 136, dtype), *SEEDS, scheme, transform, 3))


def test_columnwise() -> None:
    agree(calls.one(matrix(140, 136), SEEDS[0], "nvfp4_sr" + SWIZZLED, "rht16", True, 1))


@pytest.mark.parametrize(
    "scheme, dtype",
    [
        (FORWARD, torch.bfloat16),
        (FORWARD + SWIZZLED, torch.float32),
        ("nvfp4_46", torch.float16),
        ("nvfp4_search_pow2", torch.bfloat16),
        ("nvfp4_sr", torch.bfloat16),
    ],
)
def test_rowwise(scheme, dtype) -> None:
    """The operands of a forward pass, and rows that do not start on 16 bytes."""
    x = matrix(140, 133, dtype)
    agree(calls.with_amax(x, SEEDS[0], scheme))


@pytest.mark.parametrize("scheme", ["mxfp4_quest", "mxfp4_quest" + SWIZZLED])
def test_with_a_trust_mask(scheme) -> None:
    agree(calls.masked(matrix(130, 160), scheme, "h32"))


@pytest.mark.parametrize(
    "source, scheme, transform",
    [
        ("nvfp4_16x16", EXACT_EDEN, "rht128"),
        (FORWARD + SWIZZLED, "nvfp4_sr_pow2", "rht128"),
        ("nvfp4", "nvfp4_sr", "rht16"),
        ("mxfp4_rtn", "mxfp4_rtn34" + SWIZZLED, "rht32"),
    ],
)
def test_requantize(source, scheme, transform) -> None:
    x = matrix(145, 136)
    packed = calls.with_amax(x, None, source)()
    agree(calls.again(*packed, SEEDS[0], source, scheme, transform, 136, 1))


def test_requantize_by_scales() -> None:
    x = matrix(145, 136)
    scales = calls.plain(x, None, None, FORWARD + SWIZZLED)()[1:]
    agree(calls.by_scales(x, *scales, SEEDS[0], FORWARD + SWIZZLED, EDEN, "rht128", 1))


def test_groups() -> None:
    """Chunks filled with copies, empty groups, rows of no group."""
    offs = torch.tensor([3, 20, 20, 90, 130], dtype=torch.int32)
    groups = offs, q2.padded_ends(offs)
    agree(calls.grouped_both(matrix(140, 136), *groups, *SEEDS, EDEN, "rht128", 3))


def test_with_dbias() -> None:
    agree(calls.both(matrix(300, 72), *SEEDS, "mxfp4_sr", "rht64", 3, dbias=torch.float32))


def test_batched_launches() -> None:
    """Operands of different sizes, and one launch for the scales of all."""
    sizes = (140, 136), (3, 64)
    members = [calls.plain(matrix(*size), None, None, FORWARD + SWIZZLED) for size in sizes]
    ops = [getattr(quantizers, call.spec.name) for call in members]
    call = grouped_plan([op.plan(*c.positional) for op, c in zip(ops, members, strict=True)])
    assert [step.grid[1] for step in call.steps] == [2, 2]
    outputs = [torch.empty(o.shape, dtype=o.dtype) for o in call.outputs]
    operands = [t for c in members for t in tensors_of(c.positional)]
    BoundCall(call, 0)([*operands, *outputs])
    assert_same_bits(outputs, [output for c in members for output in c()])


@pytest.mark.parametrize(
    "scheme, dtype, cols",
    [
        (FORWARD, torch.bfloat16, 72),
        ("nvfp4_16x16", torch.float32, 80),
        ("mxfp4_rtn", torch.float16, 96),
    ],
)
def test_dequantize(scheme, dtype, cols) -> None:
    x = matrix(40, cols, torch.float32)
    packed = calls.with_amax(x, None, scheme)()
    args = (*packed, scheme, cols, dtype)
    assert_same_bits((other_ops.dequantize(*args),), (q2.dequantize(*args),))


@pytest.mark.parametrize("is_swizzled", [False, True])
def test_transpose(is_swizzled) -> None:
    codes, scales, _ = calls.plain(matrix(130, 200), None, None, "nvfp4_16x16_pow2")()
    args = (codes, scales, "nvfp4_16x16_pow2", 200, is_swizzled)
    assert_same_bits(other_ops.transpose(*args), q2.transpose(*args))


def test_swizzled_scales() -> None:
    scales = torch.randint(0, 127, (200, 9), dtype=torch.uint8).view(torch.float8_e4m3fn)
    got = swizzled(Factor(torch.empty(200, 0), scales, None, get_scheme("nvfp4")))
    assert_same_bits((got,), (swizzle_32x4x4(scales),))


@pytest.mark.parametrize("scheme", [FORWARD, "nvfp4_pow2" + SWIZZLED])
def test_split_scales(scheme) -> None:
    """partial_max.cu, and align_scales.cu after it."""
    raw = torch.randn((300, 41), generator=torch.Generator().manual_seed(1)).mul(4).exp()
    assert_same_bits(other_ops.split_scales(raw, scheme), q2.split_scales(raw, scheme))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masked_unrotate(dtype) -> None:
    *_, mask = calls.masked(matrix(66, 96), "mxfp4_quest", "h32")()
    args = (matrix(66, 96, dtype), mask, "h32")
    assert_same_bits((other_ops.masked_unrotate(*args),), (q2.masked_unrotate(*args),))


def test_signs() -> None:
    assert_same_bits((other_ops.signs(SEEDS[0], "rht128"),), (q2.signs(SEEDS[0], "rht128"),))


def test_zeros_in_rows_of_no_group() -> None:
    out = torch.ones((70, 24), dtype=torch.bfloat16)
    grouped_mm.zero_rows(out, torch.tensor([3, 41], dtype=torch.int32))
    assert out[:41].eq(1).all() and out[41:].eq(0).all()


def test_random_bits_close_to_their_fractions() -> None:
    x = close_to_their_random_bits(SEEDS[0], 8, 64)
    agree(calls.plain(x, None, SEEDS[0], "nvfp4_sr_pow2", 1))


@pytest.mark.parametrize(
    "fault", [f for f in FAULTS if Path(f.file).name == "ptx.cuh"], ids=lambda fault: fault.name
)
def test_faults_in_blackwell_s_branch_are_caught(fault, monkeypatch) -> None:
    """The emulation and a Hopper compile other code in its place."""
    headers = nvrtc.common_headers()
    planted = {**headers, "ptx.cuh": fault.planted(headers["ptx.cuh"])}
    monkeypatch.setattr(nvrtc, "common_headers", lambda: planted)
    ptx.compiled.cache_clear()
    try:
        with pytest.raises(AssertionError, match=r"bytes of .* differ|griddepcontrol\.wait"):
            agree(calls.plain(matrix(40, 72), None, None, FORWARD))
    finally:
        ptx.compiled.cache_clear()


@pytest.mark.parametrize(
    "architecture, kib", [("sm_103a", 228), ("sm_110f", 228), ("sm_120f", 100), ("sm_121a", 100)]
)
def test_other_blackwells(architecture, kib, monkeypatch) -> None:
    """Their PTX is not always the same; those with less shared memory hold one tile at a time."""
    ptx.serve(monkeypatch, architecture)
    pretend_device(monkeypatch, 1024 * kib, multiprocessors=1)
    agree(calls.both(matrix(140, 136), *SEEDS, EDEN + SWIZZLED, "rht128", 3))
    if kib == 228:
        agree(calls.plain(matrix(40, 72), None, None, FORWARD))
