# SPDX-License-Identifier: Apache-2.0
"""A NaN or Inf poisons its own blocks and nothing else, for every scheme and op (blocks.py)."""

from itertools import product

import pytest
import torch

from q2compile.runtime_kernels.numerics.groups import padded_ends
from q2compile.runtime_kernels.numerics.scaled_codes import scaled_codes
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SCHEMES, SWIZZLED, get_scheme
from q2compile.runtime_kernels.numerics.transforms import TRANSFORMS, get_transform
from tests.support import quantizer_calls as calls
from tests.support.nonfinite import VALUES, poisoned_elements, spread, with_bad
from tests.support.pairwise import pairwise

q2 = torch.ops.q2
ONE_ROW = [name for name, s in SCHEMES.items() if s.block[0] == 1]
SWIZZLABLE = [name for name in ONE_ROW if SCHEMES[name].has_block_scales]
EVERY_FORM = [*SCHEMES, *(s + DEQUANTIZED for s in SCHEMES), *(s + SWIZZLED for s in SWIZZLABLE)]
SEED = torch.tensor(11)


def matrix(rows: int = 48, columns: int = 160) -> torch.Tensor:
    return torch.randn((rows, columns), generator=torch.Generator().manual_seed(rows + columns))


def assert_poison(parts, expected, scheme: str) -> None:
    """The elements that are NaN are the expected ones, and the global scale is finite."""
    assert parts[2].isfinite()
    got = poisoned_elements(*parts, scheme)
    assert torch.equal(got, expected), f"{got.nonzero()} instead of {expected.nonzero()}"
    assert expected.any() and not expected.all()


def assert_others_as_without(parts, clean, expected, scheme: str) -> None:
    """The other blocks dequantize as if the poisoned elements were zero."""
    assert torch.equal(parts[2], clean[2])
    got, want = (scaled_codes(*one[:2], get_scheme(scheme))[~expected] for one in (parts, clean))
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))


def test_quantize() -> None:
    for scheme, value in pairwise(EVERY_FORM, VALUES):
        spec, x = get_scheme(scheme), matrix()
        bad = with_bad(x, value)
        expected = spread(~bad.isfinite(), scheme, "none")
        without = bad.masked_fill(expected, 0.0)
        amax = q2.amax(without) if spec.takes_amax else None
        seed = SEED if spec.stochastic else None
        parts, clean = (calls.plain(one, amax, seed, scheme, 3)() for one in (bad, without))
        assert_poison(parts, expected, scheme)
        assert_others_as_without(parts, clean, expected, scheme)


def test_rht_quantize() -> None:
    for scheme, transform, transpose, value in pairwise(ONE_ROW, TRANSFORMS, [False, True], VALUES):
        bad = with_bad(matrix(), value)
        expected = spread(~(bad.t() if transpose else bad).isfinite(), scheme, transform)
        if expected.all():  # a chunk of 128 rows holds all there are
            continue
        cut = expected[:, : bad.shape[0 if transpose else 1]]
        without = bad.masked_fill(cut.t() if transpose else cut, 0.0)
        args = (SEED, scheme, transform, transpose, 3)
        parts, clean = calls.one(bad, *args)(), calls.one(without, *args)()
        assert_poison(parts, expected, scheme)
        assert_others_as_without(parts, clean, expected, scheme)


