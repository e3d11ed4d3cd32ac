"""q2::transpose: the same numbers with the contraction on the other dimension, for 16x16 blocks.

    transpose(codes uint8 [M, Kp/2], scales [M/16, Kp/16], scheme, rows)
        -> codes uint8 [rows, Mp/2], scales [rows/16, Mp/16]

rows is K without its padding; the new contraction M is padded to whole blocks. A square block
shares one scale in both directions, so the codes only change places: this is what lets NVIDIA's
recipe quantise a weight once for fprop and dgrad. Blocks of one row cannot be reused so.
"""

import torch

from q2compile.runtime_kernels.numerics.layout import ceil_div, unpack
from q2compile.runtime_kernels.numerics.schemes import SCHEMES, Scheme, get_scheme
from q2compile.runtime_kernels.registry import REFERENCE, define, kernel


def checked(scheme: str) -> Scheme:
    """The scheme by name.

    Raises:
        ValueError: unknown, or its blocks are not square.
    """
    spec = get_scheme(scheme)
    if spec.block[0] != spec.block[1]:
        square = ", ".join(s.name for s in SCHEMES.values() if s.block[0] == s.block[1])
        raise ValueError(
            f"q2::transpose takes square blocks ({square}), got {scheme!r}: its blocks of "
            f"{spec.block[0]}x{spec.block[1]} lie along one dimension; use q2::requantize."
        )
    return spec


def fake(codes, scales, scheme, rows):
    side = checked(scheme).width
    blocks = ceil_div(codes.shape[0], side)
    return (
        codes.new_empty((rows, blocks * side // 2), dtype=torch.uint8),
        scales.new_empty((ceil_div(rows, side), blocks)),
    )


define(
    "transpose(Tensor codes, Tensor scales, str scheme, SymInt rows) -> (Tensor, Tensor)",
    fake=fake,
)


@kernel("transpose", REFERENCE)
def transpose(
    codes: torch.Tensor, scales: torch.Tensor, scheme: str, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference: see the top of this file."""
    side = checked(scheme).width
    turned = unpack(codes)[:, :rows].t()
    turned = torch.nn.functional.pad(turned, (0, -codes.shape[0] % side))
    packed = turned[:, 0::2] | (turned[:, 1::2] << 4)
    return packed.contiguous(), scales[:, : ceil_div(rows, side)].t().contiguous()
