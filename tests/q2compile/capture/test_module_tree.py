# SPDX-License-Identifier: Apache-2.0
"""Models whose own code must not run while their names are found, and the state after a
compilation."""

import copy
import weakref

import pytest
import torch
from torch import nn

from q2compile import explain
from q2compile.capture.module_tree import named_modules, named_parameters, parameter_at
from q2compile.report.report import RunReport, collector

pytestmark = pytest.mark.usefixtures("fresh_compiler")

EAGER = {"inner": "eager"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x):
        return self.down(self.up(x).relu())


def rows_of(call):
    report = RunReport()
    token = collector.set(report)
    try:
        call()
    finally:
        collector.reset(token)
    return {row.module: row.taken for row in report.compiled_rows}


class OldNames(Net):
    """The signature of torch < 2.0."""

    def named_parameters(self, prefix="", recurse=True):
        return super().named_parameters(prefix, recurse)


class Prefixed(Net):
    def named_parameters(self, *args, **kwargs):
        return (("added." + n, p) for n, p in super().named_parameters(*args, **kwargs))


class Falsy(Net):
    def __bool__(self):
        raise RuntimeError("touched")

    def __len__(self):
        return 0


class Raising(Net):
    @property
    def weight(self):
        raise RuntimeError("touched")

    in_proj_weight = weight_ih_l0 = module = weight


class Iterating(Net):
    """torch's ways to iterate over a model that Dynamo does not use."""

    def modules(self, *args, **kwargs):
        raise RuntimeError("touched")

    children = parameters = modules


class Equal(Net):
    """With no hash, as __eq__ takes it away."""

    def __eq__(self, other):
        raise RuntimeError("touched")


KINDS = [OldNames, Prefixed, Falsy, Raising, Iterating]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cached", [False, True])
def test_names_are_found_without_the_models_own_code(kind, cached, request):
    if not cached:
        request.getfixturevalue("only_rewritten")
    options = {**EAGER, "strict": True, "policy": {"up": "bf16"}, "cache_weights": cached}
    model = kind()
    compiled = torch.compile(model, backend="quartet2", options=options)
    report = RunReport()
    token = collector.set(report)
    try:
        compiled(torch.randn(16, 32)).sum().backward()
    finally:
        collector.reset(token)
    assert [(row.module, row.taken) for row in report.rows] == [("up", False), ("down", True)]
    assert model.down.weight.grad is not None


@pytest.mark.usefixtures("only_rewritten")
def test_a_model_without_a_hash():
    report = explain(nn.Sequential(Net()), torch.randn(4, 32), options=EAGER)
    assert [row.module for row in report.rows] == ["0.up", "0.down"]
    from q2compile.config import Config
    from q2compile.report.model_coverage import Coverage

    model, config = Equal(), Config()
    coverage = Coverage.of(model, config)
    assert Coverage.of(model, config) is coverage
    assert [row.module for row in coverage.not_seen()] == ["up", "down"]


def test_the_tree_is_torchs():
    """Names, order and duplicates as torch.nn.Module has them; a cycle ends."""
    model = nn.ModuleDict({"a": Net(), "b": nn.ModuleList([Net(), nn.Embedding(4, 8)])})
    model["c"] = model["a"]
    model["b"][0].down.weight = model["a"].down.weight
    model.register_parameter("none", None)
    model["lazy"] = nn.LazyLinear(4)
    torchs = dict(model.named_parameters(remove_duplicate=False))
    own = dict(named_parameters(model))
    assert list(own) == [n for n in torchs if "lazy" not in n]
    assert all(own[name] is torchs[name] for name in own)
    assert list(named_modules(model)) == list(model.named_modules())
    twice = list(model.named_modules(remove_duplicate=False))
    assert list(named_modules(model, twice=True)) == twice
    assert parameter_at(model, "c.up.bias") is model["a"].up.bias
    assert parameter_at(model, "c.nothing.bias") is parameter_at(model, "c.up.x") is None
    model["a"].back = model
    assert len(list(named_modules(model, twice=True))) < 40


