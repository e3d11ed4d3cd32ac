"""q2::quantize_masked: q2::rht_quantize of [M, K] for QuEST, whose trust mask the backward needs.

    quantize_masked(x [M, K], scheme, transform)
        -> codes uint8 [M, Kp/2], scales, global_scale fp32 0-dim, mask uint8 [M, Kp/8]

The mask has one bit an element of the rotated x, the little bit first, 1 where |x / scale| < 6:
where the rounding did not clip. Quartet (2505.14669 v4), algorithm 1 (appendix A.1).
"""

import torch

from q2compile.runtime_kernels.numerics.layout import Tiling, empty_quantized, padded
from q2compile.runtime_kernels.numerics.quantize_tiles import quantize_tiles, rotate_tiles
from q2compile.runtime_kernels.numerics.schemes import SCHEMES, Scheme
from q2compile.runtime_kernels.numerics.transforms import Transform
from q2compile.runtime_kernels.ops.argument_checks import check_operand
from q2compile.runtime_kernels.ops.rht_quantize import checked as checked_rotation
from q2compile.runtime_kernels.registry import REFERENCE, define, kernel


def checked(x: torch.Tensor, scheme: str, transform: str) -> tuple[Scheme, Transform]:
    """The scheme and the transform by name.

    Raises:
        ValueError: x is not a float matrix; the scheme has no mask; the transform draws signs (the
            forward pass must be deterministic).
    """
    check_operand("quantize_masked", x)
    spec, rotation = checked_rotation("quantize_masked", None, scheme, transform)
    if not spec.masked:
        having = ", ".join(s.name for s in SCHEMES.values() if s.masked)
        raise ValueError(
            f"q2::quantize_masked takes schemes with a trust mask ({having}), got {scheme!r}: "
            "use q2::rht_quantize."
        )
    return spec, rotation


def fake(x, scheme, transform):
    spec, rotation = checked(x, scheme, transform)
    quantized = empty_quantized(x, x.shape[0], x.shape[1], spec, rotation)
    width = padded(x.shape[1], spec, rotation)
    return (*quantized, x.new_empty((x.shape[0], width // 8), dtype=torch.uint8))


define(
    "quantize_masked(Tensor x, str scheme, str transform) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=fake,
)


@kernel("quantize_masked", REFERENCE)
def quantize_masked(
    x: torch.Tensor, scheme: str, transform: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The reference: see the top of this file."""
    spec, rotation = checked(x, scheme, transform)
    tiling = Tiling.of(x, max(spec.width, rotation.size), transpose=False)
    tiles = rotate_tiles(tiling.cut(x), rotation, None)
    codes, scales, global_scale, mask = quantize_tiles(tiles, tiling, spec, factor=rotation.norm)
    assert mask is not None, "checked() lets only schemes with a mask through"
    return codes, scales, global_scale, mask
