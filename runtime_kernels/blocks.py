"""From fp32 tiles to codes, block scales and the global scale: the law that kernels are held to.

Tiles are [n, 16, lanes], a block in each column of 16 (layout.py). Every step is one fp32 operation
with its own rounding: no fused multiply-add, no re-association. A sum over a block adds neighbours
first: (t0+t1), (t2+t3), ...; then pairs of those; and so on.

    exact   g = amax / (vmax * cap); s = e4m3(largest / vmax / g); r = (1/g) / s; code = e2m1(x * r)
    pow2    p = largest / vmax to 4 significant bits; r = 1 / p; code = e2m1(x * r); then, once all
            blocks are done, g = 2^k from the largest p; s = e4m3(p / g)

Where s or p is 0, r is taken as if it were 1. In pow2 the codes need nothing from outside their
block: p has as many bits as an e4m3 number, so dividing it by 2^k loses bits only in e4m3's
subnormals, below 2^-14 of the largest.
"""

from collections.abc import Callable

import torch

from q2compile.runtime_kernels import philox
from q2compile.runtime_kernels.formats import (
    encode_e2m1,
    keep_4_bits,
    nearest_e4m3,
    power_of_two,
    round_e2m1,
    stochastic_e4m3,
)
from q2compile.runtime_kernels.layout import Tiling, pack
from q2compile.runtime_kernels.schemes import Scheme

_TINY = torch.finfo(torch.float32).tiny
_HUGE = torch.finfo(torch.float32).max

