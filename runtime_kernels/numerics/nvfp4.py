# SPDX-License-Identifier: Apache-2.0
"""Rounding rules of NVFP4: e2m1 codes, e4m3 block scales, an fp32 global scale.

    exact   g = amax / (vmax * cap); s = e4m3(largest / vmax / g); r = (1/g) / s; code = e2m1(x * r)
    pow2    p = largest / vmax to 4 significant bits; r = 1 / p; code = e2m1(x * r); then, once all
            blocks are done, g = 2^k from the largest p; s = e4m3(p / g)
    ms_eden codes as in pow2; p is corrected before it is split, and s rounded stochastically

4/6 and scale search have several candidates for s or p, and keep the one with the least error.

Where s is 0, r is taken as if it were 1; under pow2 r is at most 2^126. Codes of pow2 need
nothing from outside their block: p has as many bits as an e4m3 value, so dividing it by 2^k loses
bits only in e4m3's subnormals, below 2^-14 of the largest.

"exact" is NVIDIA's rule, "Pretraining LLMs with NVFP4" (2509.25149), appendix B; "pow2" is ours.
"""

import torch

from q2compile.runtime_kernels.numerics import philox
from q2compile.runtime_kernels.numerics.blocks import (
    Blocks,
    Rounded,
    finite_or_nan,
    finite_reciprocal,
    largest_of,
    or_one,
    sum_neighbors,
)
from q2compile.runtime_kernels.numerics.formats import (
    keep_4_bits,
    nearest_e4m3,
    power_of_two,
    round_e2m1,
    stochastic_e4m3,
)
from q2compile.runtime_kernels.numerics.schemes import Scheme

_TINY = torch.finfo(torch.float32).tiny
_LAST_BIT = 2.0**38  # the last bit of an fp64 there weighs 2^-14
_CUT = 2.0**-13  # what the products of MS-EDEN's sums are multiples of
_LANES = 4096
_CUT_BITS = 20  # of an fp32 with 4 significant bits: an e4m3 step counts from there on
_LARGEST_BYTE, _NORMAL_BYTE = 0x7E, 8  # of e4m3: 448, and the least normal value


def rounded(blocks: Blocks, amax: torch.Tensor | None) -> Rounded:
    """The scheme's rule. amax: fp32 0-dim, for schemes that take it."""
    if blocks.scheme.rounding == "ms_eden":
        return _ms_eden(blocks)
    scheme, largest = blocks.scheme, blocks.largest
    global_scale = None if amax is None else exact_global_scale(amax, scheme)
    scale = _block_scale(largest, scheme.vmax, global_scale)
    if scheme.steps:
        values, scale = _scale_search(blocks, scale, global_scale)
    elif scheme.selects:
        values, scale = _four_over_six(blocks, largest, scale, global_scale)
    else:
        values = blocks.to_e2m1(blocks.scaled(_reciprocal(scale, global_scale)))
    if global_scale is None:
        global_scale = pow2_global_scale(scale, scheme.cap)
        scale = scale / global_scale
    return Rounded(values, nearest_e4m3(blocks.join_scales(scale)), global_scale)


