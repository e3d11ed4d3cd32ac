# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels on a CPU (tests/support/emulation), against the torch reference, bit by bit:
with the fp4 conversions of Blackwell, and with their replacements elsewhere, the fp8 conversions of
Hopper or arithmetic. Other schemes of kernels for Blackwell run as PTX (test_ptx_kernels.py,
test_ptx_training.py)."""

from __future__ import annotations

import ctypes
from itertools import product

import pytest
import torch

from q2compile.runtime_kernels.cuda import other_ops
from q2compile.runtime_kernels.cuda.gemm.swizzle import swizzled
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SWIZZLED, get_scheme
from q2compile.runtime_kernels.numerics.swizzle import swizzle_32x4x4
from q2compile.runtime_kernels.ops.gemm import Factor
from tests.support import emulation
from tests.support import quantizer_calls as calls
from tests.support.emulation.on_cpu import assert_agrees, assert_same_bits, matrix
from tests.support.emulation.random_bits import close_to_their_random_bits
from tests.support.pairwise import pairwise
from tests.support.quantizer_calls import SEEDS

pytestmark = pytest.mark.usefixtures("on_cpu")

q2 = torch.ops.q2
POW2, EXACT = "nvfp4_ms_eden_pow2", "nvfp4_ms_eden"


AMPERE, HOPPER, BLACKWELL = "sm_80", "sm_90a", "sm_100a"


SHAPES = [*product([(128, 128), (300, 200), (33, 517), (1, 1)], [HOPPER])]


@pytest.mark.parametrize(
    "shape, architecture", [*SHAPES, *product([(300, 200)], [AMPERE, BLACKWELL])]
)
def test_rht_quantize_both(shape) -> None:
    x = matrix(*shape)
    assert_agrees(calls.both(x, *SEEDS, POW2, "rht128", 3))


@pytest.mark.parametrize("room, architecture", [(100 * 1024, BLACKWELL)])
def test_one_tile_at_a_time() -> None:
    """On 8.6, 8.9 and 12.x: several tiles for each thread block, partial and whole, rowwise and
    columnwise; of elements, and of codes, which reach shared memory through registers."""
    x = matrix(300, 700)
    assert_agrees(calls.both(x, *SEEDS, POW2, "rht128", 0))
    assert_agrees(calls.one(x, SEEDS[0], "nvfp4_sr", "rht16", True, 0))
    for source, scheme in (("nvfp4_46_pow2", POW2), ("mxfp4_rtn", "mxfp4_rtn34")):
        packed = calls.plain(x, None, None, source)()
        assert_agrees(calls.again(*packed, SEEDS[0], source, scheme, "rht32", 700, 1))


def test_rht_quantize() -> None:
    for transpose in [False, True]:
        for x in (matrix(140, 136), matrix(136, 140).t(), matrix(1, 136).expand(140, 136)):
            assert_agrees(calls.one(x, SEEDS[0], EXACT, "rht128", transpose, 0))


def test_other_dtypes() -> None:
    for dtype in [torch.float16, torch.float32]:
        assert_agrees(calls.both(matrix(130, 140, dtype), *SEEDS, POW2, "rht128", 0))


def test_other_transforms() -> None:
    for transform in ["none", "rht32_fixed", "rht64"]:
        assert_agrees(calls.both(matrix(136, 136), *SEEDS, POW2, transform, 0))


def test_empty() -> None:
    for shape in [(0, 40), (40, 0)]:
        assert_agrees(
            calls.both(torch.empty(shape, dtype=torch.bfloat16), *SEEDS, POW2, "rht128", 0)
        )


REQUANTIZED = [*product(["nvfp4_46_pow2", "nvfp4_46", "nvfp4_16x16"], [POW2, EXACT], [HOPPER])]


@pytest.mark.parametrize(
    "source, scheme, architecture", [*REQUANTIZED, ("nvfp4_46_pow2", POW2, AMPERE)]
)
def test_requantize(source, scheme) -> None:
    x = matrix(145, 200)
    packed = calls.with_amax(x, None, source)()
    assert_agrees(calls.again(*packed, SEEDS[0], source, scheme, "rht128", 200, 1))


ZEROS = [*product([POW2, "nvfp4_pow2", "nvfp4_sr_pow2"], ["rht128"], [HOPPER])]
ZEROS += [("nvfp4_pow2", "rht16", HOPPER), (POW2, "rht16", BLACKWELL)]


@pytest.mark.parametrize(
    "scheme, transform, architecture", [*ZEROS, ("nvfp4_pow2", "rht128", BLACKWELL)]
)
def test_requantized_zeros_are_positive(transform, scheme) -> None:
    """Chunks whose few elements cancel: in hadamard's order some sums would be -0. So that they
    cancel, all elements of a row have one scale."""
    x = torch.zeros((140, 72), dtype=torch.bfloat16)
    x[::9, ::2], x[4::9, ::2] = 3.0, -3.0
    packed = calls.plain(x, None, None, "nvfp4_pow2")()
    call = calls.again(*packed, SEEDS[0], "nvfp4_pow2", scheme, transform, 72, 1)
    assert_agrees(call)
    if not get_scheme(scheme).stochastic:  # which may round to -0, too
        codes = call()[0]
        assert (codes & 15).ne(8).all() and (codes >> 4).ne(8).all()


ROTATED = [*product([POW2, "nvfp4_sr_pow2"], ["rht64", "rht128"], [HOPPER])]
ROTATED += [(POW2, "rht64", BLACKWELL), ("nvfp4_sr_pow2", "rht128", AMPERE)]


@pytest.mark.parametrize("scheme, transform, architecture", ROTATED)
def test_rotated_zeros_are_positive(transform, scheme) -> None:
    """Chunks of zeros of one sign or of both, like those of masked tokens, and of few elements that
    cancel. Two lanes of a row subtract in different orders, which zeros could show."""
    x = torch.zeros((140, 136), dtype=torch.bfloat16)
    x[:, ::3] = -0.0
    x[::2] = -0.0
    x[::9, ::2], x[4::9, ::2] = 3.0, -3.0
    call = calls.both(x, *SEEDS, scheme, transform, 1)
    assert_agrees(call)
    if not get_scheme(scheme).stochastic:  # which may round to -0, too
        for codes in (call()[0], call()[3]):
            assert (codes & 15).ne(8).all() and (codes >> 4).ne(8).all()


OF_ANY_BLOCK = ["nvfp4_46", "nvfp4_16x16_pow2", "mxfp4_rtn", "mxfp4_rceil_32x32"]


@pytest.mark.parametrize(
    "scheme, dtype, architecture",
    pairwise(OF_ANY_BLOCK, [torch.bfloat16, torch.float32], [AMPERE, HOPPER]),
)
def test_dequantize(scheme, dtype) -> None:
    x = matrix(40, 72, torch.float32)
    packed = calls.with_amax(x, SEEDS[0], scheme)()
    for cols in (72, 2 * packed[0].shape[1]):
        args = (*packed, scheme, cols, dtype)
        assert_same_bits((other_ops.dequantize(*args),), (q2.dequantize(*args),))


def test_transpose() -> None:
    """Whole tiles and parts; columns of padding, which are no rows of the result."""
    for scheme, shape, by_tiles in pairwise(
        ["nvfp4_16x16_pow2", "mxfp4_rceil_32x32"],
        [(256, 128), (130, 200), (33, 517), (1, 1), (0, 40), (40, 0)],
        [False, True],
    ):
        codes, scales, _ = calls.plain(matrix(*shape), None, None, scheme)()
        for rows in {shape[1], min(shape[1], 72)}:
            args = (codes, scales, scheme, rows, by_tiles)
            assert_same_bits(other_ops.transpose(*args), q2.transpose(*args))


def test_swizzled_scales() -> None:
    for rows, blocks in [(1, 1), (128, 4), (200, 9)]:
        scales = torch.randint(0, 127, (rows, blocks), dtype=torch.uint8).view(torch.float8_e4m3fn)
        got = swizzled(Factor(torch.empty(rows, 0), scales, None, get_scheme("nvfp4")))
        assert_same_bits((got,), (swizzle_32x4x4(scales),))
        for scheme, side in (("nvfp4_16x16", 16), ("mxfp4_rceil_32x32", 32)):
            shared = swizzled(Factor(torch.empty(side * rows, 0), scales, None, get_scheme(scheme)))
            repeated = scales.view(torch.uint8).repeat_interleave(side, 0).view(scales.dtype)
            assert_same_bits((shared,), (swizzle_32x4x4(repeated),))


# Scheme and transform of every operand that a recipe quantizes from a tensor in its backward, and
# further combinations that a user could choose.
QUANTIZERS = [
    *((scheme, "rht128") for scheme in ("nvfp4_sr_pow2", "nvfp4_sr")),
    *((s, "rht16") for s in ("nvfp4_sr_pow2", "nvfp4_sr", "nvfp4_pow2", "nvfp4")),
    *(("mxfp4_sr", "rht64"), ("mxfp4_rtn34", "rht32"), ("mxfp4_rtn", "none")),
    ("nvfp4_sr_clip_pow2", "rht32_fixed"),
    *(("mxfp4_rceil", "h32"), ("mxfp4_rceil_sr", "none"), ("mxfp4_rceil", "rht32_fixed")),
]


@pytest.mark.parametrize(
    "scheme, transform, architecture",
    [*((*case, HOPPER) for case in QUANTIZERS), *((*QUANTIZERS[i], AMPERE) for i in (0, 3))],
)
def test_other_schemes(scheme, transform) -> None:
    assert_agrees(calls.both(matrix(130, 200), *SEEDS, scheme, transform, 3))


def test_rows_that_are_not_whole_vectors() -> None:
    """Chunks of each size."""
    for scheme, transform in [QUANTIZERS[i] for i in (3, 6, 7, 8)]:
        assert_agrees(calls.both(matrix(33, 300), *SEEDS, scheme, transform, 3))


SEVERAL = ["nvfp4_46_pow2", "nvfp4_46", "nvfp4_search_pow2", "nvfp4_search"]
SEVERAL += ["nvfp4_search_pow2" + form for form in (SWIZZLED, DEQUANTIZED)]


@pytest.mark.parametrize(
    "scheme, architecture", [*product(SEVERAL, [HOPPER]), ("nvfp4_46", AMPERE)]
)
def test_several_scales(scheme) -> None:
    x = matrix(64, 200)
    x[40:] = torch.randn((24, 200), generator=torch.Generator().manual_seed(3)).bfloat16()
    x[50] *= 1e-37
    assert_agrees(calls.with_amax(x, None, scheme, 0))


def test_quantize() -> None:
    for scheme in ["nvfp4_sr_pow2", "nvfp4_sr", "mxfp4_sr", "mxfp4_rceil_sr"]:
        x = matrix(30, 200)
        assert_agrees(calls.with_amax(x, SEEDS[0], scheme, 5))


def next_to_the_grid() -> torch.Tensor:
    """fp32 [12, 64]: grid points, midpoints, and values up to 8 ulp from them. One 6 in each block
    makes its scale 1."""
    points = torch.tensor([0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0])
    steps = torch.tensor([-8, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 8])
    x = (points.view(torch.int32)[:, None] + steps).view(torch.float32).flatten()
    x = torch.cat([x, -x, torch.zeros(12 * 60 - 2 * x.numel())]).view(48, 15)
    return torch.cat([torch.full((48, 1), 6.0), x], dim=1).view(12, 64)


@pytest.mark.parametrize("architecture", [AMPERE, HOPPER, BLACKWELL])
@pytest.mark.parametrize("scheme", ["nvfp4_pow2", "nvfp4_ms_eden_pow2"])
def test_rounding_next_to_the_grid(scheme) -> None:
    assert_agrees(calls.one(next_to_the_grid(), SEEDS[0], scheme, "none", False, 0))


@pytest.mark.parametrize("architecture", [AMPERE, HOPPER, BLACKWELL])
def test_stochastic_rounding_next_to_random_bits() -> None:
    x = close_to_their_random_bits(SEEDS[0], 8, 64)
    assert_agrees(calls.plain(x, None, SEEDS[0], "nvfp4_sr_pow2", 1))


def test_requantize_to_other_schemes() -> None:
    for source, scheme, transform in [
        ("nvfp4_pow2", "nvfp4_sr_pow2", "rht128"),
        ("nvfp4", "nvfp4_sr", "rht128"),
        ("mxfp4_quest", "mxfp4_rtn34", "rht32"),
        ("mxfp4_rceil_32x32", "mxfp4_rceil_sr", "rht32"),
    ]:
        x = matrix(145, 200)
        spec = get_scheme(source)
        packed = (
            q2.quantize(
                x, scheme=source, transform="h32", rowwise=True, columnwise=False, mask=True
            )[:3]
            if spec.masked
            else calls.with_amax(x, None, source)()
        )
        assert_agrees(calls.again(*packed, SEEDS[0], source, scheme, transform, 200, 1))


# Scales swizzled where they are made: by align_scales.cu in chunks of 128 and in others, of rows of
# any number of blocks; by rotate_quantize.cu those of EXACT and of MX. Where scales go depends on
# the rounding and on the length of chunks separately.
SWIZZLING = [
    *((POW2, "rht128"), (POW2, "none"), (EXACT, "rht64"), ("nvfp4_sr_pow2", "rht16")),
    *(("nvfp4_sr", "rht128"), ("nvfp4_46", "none"), ("mxfp4_sr", "rht64")),
    *(("mxfp4_rtn34", "rht32"), ("mxfp4_rceil", "h32")),
]
# Rows and columns: parts of the last tile of scales rowwise and columnwise; an odd number of tiles
# of columns for a kernel that takes 64 at a time; 3, 13 and 33 blocks per row.
RAGGED = [(130, 200), (33, 517), (257, 40), (1, 1)]


def test_scales_are_written_swizzled() -> None:
    """The reference swizzles plain scales (swizzle.py); the kernels write them so. Rows that are
    not whole vectors are read by other code, which knows nothing of scales."""
    for scheme, transform in SWIZZLING:
        for shape in RAGGED if (scheme, transform) in SWIZZLING[::3] else RAGGED[::2]:
            x = matrix(*shape)
            args = (x, *SEEDS, scheme + SWIZZLED, transform, 3)
            got = calls.launched(calls.both(*args))
            assert_same_bits(got, calls.both(*args)())
            plain = q2.quantize(
                x,
                scheme=scheme,
                transform=transform,
                rowwise=True,
                columnwise=True,
                rng_offset=3,
                rowwise_seed=SEEDS[0],
                columnwise_seed=SEEDS[1],
            )
            want = [swizzle_32x4x4(s) for s in plain[1::3]]
            assert_same_bits((got[1].flatten(), got[4].flatten()), want)
            # One direction alone is another kernel, and so is one of rows of no whole vectors.
            alone = (scheme, transform) in SWIZZLING[::4] and shape in RAGGED[:2]
            for transpose in (False, True) if alone else ():
                one = (x, SEEDS[transpose], scheme + SWIZZLED, transform, transpose, 3)
                side = got[3:] if transpose else got[:3]
                assert_same_bits(calls.launched(calls.one(*one)), side)


def test_empty_with_swizzled_scales() -> None:
    for scheme, shape in pairwise([POW2, "nvfp4_sr", "mxfp4_sr"], [(0, 40), (40, 0)]):
        assert_agrees(
            calls.both(
                torch.empty(shape, dtype=torch.bfloat16), *SEEDS, scheme + SWIZZLED, "rht16", 0
            )
        )


def test_quantize_with_swizzled_scales() -> None:
    for scheme in ["nvfp4_46_pow2", "nvfp4_46", "nvfp4_pow2", "mxfp4_sr"]:
        for shape in RAGGED:
            x = matrix(*shape)
            got = calls.launched(calls.with_amax(x, SEEDS[0], scheme + SWIZZLED, 0))
            codes, scales, global_scale = calls.with_amax(x, SEEDS[0], scheme)()
            assert_same_bits(got, (codes, swizzle_32x4x4(scales).view(-1, 512), global_scale))


def test_requantize_with_swizzled_scales() -> None:
    """Swizzled scales of the source, of the result, and of both."""
    for source, scheme, transform in [
        ("nvfp4_46_pow2", POW2, "rht128"),
        ("nvfp4_46", EXACT, "rht128"),
        ("nvfp4_pow2", "nvfp4_sr", "rht16"),
        ("mxfp4_rtn", "mxfp4_rtn34", "rht32"),
    ]:
        whole = source in ("nvfp4_46_pow2", "mxfp4_rtn")
        for shape in ((145, 200), (300, 72)):
            x = matrix(*shape)
            amax = q2.amax(x) if get_scheme(source).takes_amax else None
            others = [("", SWIZZLED), (SWIZZLED, "")] if whole else []
            for of_source, of_result in (*others, (SWIZZLED, SWIZZLED)):
                packed = calls.plain(x, amax, None, source + of_source)()
                names = (source + of_source, scheme + of_result, transform)
                args = (*packed, SEEDS[0], *names, shape[1], 1)
                plain = calls.plain(x, amax, None, source)()
                want = calls.again(*plain, SEEDS[0], source, *names[1:], shape[1], 1)()
                assert_same_bits(calls.launched(calls.again(*args)), want)
                assert_same_bits(calls.again(*args)(), want)


def test_padding_is_zero_where_a_source_has_more_columns() -> None:
    """Only the first `rows` columns of the source become rows of the result."""
    packed = calls.plain(matrix(130, 200), None, None, "nvfp4_46_pow2")()
    args = (*packed, SEEDS[0], "nvfp4_46_pow2", "nvfp4_sr_pow2" + SWIZZLED, "rht16", 72, 1)
    got = calls.launched(calls.again(*args))
    assert got[1].view(torch.uint8).view(3, 32, 4, 4)[:, 8:, 2].sum() == 0


@pytest.mark.parametrize("scheme", ["mxfp4_quest", "mxfp4_quest" + SWIZZLED])
def test_quantize_masked(scheme) -> None:
    """Values that clip, zeros, and blocks down to 2^-96."""
    tiny = matrix(64, 128, torch.float32) * torch.logspace(-27, -3, 128)
    for x in (matrix(130, 200), matrix(33, 517), matrix(200, 130).t(), tiny):
        assert_agrees(calls.masked(x, scheme, "h32"))


@pytest.mark.parametrize("transform", ["none", "rht16_fixed", "rht128_fixed"])
def test_quantize_masked_of_other_transforms(transform) -> None:
    assert_agrees(calls.masked(matrix(130, 200, torch.float16), "mxfp4_quest", transform))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_masked_unrotate(dtype) -> None:
    for shape in ((130, 192), (1, 32), (0, 64)):
        *_, mask = q2.quantize(
            matrix(*shape),
            scheme="mxfp4_quest",
            transform="h32",
            rowwise=True,
            columnwise=False,
            mask=True,
        )
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)
        args = (grad, mask, "h32")
        assert_same_bits((other_ops.masked_unrotate(*args),), (q2.masked_unrotate(*args),))


DEQUANTIZED_CASES = [
    (POW2, "rht128"),
    ("nvfp4_sr_pow2", "rht16"),
    ("nvfp4_46_pow2", "none"),
    ("nvfp4_sr", "rht16"),
    ("mxfp4_sr", "rht64"),
]


@pytest.mark.parametrize(
    "scheme, transform, architecture",
    [*((*case, HOPPER) for case in DEQUANTIZED_CASES), (*DEQUANTIZED_CASES[0], AMPERE)],
)
def test_values_instead_of_codes(scheme, transform, architecture) -> None:
    ragged = [(33, 517)] if (scheme, transform) in DEQUANTIZED_CASES[:2] else []
    for shape in ((300, 200), *(ragged if architecture == HOPPER else ())):
        assert_agrees(calls.both(matrix(*shape), *SEEDS, scheme + DEQUANTIZED, transform, 3))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("scheme", [POW2, "nvfp4_pow2", "nvfp4_46_pow2", "nvfp4_sr_pow2"])
def test_values_of_subnormal_scales(scheme, transpose) -> None:
    """Rows of the result from 1e-38 to 1e-3: scales in e4m3's subnormals, and products below bf16's
    normals."""
    transform = "rht128" if scheme == POW2 else "none"
    sizes = torch.logspace(-38, -3, 144)
    x = matrix(144, 144, torch.float32) * (sizes if transpose else sizes[:, None])
    args = (x, SEEDS[0], scheme + DEQUANTIZED, transform, transpose, 0)
    got, want = calls.launched(calls.one(*args)), calls.one(*args)()
    assert_same_bits(got, want)
    plain = q2.quantize(
        x,
        scheme=scheme,
        transform=transform,
        rowwise=not transpose,
        columnwise=transpose,
        rowwise_seed=SEEDS[0],
        columnwise_seed=SEEDS[0],
    )
    subnormal = (plain[1].float() < 2.0**-6) & (plain[1].float() > 0)
    assert subnormal.any() and (plain[1].float() >= 2.0**-6).any()


def test_values_of_a_requantized_operand() -> None:
    x = matrix(145, 200)
    packed = calls.plain(x, None, None, "nvfp4_46_pow2")()
    assert_agrees(
        calls.again(*packed, SEEDS[0], "nvfp4_46_pow2", POW2 + DEQUANTIZED, "rht128", 200, 1)
    )


CONVERSIONS = """
#include "formats.cuh"
extern "C" void to_e4m3(const float* x, u32* bytes, int n) {
  for (int i = 0; i < n; ++i, x += 4) bytes[i] = to_e4m3x4(x[0], x[1], x[2], x[3]);
}
extern "C" void from_e4m3(const u16* bytes, u32* words, int n) {
  for (int i = 0; i < n; ++i) words[i] = e4m3x2_to_f16x2(bytes[i]);
}
"""


def convert(name: str, x: torch.Tensor, n: int) -> torch.Tensor:
    """int32 [n] by a function of CONVERSIONS, without conversion instructions."""
    out = torch.empty(n, dtype=torch.int32)
    function = getattr(emulation.library(CONVERSIONS, nvrtc.conversions(AMPERE)), name)
    function(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), n)
    return out


def test_to_e4m3_by_arithmetic() -> None:
    """All values with a mantissa of 7 bits, among them every tie (e4m3 has 3 bits), and their
    neighbors. By the PTX manual the instruction equals torch's cast of the clamped value."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    x = torch.cat([upper + step for step in (0, 1, 2**15, 2**16 - 1)]).view(torch.float32)
    got = convert("to_e4m3", x, x.numel() // 4).view(torch.uint8)
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    nan = x.isnan()
    assert torch.equal(got[~nan], want[~nan]) and (got[nan] == 0x7F).all()


def test_from_e4m3_by_arithmetic() -> None:
    """All pairs of bytes; f16 holds every e4m3 exactly."""
    pairs = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    got = convert("from_e4m3", pairs, 2**16).view(torch.float16)
    want = pairs.view(torch.float8_e4m3fn).to(torch.float16)
    nan = want.isnan()
    assert torch.equal(got[~nan].view(torch.int16), want[~nan].view(torch.int16))
    assert got[nan].isnan().all()


@pytest.mark.parametrize("transform", ["rht16", "rht128"])
def test_signs(transform) -> None:
    for seed in SEEDS:
        assert_same_bits((other_ops.signs(seed, transform),), (q2.signs(seed, transform),))
