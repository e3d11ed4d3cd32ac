"""q2::quantize_masked: q2::rht_quantize of [M, K] for QuEST, whose trust mask the backward needs.

    quantize_masked(x [M, K], scheme, transform)
        -> codes uint8 [M, Kp/2], scales, global_scale fp32 0-dim, mask uint8 [M, Kp/8]

The mask has one bit an element of the rotated x, the little bit first, 1 where |x / scale| < 6:
where the rounding did not clip. Quartet (2505.14669 v4), algorithm 1 (appendix A.1).
"""

import torch

from q2compile.runtime_kernels.checks import check_operand
from q2compile.runtime_kernels.layout import empty_quantized, padded
from q2compile.runtime_kernels.registry import define
from q2compile.runtime_kernels.rht_quantize.op import checked as checked_rotation
from q2compile.runtime_kernels.schemes import SCHEMES, Scheme
from q2compile.runtime_kernels.transforms import Transform


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
