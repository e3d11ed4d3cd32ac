# SPDX-License-Identifier: Apache-2.0
"""Quantizes fp32 tiles to an operand of any format; shared by the references of the ops."""

import torch

from q2compile.runtime_kernels.numerics import fp8, mxfp4, nvfp4
from q2compile.runtime_kernels.numerics.blocks import Blocks, largest_of, poison
from q2compile.runtime_kernels.numerics.formats import encode_e2m1
from q2compile.runtime_kernels.numerics.layout import Tiling, pack, pack_bits
from q2compile.runtime_kernels.numerics.scaled_codes import scaled_codes
from q2compile.runtime_kernels.numerics.schemes import Scheme
from q2compile.runtime_kernels.numerics.swizzle import swizzle_32x4x4
from q2compile.runtime_kernels.numerics.transforms import Transform, hadamard, signs_of

Quantized = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def quantize_tiles(
    tiles: torch.Tensor,
    tiling: Tiling,
    scheme: Scheme,
    *,
    factor: float | torch.Tensor = 1.0,
    amax: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    rng_offset: int = 0,
    shares: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantizes the tiles that tiling.cut made.

    Args:
        tiles: fp32 [outer, size, lanes], size a multiple of the block.
        tiling: how they were cut; the result has its rows.
        factor: of the tiles, not yet applied: the norm of a rotation, times the global scale of a
            quantized source. It is applied to one value for each block: with MS-EDEN, whose codes
            do not depend on it, to the raw scale; elsewhere to the factor of the elements. Only
            QuEST applies it to each element.
        amax: fp32 0-dim, the largest finite |x| of the whole tensor, for schemes that take it. By
            default it is computed, over the finite blocks.
        seed, rng_offset: of the random bits of a stochastic scheme.
        shares: further factors of MS-EDEN, one for the rows of each chunk (groups.py).

    Returns:
        codes uint8 [rows, Kp/2], of fp8 e4m3 [rows, Kp], or dequantized bf16 [rows, Kp]; scales
        [rows / rows of a block, Kp / width], or none; global_scale fp32 0-dim; and for QuEST the
        trust mask, uint8 [rows, Kp/8], one bit per element, else None.
    """
    if scheme.rounding == "quest":
        tiles, factor = tiles.mul_(factor), 1.0
    outer, size, lanes = tiles.shape
    if scheme.is_tensorwise:
        codes, global_scale = fp8.quantize(tiles * factor, amax)
        parts = tiling.join(codes), codes.new_empty((0, 0)), global_scale
        return *(_dequantized(*parts, scheme) if scheme.dequantized else parts), None
    shape = (outer * (size // scheme.width), scheme.width, lanes)
    blocks = Blocks(tiles.view(shape), tiling, scheme, factor, seed, rng_offset, shares)
    if scheme.takes_amax and amax is None:
        amax = largest_of(blocks.largest)
    rounded = mxfp4.rounded(blocks) if scheme.format == "mxfp4" else nvfp4.rounded(blocks, amax)
    codes = blocks.join(pack(encode_e2m1(rounded.values)))
    mask = None if rounded.trusted is None else blocks.join(pack_bits(rounded.trusted))
    scales, global_scale = rounded.scales, rounded.global_scale
    poison(scales, blocks.join_scales(blocks.poisoned))
    if scheme.dequantized:
        codes, scales, global_scale = _dequantized(codes, scales, global_scale, scheme)
    elif scheme.swizzled:
        scales = swizzle_32x4x4(scales).view(-1, 512)
    return codes, scales, global_scale, mask


def _dequantized(codes, scales, global_scale, scheme: Scheme) -> Quantized:
    """The dequantized bf16 operand of a scheme that ends in DEQUANTIZED, no scales, and the global
    scale that has still to be applied."""
    values = scaled_codes(codes, scales, scheme.with_form(""))
    if scheme.has_pow2_scale:
        values = values.mul_(global_scale)
        global_scale = torch.where(global_scale.isnan(), global_scale, 1.0)
    return values.to(torch.bfloat16), scales.new_empty((0, 0)), global_scale


def rotate_tiles(
    tiles: torch.Tensor, transform: Transform, seed: torch.Tensor | None
) -> torch.Tensor:
    """H (x * D) of every chunk of tiles [outer, size, lanes], size whole chunks, up to
    transform.norm. Overwrites them.

    A rotated zero is +0, so that kernels may add in other orders where sums are exact, and
    subtract either operand of a butterfly from the other: x - y and -(y - x) are different zeros.
    In hadamard's order a sum is -0 only if the first element of its chunk is -0, since each
    butterfly needs a first operand of -0. So the first element is made +0.
    """
    signs = signs_of(transform, seed, tiles.device)
    if signs is not None:
        tiles = _chunks(tiles, transform).mul_(signs[:, None]).view(tiles.shape)
    if transform.size > 1:
        _chunks(tiles, transform)[:, 0].add_(0.0)
    return hadamard(_chunks(tiles, transform)).view(tiles.shape)


def rotate_tiles_back(
    tiles: torch.Tensor, transform: Transform, seed: torch.Tensor | None
) -> torch.Tensor:
    """Undoes the rotation, norm and all: D (H y), since H is symmetric and its own inverse.
    Overwrites the tiles."""
    signs = signs_of(transform, seed, tiles.device)
    tiles = hadamard(_chunks(tiles, transform)).view(tiles.shape).mul_(transform.norm)
    if signs is not None:
        _chunks(tiles, transform).mul_(signs[:, None])
    return tiles


def _chunks(tiles: torch.Tensor, transform: Transform) -> torch.Tensor:
    outer, size, lanes = tiles.shape
    return tiles.view(outer * (size // transform.size), transform.size, lanes)
