# SPDX-License-Identifier: Apache-2.0
"""`expect`: training raises an error before the first optimizer step if nothing runs in 4 bits."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import q2compile
from q2compile.report import expect as module
from tests.support.small_model import Mlp

OPTIONS = {"inner": "eager"}


@pytest.fixture(autouse=True)
def _as_in_a_new_process(fresh_compiler: None, only_rewritten: None) -> Iterator[None]:
    """Errors keep the models of tests alive."""
    yield
    for expected in module._expected.values():
        expected.forget()
    module._expected.clear()


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def hooks(model: nn.Module) -> int:
    return sum(bool(p._post_accumulate_grad_hooks) for p in model.parameters())


def test_a_model_that_was_not_compiled_raises_before_the_first_step() -> None:
    model = Mlp()
    q2compile.expect(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(q2compile.NotTakenError, match="Mlp runs in 4 bits: no graph of it came"):
        step(model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_model_in_4_bits_trains_and_keeps_no_hook() -> None:
    model = Mlp()
    q2compile.expect(model)
    q2compile.expect(model)  # a second call changes nothing
    assert hooks(model) == len(list(model.parameters()))
    model.compile(backend="quartet2", options=OPTIONS)
    step(model)
    assert hooks(model) == 0
    step(model)


def test_another_backend_is_not_enough() -> None:
    model = Mlp()
    q2compile.expect(model)
    model.compile(backend="aot_eager")
    with pytest.raises(q2compile.NotTakenError, match="no graph of it came"):
        step(model)


def test_a_policy_that_takes_nothing_is_named_as_the_reason() -> None:
    model = Mlp()
    q2compile.expect(model)
    model.compile(backend="quartet2", options={**OPTIONS, "policy": {"*": "bf16"}})
    with pytest.raises(
        q2compile.NotTakenError, match=r"no matmul of its graphs was taken: .*policy"
    ):
        step(model)


def test_explain_alone_is_not_enough() -> None:
    model = Mlp()
    q2compile.explain(model, torch.randn(32, 64), options=OPTIONS)
    q2compile.expect(model)
    with pytest.raises(q2compile.NotTakenError):
        step(model)


def test_graphs_from_before_the_call_count() -> None:
    model = Mlp()
    model.compile(backend="quartet2", options=OPTIONS)
    step(model)
    q2compile.expect(model)
    step(model)


def test_an_equal_model_is_served_by_the_graphs_of_the_first() -> None:
    """Dynamo calls no backend for it."""
    first, second = Mlp(), Mlp()
    for model in (first, second):
        model.compile(backend="quartet2", options=OPTIONS)
    step(first)
    q2compile.expect(second)
    graphs = counters["stats"]["unique_graphs"]
    step(second)
    assert counters["stats"]["unique_graphs"] == graphs == 1


def pair() -> tuple[Any, Any]:
    """Two equal models that share no parameter."""
    return Mlp(), Mlp()


@pytest.mark.parametrize("part", ["", "up"])
def test_an_equal_model_that_was_compiled_does_not_count(part: str) -> None:
    """Nor does an equal nn.Linear."""
    other, model = pair()
    compiled = torch.compile(other.get_submodule(part), backend="quartet2", options=OPTIONS)
    compiled(torch.randn(32, 64)).sum().backward()
    q2compile.expect(model)
    compiled(torch.randn(32, 64)).sum().backward()
    with pytest.raises(q2compile.NotTakenError, match="no graph of it came"):
        step(model)


def test_another_model_of_the_same_graph_does_not_count() -> None:
    models = nn.ModuleDict(dict(zip(("student", "teacher"), pair(), strict=True)))

    def run(x: torch.Tensor) -> torch.Tensor:
        return models["teacher"](models["student"](x)).square().mean()

    for model in models.values():
        q2compile.expect(model)
    options = {**OPTIONS, "policy": {"teacher.*": "bf16"}}
    with pytest.raises(q2compile.NotTakenError, match="Mlp runs in 4 bits"):
        torch.compile(run, backend="quartet2", options=options)(torch.randn(32, 64)).backward()
    assert hooks(models["student"]) == 0 < hooks(models["teacher"])


def test_an_evaluation_in_4_bits_is_no_training() -> None:
    model = Mlp()
    compiled = torch.compile(model, backend="quartet2", options=OPTIONS)
    q2compile.expect(model)
    with torch.no_grad():
        compiled(torch.randn(32, 64))
    with pytest.raises(q2compile.NotTakenError):
        step(model)


def test_a_graph_that_failed_and_runs_in_bf16_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("planted")

    monkeypatch.setattr("q2compile.backend.compile_graph", fail)
    model = Mlp()
    q2compile.expect(model)
    model.compile(backend="quartet2", options={**OPTIONS, "on_error": "bf16"})
    with (
        pytest.warns(q2compile.FaultWarning),
        pytest.raises(
            q2compile.NotTakenError, match="on_error='bf16': compilation of the rewritten"
        ),
    ):
        step(model)


@pytest.mark.parametrize("made", [Mlp, lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU())])
def test_a_model_that_waits_is_compiled_as_any_other(made: Callable[[], nn.Module]) -> None:
    """In one graph, which is not compiled again when the hooks are removed. A copy waits for
    nothing, and can be saved."""
    model = made()
    q2compile.expect(model)
    assert hooks(model) > 0
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    for call in (model, lambda x: model(x)):
        torch._dynamo.reset()
        q2compile.expect(model)
        graphs = counters["stats"]["unique_graphs"]
        compiled = torch.compile(call, backend="quartet2", options=OPTIONS, fullgraph=True)
        for _ in range(2):
            compiled(torch.randn(32, 64)).sum().backward()
        assert counters["stats"]["unique_graphs"] == graphs + 1
        assert hooks(model) == 0
    copied(torch.randn(32, 64)).sum().backward()


def test_a_wrapper_and_a_compiled_function() -> None:
    model = Mlp()
    compiled = torch.compile(model, backend="quartet2", options=OPTIONS)
    q2compile.expect(compiled)
    step(compiled)
    other = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    q2compile.expect(other)
    call = torch.compile(lambda x: other(x).square().mean(), backend="quartet2", options=OPTIONS)
    call(torch.randn(32, 64)).backward()
    assert hooks(other) == 0


def test_one_block_in_4_bits_is_enough() -> None:
    model = nn.Sequential(nn.Linear(64, 64), Mlp())
    q2compile.expect(model)
    model[1].compile(backend="quartet2", options=OPTIONS)
    step(model)
    assert hooks(model) == 0


def test_bad_arguments() -> None:
    with pytest.raises(q2compile.ConfigError, match="got 'int'; allowed: a torch.nn.Module"):
        q2compile.expect(3)  # type: ignore[arg-type]
    with pytest.raises(q2compile.ConfigError, match="no parameter of Mlp requires a gradient"):
        q2compile.expect(Mlp().requires_grad_(False))


def test_the_model_can_go_away() -> None:
    model = Mlp()
    q2compile.expect(model)
    assert model in module._expected
    del model
    assert not list(module._expected.keys())
