"""What a graph must look like before and after the passes. Breaking it is silent in the loss, so it
is an error here: two operands of a GEMM with different signs give a gradient that is noise."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from q2compile.passes.graphs import is_q2, producer, q2_nodes


class GraphSpecError(AssertionError):
    """A rewritten graph that does not compute what its recipe says: a fault of q2compile, not the
    user's.
    """


def check_spec(graph: fx.Graph, kind: str, when: str, random_forward: bool = False) -> None:
    """Raise GraphSpecError if ``graph``, a "forward" or "backward" graph, breaks the rules:

    1. seeds, and ops that take one, stand in backward graphs alone: a seed that the partitioner
    moved
       into the forward is drawn a second time in the backward (``random_forward``: a recipe draws
       one in the forward on purpose, and saves it);
    2. every q2.gemm's operands come each whole from one op (codes, scales, global scale), or from
       placeholders;
    3. two rotated operands of one gemm have the same seed and transform, and different streams;
    4. a rotated operand whose partner the forward saved takes its signs from the forward too.
    """
    for node in q2_nodes(graph):
        draws = is_q2(node, "seed") or named_arguments(node).get("seed") is not None
        if kind == "forward" and draws and not random_forward:
            raise GraphSpecError(f"{when}: {node.format_node()} may not stand in a forward graph")
    for gemm in q2_nodes(graph, "gemm"):
        _check_gemm(gemm, kind, when)


def _check_gemm(gemm: fx.Node, kind: str, when: str) -> None:
    operands = [_operand(gemm, gemm.args[i : i + 3], when) for i in (0, 3)]
    a, b = (
        named_arguments(o) if is_q2(o, "rht_quantize", "requantize") else None for o in operands
    )
    if a is not None and b is not None:
        for what in ("seed", "transform"):
            if a[what] is not b[what] and a[what] != b[what]:
                raise GraphSpecError(
                    f"{when}: the operands of {gemm.name} have different {what}s ({a[what]}, "
                    f"{b[what]}); their rotations do not cancel"
                )
        if a["seed"] is not None and a["stream"] == b["stream"]:
            raise GraphSpecError(
                f"{when}: the operands of {gemm.name} draw the same coins, stream {a['stream']}"
            )
        return
    rotated = a or b
    partner = operands[0] if a is None else operands[1]
    if kind == "backward" and rotated and partner.op == "placeholder":
        seed: Any = rotated["seed"]
        if isinstance(seed, fx.Node) and seed.op != "placeholder":
            raise GraphSpecError(
                f"{when}: an operand of {gemm.name} was rotated in the forward, and its partner "
                f"with signs drawn here ({seed.name}); their rotations do not cancel"
            )


def _operand(gemm: fx.Node, triple: Any, when: str) -> fx.Node:
    """The op that made an operand's codes, scales and global scale, or a placeholder."""
    codes, scales, global_scale = triple
    if codes.op == "placeholder":
        return codes
    if is_q2(producer(codes), "transpose"):  # re-used codes: the global scale is the source's
        return producer(codes)
    sources = {producer(n) for n in triple}
    outputs = [n.args[1] if n.target is operator.getitem else None for n in triple]
    if len(sources) != 1 or outputs != [0, 1, 2]:
        raise GraphSpecError(
            f"{when}: an operand of {gemm.name} is pieced together from "
            f"{', '.join(n.name for n in triple)}"
        )
    return sources.pop()


def named_arguments(node: fx.Node) -> dict[str, object]:
    """The arguments of an op by the names of its schema."""
    target: Any = node.target
    names = [a.name for a in target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}
