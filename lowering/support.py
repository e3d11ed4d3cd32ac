"""Which ops Inductor has loops for, and where a loop is taken instead of a kernel's call."""

import torch

from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.numerics.transforms import get_transform

LARGEST_CHUNK = 32  # of a rotation: two blocks of 16


def why_not_lowered(device: torch.device, scheme: str, transform: str = "none") -> str | None:
    """None when Inductor can compile `q2::quantize` of this scheme, or `q2::rht_quantize`, to loops
    of its own, otherwise the reason in words."""
    spec, size = get_scheme(scheme), get_transform(transform).size
    if device.type != "cuda":
        return f"on {device.type} the reference compiles faster than loops"
    if spec.widened:
        return f"{scheme} has numbers instead of codes"
    if spec.masked:
        return f"{scheme} has a trust mask"
    if spec.rounding == "ms_eden":
        return f"{scheme} corrects its scales by sums of fp32 in a fixed order"
    if spec.stochastic and spec.select:
        return f"{scheme} draws coins for two candidates"
    if size > LARGEST_CHUNK:
        return f"the chunks of {size} of {transform} are too long for the registers of a thread"
    return None


def beats_kernels(scheme: str, transform: str = "none") -> bool:
    """Whether the loops are taken even where a kernel of our own serves, if something computes x.
    The others are for GPUs that have none (compute capability below 8.0, no NVRTC); they load
    number by number, or were never measured."""
    spec = get_scheme(scheme)
    return spec.format == "nvfp4" and spec.rounding == "rtn" and transform == "none"
