# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels on a CPU (tests/support/emulation) with NaN and Inf: the reference's bits, but
for the codes of poisoned blocks (numerics/blocks.py)."""

from __future__ import annotations

import pytest
import torch

from q2compile.runtime_kernels.cuda import other_ops
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SWIZZLED, get_scheme
from tests.support import quantizer_calls as calls
from tests.support.emulation.on_cpu import assert_same_bits, matrix
from tests.support.nonfinite import VALUES, assert_same, with_bad
from tests.support.quantizer_calls import SEEDS

pytestmark = pytest.mark.usefixtures("on_cpu")

q2 = torch.ops.q2
EDEN, EXACT_EDEN = "nvfp4_ms_eden_pow2", "nvfp4_ms_eden"
AMPERE, HOPPER, BLACKWELL = "sm_80", "sm_90a", "sm_100a"

each_value = pytest.mark.parametrize("value", VALUES)


ROTATED = [
    *((scheme, "rht128") for scheme in (EDEN, EXACT_EDEN, EDEN + DEQUANTIZED, EDEN + SWIZZLED)),
    *((scheme, "rht16") for scheme in ("nvfp4_sr_pow2", "nvfp4_sr", "nvfp4_pow2", "nvfp4")),
    *((scheme, "rht16") for scheme in ("nvfp4_sr_pow2" + DEQUANTIZED, "nvfp4_sr" + DEQUANTIZED)),
    *(("mxfp4_sr", "rht64"), ("mxfp4_rtn34", "rht32"), ("mxfp4_sr" + DEQUANTIZED, "rht64")),
    *(("nvfp4" + SWIZZLED, "rht16"), ("mxfp4_rtn34" + SWIZZLED, "rht32")),
    *((scheme, "none") for scheme in ("nvfp4_46_pow2", "nvfp4_sr", "mxfp4_rtn", EDEN)),
    ("nvfp4_46_pow2" + DEQUANTIZED, "none"),
]


@pytest.mark.parametrize(
    ("scheme", "transform", "architecture"),
    [(*case, HOPPER) for case in ROTATED]
    + [(*ROTATED[i], AMPERE) for i in (0, 6)]
    + [(*ROTATED[i], BLACKWELL) for i in (3, 6)],
)
def test_both_directions(scheme, transform) -> None:
    for value in VALUES:
        args = (with_bad(matrix(300, 200), value), *SEEDS, scheme, transform, 3)
        assert_same(calls.launched(calls.both(*args)), calls.both(*args)(), scheme)


# Any two of dtype, direction and scheme meet.
@pytest.mark.parametrize(
    "dtype, transpose, scheme",
    [
        *((torch.float16, False, EDEN), (torch.float16, True, "nvfp4")),
        *((torch.float32, True, EDEN), (torch.float32, False, "nvfp4")),
    ],
)
def test_other_dtypes(dtype, transpose, scheme) -> None:
    for value in VALUES:
        x = with_bad(matrix(300, 200, dtype), value)
        args = (x, SEEDS[0], scheme, "rht128", transpose, 0)
        assert_same(calls.launched(calls.one(*args)), calls.one(*args)(), scheme)


@pytest.mark.parametrize(
    ("scheme", "architecture"),
    [
        *((s, HOPPER) for s in ("nvfp4_46_pow2", "nvfp4_46", "nvfp4_sr")),
        *((s, HOPPER) for s in ("nvfp4_search_pow2", "nvfp4_search")),
        *(("nvfp4_46_pow2", other) for other in (AMPERE, BLACKWELL)),
        *(("nvfp4", other) for other in (AMPERE, BLACKWELL)),
        *((s + DEQUANTIZED, HOPPER) for s in ("nvfp4_pow2", "nvfp4", "mxfp4_rtn")),
        *((s + SWIZZLED, HOPPER) for s in ("nvfp4_46_pow2", "nvfp4_46", "mxfp4_rtn34")),
    ],
)
def test_quantize(scheme) -> None:
    spec = get_scheme(scheme)
    for value in VALUES:
        x = with_bad(matrix(145, 200), value)
        amax = q2.amax(x) if spec.takes_amax else None
        args = (x, amax, SEEDS[0] if spec.stochastic else None, scheme, 0)
        assert_same(calls.launched(calls.plain(*args)), calls.plain(*args)(), scheme)


@pytest.mark.parametrize("transform, architecture", [("h32", HOPPER), ("none", BLACKWELL)])
def test_quantize_masked(transform) -> None:
    for value in VALUES:
        args = (with_bad(matrix(130, 200), value), "mxfp4_quest", transform)
        got, want = calls.launched(calls.masked(*args)), calls.masked(*args)()
        assert_same(got, want, "mxfp4_quest")


@pytest.mark.parametrize(
    "source, architecture",
    [
        *((s, HOPPER) for s in ("nvfp4_46_pow2", "nvfp4_46", "nvfp4_16x16", "mxfp4_rtn")),
        *(("nvfp4_46_pow2", AMPERE), ("nvfp4_46", BLACKWELL), ("mxfp4_rtn", BLACKWELL)),
    ],
)
def test_requantize(source) -> None:
    x = with_bad(matrix(300, 200), torch.nan)
    packed = calls.with_amax(x, None, source, 0)()
    for scheme, transform in ((EDEN, "rht128"), ("nvfp4", "rht64"), (EDEN + DEQUANTIZED, "rht128")):
        args = (*packed, SEEDS[0], source, scheme, transform, 200, 1)
        assert_same(calls.launched(calls.again(*args)), calls.again(*args)(), scheme)


@each_value
@pytest.mark.parametrize("source", ["nvfp4_46_pow2", "nvfp4_46_pow2" + SWIZZLED])
def test_requantize_by_scales(source, value) -> None:
    x = with_bad(matrix(300, 200), value)
    scales = calls.plain(x, None, None, source, 0)()[1:]
    for scheme, transform in (
        (EDEN, "rht128"),
        ("nvfp4_pow2", "none"),
        (EDEN + DEQUANTIZED, "rht128"),
    ):
        args = (x, *scales, SEEDS[0], source, scheme, transform, 1)
        assert_same(calls.launched(calls.by_scales(*args)), calls.by_scales(*args)(), scheme)


@pytest.mark.parametrize(
    ("scheme", "transform"),
    [
        (EDEN, "rht128"),
        (EDEN + DEQUANTIZED, "rht128"),
        ("nvfp4_sr", "rht16"),
        ("mxfp4_sr", "rht64"),
    ],
)
def test_groups(scheme, transform) -> None:
    """Groups that are filled with copies, too. Rows of no group are poisoned rowwise only."""
    offs = torch.tensor([3, 20, 20, 170, 230, 290], dtype=torch.int32)
    groups = offs, q2.padded_ends(offs)
    for value in VALUES:
        x = with_bad(matrix(300, 150), value)
        x[299, 7] = value
        args = (x, *groups, *SEEDS, scheme, transform, 3)
        want = calls.grouped_both(*args)()
        assert_same(calls.launched(calls.grouped_both(*args)), want, scheme)
    packed = calls.plain(x, None, None, "nvfp4_46_pow2", 0)()
    args = (*packed, *groups, SEEDS[0], "nvfp4_46_pow2", scheme, transform, 150, 1)
    assert_same(calls.launched(calls.grouped_again(*args)), calls.grouped_again(*args)(), scheme)


@each_value
def test_sums_of_columns(value) -> None:
    x = with_bad(matrix(300, 140), value)
    call = calls.both(x, *SEEDS, EDEN, "rht128", dbias=torch.bfloat16)
    got, want = calls.launched(call), call()
    assert_same(got[:6], want[:6], EDEN)
    assert torch.equal(got[6].isfinite(), want[6].isfinite())
    assert torch.equal(got[6][got[6].isfinite()], want[6][want[6].isfinite()])


@pytest.mark.parametrize("scheme", ["nvfp4_46_pow2", "nvfp4_pow2" + SWIZZLED])
def test_split_scales(scheme, monkeypatch) -> None:
    raw = torch.randn((300, 41), generator=torch.Generator().manual_seed(1)).mul(4).exp()
    for bad in (raw.clone(), raw):
        bad[3, 4], bad[17], bad[299, 40] = torch.nan, torch.nan, torch.nan
        assert_same_bits(other_ops.split_scales(bad, scheme), q2.split_scales(bad, scheme))
        raw[:] = torch.nan


@pytest.mark.parametrize("scheme", ["nvfp4_46_pow2", "nvfp4_16x16_pow2", "mxfp4_rtn"])
def test_dequantize_and_transpose(scheme) -> None:
    packed = calls.plain(with_bad(matrix(64, 96), torch.inf), None, None, scheme, 0)()
    args = (*packed, scheme, 96, torch.bfloat16)
    got, want = other_ops.dequantize(*args), q2.dequantize(*args)
    assert torch.allclose(got, want, rtol=0, atol=0, equal_nan=True) and want.isnan().any()
    if get_scheme(scheme).block[0] > 1:
        args = (*packed[:2], scheme, 96, False)
        assert_same_bits(other_ops.transpose(*args), q2.transpose(*args))
