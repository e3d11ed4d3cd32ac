# SPDX-License-Identifier: Apache-2.0
"""q2::amax (runtime_kernels/ops/amax.py) as Inductor's reduction."""

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import ops

from q2compile.lowering.member import OpCall


def amax(call: OpCall) -> Any:
    """A reduction, to be fused with what computes x. With a call of the op instead, on a CPU, the
    first step of fp8 took 8.6 and not 11.1 s (one block, 1024 tokens), and later steps 27% longer.
    """
    (x,) = call.bound
    load, dtype = x.make_loader(), x.get_dtype()

    def finite(place: Any) -> Any:
        magnitude = ops.abs(load(place))
        is_finite = ops.lt(magnitude, ops.constant(torch.inf, dtype))
        return ops.where(is_finite, magnitude, ops.constant(0.0, dtype))

    device = x.get_device_or_error()
    made = ir.Pointwise.create(device=device, dtype=dtype, inner_fn=finite, ranges=x.get_size())
    largest = lowerings[torch.ops.aten.amax.default](made)
    return lowerings[torch.ops.prims.convert_element_type.default](largest, torch.float32)
