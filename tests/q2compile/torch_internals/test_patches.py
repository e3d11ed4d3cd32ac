# SPDX-License-Identifier: Apache-2.0
"""Replaced attributes of torch: in force for graphs of ours alone, and gone afterwards."""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import fx, nn
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from q2compile import lowering
from q2compile.torch_internals import patches
from q2compile.torch_internals.patches import PATCHES, patched

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(autouse=True)
def registered() -> None:
    lowering.register()
    inductor_config.force_disable_caches  # noqa: B018  Inductor's config is loaded


def values() -> dict[str, Any]:
    found = {patch.name: patch.value() for patch in PATCHES if patch.name != "choices"}
    return {**found, "choices": V.choices}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert [name for name in one if one[name] is not other[name]] == []


def test_every_row_is_made_and_found() -> None:
    assert set(patches._REPLACEMENTS) == {patch.name for patch in PATCHES}
    assert set(values()) == {patch.name for patch in PATCHES}
    for patch in PATCHES:
        assert patch.cause and patch.upstream and patch.versions and patch.benefit


def test_in_force_inside_and_gone_outside() -> None:
    before = values()
    with patched():
        inside = values()
        assert [name for name in before if inside[name] is before[name]] == []
        with patched():
            assert_same(values(), inside)
        assert_same(values(), inside)
    assert_same(values(), before)


def test_gone_after_an_error() -> None:
    before = values()
    with pytest.raises(ZeroDivisionError), patched(), patched():
        raise ZeroDivisionError
    assert_same(values(), before)
    assert patches._here.depth == 0


def asserts(code: str) -> str:
    """A line that Inductor would write for a graph with an op of ours, as
    PythonWrapperCodegen.generate returns it."""
    graph = fx.Graph()
    graph.output(graph.call_function(torch.ops.q2.quantize.default))

    class Text:
        value = code

    class Graph:
        module = fx.GraphModule({}, graph)

    with V.set_graph_handler(Graph()):  # type: ignore[arg-type]
        return PythonWrapperCodegen.generate(lambda: (Text(), None), False)[0].value  # type: ignore[arg-type, return-value]


LINE = "assert not buf0.isinf().any().item()"


@pytest.fixture
def echoing(monkeypatch) -> None:
    monkeypatch.setattr(PythonWrapperCodegen, "generate", lambda self, is_inference: self())


def test_other_threads_call_the_original(echoing) -> None:
    elsewhere: list[str] = []
    with patched():
        thread = threading.Thread(target=lambda: elsewhere.append(asserts(LINE)))
        thread.start()
        thread.join()
        assert asserts(LINE) != LINE
    assert elsewhere == [LINE] and asserts(LINE) == LINE


def test_two_threads_that_overlap(echoing) -> None:
    """The second enters before the first leaves, and leaves after it."""
    before, entered, left = values(), threading.Event(), threading.Event()
    said: list[str] = []

    def second() -> None:
        with patched():
            entered.set()
            assert left.wait(10)
            said.append(asserts(LINE))

    thread = threading.Thread(target=second)
    with patched():
        thread.start()
        assert entered.wait(10)
    assert asserts(LINE) == LINE
    left.set()
    thread.join()
    assert said != [LINE] and len(said) == 1
    assert_same(values(), before)


def test_what_somebody_puts_there_meanwhile_stays(echoing, monkeypatch) -> None:
    calls = []
    with patched():
        ours = PythonWrapperCodegen.generate

        def foreign(self: Any, is_inference: bool) -> Any:
            calls.append(is_inference)
            return ours(self, is_inference)

        monkeypatch.setattr(PythonWrapperCodegen, "generate", foreign)
        assert asserts(LINE) != LINE
    assert PythonWrapperCodegen.generate is foreign
    assert asserts(LINE) == LINE and len(calls) == 2
    with patched():
        assert asserts(LINE) != LINE  # and the first replacement does not come back
    assert PythonWrapperCodegen.generate is foreign and len(calls) == 3


# ---- compilations


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 96)

    def forward(self, x):
        return torch.relu(self.up(x))


@pytest.fixture
def seen(monkeypatch) -> list[tuple[bool, bool]]:
    """For each graph that Inductor lowers: whether it has q2 ops, and whether patches are in force
    in that thread."""
    found: list[tuple[bool, bool]] = []
    run = GraphLowering.run

    def watched(self: Any, *args: Any) -> Any:
        ours = any("q2." in str(node.target) for node in self.graph.nodes)
        found.append((ours, patches._here.depth > 0))
        return run(self, *args)

    monkeypatch.setattr(GraphLowering, "run", watched)
    return found


def train(backend: str, **options: Any) -> None:
    how: dict[str, Any] = {"options": options} if backend == "quartet2" else {}
    model = torch.compile(Layer(), backend=backend, **how)
    model(torch.randn(64, 64)).sum().backward()


