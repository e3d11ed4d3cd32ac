# SPDX-License-Identifier: Apache-2.0
"""Which quantizers share launches, on graphs built by hand: the pass's decision, and what lowering
does with it. The launches are counted in tests/lowering/test_launch_counts.py."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from q2compile.graph.node_meta import ALPHA_FROM, LAUNCH_GROUP
from q2compile.graph.quantizers import quantizer_of, set_call
from q2compile.lowering import state
from q2compile.lowering.state import lowering_state
from q2compile.passes.post_grad.group_launches import group_launches_pass
from q2compile.report.graph_text import lines_of
from q2compile.runtime_kernels.cuda.calls import MOST_OPERANDS
from tests.support import quantizer_calls as calls
from tests.support.emulation.inductor import serve_as_on
from tests.support.graph_builder import EDEN, SOURCE, Builder, q2, traced
from tests.support.serving import serve_by

aten = torch.ops.aten
BLACKWELL = 100


@pytest.fixture(autouse=True)
def kernels_of_a_blackwell(monkeypatch) -> None:
    serve_as_on(monkeypatch, BLACKWELL)


def groups(*nodes: fx.Node) -> list[int | None]:
    return [node.meta.get(LAUNCH_GROUP) for node in nodes]


def quantizers(between=None, scheme: str = SOURCE) -> tuple[Builder, fx.Node, fx.Node]:
    """x and w quantized, `between` called between them with the builder, x and its codes."""
    b = Builder()
    x, w = b.placeholder("arg0_1", 32, 64), b.placeholder("arg1_1", 48, 64)
    first = b.call(calls.plain(x, None, None, SOURCE, 0))
    qx = b.outputs(first)
    if between is not None:
        w = between(b, x, w, qx) or w
    second = b.call(calls.plain(w, None, None, scheme, 0))
    b.done(b.call(q2.gemm.default, *qx, *b.outputs(second), None, SOURCE, scheme, torch.bfloat16))
    return b, first, second


def cast(b, x, w, qx):
    return b.call(
        aten.view.default,
        b.call(torch.ops.prims.convert_element_type.default, w, torch.float32),
        [48, 64],
    )


def computed(b, x, w, qx):
    return b.call(aten.silu.default, w)


def read(b, x, w, qx):
    return b.call(q2.dequantize.default, *qx, SOURCE, 64, torch.bfloat16)


def read_by_view(b, x, w, qx):
    b.call(aten.view.default, qx[0], [-1])


def changed(b, x, w, qx):
    b.call(aten.copy_.default, x, x)


def noted(b, x, w, qx):
    b.call(q2.seed.default, x, 0)


@pytest.mark.parametrize("between", [None, cast])
def test_neighbors_are_a_group(between) -> None:
    b, first, second = quantizers(between)
    assert group_launches_pass(b.graph) == 1
    assert groups(first, second) == [0, 0]


@pytest.mark.parametrize("between", [computed, read, read_by_view, changed, noted])
def test_each_is_alone_where_more_stands_between(between) -> None:
    """A node between them reads the codes, changes x, or takes long, so that x would stay alive."""
    b, first, second = quantizers(between)
    assert group_launches_pass(b.graph) == 0
    assert groups(first, second) == [0, 1]
    *_, gemm, _ = b.graph.nodes
    assert gemm.meta[ALPHA_FROM] == 1  # before it one of the global scales is not known


def test_what_ends_otherwise_is_in_no_group() -> None:
    """An exact global scale has no such launch."""
    b, first, second = quantizers(scheme="nvfp4_46")
    assert group_launches_pass(b.graph) == 0
    assert groups(first, second) == [0, None]


def test_what_reads_a_member_is_in_another_group() -> None:
    b = Builder()
    x, seed = b.placeholder("arg0_1", 32, 64), b.placeholder("arg1_1", dtype=torch.int64)
    first = b.call(calls.plain(x, None, None, SOURCE, 0))
    second = b.call(calls.again(*b.outputs(first), seed, SOURCE, EDEN, "rht128", 64, 1))
    b.done(second)
    assert group_launches_pass(b.graph) == 0
    assert groups(first, second) == [0, 1]


def test_a_group_has_as_many_operands_as_the_launch_has_room_for() -> None:
    b = Builder()
    inputs = [b.placeholder(f"arg{i}_1", 32, 64) for i in range(MOST_OPERANDS + 1)]
    made = [b.call(calls.plain(x, None, None, SOURCE, 0)) for x in inputs]
    b.done(*made)
    assert group_launches_pass(b.graph) == 1
    assert groups(*made) == [0] * MOST_OPERANDS + [1]


def test_none_where_nothing_is_launched(monkeypatch) -> None:
    """The reference of a CPU is no launch."""
    monkeypatch.undo()
    b, first, second = quantizers()
    assert group_launches_pass(b.graph) == 0
    assert groups(first, second) == [None, None]


def test_alpha_comes_from_the_group_that_ends_last() -> None:
    """Alpha of dgrad and wgrad: the global scales of both operands of dy, with those of w and x. A
    dump shows the decision."""
    gm, _ = traced()
    b, first, second = quantizers()
    assert group_launches_pass(b.graph) == 1
    *_, gemm, _ = b.graph.nodes
    assert gemm.meta[ALPHA_FROM] == 0
    shown = [line.partition("  # ")[2] for line in lines_of(b.graph)]
    assert [text for text in shown if text] == 2 * ["launch group 0"] + [
        "alpha from launch group 0"
    ]
    assert group_launches_pass(gm.graph) == 1
    gemms = gm.graph.find_nodes(op="call_function", target=q2.gemm.default)
    assert [gemm.meta.get(ALPHA_FROM) for gemm in gemms] == [0, 0]


def test_alpha_is_the_gemm_s_own_where_it_is_emulated(monkeypatch) -> None:
    serve_as_on(monkeypatch, 90)
    b, first, second = quantizers()
    assert group_launches_pass(b.graph) == 1
    *_, gemm, _ = b.graph.nodes
    assert groups(first, second) == [0, 0] and ALPHA_FROM not in gemm.meta


class Lowered:
    """Inductor's state of a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.module = type("Module", (), {"graph": graph})


