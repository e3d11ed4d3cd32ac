# SPDX-License-Identifier: Apache-2.0
"""A stage of q2compile raises, or is interrupted: the user gets the graph, the stage, a file that
reproduces it, and the choice to go on without. Faults of the machine are in test_machine_faults."""

import functools
import runpy
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from q2compile import explain
from q2compile.errors import StageError
from q2compile.failures.stage_error import FaultWarning
from q2compile.graph.nodes import q2_nodes
from q2compile.report.graph_text import readable
from tests.support import forked
from tests.support.pass_table import replace_pass
from tests.support.warned import texts

pytestmark = pytest.mark.usefixtures("fresh_compiler")

EAGER = {"inner": "eager"}


class Linears(nn.Module):
    """Two linears, one of them checkpointed."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(checkpoint(self.up, x, use_reentrant=False).relu())


class Net(Linears):
    """And attention by nn.MultiheadAttention."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x):
        x = super().forward(x)
        return self.attention(x, x, x, need_weights=False)[0]


def fails_on(*ops):
    """A pass that raises on graphs that hold these q2 ops."""

    def broken_pass(graph):
        if any(q2_nodes(graph, *ops)):
            raise KeyError("boom")
        return 0

    return broken_pass


def fails(*args, **kwargs):
    raise KeyError("boom")


# stage -> (what is broken, as the target and the replacement; the reproducer's name)
STAGES = {
    "pass 'merge_seeds' failed on the forward graph": "merge_seeds_forward",
    "pass 'merge_seeds' failed on the backward graph": "merge_seeds_backward",
    "pass 'gather_scattered' failed on the joint graph": "gather_scattered_joint",
    "the check before the passes failed on the forward": "the_check_before_the_passes_forward",
    "capture and rewrite failed on graph": "capture_and_rewrite",
    "compilation of the rewritten graph failed on graph": "compilation_of_the_rewritten_graph",
}


@pytest.fixture(params=STAGES)
def broken(request, monkeypatch):
    """One stage of q2compile raises KeyError('boom'); the stage, as the message names it."""
    stage = request.param
    if stage.startswith("pass"):
        op = "requantize" if "backward" in stage else "quantize"
        replace_pass(monkeypatch, stage.split("'")[1], fails_on(op))
    elif stage.startswith("the check"):
        monkeypatch.setattr("q2compile.compiler.post_grad_passes.check_spec", fails)
    elif stage.startswith("capture"):
        monkeypatch.setattr("q2compile.rewrite.rewrite_graph.share_bodies", fails)
    else:
        monkeypatch.setattr("q2compile.report.graph_log.set_kernels", lambda *_: None)
        monkeypatch.setattr("q2compile.linear.autograd.LinearFunction.forward", staticmethod(fails))
    return stage


def step(model, x, **options):
    y = torch.compile(model, backend="quartet2", options=options)(x)
    y.square().mean().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return y.detach(), grads


# ---- a stage of q2compile raises ----------------------------------------------------------------


def test_the_user_gets_graph_stage_reproducer_and_the_choice(broken, tmp_path):
    """The reproducer shows the same error, until the fault is fixed."""
    with pytest.raises(StageError, match="boom") as caught:
        step(Net(), torch.randn(2, 8, 32), **EAGER, dump=str(tmp_path))
    message, error = str(caught.value), caught.value
    assert f"{broken}" in message and "graph 0/0 of Net" in message
    assert "on_error='bf16'" in message and "test_failures.py:" in message
    assert "inner='eager'" not in message  # that is how it ran
    path = tmp_path / "graph_0" / f"reproduce_{STAGES[broken]}.py"
    assert error.reproducer == str(path) and error.stage in broken and error.graph in message
    name = broken.split("'")[1] if broken.startswith("pass") else ""
    assert f"disable_passes=[{name!r}]" in message or not name
    with pytest.raises((KeyError, StageError), match="boom"):
        runpy.run_path(str(path), run_name="__main__")


def test_a_reproducer_without_the_fault_runs_in_a_process_of_its_own(tmp_path, monkeypatch):
    replace_pass(monkeypatch, "merge_seeds", fails_on("requantize"))
    options = {**EAGER, "recipe": {"base": "quartet2", "dgrad": "bf16"}, "policy": {"up": "nvfp4"}}
    with pytest.raises(StageError) as caught:
        step(Net(), torch.randn(2, 40, 32), **options)
    assert Path(caught.value.reproducer).parent.name.startswith("q2compile_")
    done = forked.run_file(Path(caught.value.reproducer), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "No error this time.\n"), done.stderr


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_reproducer_builds_the_very_graph(tmp_path, monkeypatch, dynamic):
    """Node for node with names, dtypes and shapes, the checkpointed body inside it too. Under
    dynamic shapes the sizes are those that were traced."""
    for stage, file, call in (
        ("rewrite", "capture_and_rewrite", "0_dynamo"),
        ("pass", "merge_seeds_backward", "3_backward"),
    ):
        torch._dynamo.reset()
        folder = tmp_path / stage
        with monkeypatch.context() as patch:
            if stage == "pass":
                replace_pass(patch, "merge_seeds", fails_on("requantize"))
            else:
                patch.setattr("q2compile.rewrite.rewrite_graph.share_bodies", fails)
            options = {**EAGER, "dump": str(folder)}
            net = Linears() if dynamic else Net()
            model = torch.compile(net, backend="quartet2", options=options, dynamic=dynamic)
            with pytest.raises(StageError):
                model(torch.randn(2, 8, 32)).sum().backward()
        rebuilt = runpy.run_path(str(folder / "graph_0" / f"reproduce_{file}.py"))["graph"]()
        text = (folder / "graph_0" / f"{call}.txt").read_text()
        if not dynamic:
            without_comments = [s for s in text.splitlines() if s and not s.startswith("# ")]
            assert without_comments == [
                s for s in readable(rebuilt.module()).splitlines() if s and not s.startswith("# ")
            ]
        else:
            names = [s.partition(":")[0].partition(" =")[0] for s in text.splitlines()]
            nodes = [n.name for n in rebuilt.module().graph.nodes if n.op != "output"]
            assert [n for n in names if n in nodes][: len(nodes)] == nodes


