# SPDX-License-Identifier: Apache-2.0
"""Which calls Inductor kernels serve: rows of the ops' kernels, for `choose`."""

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from q2compile.lowering.inductor_kernels import fusion_gain, selfcheck
from q2compile.lowering.inductor_kernels.fusion_gain import ComputedOperand
from q2compile.runtime_kernels.choice import InGraph, choose, generated_kernel
from q2compile.runtime_kernels.cuda.jit.limits import capability_of, why_no_fp8
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.table import (
    AMAX,
    DEQUANTIZE,
    QUANTIZE,
    QuantizerCall,
)
from q2compile.runtime_kernels.registry import CPP, INDUCTOR, REFERENCE


@generated_kernel(AMAX, INDUCTOR)
def why_not_amax(graph: InGraph, x: torch.Tensor) -> str | None:
    return _why_not_empty(x)


@generated_kernel(QUANTIZE, INDUCTOR, selfcheck.check_of)
def why_not_quantizer(graph: InGraph, *args: Any) -> str | None:
    """It is instead of a CUDA kernel only where that is faster with the producer of x: for rows of
    nvfp4 by their instructions, for those of fp8, which read and write no more than a copy, always.
    """
    call = QuantizerCall.of(QUANTIZE, args)
    why = why_not_generated(call.x.device, call) or _why_not_empty(call.x)
    if why is not None:
        return why
    slower: str | None = "it is no faster where nothing is fused"
    if graph.computed is not None:
        on_gpu = call.x.device.type == "cuda"
        major = capability_of(call.x.device)[0] if on_gpu else 0
        slower = fusion_gain.why_not(call.scheme, ComputedOperand(*graph.computed), major)
    if slower is not None:
        other = choose(QUANTIZE, call.replace(recorded=False).positional).name
        if other not in (CPP, REFERENCE):
            return f"{slower}; kernel {other!r} serves"
    return None


@generated_kernel(DEQUANTIZE, INDUCTOR)
def why_not_dequantize(graph: InGraph, *args: Any) -> str | None:
    codes, _, _, scheme, *_ = args
    if not get_scheme(scheme).is_tensorwise:
        return f"there is no Inductor kernel for {scheme}"
    return why_no_conversion(codes.device)


def why_no_conversion(device: torch.device) -> str | None:
    """None if Triton converts to e4m3 on this device."""
    if device.type != "cuda":
        return f"Triton does not run on {device.type}"
    return why_no_fp8(capability_of(device))


def _why_not_empty(x: torch.Tensor) -> str | None:
    if any(statically_known_true(size == 0) for size in x.shape):
        return "a matrix without elements has no largest one"
    return None


def why_not_generated(device: torch.device, call: QuantizerCall) -> str | None:
    """None when Inductor can make a kernel of its own of such a call, otherwise the reason in
    words."""
    scheme = call.scheme
    if device.type != "cuda":
        return f"on {device.type} the reference compiles faster than an Inductor kernel"
    if scheme.format == "mxfp4":
        return f"there is no Inductor kernel for {scheme.name}: none would be faster than cuda's"
    if call.spec.name != QUANTIZE or len(call.operands) > 1 or call.grouped:
        return f"there is no Inductor kernel for {call.label}"
    if call.masked or call.dbias is not None:
        return f"Inductor kernels have one operand and no mask or dbias, unlike {call.label}"
    if call.rotated or call.columnwise:
        return f"Inductor kernels neither rotate nor transpose, unlike {call.label}"
    if scheme.dequantized:
        return f"{scheme.name} has dequantized operands instead of codes"
    if scheme.is_tensorwise:
        if call.args["amax"] is None or call.recorded:
            return f"the Inductor kernel of {scheme.name} needs an amax and returns no statistics"
        return why_no_fp8(capability_of(device))
    if scheme.rounding != "rtn":
        return f"{scheme.name} does not round to nearest"
    return None