@pytest.mark.usefixtures("only_rewritten")
def test_names_that_can_not_be_found_leave_those_of_the_frame(monkeypatch, caplog):
    """Only a policy needs the names. It is then not applied by names that mean something else."""

    def fails(*args):
        raise KeyError("boom")

    monkeypatch.setattr("q2compile.capture.module_names.running", fails)
    x = torch.randn(4, 32)
    compiled = torch.compile(Net(), backend="quartet2", options=EAGER)
    assert rows_of(lambda: compiled(x)) == {"up": True, "down": True}
    assert "names are relative to the compiled frame" in caplog.text and "boom" in caplog.text
    with pytest.raises(RuntimeError, match="capture and rewrite failed"):
        explain(Net(), x, options={**EAGER, "policy": {"up": "bf16"}})
    options = {**EAGER, "policy": {"up": "bf16"}, "on_error": "bf16"}
    with pytest.warns(RuntimeWarning, match="boom"):
        report = explain(Net(), x, options=options)
    assert not any(row.taken for row in report.rows)


class Stored(nn.Linear):
    """Its ``weight`` is a property."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        stored = self._parameters.pop("weight")
        self.stored = stored

    @property
    def weight(self):
        return self.stored


@pytest.mark.usefixtures("only_rewritten")
def test_strict_takes_a_linear_whose_weight_is_a_property():
    model = nn.Sequential(Stored(32, 32), nn.ReLU(), nn.Linear(32, 32))
    compiled = torch.compile(model, backend="quartet2", options={**EAGER, "strict": True})
    compiled(torch.randn(4, 32)).sum().backward()
    report = explain(model, torch.randn(4, 32), options=EAGER)
    assert [(row.module, row.taken) for row in report.rows] == [("0.stored", True), ("2", True)]


# ---- what a compilation leaves of parameters ----------------------------------------------------

LEFT = {
    "plain": {},
    "inductor": {"inner": "inductor"},
    "cache_weights": {"cache_weights": True},
    "dump": {"dump": "graphs", "strict": True},
    "telemetry": {"telemetry": {"every": 1}, "on_error": "bf16"},
}


@pytest.mark.parametrize("case", LEFT)
def test_parameters_can_be_swapped_afterwards(case, tmp_path, monkeypatch):
    """torch.utils.swap_tensors raises an error for a tensor that has weak references."""
    monkeypatch.chdir(tmp_path)
    model, x = Net(), torch.randn(16, 32)
    compiled = torch.compile(model, backend="quartet2", options={**EAGER, **LEFT[case]})
    compiled(x).sum().backward()
    model.zero_grad()
    assert not any(weakref.getweakrefs(p) for p in model.parameters())
    other = copy.deepcopy(model.up.weight)
    torch.utils.swap_tensors(model.up.weight, other)
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    model.to(torch.bfloat16)
    assert compiled(x.bfloat16()).dtype == torch.bfloat16


def test_parameters_can_be_swapped_after_a_failure(monkeypatch):
    def fails(*args, **kwargs):
        raise KeyError("boom")

    monkeypatch.setattr("q2compile.rewrite.rewrite_graph.share_bodies", fails)
    model = Net()
    compiled = torch.compile(model, backend="quartet2", options={**EAGER, "on_error": "bf16"})
    with pytest.warns(RuntimeWarning, match="boom"):
        compiled(torch.randn(16, 32))
    assert not any(weakref.getweakrefs(p) for p in model.parameters())


# ---- blocks that are compiled on their own ------------------------------------------------------


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Net(), Net()

    def forward(self, x):
        return self.b(self.a(x))


@pytest.mark.usefixtures("only_rewritten")
@pytest.mark.parametrize("wrapped", [False, True])
def test_options_of_one_block_are_kept(wrapped):
    """One alone is compiled; or each has its own; or equal ones of equal meaning, which are not."""
    x, policy = torch.randn(4, 32), {"a.up": "bf16"}

    def compile(model, name, policy):
        options = {**EAGER, "policy": policy}
        if wrapped:
            setattr(
                model,
                name,
                torch.compile(getattr(model, name), backend="quartet2", options=options),
            )
        else:
            getattr(model, name).compile(backend="quartet2", options=options)

    model = Two()
    compile(model, "a", policy)
    assert rows_of(lambda: model(x)) == {"a.up": False, "a.down": True}
    torch._dynamo.reset()
    compile(model, "b", {"b.down": "bf16"})
    taken = {"a.up": False, "a.down": True, "b.up": True, "b.down": False}
    assert rows_of(lambda: model(x)) == taken
    torch._dynamo.reset()
    model = Two()
    compile(model, "a", policy)
    compile(model, "b", policy)
    with pytest.raises(ValueError, match="'a.up' and 'b.up' different recipes"):
        model(x)
