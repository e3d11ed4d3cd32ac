# SPDX-License-Identifier: Apache-2.0
"""Nodes that telemetry inserts into a graph, after all passes, before Inductor lowers it.

before                                         after, in a recording graph
    q = quantize(x, scheme=S, ...)                 q = quantize(x, scheme=S, ..., recorded=True)
    gemm(q[0], q[1], q[2], ...)                    gemm(q[0], q[1], q[2], ...)
                                                   c = sampled_codes(...)             # of weights
                                                   a = mark(q[0], q[1])
                                                   m = stack_marks([a, ...])
    return ...                                     note([m, q[3], ..., c, ...], place, layout)
                                                   return ...

In a plain graph only the marks are noted, one element per operand (`ops.note`). Each is made behind
the first GEMM that reads the operand, so it does not extend the operand's life.

The bits of a step do not change. A recorded op returns the outputs of the op that it replaces, from
the same arguments. The other inserted nodes read only these outputs, which are in memory anyway
because a GEMM reads them. So no tensor gains a reader that could make Inductor fuse, and round,
differently.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx

from q2compile.graph.node_meta import seed_index_of
from q2compile.graph.nodes import (
    GEMM_OPS,
    depending_on_tangents,
    is_q2,
    named_arguments,
    outputs_of,
    producer,
    q2_nodes,
    update_outputs,
)
from q2compile.graph.quantizers import quantizer_of, quantizers, set_call
from q2compile.recipes.recipe import GEMMS, Gemm, Recipe
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.table import GATHER_ROWS, GROUPED_GEMM, PARTS, TRANSPOSE

Place = tuple[int, str, str]  # seed index of the linear, gemm, operand


@dataclass
class NoteLayout:
    """The tensors of one note: a vector of marks; a vector of statistics for each index that a row
    has; codes of weights.

    marks    the operand of each mark, in the order in which the graph multiplies
    rows     (operand, index of its statistics): equal operands of several GEMMs share one
    weights  the linear (seed index) of each tensor of codes
    """

    marks: list[Place] = field(default_factory=list)
    rows: list[tuple[Place, int]] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)

    @property
    def statistics(self) -> int:
        return 1 + max((index for _, index in self.rows), default=-1)

    def text(self) -> str:
        """The layout as an argument of an op, without double quotes: Inductor's C++ wrapper does
        not escape them."""
        return json.dumps(asdict(self)).replace('"', "'")

    @staticmethod
    @cache
    def parse(text: str) -> NoteLayout:
        """Reads what `text` wrote; tuples become lists. Cached, since a graph that runs on the host
        notes in every step."""
        return NoteLayout(**json.loads(text.replace("'", '"')))


@dataclass(frozen=True)
class _Use:
    """An operand: (codes, scales, global scale) that a gemm takes, or that only a backward will."""

    place: Place
    parts: tuple[fx.Node, fx.Node, fx.Node]
    scheme: str

    @property
    def maker(self) -> fx.Node:
        return producer(self.parts[0])

    @property
    def which(self) -> int:
        """The operand's place among its maker's: 1 for the columnwise one of a gradient's two."""
        index: Any = self.parts[0].args[1] if self.maker is not self.parts[0] else 0
        return index // len(PARTS)


def insert_recording(
    graph: fx.Graph, kind: str, place: str, recipes: dict[int, Recipe], wanted: set[int] | None
) -> None:
    """Change a "forward" or "backward" graph of AOTAutograd's in place.

    place: of its notes.  recipes: of its linears, by seed_index.  wanted: the seed_index of
    each one to record; None makes a plain graph.
    """
    inputs = graph.find_nodes(op="placeholder")
    if not any(n.name.startswith(("primals", "tangents")) for n in inputs):
        return  # inference, or the body of a higher-order op
    uses = list(_uses(graph, kind, recipes))
    layout, noted = NoteLayout(), []
    end = graph.output_node()
    marks = _add_marks(graph, uses, layout, end)
    if marks is not None:
        noted.append(marks)
    elif wanted is None:
        return
    if wanted is not None:
        noted += _add_statistics(graph, [u for u in uses if u.place[0] in wanted], layout)
        if kind == "forward":
            noted += _add_weights(graph, [u for u in uses if u.place[0] in wanted], layout)
    if noted:
        with graph.inserting_before(end):
            note = graph.call_function(
                torch.ops.q2.note.default, (noted, f"{place}.{kind}", layout.text())
            )
        note.meta["val"] = None
    graph.lint()


