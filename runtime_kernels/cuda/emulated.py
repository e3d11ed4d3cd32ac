# SPDX-License-Identifier: Apache-2.0
"""Emulation and references on the GPUs of this process, with reasons. Shown in the log, in reports
and by `q2compile doctor`."""

from __future__ import annotations

import torch

from q2compile.runtime_kernels.cuda.gemm import cublaslt_fp4, triton_fp4
from q2compile.runtime_kernels.cuda.jit import launch
from q2compile.runtime_kernels.cuda.jit.limits import family_of, why_not_in_e4m3
from q2compile.runtime_kernels.kernel_states import why_disabled
from q2compile.runtime_kernels.ops.table import GEMM
from q2compile.runtime_kernels.registry import CUBLASLT_FP4, SCALED_MM, TRITON_FP4, emulation


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
    triton = why_disabled(GEMM, TRITON_FP4) or triton_fp4.unserved(index)
    cublaslt = why_disabled(GEMM, CUBLASLT_FP4) or cublaslt_fp4.unserved(index)
    if cublaslt is not None and triton is not None:
        reasons = {cublaslt: CUBLASLT_FP4}
        reasons.setdefault(triton, TRITON_FP4)
        words = [why if len(reasons) == 1 else f"{name}: {why}" for why, name in reasons.items()]
        left_out = why_disabled(GEMM, SCALED_MM) or why_not_in_e4m3(capability)
        in_e4m3 = not (reason or left_out)
        of = "NVFP4 and grouped" if in_e4m3 else "FP4"
        lines.append(f"{of} GEMMs on {where} are emulated in BF16: {'; '.join(words)}")
        if in_e4m3:
            lines.append(
                f"MXFP4 GEMMs on {where} multiply E4M3 elements on FP8 tensor cores, exactly "
                "except for blocks whose scale is over 2^14 below their operand's largest: those "
                "are rounded, by at most 2^-16 of that scale; telemetry records their share as "
                "scale_subnormal"
            )
    elif triton is not None:
        lines.append(f"MXFP4 and grouped GEMMs on {where} are emulated in BF16: {triton}")
    return lines


def _of_all() -> list[str]:
    """The sentences of all GPUs; equal ones are named once."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return list(dict.fromkeys(text for index in range(count) for text in of_device(index)))


emulation(_of_all)
