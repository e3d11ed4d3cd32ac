# SPDX-License-Identifier: Apache-2.0
"""A device error in the user's own code, in any thread, is followed by a line that names the last
launches, and those that a CUDA graph may have replayed."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from q2compile.runtime_kernels.cuda import recent_launches
from q2compile.runtime_kernels.cuda.gemm import cublaslt, triton_fp4
from q2compile.runtime_kernels.cuda.other_ops import dequantize
from tests.support import forked
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
LAUNCHES = (
    "q2compile: its last launches before this error, newest first: launch 9, launch 8, launch 7, "
    "launch 6, launch 5, launch 4, launch 3, launch 2. "
)
ADVICE = (
    "One of these may be at fault, or a kernel of others: CUDA_LAUNCH_BLOCKING=1 makes the error "
    "name the call."
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
    done = forked.run(PROGRAM.replace("ERROR", error))
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and any("Error: " in line for line in lines[-2:])
    assert lines[-1] == LAUNCHES + ADVICE if of_device else "q2compile" not in done.stderr


IN_A_THREAD = """
import threading
def fail():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
thread = threading.Thread(target=fail)
thread.start()
thread.join()
"""


def test_so_does_one_in_another_thread() -> None:
    done = forked.run(PROGRAM.replace("raise ERROR", IN_A_THREAD))
    assert done.returncode == 0 and done.stderr.startswith("Exception in thread Thread-1")
    assert done.stderr.splitlines()[-1] == LAUNCHES + ADVICE


def test_launches_that_a_graph_may_have_replayed_are_named() -> None:
    """All that were launched or captured before, once each."""
    graph = "torch.cuda.CUDAGraph = type('CUDAGraph', (), {})\ngraph = torch.cuda.CUDAGraph()\n"
    launches = "range(10)", "(0, 1, 2, 2, 2, 3, 4, 5, 6, 7, 8, 9)"
    program = PROGRAM.replace(*launches).replace(
        "raise ERROR", graph + "raise RuntimeError('CUDA error')"
    )
    names = ", ".join(f"launch {i}" for i in range(9, -1, -1))
    replayed = f"A replay of a CUDA graph may have launched: {names}. "
    assert forked.run(program).stderr.splitlines()[-1] == LAUNCHES + replayed + ADVICE


ON_A_GPU = """
import threading
import torch
import q2compile.runtime_kernels
x = torch.randn(256, 256, device="cuda").bfloat16().requires_grad_()
def quantize():
    torch.ops.q2.quantize(x, scheme="nvfp4_46_pow2", rowwise=True, columnwise=False)
class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + 1
    @staticmethod
    def backward(ctx, dy):
        assert threading.current_thread() is not threading.main_thread()
        return dy[torch.tensor([999], device="cuda")].cpu()
quantize()
torch.cuda.synchronize()
"""
CAPTURED = """
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    quantize()
graph.replay()
"""
NAMED = "q2compile: its last launches before this error, newest first: rotate_quantize.cu + "


@pytest.mark.gpu
@pytest.mark.parametrize("graph", ["", CAPTURED], ids=["launched", "replayed"])
def test_a_real_error_of_the_backward_pass_is_raised_in_the_main_thread(graph) -> None:
    program = ON_A_GPU + graph + "Fails.apply(x).sum().backward()"
    # A fork of a process that has asked how many GPUs there are may not use them.
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1 and "device-side assert triggered" in done.stderr
    line = next(line for line in done.stderr.splitlines() if line.startswith("q2compile: "))
    assert line.startswith(NAMED) and line.endswith(ADVICE)
    assert ("A replay of a CUDA graph may have launched: rotate_quantize.cu" in line) == bool(graph)


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