@pytest.mark.parametrize("options", [{}, {"on_error": "bf16"}, {"cache_weights": True}])
def test_every_graph_with_q2_ops(options, seen) -> None:
    """Forward, a backward that is compiled at its first call, and the graph that computes cached
    codes."""
    before = values()
    with inductor_config.patch(fx_graph_cache=False):
        train("quartet2", **options)
    assert set(seen) == {(True, True)} and len(seen) >= 2 + ("cache_weights" in options)
    assert_same(values(), before)


@pytest.mark.parametrize("inner", ["inductor", "eager"])
def test_between_forward_and_its_backward(inner) -> None:
    before = values()
    model = torch.compile(Layer(), backend="quartet2", options={"inner": inner})
    with inductor_config.patch(fx_graph_cache=False):
        y = model(torch.randn(64, 64)).sum()
        assert_same(values(), before)
        train("inductor")
        y.backward()
    assert_same(values(), before)


@pytest.mark.parametrize(("backend", "recipe"), [("inductor", None), ("quartet2", "bf16")])
def test_graphs_without_q2_ops(backend, recipe, seen) -> None:
    with inductor_config.patch(fx_graph_cache=False):
        train("quartet2")
        seen.clear()
        train(backend, **({} if recipe is None else {"recipe": recipe}))
    assert seen == [(False, False)] * 2


def test_another_thread_compiles_for_inductor(seen, monkeypatch) -> None:
    """This thread waits in the middle of lowering one of our graphs."""
    wait = GraphLowering.run
    started: list[threading.Thread] = []
    results: list[torch.Tensor] = []

    def interrupted(self: Any, *args: Any) -> Any:
        if not started:
            started.append(threading.Thread(target=compile_elsewhere))
            started[0].start()
            started[0].join(120)
            assert not started[0].is_alive()
        return wait(self, *args)

    def compile_elsewhere() -> None:
        x = torch.randn(64, 64)
        graph = torch.fx.symbolic_trace(lambda x: torch.cat([x.relu(), x], 1))
        result = torch._inductor.compile(graph, [x])(x)
        results.extend((result, torch.cat([x.relu(), x], 1)))

    monkeypatch.setattr(GraphLowering, "run", interrupted)
    before = values()
    with inductor_config.patch(fx_graph_cache=False):
        train("quartet2")
    assert seen == [(False, False), (True, True), (True, True)]
    assert len(results) == 2 and torch.equal(*results)
    assert_same(values(), before)


def test_a_compilation_that_fails(monkeypatch) -> None:
    before = values()

    def fail(self: Any, *args: Any) -> Any:
        assert patches._here.depth == 2  # of compile_fx, and of its inner_compile
        raise ZeroDivisionError

    monkeypatch.setattr(GraphLowering, "run", fail)
    with inductor_config.patch(fx_graph_cache=False), pytest.raises(RuntimeError):
        train("quartet2")
    assert_same(values(), before)
    assert patches._here.depth == patches._compiling == 0


# ---- what the user has set


class Chooser(InductorChoices):
    asked = 0

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative: bool) -> bool:
        Chooser.asked += 1
        return InductorChoices.should_use_persistent_reduction(features, cooperative)


def test_a_choices_handler() -> None:
    chooser = Chooser()
    with V.set_choices_handler(chooser):
        with patched():
            Chooser.asked = 0
            with suppress(Exception):  # no features
                V.choices.should_use_persistent_reduction(None, False)
            assert Chooser.asked == 1 and V.choices is not chooser
        assert V.choices is chooser


class Counter(CustomGraphPass):
    graphs = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        Counter.graphs += 1

    def uuid(self) -> str:
        return "counts graphs"


def test_a_pass_and_a_setting() -> None:
    Counter.graphs = 0
    own = Counter()
    settings = {"post_grad_custom_pre_pass": own, "unroll_reductions_threshold": 5}
    with inductor_config.patch(fx_graph_cache=False, **settings):
        train("quartet2")
        train("inductor")
        assert Counter.graphs == 4
        assert inductor_config.post_grad_custom_pre_pass is own
        assert inductor_config.unroll_reductions_threshold == 5


def test_a_graph_without_q2_ops_inside_of_ours(monkeypatch) -> None:
    """One that a user's pass compiles, in the same thread: its code is as ever."""
    sources: list[str] = []

    def save(source: str) -> None:
        sources.append(re.sub(r"AOT ID: .*|kernel path: .*", "", source))

    def compile_plain() -> None:
        graph = torch.fx.symbolic_trace(lambda x: torch.cat([x.relu(), x.half()], 1))
        torch._inductor.compile(graph, [torch.randn(64, 64)])

    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(save))
    with inductor_config.patch(fx_graph_cache=False, nan_asserts=True):
        compile_plain()
        with patched():
            compile_plain()
    assert len(sources) == 2 and sources[0] == sources[1] and "isinf" in sources[0]
