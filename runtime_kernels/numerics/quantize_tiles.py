# SPDX-License-Identifier: Apache-2.0
"""From fp32 tiles to a quantized operand, for either format: what the references of the ops
share."""

import torch

from q2compile.runtime_kernels.numerics import mxfp4, nvfp4
from q2compile.runtime_kernels.numerics.blocks import Blocks, largest_of, poison
from q2compile.runtime_kernels.numerics.formats import encode_e2m1
from q2compile.runtime_kernels.numerics.layout import Tiling, pack, pack_bits
from q2compile.runtime_kernels.numerics.scaled_codes import scaled_codes
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, Scheme, get_scheme
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
        tiling: where they came from; the result lies along its rows.
        factor: what the tiles have still to be multiplied by: the norm of a rotation, and the
            global scale of a source that was quantized before. One number a block is multiplied by
            it instead: of MS-EDEN, whose codes do not depend on it, the raw scale; of others what
            the elements are multiplied by. Only QuEST squares the elements themselves.
        amax: fp32 0-dim, the largest finite |x| of the whole tensor, for schemes that take it;
            without one it is found: that of the finite blocks.
        seed, rng_offset: where the random bits of a stochastic scheme come from.
        shares: what MS-EDEN multiplies the rows of each chunk by besides (groups.py).

    Returns:
        codes uint8 [rows, Kp/2], or dequantized bf16 [rows, Kp]; scales [rows / rows of a block,
        Kp / width], or none; global_scale fp32 0-dim; and for QuEST the trust mask, uint8 [rows,
        Kp/8], one bit an element, else None.
    """
    if scheme.rounding == "quest":
        tiles, factor = tiles.mul_(factor), 1.0
    outer, size, lanes = tiles.shape
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
    """The bf16 numbers of a scheme that ends in DEQUANTIZED, no scales, and the global scale that
    has still to be applied."""
    values = scaled_codes(codes, scales, get_scheme(scheme.name.removesuffix(DEQUANTIZED)))
    if scheme.has_pow2_scale:
        values = values.mul_(global_scale)
        global_scale = torch.where(global_scale.isnan(), global_scale, 1.0)
    return values.to(torch.bfloat16), scales.new_empty((0, 0)), global_scale


def rotate_tiles(
    tiles: torch.Tensor,
    transform: Transform,
    seed: torch.Tensor | None,
    signs: torch.Tensor | None = None,
    positive_zeros: bool = False,
) -> torch.Tensor:
    """H (x * D) of every chunk of tiles [outer, size, lanes], size whole chunks, up to
    transform.norm. Overwrites them. signs: D, where it is there already.

    positive_zeros: a rotated zero is +0. Tensor cores, which add in an order of their own, make no
    other. In hadamard's order a sum is -0 only if the first element of its chunk is -0: in each
    butterfly it takes a first operand of -0. So +0 in that one's place suffices.
    """
    if signs is None:
        signs = signs_of(transform, seed, tiles.device)
    if signs is not None:
        tiles = _chunks(tiles, transform).mul_(signs[:, None]).view(tiles.shape)
    if positive_zeros and transform.size > 1:
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
