# SPDX-License-Identifier: Apache-2.0
"""The table of views and casts, and which nodes swap the last two dimensions."""

import ast
import operator
import re
from pathlib import Path

import torch
from torch import fx

from q2compile.graph.views import (
    BITS,
    CAST,
    COPY,
    ITEM,
    PERMUTE,
    REPEAT,
    RESHAPE,
    SPLIT,
    UNIT,
    behind,
    is_view_or_cast,
    kind_of,
    transposes,
)
from tests.support.tracked import parsed, tracked

aten, prims = torch.ops.aten, torch.ops.prims


def test_an_op_is_of_one_kind_in_every_graph() -> None:
    for kind, targets in [
        (RESHAPE, ("view", torch.reshape, aten.view.default, aten._unsafe_view.default)),
        (PERMUTE, ("permute", torch.t, aten.t.default, aten.transpose.int, "mT")),
        (UNIT, ("squeeze", torch.unsqueeze, aten.squeeze.dim, aten.squeeze.dims)),
        (REPEAT, ("expand", aten.expand.default)),
        (COPY, ("contiguous", torch.clone, aten.clone.default)),
        (CAST, ("bfloat16", aten._to_copy.default, prims.convert_element_type.default)),
        (BITS, (aten.view.dtype,)),
        (SPLIT, (torch.split, torch.Tensor.split, aten.split.Tensor)),
        (ITEM, (operator.getitem,)),
        (0, (torch.relu, aten.mm.default, torch.ops.q2.transpose.default, "sum", torch.cat)),
    ]:
        for target in targets:
            graph = fx.Graph()
            x = graph.placeholder("x")
            call = graph.call_method if isinstance(target, str) else graph.call_function
            assert kind_of(call(target, (x,))) == kind, target
        assert kind_of(x) == 0


def test_attributes_are_kinds_too() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    kinds = [kind_of(graph.call_function(getattr, (x, name))) for name in ("mT", "H", "shape")]
    assert kinds == [PERMUTE, PERMUTE, 0]


def test_capture_sees_through_all_but_what_repeats() -> None:
    """An expanded parameter has more elements than it has weights; a look-up chooses rows."""
    graph = fx.Graph()
    x, rows = graph.placeholder("x"), graph.placeholder("rows")
    rows.meta["example_value"] = torch.zeros(2, dtype=torch.int64)
    seen = [("detach", ()), ("expand", (2, 3)), ("view", (6,)), ("relu", ())]
    assert [is_view_or_cast(graph.call_method(name, (x, *args))) for name, args in seen] == [
        *(True, False, True, False)
    ]
    parts = (0, rows)
    items = [graph.call_function(operator.getitem, (x, part)) for part in parts]
    assert list(map(is_view_or_cast, items)) == [True, False]


def test_behind_views_of_these_kinds() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    cast = graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.bfloat16})
    y = graph.call_function(aten.t.default, (graph.call_function(aten.view.default, (cast, [2])),))
    assert behind(y) is cast and behind(y, RESHAPE | PERMUTE | CAST) is x and behind(y, CAST) is y


def test_transposes() -> None:
    for target, dims, sizes, swaps in [
        ("t", (), (2, 3), True),
        ("T", (), (2, 3), True),
        ("T", (), (2, 3, 4), False),  # torch's T reverses all dimensions
        ("mT", (), (2, 3, 4), True),
        ("transpose", (1, 2), (2, 3, 4), True),
        ("transpose", (-1, -2), (2, 3, 4), True),
        ("transpose", (0, 1), (2, 3, 4), False),
        ("transpose", (-1, 0), (2, 3, 4), False),
        ("permute", (0, 2, 1), (2, 3, 4), True),
        ("permute", ((1, 0),), (2, 3), True),
        ("permute", (1, 0, 2), (2, 3, 4), False),
        ("view", (2, 3), (2, 3), False),
    ]:
        graph = fx.Graph()
        x = graph.placeholder("x")
        if target in ("T", "mT"):
            node = graph.call_function(getattr, (x, target))
        else:
            node = graph.call_method(target, (x, *dims))
        node.meta["example_value"] = torch.empty(sizes)
        assert transposes(node) is swaps


def test_no_other_file_lists_views_and_casts() -> None:
    """A list of two of them elsewhere is a second table."""
    view = re.compile(
        r"_?(aten|prims)\.(view|_unsafe_view|reshape|permute|transpose|t|squeeze|unsqueeze|expand"
        r"|alias|detach|clone|_to_copy|convert_element_type|select|slice|split)\b"
    )
    found = set()
    root = Path(__file__).resolve().parents[3]
    packages = ("q2compile", "lowering", "runtime_kernels")
    for path in [p for p in tracked(root) if p.suffix == ".py"]:
        if path.relative_to(root).parts[0] not in packages:
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                ops = [ast.unparse(e).removeprefix("torch.ops.") for e in node.elts]
                if sum(bool(view.match(op)) for op in ops) > 1:
                    found.add(path.name)
    assert found == set()
