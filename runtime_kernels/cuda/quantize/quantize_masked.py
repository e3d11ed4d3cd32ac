"""q2::quantize_masked on CUDA, QuEST of Quartet's forward: rotate_quantize.cu with a mask beside
the codes.
"""

import torch

from q2compile.runtime_kernels.cuda.calls import Call, Form, launching
from q2compile.runtime_kernels.cuda.quantize import rotating_ops
from q2compile.runtime_kernels.cuda.quantize.plan import Direction
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import not_served
from q2compile.runtime_kernels.cuda.selfcheck import refusal
from q2compile.runtime_kernels.ops.quantize_masked import checked
from q2compile.runtime_kernels.registry import CUDA


def _refuses_quantize(x, scheme, transform) -> str | None:
    why = not_served(scheme, transform, masked=True)
    return why or refusal("quantize_masked", CUDA, x.device.index, scheme)


@launching(
    "quantize_masked",
    refuses=_refuses_quantize,
    launches=lambda x, scheme, transform: rotating_ops.launched(
        x.contiguous(), scheme, transform, (True, False)
    ),
    forms={0: Form.CONTIGUOUS},
)
def quantize_masked(x: torch.Tensor, scheme: str, transform: str) -> Call:
    """See ops/quantize_masked.py."""
    checked(x, scheme, transform)
    return rotating_ops.rotated(x, scheme, transform, (Direction(0, 0, 1), None), 1)