def _uses(graph: fx.Graph, kind: str, recipes: dict[int, Recipe]) -> Iterator[_Use]:
    """The quantized operands of a graph's GEMMs, in their order; those of a forward graph include
    what only the backward will multiply. Operands that the forward saved are the forward's."""
    from_tangents = depending_on_tangents(graph)
    seed_indices_of: dict[Any, list[int]] = {}  # source of an x -> the linears that take it
    for gemm in q2_nodes(graph, *GEMM_OPS):
        seed_index = seed_index_of(gemm)
        if seed_index not in recipes:
            continue
        args: Any = named_arguments(gemm)
        name = _gemm_name(gemm, from_tangents)
        if kind == "backward" and name == "fprop":
            continue  # checkpointing computes it again: it is the forward's
        for role, operand_name in zip(GEMMS[name], "ab", strict=True):
            parts = tuple(args[f"{operand_name}_{part}"] for part in ("codes", "scales", "global"))
            maker = producer(parts[0])
            if is_q2(maker, TRANSPOSE, GATHER_ROWS):  # fprop's codes, if that made any
                parts = (*maker.args[:2], parts[2])
                maker = producer(parts[0])
            if kind == "backward" and maker.op == "placeholder":
                continue
            use = _Use((seed_index, name, role), parts, args[f"{operand_name}_scheme"])
            yield use
            if name == "fprop" and role == "x" and maker.op != "placeholder":
                seed_indices_of.setdefault(maker.args[0], []).append(seed_index)
            if name == "fprop" and (reusing := _reusing(recipes[seed_index], role)) is not None:
                yield _Use((seed_index, reusing, role), parts, use.scheme)
    if kind == "forward":
        yield from _saved_uses(graph, recipes, seed_indices_of)


def _saved_uses(
    graph: fx.Graph, recipes: dict[int, Recipe], seed_indices_of: dict[Any, list[int]]
) -> Iterator[_Use]:
    """x that the forward quantizes for wgrad, alone or together with fprop's x."""
    for node, call in quantizers(graph):
        if call.source_scheme is not None or call.masked:
            continue
        outputs = outputs_of(node)
        own = seed_index_of(node)
        seed_indices = seed_indices_of.get(call.x, [] if own is None else [own])
        for operand in call.operands:
            if not (call.rotated or operand.columnwise):
                continue
            made = [outputs.get(operand.first + i) for i in range(len(PARTS))]
            parts = [n for n in made if n is not None]
            if len(parts) < len(PARTS) or any(
                is_q2(user, *GEMM_OPS) for n in parts for user in n.users
            ):
                continue
            for seed_index in seed_indices:
                wgrad = recipes[seed_index].wgrad if seed_index in recipes else None
                if wgrad is not None and wgrad.b.source == "forward":
                    codes, scales, global_scale = parts
                    yield _Use(
                        (seed_index, "wgrad", "x"), (codes, scales, global_scale), call.scheme.name
                    )


def _reusing(recipe: Recipe, role: str) -> str | None:
    """The GEMM of the backward that multiplies fprop's codes of x or w, transposed."""
    name = "wgrad" if role == "x" else "dgrad"
    gemm: Gemm | None = getattr(recipe, name)
    return name if gemm is not None and gemm.b.source == "reuse" else None