def test_quantize_masked() -> None:
    """QuEST trusts nothing in a poisoned block."""
    for transform in ["none", "h32", "rht64_fixed"]:
        bad = with_bad(matrix(), torch.nan)
        codes, scales, unit, mask = calls.masked(bad, "mxfp4_quest", transform)()
        expected = spread(~bad.isfinite(), "mxfp4_quest", transform)
        assert_poison((codes, scales, unit), expected, "mxfp4_quest")
        bits = mask[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1
        assert not bits.flatten(1)[expected].any() and bits.flatten(1)[~expected].any()


def test_requantize() -> None:
    """A block of NaN poisons the blocks, or the rotated chunks, that hold one of its elements."""
    cases = pairwise(
        ["none", "rht16"],
        ["nvfp4_ms_eden_pow2", "nvfp4", "mxfp4_sr"],
        ["nvfp4_46", "nvfp4_16x16_pow2", "mxfp4_rtn"],
    )
    by_scales = product(["none", "rht16"], ["nvfp4_ms_eden_pow2", "nvfp4", "mxfp4_sr"])
    for transform, scheme, source in [*cases, *((*each, "nvfp4_46_pow2") for each in by_scales)]:
        x = matrix(160, 96)
        x[37, 41] = torch.inf
        packed = calls.with_amax(x, None, source, 0)()
        nan = spread(~x.isfinite(), source, "none")
        parts = calls.again(*packed, SEED, source, scheme, transform, 96, 1)()
        assert_poison(parts, spread(nan.t(), scheme, transform), scheme)
        if source == "nvfp4_46_pow2":
            again = calls.by_scales(x, *packed[1:], SEED, source, scheme, transform, 1)()
            assert_poison(again, spread(nan.t(), scheme, transform), scheme)


def test_groups_keep_their_poison() -> None:
    """The third of the groups of 10, 0, 130 and 33 rows has an Inf."""
    for transform, scheme in pairwise(
        ["none", "rht128"], ["nvfp4_ms_eden_pow2", "nvfp4_ms_eden", "nvfp4_sr", "mxfp4_sr"]
    ):
        x, offs = matrix(180, 64), torch.tensor([10, 10, 140, 173], dtype=torch.int32)
        ends = padded_ends(offs)
        bad = x.clone()
        bad[57, 9] = torch.inf
        args = (offs, ends, SEED, scheme, transform, 1)
        parts = calls.grouped(bad, *args)()
        nan = poisoned_elements(*parts, scheme)
        size = max(get_scheme(scheme).width, get_transform(transform).size)
        first = (int(ends[1]) + 47) // size * size
        expected = torch.zeros_like(nan)
        expected[9, first : first + size] = True
        assert torch.equal(nan, expected) and parts[2].isfinite()
        packed = calls.plain(bad, None, None, "nvfp4_46_pow2", 0)()
        again = calls.grouped_again(
            *packed, offs, ends, SEED, "nvfp4_46_pow2", scheme, transform, 64, 1
        )()
        expected[:16] = expected[9].clone()
        assert torch.equal(poisoned_elements(*again, scheme), expected)


def test_columns_are_summed_plainly() -> None:
    bad = with_bad(matrix(), torch.nan)
    *parts, sums = calls.both(
        bad, SEED, SEED, "nvfp4_ms_eden_pow2", "rht128", dbias=torch.float32
    )()
    assert torch.equal(sums.isnan(), bad.isnan().any(0))
    want = calls.both(bad, SEED, SEED, "nvfp4_ms_eden_pow2", "rht128", 0)()
    assert all(map(torch.equal, (parts[0], parts[3]), (want[0], want[3])))


def test_amax_of_the_finite_elements() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = matrix().to(dtype)
        for value in VALUES:
            bad = with_bad(x, value)
            assert q2.amax(bad) == bad[bad.isfinite()].abs().max()
            assert q2.amax(torch.full((4, 4), value, dtype=dtype)) == 0


def test_nothing_but_nan() -> None:
    """No finite number is left to scale by."""
    for scheme in [scheme for (scheme,) in pairwise(EVERY_FORM)]:
        spec, x = get_scheme(scheme), torch.full((32, 64), torch.nan)
        parts = calls.with_amax(x, SEED if spec.stochastic else None, scheme, 0)()
        assert poisoned_elements(*parts, scheme).all()
        if spec.format == "nvfp4":
            assert parts[2] == 1


def test_a_global_scale_that_is_not_known_poisons_all() -> None:
    """An amax that somebody gives, or the global scale of a source."""
    for scheme in SCHEMES:
        spec, x = get_scheme(scheme), matrix()
        seed = SEED if spec.stochastic else None
        if spec.takes_amax:
            parts = calls.plain(x, torch.tensor(torch.nan), seed, scheme, 0)()
            assert poisoned_elements(*parts, scheme).all()
        if spec.block[0] == 1:
            codes, scales, _ = calls.plain(x, None, None, "nvfp4_pow2", 0)()
            args = (SEED, "nvfp4_pow2", scheme, "rht16", 160, 1)
            parts = calls.again(codes, scales, torch.tensor(torch.nan), *args)()
            assert poisoned_elements(*parts, scheme).all()


def test_split_scales() -> None:
    for scheme in ["nvfp4_46_pow2", "nvfp4_pow2" + SWIZZLED]:
        raw = matrix(40, 9).abs()
        bad = raw.clone()
        bad[3, 4] = torch.nan
        raw[3, 4] = 0
        (scales, unit), (clean, same) = q2.split_scales(bad, scheme), q2.split_scales(raw, scheme)
        assert torch.equal(unit, same)
        differ = scales.view(torch.uint8) != clean.view(torch.uint8)
        assert differ.sum() == 1 and (scales.view(torch.uint8)[differ] == 0x7F).all()


@pytest.mark.parametrize("scheme", ["nvfp4_46", "nvfp4_46_pow2", "mxfp4_rtn", "nvfp4_46_pow2@bf16"])
def test_a_row_of_a_product(scheme) -> None:
    """Tokens do not see each other's NaN; a weight's is in its output of every token."""

    def packed(x):
        return calls.with_amax(x, None, scheme, 0)()

    x, w = matrix(48, 96), matrix(32, 96)
    bad, w_bad = x.clone(), w.clone()
    x[19, 32:64] = bad[19, 32:64] = 0
    bad[19, 37], w_bad[5, 0] = torch.nan, torch.inf
    y, y_bad = (
        q2.gemm(*packed(one), *packed(w), None, scheme, scheme, torch.bfloat16) for one in (x, bad)
    )
    others = torch.arange(48) != 19
    assert y_bad[19].isnan().all() and torch.equal(y[others], y_bad[others])
    of_weight = q2.gemm(*packed(x), *packed(w_bad), None, scheme, scheme, torch.bfloat16)
    assert torch.equal(of_weight.isnan().any(0), torch.arange(32) == 5)
    assert of_weight[:, 5].isnan().all()
