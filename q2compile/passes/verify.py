# SPDX-License-Identifier: Apache-2.0
"""Rules that a graph obeys before and after the passes. Without the check, breaking one would only
show as a bad loss: two operands of a GEMM with different signs give a gradient that is noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from q2compile.graph.nodes import GEMM_OPS, is_q2, named_arguments, producer, q2_nodes
from q2compile.graph.quantizers import quantizer_of
from q2compile.graph.views import BITS, COPY, PART, PERMUTE, RESHAPE, kind_of
from q2compile.runtime_kernels.numerics.transforms import Transform
from q2compile.runtime_kernels.ops.table import GATHER_ROWS, PARTS, SEED, TRANSPOSE

_c10d = torch.ops._c10d_functional


class GraphSpecError(AssertionError):
    """A rewritten graph that does not compute what its recipe says: a fault of q2compile, not the
    user's.
    """


@dataclass(frozen=True)
class _OperandOrigin:
    """Where a gemm's operand comes from: made here, rotated or not, or saved: by another graph, or
    as a constant, which Inductor's freezing makes of a weight's codes. ``empty``: it has no number,
    as those that contract over the rows of an empty batch. ``transform``: None for the
    operands of fprop, and for what is not made here.
    """

    saved: bool = False
    empty: bool = False
    transform: Transform | None = None
    seed: Any = None
    rng_offset: Any = None

    @property
    def signs(self) -> Any:
        """The seed that its signs are drawn from; None if it has none, or always the same ones."""
        return self.seed if self.transform is not None and self.transform.seeded else None


def check_spec(graph: fx.Graph, kind: str, when: str, random_forward: bool = False) -> None:
    """Raise GraphSpecError if ``graph``, a "forward" or "backward" graph, breaks the rules:

    1. seeds, and ops that take one, are only in backward graphs: a seed that the partitioner put
       into the forward is drawn a second time in the backward (``random_forward``: a recipe draws
       one in the forward on purpose, and saves it);
    2. the operands of gemm and grouped_gemm come each whole from one op (codes, scales, global
       scale), or from placeholders;
    3. two operands of one gemm have the same transform, the same seed if it draws signs, and
       different streams if they draw from one seed;
    4. a rotated operand whose partner the forward saved takes its signs from the forward too, if
       there is a number to rotate: codes of no bytes cost nothing to save, so the partitioner saves
       them apart from their seed.
    """
    for node in q2_nodes(graph):
        args = named_arguments(node)
        seeds = [v for name, v in args.items() if name.endswith("seed") and v is not None]
        if kind == "forward" and (seeds or is_q2(node, SEED)) and not random_forward:
            raise GraphSpecError(f"{when}: {node.format_node()} draws a seed in a forward graph")
    for gemm in q2_nodes(graph, *GEMM_OPS):
        _check_gemm(gemm, kind, when)


def _check_gemm(gemm: fx.Node, kind: str, when: str) -> None:
    a, b = (_operand(gemm, gemm.args[i : i + 3], when) for i in (0, 3))
    if a.transform is not None and b.transform is not None:
        pairs = {"transform": (a.transform.name, b.transform.name), "seed": (a.signs, b.signs)}
        for what, (of_a, of_b) in pairs.items():
            if of_a != of_b:
                raise GraphSpecError(
                    f"{when}: the operands of {gemm.name} have different {what}s ({of_a}, {of_b}); "
                    "their rotations do not cancel"
                )
        if a.seed is not None and (a.seed, a.rng_offset) == (b.seed, b.rng_offset):
            raise GraphSpecError(
                f"{when}: the operands of {gemm.name} draw the same random bits, "
                f"rng_offset {a.rng_offset}"
            )
    for rotated, partner in ((a, b), (b, a)):
        drawn_here = isinstance(rotated.signs, fx.Node) and rotated.signs.op != "placeholder"
        if kind == "backward" and drawn_here and partner.saved and not partner.empty:
            raise GraphSpecError(
                f"{when}: an operand of {gemm.name} was rotated in the forward, and its partner "
                f"with signs drawn here ({rotated.signs}); their rotations do not cancel"
            )


def _operand(gemm: fx.Node, triple: Any, when: str) -> _OperandOrigin:
    """The op whose outputs (codes, scales, global scale) must be, and its arguments."""
    gather = producer(triple[0])
    if is_q2(gather, GATHER_ROWS) and producer(triple[1]) is gather:
        triple = (*gather.args[:2], triple[2])
    shards = [_shard(part) for part in triple[:2]]
    if shards[0] is not triple[0]:
        ops = {producer(n) for n in shards}
        if len(ops) == 1 and is_q2(*ops) and [n.args[1] for n in shards] == [0, 1]:
            return (
                _OperandOrigin()
            )  # codes of all ranks; the global scale is what they were made under
    if triple[0].op in ("placeholder", "get_attr"):
        return _OperandOrigin(saved=True, empty=_is_empty(triple[0]))
    op = producer(triple[0])
    if is_q2(op, TRANSPOSE):  # re-used codes: their global scale is the source's
        return _OperandOrigin()
    call = quantizer_of(op)
    outputs = [n.args[1] if producer(n) is op and n is not op else None for n in triple]
    whole = {operand.first: operand for operand in call.operands} if call else {}
    operand = None if outputs[0] is None else whole.get(outputs[0])
    expected = [] if operand is None else list(range(operand.first, operand.first + len(PARTS)))
    if _is_empty(triple[1]):  # no block scales: the partitioner may save what is nothing
        expected[1:2], outputs[1:2] = [], []
    if operand is None or outputs != expected:
        raise GraphSpecError(
            f"{when}: an operand of {gemm.name} mixes outputs of "
            f"{', '.join(n.name for n in triple)}"
        )
    assert call is not None
    if not (operand.transform.size > 1 or operand.columnwise) or call.masked:
        return _OperandOrigin()
    return _OperandOrigin(
        transform=operand.transform, seed=operand.seed, rng_offset=call.args["rng_offset"]
    )


def _shard(part: fx.Node) -> fx.Node:
    """This rank's codes or scales, of which ``part`` has gathered all ranks'."""
    collectives = (_c10d.wait_tensor.default, _c10d.all_gather_into_tensor.default)
    views = (
        BITS | COPY | PART | RESHAPE | PERMUTE
    )  # in order, or parts along another dimension than 0
    gathered, node = False, part
    while node.target in collectives or kind_of(node) & views:
        gathered |= node.target is collectives[1]
        node = node.args[0]  # type: ignore[assignment]
    return node if gathered else part


def _is_empty(codes: fx.Node) -> bool:
    """Whether it is empty; only int sizes are compared, since comparing a symbol adds a guard."""
    sizes = getattr(codes.meta.get("val"), "shape", ())
    return any(isinstance(size, int) and size == 0 for size in sizes)
