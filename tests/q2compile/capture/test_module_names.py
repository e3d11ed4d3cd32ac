# SPDX-License-Identifier: Apache-2.0
"""Absolute names by parameter identity, and a policy that one shared graph can't keep."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from q2compile import Config, explain
from q2compile.capture.module_names import expected_sites, site_name
from q2compile.errors import ConfigError
from q2compile.report.model_coverage import Coverage

pytestmark = pytest.mark.usefixtures("fresh_compiler", "only_rewritten")

EAGER = {"inner": "eager"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 48)
        self.down = nn.Linear(48, 32)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """Three equal blocks and a head; ``breaks`` puts a graph break into the loop over them."""

    def __init__(self, breaks=False):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 32)
        self.breaks = breaks

    def forward(self, x):
        for block in self.layers:
            x = block(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return self.head(x)


ALL = [f"layers.{i}.{m}" for i in range(3) for m in ("up", "down")] + ["head"]


def names(report):
    return [row.module for row in report.rows]


@pytest.mark.parametrize(
    ("parameter", "site"),
    [
        ("mlp.up.weight", "mlp.up"),
        ("attn.in_proj_weight", "attn.in_proj"),
        ("table", "table"),
        ("_orig_mod.layers.0._checkpoint_wrapped_module.up.weight", "layers.0.up"),
        ("weight", "weight"),
    ],
)
def test_site_names(parameter, site):
    assert site_name(parameter) == site


def test_inside_another_module_names_start_at_the_outermost():
    class Harness(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Model()
            self.net.compile(
                backend="quartet2",
                options={**EAGER, "strict": True, "policy": {"net.layers.0.*": "bf16"}},
            )

        def forward(self, x):
            return self.net(x).sum()

    Harness()(torch.randn(4, 32)).backward()  # strict: the pattern matched


class Lightning(nn.Module):
    """Its methods are called, not the module itself."""

    def __init__(self):
        super().__init__()
        self.net = Model()
        options = {**EAGER, "strict": True, "policy": {"net.layers.0.*": "bf16"}}
        self.net.compile(backend="quartet2", options=options)

    def training_step(this, x):
        return this.net(x).sum()

    @torch.no_grad()
    def validation_step(self, x):
        return self.net(x).sum()


@pytest.mark.parametrize("method", ["training_step", "validation_step"])
def test_names_start_at_the_module_whose_method_runs(method):
    getattr(Lightning(), method)(torch.randn(4, 32))  # strict: the pattern matched


def test_after_a_graph_break_names_are_absolute_and_what_was_not_seen_is_said():
    """Trap: a graph break inside a Python loop makes Dynamo skip the outer frame: its head is never
    seen, and the blocks share one graph."""
    report = explain(Model(breaks=True), torch.randn(4, 32), options=EAGER)
    taken = [row.module for row in report.rows if row.taken]
    assert taken[:2] == ["layers.0.up", "layers.0.down"]
    missing = [row for row in report.rows if row.why.startswith("not seen")]
    assert [row.module for row in missing] == ["head"]
    assert any("'layers.0' also runs equal modules" in note for note in report.notes)


def test_strict_raises_for_what_was_not_seen_before_any_step_is_taken():
    model = Model(breaks=True)
    model.compile(backend="quartet2", options={**EAGER, "strict": True})
    loss = model(torch.randn(4, 32)).sum()
    with pytest.raises(RuntimeError, match="1 linear.* never reached the backend: head"):
        loss.backward()


class Skipped(nn.Module):
    """Dynamo skips its whole frame, because of a graph break in a loop."""

    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        for _ in range(2):
            torch._dynamo.graph_break()
        return self.head(self.up(x))


class WithSkipped(nn.Module):
    """The only graph of this is the relu's, which has no parameters."""

    def __init__(self):
        super().__init__()
        self.net = Skipped()

    def forward(self, x):
        return self.net(x).relu()


@pytest.mark.parametrize(("model", "graphs"), [(Skipped, 0), (WithSkipped, 1)])
def test_a_model_that_dynamo_skips_is_not_silently_left_out(model, graphs):
    report = explain(model(), torch.randn(4, 32), options=EAGER)
    assert report.graphs == graphs
    assert [n.removeprefix("net.") for n in names(report)] == ["up", "head"]
    assert all(row.why.startswith("not seen") for row in report.rows)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(32, 32)
        self.head = nn.Linear(32, 32)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


def test_a_recurrent_layer_is_not_silently_left_out():
    """Dynamo breaks the graph at the call of the LSTM, which is inside another call. It used to
    skip the frame for that; since torch 2.15 it goes on after it, with the head."""
    report = explain(Recurrent(), torch.randn(4, 32), options=EAGER)
    assert sorted(names(report)) == ["head", "lstm.weight_ih_l0"]
    assert all(row.taken or row.why.startswith("not seen") for row in report.rows)
    assert [row.module for row in report.rows if row.taken] == ["head"] * report.graphs