Quantized = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def quantize_tiles(
    tiles: torch.Tensor,
    tiling: Tiling,
    scheme: Scheme,
    *,
    amax: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    stream: int = 0,
) -> Quantized:
    """Quantises the tiles that tiling.cut made.

    Args:
        tiles: fp32 [outer, size, lanes], size a multiple of the block.
        tiling: where they came from; the result lies along its rows.
        amax: fp32 0-dim, largest |x| of the whole tensor, for schemes that take it.
        seed, stream: where the coins of a stochastic scheme come from.

    Returns:
        codes uint8 [rows, Kp/2], scales [rows, Kp/width], global_scale fp32 0-dim.
    """
    outer, size, lanes = tiles.shape
    blocks = tiles.view(outer * (size // scheme.width), scheme.width, lanes)

    def to_rows(values: torch.Tensor) -> torch.Tensor:
        per_piece = values.shape[1] * (size // scheme.width)
        return tiling.join(values.reshape(outer, per_piece, lanes))

    if scheme.rounding == "ms_eden":
        values, scales, global_scale = _ms_eden(blocks, scheme, to_rows, seed, stream)
    else:
        values, scales, global_scale = _nearest(blocks, scheme, to_rows, amax)
    return to_rows(pack(encode_e2m1(values))), scales, global_scale


def _nearest(
    blocks: torch.Tensor,
    scheme: Scheme,
    to_rows: Callable[[torch.Tensor], torch.Tensor],
    amax: torch.Tensor | None,
) -> Quantized:
    """RTN, with 4/6 where the scheme selects: e2m1 values, e4m3 scales, global scale."""
    largest = blocks.abs().amax(1, keepdim=True)
    unit = None if amax is None else exact_global_scale(amax, scheme)
    scale = _block_scale(largest, scheme.vmax, unit)
    if scheme.select:
        scale = _four_over_six(blocks, scale, _block_scale(largest, 4.0, unit), unit, scheme.select)
    values = round_e2m1(blocks * _reciprocal(scale, unit))
    if unit is not None:
        return values, nearest_e4m3(to_rows(scale)), unit
    unit = pow2_global_scale(scale, largest, scheme.cap)
    return values, nearest_e4m3(to_rows(scale) / unit), unit


def _four_over_six(
    blocks: torch.Tensor,
    six: torch.Tensor,
    four: torch.Tensor,
    unit: torch.Tensor | None,
    metric: str,
) -> torch.Tensor:
    """Of two candidate scales of a block the one with the smaller error of the dequantised block;
    six in a tie.

    Errors are taken in units of each scale, x*r - e2m1(x*r), and put on one footing by the ratio of
    the scales, so that squares neither overflow nor vanish at any magnitude of x.
    """
    ratio = _or_one(four) / _or_one(six)
    if metric == "mse":
        ratio = ratio.square()
    error_six = _block_error(blocks, _reciprocal(six, unit), metric)
    error_four = _block_error(blocks, _reciprocal(four, unit), metric).mul_(ratio)
    return torch.where(error_four < error_six, four, six)


def _block_error(blocks: torch.Tensor, reciprocal: torch.Tensor, metric: str) -> torch.Tensor:
    scaled = blocks * reciprocal
    error = scaled.sub_(round_e2m1(scaled))
    return block_sum(error.square_() if metric == "mse" else error.abs_())


def _ms_eden(
    blocks: torch.Tensor,
    scheme: Scheme,
    to_rows: Callable[[torch.Tensor], torch.Tensor],
    seed: torch.Tensor | None,
    stream: int,
) -> Quantized:
    """MS-EDEN with post-hoc range alignment (Quartet II, sections 4 and 5).

    p = largest / s_clip to 4 significant bits (s_clip > 6 * 16/17: the far tail is clipped at
    6, for a smaller error of the rest); u = x / p; c = e2m1(u); the correction S = <u, u> / <u, c>
    makes the block's projection on x exact, <x, c*p*S> = <x, x>. Only then is p*S split into a
    global scale and e4m3 scales, the latter by stochastic rounding: its mean keeps S.
    """
    assert seed is not None, "the op checks that a stochastic scheme has a seed"
    largest = blocks.abs().amax(1, keepdim=True)
    pseudo = keep_4_bits(largest * (1.0 / scheme.vmax))
    scaled = blocks * _reciprocal(pseudo, None)
    values = round_e2m1(scaled)
    projection = block_sum(scaled * values)
    correction = block_sum(scaled.square_()) / _or_one(projection)
    corrected = pseudo * torch.where(projection == 0, 1.0, correction)
    if scheme.global_scale == "exact":
        unit = _finite_or_nan(_floored(_largest_of(corrected) / scheme.cap), largest)
    else:
        unit = pow2_global_scale(corrected, largest, scheme.cap)
    scales = to_rows(corrected) / unit
    coins = philox.words(seed, scales.numel(), stream=stream, purpose=philox.COINS).view(
        scales.shape
    )
    return values, stochastic_e4m3(scales, coins), unit


def block_sum(blocks: torch.Tensor) -> torch.Tensor:
    """Sum over the middle dimension (a power of two), neighbours first: [n, w, lanes] -> [n, 1,
    lanes]."""
    while blocks.shape[1] > 1:
        blocks = blocks[:, 0::2] + blocks[:, 1::2]
    return blocks


def exact_global_scale(amax: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """g = amax / (vmax * cap), fp32 0-dim; 1 for an all-zero tensor; NaN when amax is NaN or
    Inf."""
    return _finite_or_nan(_floored(amax.to(torch.float32) / (scheme.vmax * scheme.cap)), amax)


def pow2_global_scale(scales: torch.Tensor, largest: torch.Tensor, cap: float) -> torch.Tensor:
    """The smallest 2^k with max(scales) / 2^k <= cap, fp32 0-dim; 1 for all zeros; NaN where a
    block's largest |x| is not finite."""
    top = _largest_of(scales)
    fraction, exponent = torch.frexp(top)  # top = fraction * 2^exponent, fraction in [1/2, 1)
    cap_fraction, cap_exponent = torch.frexp(torch.full_like(top, cap))
    k = exponent - cap_exponent + (fraction > cap_fraction)
    return _finite_or_nan(torch.where(top == 0, 1.0, power_of_two(k.clamp(-126, 127))), largest)


def _block_scale(largest: torch.Tensor, vmax: float, unit: torch.Tensor | None) -> torch.Tensor:
    """The scale that maps largest to vmax, fp32 with at most 4 significant bits; in units of the
    global scale if there is one."""
    if unit is None:
        return keep_4_bits(largest / vmax)
    return nearest_e4m3(largest / vmax / unit).to(torch.float32)


def _reciprocal(scale: torch.Tensor, unit: torch.Tensor | None) -> torch.Tensor:
    """What x is multiplied by. Kept finite: 1 / scale overflows for scales under 2^-128, and 0 *
    Inf would be NaN."""
    numerator = 1.0 if unit is None else 1.0 / unit
    return (numerator / _or_one(scale)).clamp_(max=_HUGE)


def _or_one(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x == 0, 1.0, x)


def _largest_of(x: torch.Tensor) -> torch.Tensor:
    return x.amax() if x.numel() else x.new_zeros(())


def _floored(global_scale: torch.Tensor) -> torch.Tensor:
    """1 instead of 0; and never an fp32 subnormal, whose reciprocal would be Inf (tensors with amax
    under 3e-35)."""
    return torch.where(global_scale == 0, 1.0, global_scale.clamp(min=_TINY))


def _finite_or_nan(global_scale: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    """Poison: NaN or Inf anywhere in the input makes every dequantised value NaN, so that a loss
    scaler sees it."""
    return torch.where(_largest_of(magnitudes).isfinite(), global_scale, torch.nan)
