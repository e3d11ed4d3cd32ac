# SPDX-License-Identifier: Apache-2.0
"""The quantizers of rows in groups on a CPU (tests/support/emulation), against the torch reference,
bit by bit."""

from __future__ import annotations

import pytest
import torch

from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SWIZZLED, get_scheme
from tests.support import quantizer_calls as calls
from tests.support.emulation.on_cpu import assert_agrees, assert_same_bits, matrix
from tests.support.quantizer_calls import SEEDS

pytestmark = pytest.mark.usefixtures("on_cpu")

q2 = torch.ops.q2
POW2, EXACT = "nvfp4_ms_eden_pow2", "nvfp4_ms_eden"
AMPERE, HOPPER, BLACKWELL = "sm_80", "sm_90a", "sm_100a"
# Each way to fill a chunk, empty groups at both ends and between, more than a chunk, and rows of no
# group: less than a tile, and more.
ROUTINGS = {
    "every filling": ([0, 1, 3, 8, 9, 16, 17, 0, 33, 64, 65, 130, 0], 20),
    "one group": ([70], 0),
    "nothing but rows of no group": ([0, 0], 150),
    "more groups than lanes": ([2] * 37 + [0, 70], 3),
}


def routed(routing: str) -> tuple[int, tuple[torch.Tensor, torch.Tensor]]:
    """The number of rows, and the ends of the groups."""
    sizes, more = ROUTINGS[routing]
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    return sum(sizes) + more, (offs, q2.padded_ends(offs))


# Any routing of one kernel, and for the others those that need another path of theirs.
MS_EDEN = [
    *((routing, POW2, HOPPER) for routing in ROUTINGS),
    *(("every filling", POW2, other) for other in (AMPERE, BLACKWELL)),
    *((routing, EXACT, HOPPER) for routing in ("every filling", "nothing but rows of no group")),
    *((r, POW2 + DEQUANTIZED, HOPPER) for r in ("every filling", "more groups than lanes")),
]


@pytest.mark.parametrize("routing, scheme, architecture", MS_EDEN)
def test_ms_eden(routing, scheme) -> None:
    rows, groups = routed(routing)
    x = matrix(rows, 150)
    args = (x, *groups, *SEEDS, scheme, "rht128", 3)
    got = calls.launched(calls.grouped_both(*args))
    assert_same_bits(got, calls.grouped_both(*args)())
    one = calls.launched(calls.grouped(x, *groups, SEEDS[1], scheme, "rht128", 3))
    assert_same_bits(one, got[3:])


@pytest.mark.parametrize(
    "scheme, transform",
    [
        *((s, "rht16") for s in ("nvfp4_sr_pow2", "nvfp4_sr", "nvfp4_pow2")),
        *(("mxfp4_sr", "rht64"), ("mxfp4_rtn34", "rht32"), (POW2, "none")),
        *(("nvfp4_sr_pow2" + DEQUANTIZED, "rht16"), (POW2 + SWIZZLED, "rht128")),
    ],
)
def test_other_schemes(scheme, transform) -> None:
    rows, groups = routed("every filling")
    args = (matrix(rows, 150), *groups, *SEEDS, scheme, transform, 3)
    assert_agrees(calls.grouped_both(*args))