def seeded():
    """Return a model and its input, which are the same in every call."""
    torch.manual_seed(0)
    return Linears(), torch.randn(2, 8, 32)


@functools.cache
def in_bf16():
    return step(*seeded(), **EAGER, recipe="bf16")


def test_on_error_bf16_compiles_the_graph_as_if_q2compile_were_not_there(
    broken, tmp_path, monkeypatch
):
    model, x = seeded()
    with pytest.warns(FaultWarning, match="boom") as caught:
        y, grads = step(model, x, **EAGER, on_error="bf16", dump=str(tmp_path))
    (ours,) = texts(caught, FaultWarning)
    assert "This graph runs in bf16." in ours
    monkeypatch.undo()  # nothing is broken any more
    torch._dynamo.reset()
    own, own_grads = in_bf16()
    assert torch.equal(y, own)
    assert all(torch.equal(a, b) for a, b in zip(grads, own_grads, strict=True))
    report = (tmp_path / "report.txt").read_text()
    assert "0 of 2 matmuls with a weight taken" in report
    stage = broken.partition(" failed")[0]
    assert report.count(f"on_error='bf16': {stage} failed") == 2
    assert "note: " + broken in report


@pytest.mark.parametrize("dynamic", [False, True])
def test_on_error_bf16_under_inductor_covers_the_backward(monkeypatch, dynamic):
    """Inductor compiles a backward when it is first called, too late to replace its forward, and
    under dynamic shapes swallows a first failure: with on_error="bf16" it is compiled at once."""
    replace_pass(monkeypatch, "merge_seeds", fails_on("requantize"))
    model, x = nn.Linear(32, 48), torch.randn(8, 32)
    options = {"on_error": "bf16"}
    compiled = torch.compile(model, backend="quartet2", options=options, dynamic=dynamic)
    with pytest.warns(FaultWarning, match="backward graph"):
        y = compiled(x)
    y.sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch._dynamo.reset()
    own = torch.compile(model, dynamic=dynamic)(x)
    own.sum().backward()
    assert torch.equal(y, own)
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))


def test_other_graphs_stay_quantized():
    """Only the graph that failed runs in bf16."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 64)

        def forward(self, x):
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(x)

    def fails_for_b(graph):
        if any(n.meta.get("custom", {}).get("q2_site") == "b" for n in graph.nodes):
            raise KeyError("boom")
        return 0

    with pytest.MonkeyPatch.context() as patch, pytest.warns(FaultWarning):
        replace_pass(patch, "merge_seeds", fails_for_b)
        report = explain(Two(), torch.randn(4, 32), options={**EAGER, "on_error": "bf16"})
    assert [(row.module, row.taken) for row in report.rows] == [("a", True), ("b", False)]


def test_a_users_own_pass_that_fails_is_not_called_ours():
    """A pass in Inductor's slot runs before q2compile's."""
    model = nn.Sequential(nn.Linear(32, 32))
    own_pass = torch._inductor.config.patch(post_grad_custom_pre_pass=fails)
    with own_pass, pytest.raises(RuntimeError, match="boom") as caught:
        torch.compile(model, backend="quartet2")(torch.randn(4, 32))
    assert "pass '" not in str(caught.value)


def test_what_the_user_can_mend_is_no_fault():
    """on_error is about q2compile's faults: a wrong option raises under either value."""
    x = torch.randn(4, 32)
    for on_error in ("raise", "bf16"):
        options = {**EAGER, "on_error": on_error, "recipe": "quartet3"}
        with pytest.raises(ValueError, match="did you mean"):
            torch.compile(nn.Linear(32, 32), backend="quartet2", options=options)(x)


def test_a_reproducer_that_cannot_be_written_does_not_hide_the_error(monkeypatch):
    replace_pass(monkeypatch, "merge_seeds", fails_on("quantize"))
    monkeypatch.setattr("q2compile.failures.reproducer.write", fails)
    with pytest.raises(StageError, match="(?s)'merge_seeds' failed.*No reproducer could") as caught:
        step(Linears(), torch.randn(2, 8, 32), **EAGER)
    assert caught.value.reproducer is None


# ---- Ctrl-C -------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_error", ["raise", "bf16"])
def test_ctrl_c_during_compilation_leaves_nothing_half_done(
    monkeypatch, tmp_path, ctrl_c, on_error
):
    model, x = Linears(), torch.randn(2, 8, 32)
    options = {**EAGER, "on_error": on_error, "dump": str(tmp_path)}
    torch.manual_seed(1)
    never_interrupted = step(model, x, **options)
    torch._dynamo.reset()

    def interrupted(graph):
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        replace_pass(patch, "merge_seeds", interrupted)
        step(model, x, **options)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        replace_pass(patch, "merge_seeds", interrupted)
        explain(model, x, options=options)
    torch.manual_seed(1)
    y, grads = step(model, x, **options)
    assert torch.equal(y, never_interrupted[0])
    assert all(torch.equal(a, b) for a, b in zip(grads, never_interrupted[1], strict=True))
    report = explain(model, x, options=options)  # the one that was interrupted collects no more
    assert [row.taken for row in report.rows if row.has_parameter] == [True] * 2
