# SPDX-License-Identifier: Apache-2.0
"""Emulation and references on the GPUs of this process, with reasons. Shown in the log, in reports
and by `q2compile doctor`."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from q2compile.runtime_kernels.choice import Choice, choose
from q2compile.runtime_kernels.cuda.jit import launch
from q2compile.runtime_kernels.cuda.jit.limits import family_of
from q2compile.runtime_kernels.kernel_states import KNOWN, Noted, awaited_in
from q2compile.runtime_kernels.numerics.layout import empty_quantized
from q2compile.runtime_kernels.numerics.schemes import SWIZZLED, get_scheme
from q2compile.runtime_kernels.numerics.transforms import get_transform
from q2compile.runtime_kernels.ops.table import GEMM
from q2compile.runtime_kernels.registry import CUBLASLT_FP4, SCALED_MM, TRITON_FP4


def of_device(index: int) -> list[str]:
    """A sentence for each emulation or reference on a device."""
    capability = torch.cuda.get_device_capability(index)
    where = f"{torch.cuda.get_device_name(index)} ({capability[0]}.{capability[1]})"
    lines = []
    if reason := launch.unsupported(index):
        lines.append(f"quantizers on {where} are Inductor's kernels or torch references: {reason}")
    else:
        target = launch.target(index)
        if target.why and family_of(capability) is not None:
            lines.append(f"quantizers on {where} round to FP4 by arithmetic: {target.why}")
        elif target.why:
            lines.append(f"quantizers on {where} are compiled for {target.name}: {target.why}")
    schemes = "nvfp4_46_pow2" + SWIZZLED, "mxfp4_rtn"
    of_nvfp4, of_mxfp4 = (_of_gemm(index, scheme) for scheme in schemes)
    if of_nvfp4.name not in (CUBLASLT_FP4, TRITON_FP4):
        reasons = {of_nvfp4.why_not[name]: name for name in (TRITON_FP4, CUBLASLT_FP4)}
        words = [why if len(reasons) == 1 else f"{name}: {why}" for why, name in reasons.items()]
        in_e4m3 = of_mxfp4.name == SCALED_MM
        of = "NVFP4 and grouped" if in_e4m3 else "FP4"
        lines.append(f"{of} GEMMs on {where} are emulated in BF16: {'; '.join(reversed(words))}")
        if in_e4m3:
            lines.append(
                f"MXFP4 GEMMs on {where} multiply E4M3 elements on FP8 tensor cores, exactly "
                "except for blocks whose scale is over 2^14 below their operand's largest: those "
                "are rounded, by at most 2^-16 of that scale; telemetry records their share as "
                "scale_subnormal"
            )
    elif of_mxfp4.name != TRITON_FP4:
        why = of_mxfp4.why_not[TRITON_FP4]
        lines.append(f"MXFP4 and grouped GEMMs on {where} are emulated in BF16: {why}")
    return lines


def _of_gemm(index: int, scheme: str) -> Choice:
    """The choice for a GEMM. No check begins, and a kernel that was not checked counts as good."""
    with FakeTensorMode(), awaited_in(Noted()):
        x = torch.empty((), device=f"cuda:{index}")
        operand = empty_quantized(x, 128, 256, get_scheme(scheme), get_transform("none"))
        return choose(GEMM, (*operand, *operand, None, scheme, scheme, torch.bfloat16))


def emulations() -> list[str]:
    """Lines on what is emulated on the GPUs of this process, or runs as a reference there."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    lines = [text for index in range(count) for text in of_device(index)]
    return [*dict.fromkeys(lines), *KNOWN.references.values()]  # equal GPUs are named once