def standing(graph: fx.Graph, monkeypatch, *nodes: fx.Node) -> list[tuple[int, Any] | None]:
    """The groups that lowerings see."""
    monkeypatch.setattr(state, "V", type("V", (), {"graph": Lowered(graph)}))
    return [lowering_state().groups.get(node) for node in nodes]


def test_lowerings_see_what_the_pass_wrote(monkeypatch) -> None:
    b, first, second = quantizers()
    assert standing(b.graph, monkeypatch, first, second) == [None, None]
    group_launches_pass(b.graph)
    assert standing(b.graph, monkeypatch, first, second) == [(0, second), (0, second)]


def test_lowerings_split_what_later_passes_take_apart(monkeypatch) -> None:
    """A reader of the first one's codes that comes between; a call that becomes a recorded one."""
    b, first, second = quantizers()
    group_launches_pass(b.graph)
    codes = next(iter(first.users))
    with b.graph.inserting_before(second):
        view = b.graph.call_function(aten.view.default, (codes, [-1]))
    assert standing(b.graph, monkeypatch, first, second) == [(0, first), (0, second)]
    b.graph.erase_node(view)
    call = quantizer_of(second)
    assert call is not None
    set_call(second, call.replace(recorded=True))
    assert standing(b.graph, monkeypatch, first, second) == [(0, first), None]


def test_only_its_own_outputs_are_a_quantizer_s() -> None:
    """getitem of another tuple is a reader like others."""
    b, first, second = quantizers(lambda b, x, w, qx: b.call(operator.getitem, [qx[0]], 0) and None)
    assert group_launches_pass(b.graph) == 0 and groups(first, second) == [0, 1]


def test_no_check_is_asked_for_scales_that_split_scales_does_not_make(monkeypatch) -> None:
    """Without the quantizing kernel MS-EDEN has no launch, and q2::split_scales needs no check."""
    asked: list[str] = []

    def only_split_scales(op: str, args: Any) -> Any:
        asked.append(op)
        return type("Served", (), {"launching": None, "name": "reference"})

    serve_by(monkeypatch, only_split_scales)
    b = Builder()
    x = b.placeholder("arg0_1", 32, 64)
    made = b.call(calls.one(x, b.placeholder("seed", dtype=torch.int64), EDEN, "rht128", False, 0))
    b.done(b.outputs(made)[0])
    assert group_launches_pass(b.graph) == 0 and groups(made) == [None]
    assert asked == ["quantize"]
