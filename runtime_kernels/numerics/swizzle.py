# SPDX-License-Identifier: Apache-2.0
"""The layout in which Blackwell's tensor cores read block scales: tiles of 128 rows x 4 blocks.

Scale (row, block) of a padded [128 a, 4 b] matrix of bytes is at

    ((row // 128) * b + block // 4) * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + block % 4

"32x4x4" in cuBLAS's documentation ("block scaling factors layout"): four groups of 32 rows are side
by side, 4 bytes each. Operands that nothing but fp4 GEMMs and requantizations read are quantized
with scales in this layout (schemes.py, SWIZZLED), as [tiles, 512]; those of others are swizzled on
the way into the GEMM.
"""

import torch

from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.numerics.schemes import Scheme


def swizzle_32x4x4(scales: torch.Tensor) -> torch.Tensor:
    """[rows, blocks] of 8-bit scales -> flat, padded with zero bytes to whole tiles.

    Returns:
        Same dtype, [ceil(rows/128) * ceil(blocks/4) * 512].

    Raises:
        ValueError: scales are not a matrix of 8-bit values.
    """
    if scales.dim() != 2 or scales.element_size() != 1:
        raise ValueError(
            f"swizzle_32x4x4 takes a matrix of 8-bit scales, got {scales.dtype} in {scales.dim()} "
            "dimensions."
        )
    rows, blocks = scales.shape
    padding = (0, -blocks % 4, 0, -rows % 128)
    bytes_ = torch.nn.functional.pad(scales.view(torch.uint8), padding)
    tiles = bytes_.view(ceil_div(rows, 128), 4, 32, ceil_div(blocks, 4), 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(scales.dtype)


def unswizzle_32x4x4(swizzled: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Undoes swizzle_32x4x4: flat -> [rows, blocks].

    Raises:
        ValueError: the number of bytes is not that of whole tiles for rows and blocks.
    """
    a, b = ceil_div(rows, 128), ceil_div(blocks, 4)
    if swizzled.numel() != a * b * 512:
        raise ValueError(
            f"unswizzle_32x4x4: [{rows}, {blocks}] scales fill {a * b * 512} bytes, got "
            f"{swizzled.numel()}."
        )
    tiles = swizzled.view(torch.uint8).view(a, b, 32, 4, 4).permute(0, 3, 2, 1, 4)
    plain = tiles.reshape(a * 128, b * 4)[:rows, :blocks]
    return plain.contiguous().view(swizzled.dtype)


def plain_scales(scales: torch.Tensor, rows: int, columns: int, scheme: Scheme) -> torch.Tensor:
    """The scales of a quantized [rows, columns] matrix, unswizzled if they are swizzled."""
    if not scheme.swizzled:
        return scales
    return unswizzle_32x4x4(scales, rows, ceil_div(columns, scheme.width))
