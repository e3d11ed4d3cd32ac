"""What a graph must look like before and after the passes. Breaking it is silent in the loss, so it
is an error here: two operands of a GEMM with different signs give a gradient that is noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from q2compile.passes.graph_queries import (
    BOTH_ROTATED,
    BOTH_SUMMED,
    GEMM_OPS,
    ONE_ROTATED,
    ONE_SUMMED,
    is_q2,
    producer,
    q2_nodes,
)


class GraphSpecError(AssertionError):
    """A rewritten graph that does not compute what its recipe says: a fault of q2compile, not the
    user's.
    """


@dataclass(frozen=True)
class _Operand:
    """Where a gemm's operand comes from: made here, rotated or not, or saved: by another graph, or
    as a constant, which Inductor's freezing makes of a weight's codes. ``empty``: it has no number,
    as those that contract over the rows of an empty batch.
    """

    saved: bool = False
    empty: bool = False
    rotated: bool = False
    seed: Any = None
    transform: Any = None
    stream: Any = None


def check_spec(graph: fx.Graph, kind: str, when: str, random_forward: bool = False) -> None:
    """Raise GraphSpecError if ``graph``, a "forward" or "backward" graph, breaks the rules:

    1. seeds, and ops that take one, stand in backward graphs alone: a seed that the partitioner put
       into the forward is drawn a second time in the backward (``random_forward``: a recipe draws
       one in the forward on purpose, and saves it);
    2. the operands of gemm and grouped_gemm come each whole from one op (codes, scales, global
       scale), or from placeholders;
    3. two rotated operands of one gemm have the same seed and transform, and different streams;
    4. a rotated operand whose partner the forward saved takes its signs from the forward too, if
       there is a number to rotate: codes of no bytes cost nothing to save, so the partitioner saves
       them apart from their seed.
    """
    for node in q2_nodes(graph):
        args = named_arguments(node)
        seeds = [v for name, v in args.items() if name.endswith("seed") and v is not None]
        if kind == "forward" and (seeds or is_q2(node, "seed")) and not random_forward:
            raise GraphSpecError(f"{when}: {node.format_node()} may not stand in a forward graph")
    for gemm in q2_nodes(graph, *GEMM_OPS):
        _check_gemm(gemm, kind, when)


def _check_gemm(gemm: fx.Node, kind: str, when: str) -> None:
    a, b = (_operand(gemm, gemm.args[i : i + 3], when) for i in (0, 3))
    if a.rotated and b.rotated:
        for what in ("seed", "transform"):
            of_a, of_b = getattr(a, what), getattr(b, what)
            if of_a is not of_b and of_a != of_b:
                raise GraphSpecError(
                    f"{when}: the operands of {gemm.name} have different {what}s ({of_a}, {of_b}); "
                    "their rotations do not cancel"
                )
        if a.seed is not None and a.stream == b.stream:
            raise GraphSpecError(
                f"{when}: the operands of {gemm.name} draw the same coins, stream {a.stream}"
            )
    for rotated, partner in ((a, b), (b, a)):
        drawn_here = isinstance(rotated.seed, fx.Node) and rotated.seed.op != "placeholder"
        here = rotated.rotated and drawn_here
        if kind == "backward" and here and partner.saved and not partner.empty:
            raise GraphSpecError(
                f"{when}: an operand of {gemm.name} was rotated in the forward, and its partner "
                f"with signs drawn here ({rotated.seed}); their rotations do not cancel"
            )


def _operand(gemm: fx.Node, triple: Any, when: str) -> _Operand:
    """What (codes, scales, global scale) are, from the op whose outputs they must be."""
    gather = producer(triple[0])
    if is_q2(gather, "gather_rows") and producer(triple[1]) is gather:
        triple = (*gather.args[:2], triple[2])
    if triple[0].op in ("placeholder", "get_attr"):
        return _Operand(saved=True, empty=_is_empty(triple[0]))
    op = producer(triple[0])
    if is_q2(op, "transpose"):  # re-used codes: their global scale is the source's
        return _Operand()
    outputs = [n.args[1] if producer(n) is op and n is not op else None for n in triple]
    whole = {"[0, 1, 2]": "row_seed", "[3, 4, 5]": "col_seed"}.get(str(outputs))
    if whole is None:
        raise GraphSpecError(
            f"{when}: an operand of {gemm.name} is pieced together from "
            f"{', '.join(n.name for n in triple)}"
        )
    both = is_q2(op, *BOTH_ROTATED, *BOTH_SUMMED)
    if not both and not is_q2(op, *ONE_ROTATED, *ONE_SUMMED):
        return _Operand()
    args = named_arguments(op)
    seed = args[whole] if both else args["seed"]
    return _Operand(rotated=True, seed=seed, transform=args["transform"], stream=args["stream"])


def _is_empty(codes: fx.Node) -> bool:
    """Asked of sizes that are numbers: comparing a symbol would be a guard."""
    sizes = getattr(codes.meta.get("val"), "shape", ())
    return any(isinstance(size, int) and size == 0 for size in sizes)


def named_arguments(node: fx.Node) -> dict[str, object]:
    """The arguments of an op by the names of its schema."""
    target: Any = node.target
    names = [a.name for a in target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}
