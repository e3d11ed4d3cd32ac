# SPDX-License-Identifier: Apache-2.0
"""q2::transpose: the transposed matrix, as codes and scales, for square blocks and for fp8.

    transpose(codes uint8 [M, Kp/2], scales [M/16, Kp/16], scheme, rows, swizzled, offs,
              padded_offs)
        -> codes uint8 [rows, Mp/2], scales [rows/16, Mp/16]      (mxfp4: 32 for 16)

rows is K without its padding; the new contraction M is padded to whole blocks. A square block
has one scale rowwise and columnwise, so the codes only change places. That lets NVIDIA's recipe
quantize a weight once for fprop and dgrad. Blocks of one row cannot be reused in this way. Codes
of fp8, float8_e4m3fn [M, Kp] -> [rows, Mp], share one scale in any direction, and have no others.
Only they can be transposed in groups of rows, as in q2::quantize: offs and padded_offs are the ends
of the groups, Mp counts the rows of the padded layout, and rows of no group are +0.

swizzled: each row gets its own copy of the scales, swizzled for FP4 GEMMs (numerics/swizzle.py):
[tiles, 512]. The operand then has the scheme with blocks of one row (`of_rows`).
"""

import torch

from q2compile.runtime_kernels.numerics.groups import lay_out, padded_rows
from q2compile.runtime_kernels.numerics.layout import ceil_div, scales_shape, unpack
from q2compile.runtime_kernels.numerics.schemes import SCHEMES, SWIZZLED, Scheme, get_scheme
from q2compile.runtime_kernels.numerics.swizzle import swizzle_32x4x4
from q2compile.runtime_kernels.ops.argument_checks import check_groups
from q2compile.runtime_kernels.registry import define


def checked_transpose(scheme: str) -> Scheme:
    """The scheme by name.

    Raises:
        ValueError: unknown, or its scales do not serve rowwise and columnwise.
    """
    spec = get_scheme(scheme)
    if not spec.is_transposable:
        square = ", ".join(s.name for s in SCHEMES.values() if s.is_transposable)
        raise ValueError(
            f"q2::transpose takes scales that serve rowwise and columnwise ({square}), got "
            f"{scheme!r}: its blocks of "
            f"{spec.block[0]}x{spec.block[1]} are along one dimension; use q2::requantize."
        )
    return spec


def of_rows(scheme: str) -> str:
    """The scheme of an operand of square blocks once its scales are repeated for each row and
    swizzled: nvfp4_pow2@32x4x4 for nvfp4_16x16_pow2."""
    spec = checked_transpose(scheme)
    return spec.name.replace(f"_{spec.width}x{spec.width}", "") + SWIZZLED


def shapes(
    codes, scheme: str, rows, swizzled: bool, offs=None, padded_offs=None
) -> tuple[tuple, tuple]:
    """The shapes of the resulting codes and scales; sizes may be symbolic. Checks the groups."""
    spec, height = checked_transpose(scheme), codes.shape[0]
    if offs is not None or padded_offs is not None:
        right = spec.is_tensorwise and offs is not None and padded_offs is not None
        assert right, f"q2::transpose takes groups of fp8 with both of their ends, not of {scheme}"
        check_groups("transpose", offs, padded_offs)
        height = padded_rows(height, offs.shape[0])
    blocks = ceil_div(height, spec.width)
    transposed = get_scheme(of_rows(scheme)) if swizzled else spec
    return (rows, blocks * spec.width // spec.packed), scales_shape(rows, blocks, transposed)


def fake(codes, scales, scheme, rows, swizzled=False, offs=None, padded_offs=None):
    of_codes, of_scales = shapes(codes, scheme, rows, swizzled, offs, padded_offs)
    return codes.new_empty(of_codes), scales.new_empty(of_scales)


@define(
    "transpose(Tensor codes, Tensor scales, str scheme, SymInt rows, bool swizzled=False,"
    " Tensor? offs=None, Tensor? padded_offs=None) -> (Tensor, Tensor)",
    fake=fake,
)
def transpose(
    codes: torch.Tensor,
    scales: torch.Tensor,
    scheme: str,
    rows: int,
    swizzled: bool = False,
    offs: torch.Tensor | None = None,
    padded_offs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference: see the top of this file."""
    spec = checked_transpose(scheme)
    shapes(codes, scheme, rows, swizzled, offs, padded_offs)
    width = spec.width
    if spec.is_tensorwise:
        laid = codes.view(torch.uint8)[:, :rows]  # few functions take fp8
        if offs is not None and padded_offs is not None:
            laid, _ = lay_out(laid, offs, padded_offs, spread=False)
        laid = torch.nn.functional.pad(laid.t(), (0, -laid.shape[0] % width)).contiguous()
        return laid.view(codes.dtype), scales.clone()
    transposed = unpack(codes)[:, :rows].t()
    transposed = torch.nn.functional.pad(transposed, (0, -codes.shape[0] % width))
    packed = transposed[:, 0::2] | (transposed[:, 1::2] << 4)
    transposed_scales = scales[:, : ceil_div(rows, width)].t().contiguous()
    if swizzled:
        of_each_row = transposed_scales.view(torch.uint8).repeat_interleave(width, 0)[:rows]
        transposed_scales = swizzle_32x4x4(of_each_row.view(scales.dtype)).view(-1, 512)
    return packed.contiguous(), transposed_scales
