# SPDX-License-Identifier: Apache-2.0
"""q2::amax (runtime_kernels/ops/amax.py) as the lowerings of aten's ops."""

from typing import Any

import torch
from torch._inductor.lowering import lowerings

from q2compile.lowering.member import OpCall

_aten = torch.ops.aten


def amax(call: OpCall) -> Any:
    """A reduction, to be fused with what computes x. With a call of the op instead, on a CPU, the
    first step of fp8 took 8.6 and not 11.1 s (one block, 1024 tokens), and later steps 27% longer.
    """
    (x,) = call.bound
    magnitude = lowerings[_aten.abs.default](x)
    is_finite = lowerings[_aten.lt.Scalar](magnitude, torch.inf)
    zero = lowerings[_aten.full.default]([], 0.0, dtype=x.get_dtype(), device=x.get_device())
    finite = lowerings[_aten.where.self](is_finite, magnitude, zero)
    largest = lowerings[_aten.amax.default](finite)
    return lowerings[torch.ops.prims.convert_element_type.default](largest, torch.float32)