def _gemm_name(gemm: fx.Node, from_tangents: set[fx.Node]) -> str:
    if is_q2(gemm, GROUPED_GEMM):
        return str(named_arguments(gemm)["gemm"])
    if gemm not in from_tangents:
        return "fprop"
    codes: Any = gemm.args[0]
    call = quantizer_of(producer(codes))
    if call is None or call.source_scheme is not None:
        return "dgrad"
    return "wgrad" if call.operand_of(codes.args[1]).columnwise else "dgrad"


def _add_marks(
    graph: fx.Graph, uses: list[_Use], layout: NoteLayout, end: fx.Node
) -> fx.Node | None:
    """The marks of the operands that the graph quantizes, stacked. One for each quantizer: both
    directions of a gradient are finite, or neither. Codes that are requantized were marked where
    they were made."""
    marks: dict[fx.Node, fx.Node] = {}
    for use in uses:
        maker = use.maker
        call = quantizer_of(maker)
        requantizes = call is not None and call.source_scheme is not None
        if maker in marks or requantizes or maker.op == "placeholder":
            continue
        layout.marks.append(use.place)
        codes, scales, global_scale = use.parts
        readers = [n for n in codes.users if is_q2(n, *GEMM_OPS)]
        after = min(readers) if readers else global_scale
        marks[maker] = _call(graph, torch.ops.q2.mark.default, (codes, scales), after)
    if not marks:
        return None
    with graph.inserting_before(end):
        stacked = graph.call_function(torch.ops.q2.stack_marks.default, (list(marks.values()),))
    like = next(iter(marks.values())).meta["val"]
    stacked.meta["val"] = like.new_empty((len(marks),), dtype=torch.float32)
    return stacked


def _add_statistics(graph: fx.Graph, uses: list[_Use], layout: NoteLayout) -> list[fx.Node]:
    """The statistics of all operands; each quantizer becomes the one that measures."""
    found: dict[tuple[fx.Node, int], fx.Node] = {}
    order = []
    for use in uses:
        maker = use.maker
        key = (maker, use.which) if maker.op != "placeholder" else (use.parts[0], 0)
        if key not in found:
            if quantizer_of(maker) is not None:
                found[key] = _recorded_output(graph, maker, use.which)
            elif maker.op == "placeholder" and not get_scheme(use.scheme).dequantized:
                args = (*use.parts, use.scheme)
                op = torch.ops.q2.statistics_of_codes.default
                found[key] = _call(graph, op, args, use.parts[-1])
            else:
                continue
            order.append(found[key])
        layout.rows.append((use.place, order.index(found[key])))
    return order


def _recorded_output(graph: fx.Graph, maker: Any, which: int) -> fx.Node:
    """The output of a quantizer that has the statistics of one operand."""
    call = quantizer_of(maker)
    assert call is not None
    call = call.replace(recorded=True)
    set_call(maker, call)
    at = call.outputs.index("statistics") + which
    with graph.inserting_after(maker):
        output = graph.call_function(operator.getitem, (maker, at))
    update_outputs(maker)
    return output


def _add_weights(graph: fx.Graph, uses: list[_Use], layout: NoteLayout) -> list[fx.Node]:
    """Codes of the weights as fprop multiplies them, to be compared with the next record's."""
    sampled: dict[fx.Node, fx.Node] = {}
    for use in uses:
        codes = use.parts[0]
        if use.place[1:] == ("fprop", "w") and codes not in sampled:
            sampled[codes] = _call(graph, torch.ops.q2.sampled_codes.default, (codes,), codes)
            layout.weights.append(use.place[0])
    return list(sampled.values())


def _call(graph: fx.Graph, op: Any, args: tuple[Any, ...], after: fx.Node) -> fx.Node:
    """A new call next to its inputs, so that they do not live until the graph's end for it.

    after: the last of its arguments in the graph.
    """
    with graph.inserting_after(max([after, *(a for a in args if isinstance(a, fx.Node))])):
        node = graph.call_function(op, args)
    values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
    node.meta["val"] = op(*values)
    return node