def _four_over_six(
    blocks: Blocks, largest: torch.Tensor, six: torch.Tensor, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses between two scales of a block, which map its amax to vmax and to vmax / 1.5: the one
    with the smaller error of the dequantized block, the first in a tie. "Four over Six"
    (2512.02010); Quartet II (2601.22813 v2), section 4.2. Returns the e2m1 values and the scale.

    Errors are taken in units of each scale, x*r - e2m1(x*r), and put on one footing by the ratio of
    the scales, so that squares neither overflow nor vanish at any magnitude of x.
    """
    four = _block_scale(largest, blocks.scheme.vmax / 1.5, global_scale)
    ratio = _ratio(four, six, global_scale)
    values_six, error_six = _candidate(blocks, _reciprocal(six, global_scale), philox.RANDOM_BITS)
    values_four, error_four = _candidate(
        blocks, _reciprocal(four, global_scale), philox.SECOND_RANDOM_BITS
    )
    chosen = error_four * ratio.square() < error_six
    return torch.where(chosen, values_four, values_six), torch.where(chosen, four, six)


def _scale_search(
    blocks: Blocks, first: torch.Tensor, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale with the smallest error of the dequantized block, among those `scheme.steps` e4m3
    steps from `first`; the first of them in a tie. Errors are compared as in `_four_over_six`, in
    units of `first`. Returns the e2m1 values and the scale."""
    found = []
    for step in blocks.scheme.steps:
        scale = _stepped(first, step, global_scale)
        ratio = _ratio(scale, first, global_scale)
        values, error = _candidate(blocks, _reciprocal(scale, global_scale), philox.RANDOM_BITS)
        found.append((values, error * ratio.square(), scale))
    best_values, best_error, best_scale = found[0]  # also where all errors are infinite
    for values, error, scale in found[1:]:
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_values = torch.where(better, values, best_values)
        best_scale = torch.where(better, scale, best_scale)
    return best_values, best_scale


def _ratio(
    scale: torch.Tensor, first: torch.Tensor, global_scale: torch.Tensor | None
) -> torch.Tensor:
    """The ratio scale / first."""
    if global_scale is None:
        return scale * _reciprocal(first, None)
    return or_one(scale) / or_one(first)


def _stepped(scale: torch.Tensor, step: int, global_scale: torch.Tensor | None) -> torch.Tensor:
    """The scale so many steps up. Without a global scale: the scale itself where it is 0, or a step
    ends below the least normal fp32. With one: at most 448; and the scale itself where it is 0, is
    saturated, or is a subnormal under which a step down would put elements far over 6. So a block's
    errors are small enough for an exact sum, or all the same.
    """
    if global_scale is None:
        stepped = (scale.view(torch.int32) + (step << _CUT_BITS)).view(torch.float32)
        return torch.where((scale > 0) & (stepped >= _TINY), stepped, scale)
    byte = nearest_e4m3(scale).view(torch.uint8).to(torch.int32)
    stays = (byte == 0) | (byte == _LARGEST_BYTE) | (step < 0) & (byte < _NORMAL_BYTE)
    stepped = torch.where(stays, byte, (byte + step).clamp(max=_LARGEST_BYTE)).to(torch.uint8)
    return stepped.view(torch.float8_e4m3fn).to(torch.float32)


def _candidate(
    blocks: Blocks, reciprocal: torch.Tensor, purpose: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """e2m1 values under one scale, and each block's error in units of that scale.

    Each exact square is rounded to a multiple of 2^-14, so that the sum over a block is exact and a
    kernel may add in any order, as wide as its loads are.
    """
    scaled = blocks.scaled(reciprocal)
    values = blocks.to_e2m1(scaled, purpose)
    error = scaled.sub_(values)
    error = error.double().square_().add_(_LAST_BIT).sub_(_LAST_BIT).float()
    return values, blocks.shared(sum_neighbors(error), total=True)


def _ms_eden(blocks: Blocks) -> Rounded:
    """MS-EDEN with post-hoc range alignment, Quartet II (2601.22813 v2), algorithm 1 and section 7.

    p = largest / s_clip to 4 significant bits (s_clip > 6 * 16/17: the far tail is clipped at 6,
    for a smaller error of the rest); u = x / p; c = e2m1(u); the correction S = <u, u> / <u, c>
    makes the block's projection on x exact, <x, c*p*S> = <x, x>. Only then is p*S split into a
    global scale and e4m3 scales, the latter by stochastic rounding, whose mean keeps S.

    p goes to the nearest 4 bits. The authors' kernels cut toward zero, which clips more: an error
    of 9.7e-3 on N(0,1) instead of 9.4e-3.
    """
    scheme = blocks.scheme
    pseudo = _block_scale(blocks.largest, scheme.vmax, None)
    scaled = blocks.x * finite_reciprocal(1.0, pseudo)
    values = round_e2m1(scaled)
    projection = _sum_of_products(scaled, values)
    correction = _sum_of_products(scaled, scaled) / or_one(projection)
    correction = torch.where((projection == 0) | blocks.poisoned, 1.0, correction)
    corrected = pseudo * correction
    if blocks.shares is not None:
        corrected = corrected * blocks.shares.repeat_interleave(8)[:, None, None]
    corrected = corrected * blocks.factor
    if scheme.global_scale == "exact":
        top = largest_of(corrected)
        global_scale = finite_or_nan(_floored(top / scheme.cap), top)
    else:
        global_scale = pow2_global_scale(corrected, scheme.cap)
    scales = blocks.join_scales(corrected) / global_scale
    return Rounded(
        values, stochastic_e4m3(scales, blocks.random_bits(tuple(scales.shape))), global_scale
    )


def _sum_of_products(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """<x, y> of each block, fp32. The products are not negative, and their sum is below 1024.

    Each product is cut to a multiple of 2^-13, so that the sum is exact and a kernel may add in any
    order, by multiply-adds. Either sum of S loses some .001 by that, of 30 at least.
    """
    sums = x.new_empty((x.shape[0], 1, x.shape[2]))
    for a, b, total in zip(_pieces(x), _pieces(y), _pieces(sums), strict=True):
        total.copy_((a.double() * b).mul_(1 / _CUT).floor_().sum(1, keepdim=True))
    return sums.mul_(_CUT)


def _pieces(tiles: torch.Tensor) -> list[torch.Tensor]:
    """Views of the tiles. On a CPU, each has as many lanes as its cache holds products."""
    if tiles.device.type != "cpu":
        return [tiles]
    return [piece for tile in tiles.split(1) for piece in tile.split(_LANES, 2)]


def exact_global_scale(amax: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """g = amax / (vmax * cap), fp32 0-dim; 1 for an all-zero tensor; NaN when amax is not finite.
    "Pretraining LLMs with NVFP4" (2509.25149), appendix B.1."""
    return finite_or_nan(_floored(_divided(amax, scheme.vmax * scheme.cap)), amax)


def pow2_global_scale(scales: torch.Tensor, cap: float) -> torch.Tensor:
    """The smallest 2^k with max(scales) / 2^k <= cap, fp32 0-dim; 1 for an all-zero tensor; NaN
    where a scale is not finite."""
    top = largest_of(scales)
    fraction, exponent = torch.frexp(top)  # top = fraction * 2^exponent, fraction in [1/2, 1)
    cap_fraction, cap_exponent = torch.frexp(torch.full_like(top, cap))
    k = exponent - cap_exponent + (fraction > cap_fraction)
    return finite_or_nan(torch.where(top == 0, 1.0, power_of_two(k.clamp(-126, 127))), top)


def _block_scale(
    largest: torch.Tensor, vmax: float, global_scale: torch.Tensor | None
) -> torch.Tensor:
    """The scale that maps largest to vmax, fp32 with at most 4 significant bits; in units of the
    global scale where there is one. Without one, a subnormal scale becomes 0: the reciprocal of
    every other is no subnormal, and no kernel needs a slow path."""
    if global_scale is None:
        scale = keep_4_bits(largest * (1.0 / vmax))
        return torch.where(scale < _TINY, 0.0, scale)
    return nearest_e4m3(_divided(largest, vmax) / global_scale).to(torch.float32)


def _divided(x: torch.Tensor, by: float) -> torch.Tensor:
    """The quotient x / by. A plain x / by is x * (1/by) on CUDA, with other bits than on a CPU."""
    return x / x.new_full((), by)


def _reciprocal(scale: torch.Tensor, global_scale: torch.Tensor | None) -> torch.Tensor:
    """The factor of x. Without a global scale, a block whose scale is 0 still has codes; its values
    are zeros all the same."""
    if global_scale is None:
        return 1.0 / scale.clamp(min=_TINY)
    return finite_reciprocal(1.0 / global_scale, scale)


def _floored(global_scale: torch.Tensor) -> torch.Tensor:
    """A divisor: 1 instead of 0, and never an fp32 subnormal, whose reciprocal could be Inf (an
    amax under 3e-35)."""
    return torch.where(global_scale == 0, 1.0, global_scale.clamp(min=_TINY))