@pytest.mark.parametrize(
    "scheme, transform",
    [
        *((s, "rht128") for s in ("nvfp4_pow2", "nvfp4_sr", "mxfp4_rtn34", POW2 + DEQUANTIZED)),
        *(("nvfp4_sr_pow2", "rht16"), ("nvfp4", "rht32"), ("mxfp4_sr", "rht16")),
    ],
)
def test_rows_of_no_group_are_zeros_without_a_sign(scheme, transform) -> None:
    """The rotation of zeros would give about one negative zero in twenty, for any seed."""
    rows, groups = routed("one group")
    for seed in range(4):
        args = (matrix(rows, 40), *groups, torch.tensor(seed), scheme, transform, 3)
        got = calls.launched(calls.grouped(*args))
        assert_same_bits(got, calls.grouped(*args)())
        assert not got[0][:, got[0].shape[1] // 2 :].view(torch.uint8).any()


def test_exact_scales_without_a_global_scale() -> None:
    """All are NaN, those of rows of no group included."""
    rows, groups = routed("one group")
    codes, scales, _ = calls.plain(matrix(rows, 40), None, None, "nvfp4_pow2")()
    unit = torch.tensor(torch.nan)
    how = SEEDS[0], "nvfp4_pow2", "nvfp4_sr", "rht128", 40, 3
    call = calls.grouped_again(codes, scales, unit, *groups, *how)
    for made in (calls.launched(call), call()):
        assert made[1].float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype) -> None:
    rows, groups = routed("every filling")
    args = (matrix(rows, 40, dtype), *groups, *SEEDS, POW2, "rht128", 0)
    assert_agrees(calls.grouped_both(*args))


@pytest.mark.parametrize("x", [matrix(300, 130)[:, 1:], matrix(130, 300).t()])
def test_other_strides(x) -> None:
    offs = torch.tensor([100, 290], dtype=torch.int32)
    args = (x, offs, q2.padded_ends(offs), SEEDS[0], POW2, "rht128", 0)
    assert_agrees(calls.grouped(*args))


@pytest.mark.parametrize(
    "source, scheme, transform, architecture",
    [
        ("nvfp4_46_pow2", POW2, "rht128", HOPPER),
        ("nvfp4_46_pow2", POW2 + DEQUANTIZED, "rht128", HOPPER),
        ("nvfp4_46_pow2", POW2, "rht128", BLACKWELL),
        ("nvfp4_46", EXACT, "rht128", HOPPER),
        ("nvfp4_pow2", "nvfp4_sr_pow2", "rht128", HOPPER),
        ("mxfp4_rtn", "mxfp4_rtn34", "rht32", HOPPER),
        ("nvfp4_46_pow2" + SWIZZLED, POW2, "rht128", HOPPER),
    ],
)
def test_requantize(source, scheme, transform) -> None:
    rows, groups = routed("every filling")
    x = matrix(rows, 200)
    amax = q2.amax(x) if get_scheme(source).takes_amax else None
    packed = q2.quantize(x, scheme=source, rowwise=True, columnwise=False, amax=amax)
    args = (*packed, *groups, SEEDS[0], source, scheme, transform, 200, 1)
    assert_agrees(calls.grouped_again(*args))


def test_values_of_subnormal_scales() -> None:
    """Copies too: columns from 1e-38 to 1e-3."""
    rows, groups = routed("every filling")
    x = matrix(rows, 144, torch.float32) * torch.logspace(-38, -3, 144)
    args = (x, *groups, SEEDS[0], POW2 + DEQUANTIZED, "rht128", 0)
    assert_agrees(calls.grouped(*args))


def test_rows_of_no_group_poison_their_own_direction_alone() -> None:
    rows, groups = routed("every filling")
    x = matrix(rows, 140)
    x[rows - 1, 7] = float("nan")
    results = calls.launched(calls.grouped_both(x, *groups, *SEEDS, POW2, "rht128", 0))
    assert results[1].float().isnan().any() and results[4].float().isfinite().all()
    x[5, 7] = float("inf")
    scales = calls.launched(calls.grouped(x, *groups, SEEDS[0], POW2, "rht128", 0))[1]
    assert scales.float().isnan().any()


@pytest.mark.parametrize("rows, columns", [(0, 40), (40, 0)])
def test_empty(rows, columns) -> None:
    offs = torch.tensor([rows // 2, rows], dtype=torch.int32)
    x = torch.empty((rows, columns), dtype=torch.bfloat16)
    args = (x, offs, q2.padded_ends(offs), *SEEDS, POW2, "rht128", 0)
    assert_agrees(calls.grouped_both(*args))
