# SPDX-License-Identifier: Apache-2.0
"""Rotating quantizers that compute their operand, on a GPU: against the same functions without
fusion there, and against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn

from q2compile import lowering
from q2compile.lowering.prologue import fusion_rule
from q2compile.passes.post_grad.fuse_rotations import fuse_rotations_pass, fusion_notes
from q2compile.runtime_kernels.cuda.quantize import fused
from q2compile.runtime_kernels.ops.table import QUANTIZE
from q2compile.runtime_kernels.small_calls import form_of
from q2compile.torch_internals.patches import patched
from tests.support import quantizer_calls as calls
from tests.support.emulation.on_cpu import assert_same_bits
from tests.support.prologues import PROLOGUES, ROWS, matrices, silu_mul
from tests.support.quantizer_calls import quantized_both

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_compiler")]
EDEN = "nvfp4_ms_eden_pow2"
SCHEMES = [
    *((EDEN, "rht128"), (EDEN + "@bf16", "rht128"), (EDEN + "@32x4x4", "rht128")),
    *(("nvfp4_sr_pow2", "rht128"), ("nvfp4_sr", "rht128"), ("nvfp4_sr_pow2", "rht16")),
    *(("mxfp4_sr", "rht64"), ("mxfp4_rtn34", "rht32"), ("mxfp4_sr@32x4x4", "rht64")),
]


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize(("scheme", "transform"), SCHEMES)
def test_small_ones_agree_with_the_reference(both, scheme, transform) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    cases = [calls.both(None, ..., ..., scheme, transform)]
    if not both:
        cases = [calls.one(None, ..., scheme, transform, c, 1) for c in (False, True)]
    for case in cases:
        form = form_of(QUANTIZE, case.replace(x=None).positional)
        assert fused.disagreement(device, form) is None
        if fused.no_pair(fused.representative(2), case, device.index) is None:
            assert fused.disagreement(device, form, 2) is None


def test_quest_agrees_with_the_reference() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    form = form_of(QUANTIZE, calls.masked(None, "mxfp4_quest", "h32").positional)
    assert fused.disagreement(device, form) is None


def compiled(monkeypatch, function: Callable, *args: Any, fuse: bool, **how: Any) -> Callable:
    lowering.register()
    monkeypatch.setattr(fusion_rule, "why_not", lambda *args: None)
    told: list[list[str]] = []

    def marked(graph: torch.fx.Graph) -> None:
        if fuse:
            fuse_rotations_pass(graph)
            told.append(fusion_notes(graph))

    torch._dynamo.reset()
    settings = {"force_disable_caches": True, "post_grad_custom_pre_pass": marked, **how}
    with inductor_config.patch(settings), patched():
        call = torch.compile(function)
        call(*args)
    assert all("fused with" in note for notes in told for note in notes)
    assert bool(sum(map(len, told))) == fuse
    return call


def assert_nearly_the_same(results: list[Any]) -> None:
    """One bf16 in 2^10 is rounded differently (test_fused_launches.py). It may change the codes of
    its chunk of 128 slightly, which happens in one of eight chunks."""
    for got, want in zip(*results, strict=True):
        if got.dtype == torch.uint8:
            assert (got != want).float().mean() < 0.125


def test_two_operands_of_one_read(monkeypatch) -> None:
    """dg and du of a SwiGLU by one kernel, against Inductor's and two."""
    device = torch.device("cuda", torch.cuda.current_device())
    seeds = torch.tensor([11, 12], device=device)
    args = [m.to(device) for m in matrices(3)]

    def pair(seeds, dh, g, u):
        dg = torch.ops.aten.silu_backward(dh * u, g)
        first = quantized_both(dg, seeds[0], seeds[1], EDEN, "rht128", 3)
        return [*first, *quantized_both(silu_mul(g, dh), seeds[1], seeds[0], EDEN, "rht128", 5)]

    steps = [compiled(monkeypatch, pair, seeds, *args, fuse=fuse) for fuse in (True, False)]
    results = [step(seeds, *args) for step in steps]
    assert len(results[0]) == 12
    assert_nearly_the_same(results)


@pytest.mark.parametrize("name", PROLOGUES)
def test_prologues(name, monkeypatch) -> None:
    """Under emulate_precision_casts ptxas contracts no operations, so exact expressions have equal
    bits."""
    function, operands, exact = PROLOGUES[name]
    device = torch.device("cuda", torch.cuda.current_device())
    seeds = torch.tensor([11, 12], device=device)
    args = [a.to(device) for a in operands()]

    def both(seeds, *operands):
        return quantized_both(function(*operands), seeds[0], seeds[1], EDEN, "rht128", 3)

    results = [
        compiled(monkeypatch, both, seeds, *args, fuse=fuse, emulate_precision_casts=True)(
            seeds, *args
        )
        for fuse in (True, False)
    ]
    if exact:
        assert_same_bits(*([t.cpu() for t in r] for r in results))
        return
    assert_nearly_the_same(results)


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = (256, 512), (256, 512), (512, 256)
        self.gate, self.up, self.down = (
            nn.Linear(*size, bias=False, dtype=torch.bfloat16) for size in sizes
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_step_under_cuda_graphs_and_without(mode, monkeypatch) -> None:
    """The gradients of a SwiGLU, fused without asking the rule; then for other inputs, which a
    replayed graph must read."""
    monkeypatch.setattr(fusion_rule, "why_not", lambda *args: None)
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    model = SwiGLU().to(device)
    inputs = [m.to(device) for m in matrices(3)]
    inputs = [torch.cat([m, m[:, :56]], 1).requires_grad_() for m in inputs]
    found = []
    for fuse in (False, True):
        torch._dynamo.reset()
        step = torch.compile(
            model, backend="quartet2", options={"fuse_rotations": fuse, "mode": mode}
        )
        gradients = []
        for x in (*inputs, *inputs):
            model.zero_grad(set_to_none=True)
            x.grad = None  # the memory of a CUDA graph, which the next step writes again
            torch.manual_seed(1)
            step(x).square().sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        found.append(gradients)
    assert len(found[0]) == 6 and inputs[0].shape[0] == ROWS
    for one, other in zip(*found, strict=True):
        for a, b in zip(one, other, strict=True):
            # Numbers of 4 bits of a few chunks differ by a step: far less than their own error.
            assert (a - b).norm() <= 0.02 * b.norm()
