# SPDX-License-Identifier: Apache-2.0
"""One quantizer call with columns rotated and rows unrotated, emulated on a CPU: the bits of the
two calls that it replaces, and of its reference."""

from __future__ import annotations

import pytest
import torch

from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import not_served
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SWIZZLED, get_scheme
from tests.support import quantizer_calls as calls
from tests.support.emulation.on_cpu import assert_agrees, assert_same_bits, matrix
from tests.support.quantizer_calls import SEEDS

pytestmark = pytest.mark.usefixtures("on_cpu")

q2 = torch.ops.q2
HOPPER, BLACKWELL = "sm_90a", "sm_100a"


# Columns alone are rotated: schemes and transforms. Codes of x are saved, so never dequantized.
COLUMNS_ALONE = [
    *(("nvfp4_pow2" + SWIZZLED, "rht16"), ("nvfp4", "rht16_fixed")),
    *(("nvfp4_sr_pow2" + form, "rht16") for form in ("", SWIZZLED, DEQUANTIZED)),
    ("mxfp4_sr", "rht32"),
]


# Where results go does not depend on the conversion instructions: one case for Blackwell's.
@pytest.mark.parametrize(
    "scheme, transform, architecture",
    [*((*case, HOPPER) for case in COLUMNS_ALONE), (*COLUMNS_ALONE[2], BLACKWELL)],
)
def test_columns_alone_rotated(scheme, transform, architecture) -> None:
    """One read gives the results of two calls: for whole vectors, rows at any address, a transposed
    x, other dtypes, and groups of rows. How x is read does not depend on the rounding."""
    how = (*SEEDS, scheme, transform, 3)
    row, column = (SEEDS[0], scheme, "none", False, 3), (SEEDS[1], scheme, transform, True, 3)
    dtype = torch.float16 if get_scheme(scheme).swizzled else torch.float32
    other = matrix(130, 72).clamp(-1e4, 1e4).to(dtype)
    others = [matrix(33, 517), matrix(140, 300).t(), other]
    every_read = architecture == HOPPER and (scheme, transform) in COLUMNS_ALONE[::3]
    for x in (matrix(300, 264), *(others if every_read else ())):
        got = calls.launched(calls.both(x, *how, rotate_rows=False))
        assert_same_bits(got, [*calls.one(x, *row)(), *calls.one(x, *column)()])
        assert_same_bits(got, calls.both(x, *how, rotate_rows=False)())
    spec = get_scheme(scheme)
    if architecture == HOPPER and not (spec.swizzled and spec.global_scale != "pow2"):
        offs = torch.tensor([0, 70, 200], dtype=torch.int32)
        groups = {"offs": offs, "padded_offs": q2.padded_ends(offs)}
        assert_agrees(calls.both(matrix(210, 72), *how, rotate_rows=False, **groups))


def test_sums_of_columns_alone_rotated() -> None:
    for scheme in ("nvfp4_sr_pow2", "nvfp4_sr_pow2" + DEQUANTIZED):
        how = {"rotate_rows": False, "dbias": torch.bfloat16}
        assert_agrees(calls.both(matrix(300, 264), *SEEDS, scheme, "rht16", 0, **how))


@pytest.mark.parametrize(
    "scheme, transform", [("nvfp4_ms_eden_pow2", "rht16"), ("nvfp4_sr_pow2", "rht128")]
)
def test_kernels_rotate_rows_of_these_too(scheme, transform) -> None:
    """MS-EDEN applies the norm behind the codes, and chunks of 128 have an order of raw scales."""
    assert not_served(scheme, transform) is None
    assert not_served(scheme, transform, rotates_rows=False)


@pytest.mark.parametrize(
    "wrong", [{"columnwise": False}, {"rowwise": False}, {"transform": "none"}]
)
def test_rotate_rows_is_of_two_directions(wrong) -> None:
    call = calls.both(matrix(32, 32), *SEEDS, "nvfp4_pow2", "rht16", rotate_rows=False)
    with pytest.raises(AssertionError, match="rows are left unrotated"):
        call.replace(**wrong)()
