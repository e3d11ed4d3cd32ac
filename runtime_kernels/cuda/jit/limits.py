# SPDX-License-Identifier: Apache-2.0
"""The table of GPUs by compute capability: compilation targets, and the first NVRTC and the first
Triton for each.

NVRTC compiles for a family of GPUs where it can (sm_100f, from 12.9 on): that code has the fp4
conversions, and runs on all later GPUs of the family, too. Before that it compiles for the one GPU
(sm_100a). Plain targets (sm_100) and PTX have no fp4 conversions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from q2compile.runtime_kernels.kernel_states import assumed_capability

Version = tuple[int, int]


class Family(NamedTuple):
    """GPUs with fp4 tensor cores and the same instructions.

    target, nvrtc: what is compiled for all of them, and the first NVRTC that does.
    triton: the first that compiles tl.dot_scaled to fp4 tensor-core instructions, for a GPU that is
        not in DOT_SCALED.
    """

    target: str
    nvrtc: Version
    triton: Version


# By major compute capability. 11.0 is Thor.
FAMILIES = {
    10: Family("sm_100f", (12, 9), (3, 8)),
    11: Family("sm_110f", (13, 0), (3, 7)),
    12: Family("sm_120f", (12, 9), (3, 8)),
}
# On 12.1 Triton 3.6 asserts for nvfp4 and dequantizes mxfp4 to bf16.
DOT_SCALED = {(10, 0): (3, 6), (10, 3): (3, 6), (12, 0): (3, 6), (12, 1): (3, 8)}
# Targets of one GPU, and the first NVRTC of those that torch 2.11 may come without.
ARCHITECTURES = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_87",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
    (12, 1): "sm_121a",
}
_FIRST_NVRTC = {"sm_100a": (12, 8), "sm_103a": (12, 9), "sm_120a": (12, 8), "sm_121a": (12, 9)}
_NOT_OF_THE_FAMILY = ((10, 1),)  # Thor, as CUDA 12 calls it
# For other GPUs: the highest of these that they include, with the first NVRTC.
_PLAIN = {(8, 0): (11, 0), (9, 0): (11, 8), (10, 0): (12, 8), (12, 0): (12, 8)}
# Shared memory of a multiprocessor in KiB, by compute capability, where it is not 100 (CUDA C++
# Programming Guide).
SHARED_KIB = {(8, 0): 164, (8, 7): 164, (9, 0): 228, (10, 0): 228, (10, 3): 228, (11, 0): 228}


class Target(NamedTuple):
    """name: the target that kernels are compiled for; "compute_..." for PTX, None if there is none.
    why: if it is neither the GPU's own nor its family's, the reason in words."""

    name: str | None
    why: str | None = None


def capability_of(device: int | torch.device | None) -> Version:
    """The compute capability of a CUDA device, or of the GPU that is assumed."""
    return assumed_capability() or torch.cuda.get_device_capability(device)


def family_of(capability: Version) -> Family | None:
    """The family of a GPU; None for GPUs without fp4 tensor cores, and for unknown ones."""
    return None if capability in _NOT_OF_THE_FAMILY else FAMILIES.get(capability[0])


def targets(capability: Version, nvrtc: Version, driver: Version | None = None) -> list[Target]:
    """The targets for a GPU of this compute capability, the best one first. A driver may refuse to
    load code for a target that NVRTC has; launch.target() then tries the next one.

    driver: the CUDA version of the driver, which reads PTX of no later NVRTC; None: not known.
    """
    family, own = family_of(capability), ARCHITECTURES.get(capability)
    found = []
    if family is not None and nvrtc >= family.nvrtc:
        found.append(Target(family.target))
    if own is not None and nvrtc >= _FIRST_NVRTC.get(own, (0, 0)):
        found.append(Target(own))
    if capability < min(_PLAIN):
        why = "there are kernels for compute capability 8.0 and higher, not for "
        return [Target(None, why + _dotted(capability))]
    why = f"compute capability {_dotted(capability)} is not known here"
    if family is not None:
        first = min(family.nvrtc, _FIRST_NVRTC.get(own or "", family.nvrtc))
        why = (
            f"NVRTC {_dotted(nvrtc)} has no target for compute capability {_dotted(capability)}, "
            f"NVRTC {_dotted(first)} has"
        )
    lower = [c for c, first in _PLAIN.items() if c <= capability and nvrtc >= first]
    if lower and (driver is None or driver >= nvrtc):
        found.append(Target("compute_{}{}".format(*lower[-1]), why))
    if lower and lower[-1][0] == capability[0]:  # machine code of one generation runs on its later
        found.append(Target("sm_{}{}".format(*lower[-1]), why))
    read = f", and a driver of CUDA {_dotted(driver)} reads no newer PTX" if driver else ""
    return found or [Target(None, why + read)]


def why_no_fp4(capability: Version) -> str | None:
    """None for GPUs with fp4 tensor cores, otherwise the reason in words."""
    if family_of(capability) is not None:
        return None
    if capability < (10, 0):
        return "fp4 tensor cores begin with compute capability 10.0"
    return f"compute capability {_dotted(capability)} is not known to have fp4 tensor cores"


def why_no_fp8(capability: Version) -> str | None:
    """None for GPUs with fp8 tensor cores, otherwise the reason in words."""
    if capability >= (8, 9):
        return None
    return f"fp8 tensor cores begin with compute capability 8.9, this is {_dotted(capability)}"


def why_not_in_e4m3(capability: Version) -> str | None:
    """None for GPUs whose fp8 tensor cores multiply MXFP4 operands, because they have no fp4 ones;
    otherwise the reason in words."""
    if capability >= (10, 0):
        return f"compute capability {_dotted(capability)} multiplies MXFP4 codes"
    return why_no_fp8(capability)


def why_no_dot_scaled(capability: Version, triton: Version | None) -> str | None:
    """None if Triton compiles tl.dot_scaled to fp4 tensor-core instructions, otherwise the reason
    in words."""
    family = family_of(capability)
    if family is None:
        return why_no_fp4(capability)
    if triton is None:
        return "Triton is not installed"
    first = DOT_SCALED.get(capability, family.triton)
    if triton < first:
        return f"tl.dot_scaled works here from Triton {_dotted(first)} on"
    return None


def _dotted(version: Version) -> str:
    return "{}.{}".format(*version)
