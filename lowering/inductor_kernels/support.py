# SPDX-License-Identifier: Apache-2.0
"""Which quantizers can be Inductor kernels, and which are instead of CUDA kernels."""

import torch

from q2compile.runtime_kernels.cuda.jit.limits import why_no_fp8
from q2compile.runtime_kernels.ops.table import QuantizerCall

LARGEST_CHUNK = 32  # of a rotation: two blocks of 16


def why_not_lowered(device: torch.device, call: QuantizerCall) -> str | None:
    """None when Inductor can make a kernel of its own of such a call, otherwise the reason in
    words."""
    scheme, transform = call.scheme, call.transform
    if device.type != "cuda":
        return f"on {device.type} the reference compiles faster than an Inductor kernel"
    if scheme.is_tensorwise:
        return _why_not_tensorwise(device, call)
    if not call.spec.is_lowered or len(call.operands) > 1 or call.grouped:
        return f"there is no Inductor kernel for {call.label}"
    if call.masked or call.dbias is not None:
        return f"Inductor kernels have one operand and no mask or dbias, unlike {call.label}"
    if scheme.dequantized:
        return f"{scheme.name} has dequantized operands instead of codes"
    if scheme.masked:
        return f"{scheme.name} has a trust mask"
    if scheme.rounding == "ms_eden":
        return f"{scheme.name} corrects its scales by fp32 sums in a fixed order"
    if scheme.stochastic and scheme.selects:
        return f"{scheme.name} draws random bits for two candidates"
    if transform.size > LARGEST_CHUNK:
        return (
            f"the chunks of {transform.size} of {transform.name} are too long for the registers of "
            "a thread"
        )
    if call.recorded and (call.rotated or call.columnwise):
        return "statistics of it are computed beside the kernel of the same call without them"
    return None


def _why_not_tensorwise(device: torch.device, call: QuantizerCall) -> str | None:
    """The same for a scheme whose codes have one scale, which is known before the kernel runs."""
    if call.args["amax"] is None or call.rotated or call.grouped or call.scheme.dequantized:
        return f"the Inductor kernel of {call.scheme.name} takes an amax, and no {call.label}"
    if call.recorded or call.dbias is not None:
        return f"Inductor kernels return no statistics and no dbias, unlike {call.label}"
    return why_no_fp8(torch.cuda.get_device_capability(device))


def beats_kernels(call: QuantizerCall) -> bool:
    """Whether the Inductor kernel is used even where a CUDA kernel serves, if there is a producer
    of x to fuse with. Other Inductor kernels are for GPUs without CUDA kernels (compute capability
    below 8.0, no NVRTC): they load element by element, or were never measured."""
    nearest = call.scheme.format == "nvfp4" and call.scheme.rounding == "rtn"
    return nearest and not call.rotated
