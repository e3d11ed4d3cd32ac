# SPDX-License-Identifier: Apache-2.0
"""Compiled code, and the compilation itself, keep alive only what Inductor keeps alive."""

import functools
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import q2compile
from q2compile.failures.stage_error import FaultWarning
from tests.support.pass_table import replace_pass

pytestmark = pytest.mark.usefixtures("fresh_compiler")

EAGER = {"inner": "eager"}


class Net(nn.Module):
    """Two linears, one of them checkpointed on request, and a graph break between them."""

    def __init__(self, checkpointed=False, breaks=False):
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)
        self.checkpointed, self.breaks = checkpointed, breaks

    def forward(self, x):
        x = checkpoint(self.up, x, use_reentrant=False) if self.checkpointed else self.up(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.down(x.relu())


def through_a_function(model, **kwargs):
    return torch.compile(lambda x: model(x).sum(), **kwargs)


def left_after(training, backend, options=None, compile=torch.compile, **net):
    """Objects that remain of a model, its first batch and its results after all are deleted where
    they were used. Dynamo's own caches stay."""
    model = Net(**net)
    compiled = compile(model, backend=backend, options=options)
    x = torch.randn(16, 32)
    with torch.set_grad_enabled(training):
        y = compiled(x)
        if training:
            y.sum().backward()
    watched = {"input": x, "output": y, "model": model, "linear": model.up}
    watched |= dict(model.named_parameters())
    if training:
        watched |= {f"{name}.grad": p.grad for name, p in model.named_parameters()}
    left = {name: weakref.ref(value) for name, value in watched.items()}
    left |= {
        f"memory of {name}": weakref.ref(value.untyped_storage())
        for name, value in watched.items()
        if isinstance(value, torch.Tensor)
    }
    del model, compiled, x, y, watched
    gc.collect()
    return {name for name, ref in left.items() if ref() is not None}


@functools.cache
def left_by_inductor(training):
    return left_after(training, "inductor")


CASES = {
    "eager": EAGER,
    "inductor": {},
    "cache_weights": {**EAGER, "cache_weights": True},
    "dump": {**EAGER, "dump": "graphs"},
    "on_error": {**EAGER, "on_error": "bf16", "keep_packed": True, "recompute_weights": True},
    "quartet": {**EAGER, "recipe": "quartet", "strict": True},  # which saves masks
    "auto": {**EAGER, "policy": {"*": "auto"}},
    "telemetry": {**EAGER, "telemetry": {"every": 1}},
    "all and inductor": {"cache_weights": True, "dump": "graphs", "telemetry": {"every": 1}},
}


# Options that change what an inference graph does.
IN_INFERENCE = ["eager", "inductor", "cache_weights", "telemetry", "all and inductor"]


@pytest.mark.parametrize(
    ("case", "training"),
    [*((case, True) for case in CASES), *((case, False) for case in IN_INFERENCE)],
)
def test_a_model_dies_as_with_inductor(case, training, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert left_after(training, "quartet2", CASES[case]) <= left_by_inductor(training)


@pytest.mark.parametrize("kind", ["checkpointed", "breaks", "function", "explained"])
def test_so_does_one_compiled_in_another_way(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def explained(model, backend, options):
        q2compile.explain(model, torch.randn(4, 32), options=options)
        return model

    compile = {"function": through_a_function, "explained": explained}.get(kind, torch.compile)
    net = {kind: True} if kind in ("checkpointed", "breaks") else {}
    options = {**EAGER, "dump": "graphs", "cache_weights": True}
    assert left_after(True, "quartet2", options, compile, **net) <= left_by_inductor(True)


def test_so_does_one_that_q2compile_could_not_compile(monkeypatch):
    def broken_pass(graph):
        raise KeyError("boom")

    replace_pass(monkeypatch, "merge_seeds", broken_pass)
    with pytest.warns(FaultWarning):
        left = left_after(True, "quartet2", {**EAGER, "on_error": "bf16"})
    assert left <= left_by_inductor(True)


# ---- the callers --------------------------------------------------------------------------------


class Trainer(nn.Module):
    """A trainer whose methods have local variables while they compile a model."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def step(self, compiled):
        first = torch.randn(16, 32)
        seen = weakref.ref(first)
        y = compiled(first)
        del first, y
        gc.collect()
        return seen() is None

    def steps(self, compiled):
        yield self.step(compiled)


def test_what_a_caller_deletes_is_gone():
    """Trap: before Python 3.13 a look at a frame's variables leaves references to them there."""
    trainer = Trainer()

    def deep(trainer, compiled):
        batch = torch.randn(8)
        seen = weakref.ref(batch)
        freed = next(trainer.steps(compiled))
        del batch
        return freed and seen() is None

    for backend, options in (("inductor", {}), ("quartet2", EAGER)):
        torch._dynamo.reset()
        compiled = torch.compile(trainer.net, backend=backend, options=options)
        assert deep(trainer, compiled), backend
