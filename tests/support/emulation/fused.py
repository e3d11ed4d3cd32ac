# SPDX-License-Identifier: Apache-2.0
"""Rotating quantizers that compute their operand, compiled by Inductor and run in the emulation."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch._inductor.config as inductor_config

from q2compile.lowering.prologue import fusion_rule
from q2compile.passes.post_grad.fuse_rotations import fuse_rotations_pass, fusion_notes
from q2compile.runtime_kernels.cuda.call_site import CallSite
from q2compile.runtime_kernels.cuda.jit import limits, nvrtc
from q2compile.runtime_kernels.cuda.quantize.prologue_expression import PrologueExpression
from q2compile.runtime_kernels.cuda.quantize.prologue_source import FILE, cuda_source, layout
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import SOURCES
from q2compile.torch_internals.patches import patched
from tests.support.emulation import library
from tests.support.emulation.inductor import INDUCTOR_OPTIONS, emulate, serve_as_on
from tests.support.emulation.on_cpu import launches_on_cpu

_MAIN = """
constexpr int kThreads = 32, kOperands = Q2_OPERANDS;
enum Source { BF16, F16, F32 };
constexpr int kSource = Q2_SOURCE, kBytes = kSource == F32 ? 4 : 2;
#include "prologue.cuh"
extern "C" void run(const PrologueInputs* p, int rows, int cols, uint4* to) {
  long long apart = (long long)rows * cols / kPerPiece;  // one matrix after the other
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < cols; c += kPerPiece, ++to) {
      uint4 made[kOperands];
      evaluate(*p, r, c, made);
      for (int i = 0; i < kOperands; ++i) to[i * apart] = made[i];
    }
}
"""


class Fused(NamedTuple):
    """A compiled function: its results, the calls of fused sites (prologue, arguments), the notes
    of the lowering, the generated code."""

    results: Any
    calls: list[tuple[PrologueExpression, tuple]]
    notes: list[str]
    source: str


def run_fused(
    monkeypatch: pytest.MonkeyPatch,
    function: Callable,
    *args: Any,
    always: bool = True,
    capability: int = 90,
    **how: Any,
) -> Fused:
    """A function as Inductor compiles it for a GPU of a compute capability (90: 9.0), its
    quantizers marked. Triton kernels are stubs, which compute nothing.

    always: fuse without asking the rule.  how: settings of Inductor.
    """
    call = CallSite.enqueue
    sources = emulate(monkeypatch, capability)
    serve_as_on(monkeypatch, capability)
    architecture = "sm_90a" if capability == 90 else f"sm_{capability}f"
    room = 1024 * limits.SHARED_KIB.get(divmod(capability, 10), 100)
    launches_on_cpu(monkeypatch, architecture, room)
    if always:
        monkeypatch.setattr(fusion_rule, "why_not", lambda *args: None)
    calls: list[tuple[PrologueExpression, tuple]] = []
    notes: list[str] = []

    def recorded(site: CallSite, given: tuple) -> None:
        if site._prologue is not None:
            calls.append((site._prologue, tuple(given)))
            call(site, given)

    def marked(graph: torch.fx.Graph) -> None:
        fuse_rotations_pass(graph)
        nonlocal notes
        notes = fusion_notes(graph)

    monkeypatch.setattr(CallSite, "enqueue", recorded)
    torch._dynamo.reset()
    settings = {**INDUCTOR_OPTIONS, "post_grad_custom_pre_pass": marked, **how}
    with inductor_config.patch(settings), patched():
        results = torch.compile(function)(*args)
    return Fused(results, calls, notes, sources[-1])


def made_by(prologue: PrologueExpression, given: tuple) -> list[torch.Tensor]:
    """The matrices, by the same C++ as in the kernel, which a thread writes down piece by piece."""
    inputs = given[: len(prologue.inputs)]
    count = len(prologue.results)
    what = ("Q2_SOURCE", SOURCES[prologue.dtype]), ("Q2_OPERANDS", count)
    defines = (*what, *nvrtc.conversions("sm_90a"))
    kernel = library(_MAIN, defines, ((FILE, cuda_source(prologue)),))
    fields = struct.pack("@" + layout(prologue), *(t.data_ptr() for t in inputs))
    x = torch.empty((count, prologue.rows, prologue.cols), dtype=prologue.dtype)
    kernel.run(fields, *x.shape[1:], ctypes.c_void_p(x.data_ptr()))
    return [*x]