class Experts(nn.Module):
    """A loop over the experts that got tokens. Dynamo skips it, and it contains no nn.Linear."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(32, 16)
        self.up = nn.Parameter(torch.randn(16, 48, 32))
        self.scale = nn.Parameter(torch.ones(4, 32))  # held by a graph, but not multiplied
        self.position = nn.Embedding(4, 32)

    def run(self, x, chosen):
        return sum(x[chosen == e] @ self.up[e].mT for e in chosen.unique().tolist())

    def forward(self, x):
        x = x * self.scale + self.position.weight
        chosen = self.router(x).argmax(-1)
        torch._dynamo.graph_break()
        return torch.compiler.disable(self.run)(x, torch.zeros_like(chosen))


def test_weights_that_are_no_module_are_not_silently_left_out():
    report = explain(Experts(), torch.randn(4, 32), options=EAGER)
    assert [(r.module, r.taken) for r in report.rows] == [("router", True), ("up", False)]
    assert report.rows[1].why.startswith("not seen")


def test_strict_asks_only_for_what_the_policy_wants():
    model, strict = WithSkipped(), {**EAGER, "strict": True}
    model.compile(backend="quartet2", options={**strict, "policy": {"*up": "bf16"}})
    with pytest.raises(RuntimeError, match="1 linear.* never reached the backend: net.head"):
        model(torch.randn(4, 32)).sum().backward()
    model.compile(backend="quartet2", options={**strict, "policy": {"net.*": "bf16"}})
    model(torch.randn(4, 32)).sum().backward()


def test_a_policy_that_tells_equal_layers_apart_is_refused_when_they_share_a_graph():
    """Trap: under per-block compile one graph serves all equal layers, so a layer index can't be
    used."""
    model = Model()
    options = {**EAGER, "policy": {"layers.0.up": "bf16"}}
    for block in model.layers:
        block.compile(backend="quartet2", options=options)
    with pytest.raises(ValueError, match="'layers.0.up' and 'layers.1.up' different recipes"):
        model(torch.randn(4, 32))


def test_equal_layers_in_checkpoint_wrappers_share_a_graph_too():
    """Trap: the wrapper has a __getattr__ of its own, so Dynamo reaches its module through
    __dict__."""
    model = Model()
    for i, block in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(block)
    options = {**EAGER, "policy": {"layers.1.up": "bf16"}}
    for block in model.layers:
        block.compile(backend="quartet2", options=options)
    with pytest.raises(ValueError, match="'layers.0.up' and 'layers.1.up' different recipes"):
        model(torch.randn(4, 32))


def test_the_same_policy_is_kept_when_the_model_is_compiled_whole():
    report = explain(
        Model(), torch.randn(4, 32), options={**EAGER, "policy": {"layers.0.up": "bf16"}}
    )
    assert names(report) == ALL
    assert [row.module for row in report.rows if not row.taken] == ["layers.0.up"]


def test_tied_weights_are_named_by_the_module_that_uses_them():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(64, 32)
            self.lm_head = nn.Linear(32, 64, bias=False)
            self.lm_head.weight = self.embed.weight

        def forward(self, x):
            return self.lm_head(self.embed(x))

    report = explain(Tied(), torch.arange(8), options={**EAGER, "policy": {"lm_head": "bf16"}})
    (row,) = report.rows
    assert (row.module, row.why) == ("lm_head", "policy: 'lm_head' says bf16")


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("*.downproj", "'*.down_proj'"),
        ("down_proj", "'*.down_proj'"),  # a glob is of the whole name
        ("hed", "'head'"),
        ("layer.1.mlp.down_proj", "'layers.1.mlp.down_proj'"),
    ],
)
def test_a_pattern_that_matches_nothing_gets_the_nearest_that_would(pattern, nearest):
    mlp = nn.ModuleDict({"down_proj": nn.Linear(32, 32)})
    layers = nn.ModuleList(nn.ModuleDict({"mlp": mlp}) for _ in range(2))
    model = nn.ModuleDict({"layers": layers, "head": nn.Linear(32, 32)})
    coverage = Coverage(model, Config(policy={pattern: "bf16"}))
    said = f"matches no module with a weight (did you mean {nearest}?)"
    assert coverage.notes() == [f"the policy's pattern {pattern!r} {said}"]
    with pytest.raises(ConfigError, match=re.escape(f"(did you mean {nearest}?)")):
        coverage.raise_on_unmatched_patterns()


def test_telemetry_that_would_record_nothing_says_so_once(tmp_path, caplog):
    """Otherwise the empty folder would only be noticed after the run."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    telemetry = {"modules": ["3", "layers*"], "to": str(tmp_path)}
    options = {**EAGER, "telemetry": telemetry}
    for rows in (16, 32):  # two graphs
        torch.compile(model, backend="quartet2", options=options)(torch.randn(rows, 32))
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    nothing = "q2compile: telemetry records nothing: its pattern(s) '3', 'layers*' match no module"
    assert [text.startswith(nothing) for text in said] == [True]
    caplog.clear()
    telemetry["modules"] = ["0", "3"]
    report = explain(model, torch.randn(4, 32), options=options)
    assert "telemetry's pattern '3' matches no module with a weight" in report.notes
    assert not caplog.records
    with pytest.raises(ConfigError, match=r"strict: telemetry's pattern\(s\) '3' match no module"):
        explain(model, torch.randn(4, 32), options={**options, "strict": True})


def test_strict_refuses_a_wanted_matmul_that_was_not_taken():
    model = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 32))
    with pytest.raises(RuntimeError, match="0: too small.*1: too small.*Give them 'bf16'"):
        torch.compile(model, backend="quartet2", options={**EAGER, "strict": True})(
            torch.randn(4, 32)
        )
    fine = {**EAGER, "strict": True, "policy": {"?": "bf16"}}
    torch.compile(model, backend="quartet2", options=fine)(torch.randn(4, 32)).sum().backward()


def test_expected_sites():
    attention = nn.MultiheadAttention(32, 4)
    assert expected_sites(nn.ModuleDict({"a": attention, "h": nn.Linear(32, 16)})) == {
        "a.in_proj": (96, 32),
        "a.out_proj": (32, 32),
        "h": (16, 32),
    }
