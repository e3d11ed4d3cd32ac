"""Inductor lowerings of the q2 ops. An op without one is an extern kernel: the registry's."""

import torch

from q2compile.runtime_kernels.schemes import get_scheme


def register() -> None:
    """Tell Inductor how to lower the q2 ops. Apart from the import of this package, because it
    imports Inductor."""
    from q2compile.lowering import quantize  # noqa: F401


def why_not_lowered(device: torch.device, scheme: str) -> str | None:
    """None when Inductor compiles `q2::quantize` of this scheme to loops of its own, otherwise the
    reason in words."""
    spec = get_scheme(scheme)
    if device.type != "cuda":
        return f"on {device.type} the reference compiles faster than loops"
    if spec.swizzled:
        return f"{scheme} has swizzled scales"
    if spec.masked:
        return f"{scheme} has a trust mask"
    if spec.stochastic:
        return f"{scheme} draws coins"
    return None


def beats_kernels(scheme: str) -> bool:
    """Whether the loops of `q2::quantize` are taken even where a kernel of our own serves, if
    something computes x. What the others save by fusing has not been measured."""
    spec = get_scheme(scheme)
    return spec.format == "nvfp4" and spec.rounding == "rtn"
