# SPDX-License-Identifier: Apache-2.0
"""A device error in the user's own code is followed by a line that names the last launches."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from q2compile.runtime_kernels.cuda import recent_launches
from q2compile.runtime_kernels.cuda.dequantize import dequantize
from q2compile.runtime_kernels.cuda.gemm import cublaslt, triton_fp4
from tests.support.emulation.on_cpu import launches_on_cpu

PROGRAM = """
import torch
from q2compile.runtime_kernels.cuda import recent_launches
recent_launches.watch()
recent_launches.watch()
for i in range(10):
    recent_launches.note(f"launch {i}")
raise ERROR
"""
LINE = (
    "q2compile: its last launches before this error, newest first: launch 9, launch 8, launch 7, "
    "launch 6, launch 5, launch 4, launch 3, launch 2. One of these may be at fault, or a kernel "
    "of others: CUDA_LAUNCH_BLOCKING=1 makes the error name the call."
)


@pytest.mark.parametrize(
    ("error", "of_device"),
    [
        ("RuntimeError('CUDA error: an illegal memory access was encountered')", True),
        ("recent_launches.DeviceLostError('cuda:0 failed')", True),
        ("torch.OutOfMemoryError('CUDA out of memory')", False),
        ("ValueError('loss is NaN')", False),
    ],
)
def test_an_uncaught_device_error_names_them(error, of_device) -> None:
    """Once, after the traceback; other errors are as they were."""
    code = PROGRAM.replace("ERROR", error)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and any("Error: " in line for line in lines[-2:])
    assert lines[-1] == LINE if of_device else "q2compile" not in done.stderr


@pytest.fixture
def recent(monkeypatch) -> None:
    recent_launches._RECENT.clear()
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


def test_launches_are_noted_by_their_sources(recent, monkeypatch) -> None:
    launches_on_cpu(monkeypatch, "sm_90a")
    x = torch.randn(16, 32).bfloat16()
    packed = torch.ops.q2.quantize(x, scheme="nvfp4_46_pow2", rowwise=True, columnwise=False)
    dequantize(*packed, "nvfp4_46_pow2", 32, torch.bfloat16)
    assert recent_launches.recent() == ["dequantize.cu"]


def test_gemms_are_noted_by_their_kernels(recent, monkeypatch) -> None:
    ran = []
    plan = SimpleNamespace(run=lambda *args: ran.append(args))
    monkeypatch.setattr(cublaslt, "planned", lambda product: plan)
    cublaslt.run(None, None, None, None, None, None)
    with triton_fp4.compiling("grouped_gemm", torch.device("cpu"), "a variant"):
        pass
    names = ["q2::grouped_gemm by triton_fp4", "q2::gemm by cublaslt_fp4"]
    assert recent_launches.recent() == names and len(ran) == 1
