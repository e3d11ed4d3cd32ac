"""What a graph must look like before and after the passes. Breaking it is silent in the loss, so it
is an error here: two operands of a GEMM with different signs give a gradient that is noise."""

from __future__ import annotations

from torch import fx

from q2compile.passes.graphs import is_q2, producer, q2_nodes

# op -> the kinds of graph it may stand in. Coins and rotations belong to the backward: a seed that
# the partitioner moved into the forward is drawn a second time in the backward.
SPEC: dict[str, frozenset[str]] = {
    "quantize": frozenset({"forward", "backward"}),  # backward: recomputed under checkpointing
    "gemm": frozenset({"forward", "backward"}),
    "dequantize": frozenset({"forward", "backward"}),
    "seed": frozenset({"backward"}),
    "seeds": frozenset({"backward"}),
    "rht_quantize": frozenset({"backward"}),
    "requantize": frozenset({"backward"}),
}


class GraphSpecError(AssertionError):
    """A rewritten graph that does not compute what its recipe says: a fault of q2compile, not the
    user's.
    """


def check_spec(graph: fx.Graph, kind: str, when: str) -> None:
    """Raise GraphSpecError if ``graph``, a "forward" or "backward" graph, breaks the rules:

    1. every q2 op stands in a kind of graph that SPEC allows;
    2. every q2.gemm's operands come each whole from one op (codes, scales, global scale: outputs 0,
    1, 2),
       or from placeholders;
    3. two rotated operands of one gemm have the same seed and transform, and different coin
    streams.
    """
    for node in q2_nodes(graph):
        name = str(node.target).split(".")[1]
        if kind not in SPEC.get(name, frozenset()):
            raise GraphSpecError(f"{when}: {node.format_node()} may not stand in a {kind} graph")
    for gemm in q2_nodes(graph, "gemm"):
        operands = [_operand(gemm, gemm.args[i : i + 3], when) for i in (0, 3)]  # type: ignore[arg-type]
        a, b = (o if is_q2(o, "rht_quantize", "requantize") else None for o in operands)
        if a is None or b is None:
            continue
        a_args, b_args = named_arguments(a), named_arguments(b)
        for what in ("seed", "transform"):
            if a_args[what] is not b_args[what] and a_args[what] != b_args[what]:
                raise GraphSpecError(
                    f"{when}: the operands of {gemm.name} have different {what}s "
                    f"({a.name}: {a_args[what]}, {b.name}: {b_args[what]}); their rotations do not "
                    "cancel"
                )
        if a_args["stream"] == b_args["stream"]:
            raise GraphSpecError(
                f"{when}: the operands of {gemm.name} draw the same coins, stream "
                f"{a_args['stream']}"
            )


def _operand(gemm: fx.Node, triple: tuple[fx.Node, fx.Node, fx.Node], when: str) -> fx.Node:
    """The op that made an operand's codes, scales and global scale."""
    sources = [producer(n) for n in triple]
    if all(n.op == "placeholder" for n in triple):
        return triple[0]
    outputs = [n.args[1] if n is not s else None for n, s in zip(triple, sources, strict=True)]
    if len(set(sources)) != 1 or outputs != [0, 1, 2]:
        raise GraphSpecError(
            f"{when}: an operand of {gemm.name} is pieced together from "
            f"{', '.join(n.name for n in triple)}"
        )
    return sources[0]


def named_arguments(node: fx.Node) -> dict[str, object]:
    """The arguments of an op by the names of its schema."""
    schema = node.target._schema  # type: ignore[union-attr]
    names = [a.name for a in schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}
