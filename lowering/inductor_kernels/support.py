# SPDX-License-Identifier: Apache-2.0
"""Which quantizers can be Inductor kernels, and which are instead of CUDA kernels."""

import torch

from q2compile.runtime_kernels.cuda.jit.limits import capability_of, why_no_fp8
from q2compile.runtime_kernels.ops.table import QuantizerCall


def why_not_lowered(device: torch.device, call: QuantizerCall) -> str | None:
    """None when Inductor can make a kernel of its own of such a call, otherwise the reason in
    words."""
    scheme = call.scheme
    if device.type != "cuda":
        return f"on {device.type} the reference compiles faster than an Inductor kernel"
    if scheme.is_tensorwise:
        return _why_not_tensorwise(device, call)
    if not call.spec.is_lowered or len(call.operands) > 1 or call.grouped:
        return f"there is no Inductor kernel for {call.label}"
    if call.masked or call.dbias is not None:
        return f"Inductor kernels have one operand and no mask or dbias, unlike {call.label}"
    if call.rotated or call.columnwise:
        return f"Inductor kernels neither rotate nor transpose, unlike {call.label}"
    if scheme.dequantized:
        return f"{scheme.name} has dequantized operands instead of codes"
    if scheme.rounding != "rtn":
        return f"{scheme.name} does not round to nearest"
    return None


def _why_not_tensorwise(device: torch.device, call: QuantizerCall) -> str | None:
    """Why Inductor makes no kernel of a call whose scheme has one scale for the tensor; None if it
    does."""
    if call.args["amax"] is None or call.rotated or call.grouped or call.scheme.dequantized:
        return f"the Inductor kernel of {call.scheme.name} needs an amax, unlike {call.label}"
    if call.recorded or call.dbias is not None:
        return f"Inductor kernels return no statistics and no dbias, unlike {call.label}"
    return why_no_fp8(capability_of(device))


def beats_kernels(call: QuantizerCall) -> bool:
    """Whether the Inductor kernel of a call that has one is used even where a CUDA kernel serves,
    if there is a producer of x to fuse with. MXFP4's are for what no CUDA kernel serves: square
    blocks, and GPUs without CUDA kernels (compute capability below 8.0, no NVRTC).
    """
    return call.scheme.format == "nvfp4"
