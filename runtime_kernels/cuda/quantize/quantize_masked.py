"""q2::quantize_masked on CUDA, QuEST of Quartet's forward: rotate_quantize.cu with a mask beside
the codes.
"""

import torch

from q2compile.runtime_kernels.cuda.quantize import rotating_ops
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import not_served
from q2compile.runtime_kernels.cuda.selfcheck import refusal
from q2compile.runtime_kernels.registry import CUDA, kernel


def _refuses_quantize(x, scheme, transform) -> str | None:
    why = not_served(scheme, transform, masked=True)
    return why or refusal("quantize_masked", CUDA, x.device.index, scheme)


def _prepare_quantize(x, scheme, transform) -> None:
    rotating_ops.prepare(x.contiguous(), scheme, transform, (True, False))


@kernel(
    "quantize_masked",
    CUDA,
    device_type="cuda",
    refuses=_refuses_quantize,
    prepare=_prepare_quantize,
)
def quantize_masked(x: torch.Tensor, scheme: str, transform: str) -> tuple[torch.Tensor, ...]:
    """See ops/quantize_masked.py."""
    draws = ((None, 0), None)
    return rotating_ops.rotated("quantize_masked", x.contiguous(), scheme, transform, draws)[0]
