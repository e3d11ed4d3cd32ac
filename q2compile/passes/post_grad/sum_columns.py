"""The gradient of a bias from the read of dy that quantises it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from q2compile.passes.graph_queries import is_q2, is_served_by
from q2compile.passes.verify import named_arguments
from q2compile.runtime_kernels.ops.summed import DTYPES
from q2compile.runtime_kernels.registry import CUDA

_aten, _q2 = torch.ops.aten, torch.ops.q2
_CASTS = (torch.ops.prims.convert_element_type.default, _aten._to_copy.default)


def sum_columns_pass(graph: fx.Graph) -> int:
    """A bias costs no kernel of its own: the quantiser of dy sums its columns on the way.

    before                                              after
        c = rht_quantize_both(dy, s, t, S, R, 0)            c = rht_quantize_both_summed(
        c0, ..., c5 = c[0], ..., c[5]                               dy, s, t, S, R, 0, bf16)
        ...                                                 c0, ..., c5 = c[0], ..., c[5]
        b = sum(dy, [0], dtype=float32)                     b = c[6]
        b = convert_element_type(b, bf16)

    Likewise rht_quantize(dy, t, S, R, True, 0), and rht_quantize_summed(dy, t, S, R, 0, bf16).

    Preconditions: a quantiser along columns, which draws signs or coins (one that draws nothing may
    be loops, and fuse with what makes dy), reads the very node that is summed; dy does not lie in
    columns; the CUDA kernel serves the op with sums, which that of an exact global scale and that
    of groups of rows do not; and whatever reads the sums stands behind the quantiser.

    The same sums in fp32 in another order (numerics/column_sums.py), rounded once, to the last of
    the types that they are cast to: Inductor's loops, too, drop the roundings between two casts.
    """
    matches = 0
    for node in list(graph.nodes):
        if not _sums_columns(node):
            continue
        last = _last_cast(node)
        readers = [user for user in last.users if user.op != "output"]
        for quantiser in list(node.args[0].users):
            summed = _summed(quantiser, last.meta["val"].dtype)
            if summed is None or not all(quantiser < reader for reader in readers):
                continue
            _replace(graph, quantiser, *summed, last)
            matches += 1
            break
    return matches


def _sums_columns(node: fx.Node) -> bool:
    """Whether it is the sum in fp32 over the rows of a matrix."""
    if node.target is not _aten.sum.dim_IntList or len(node.args) != 2:
        return False
    x: Any = node.args[0]
    over: Any = node.args[1]  # None, as norms are decomposed, or []: over all
    return (
        x.meta["val"].dim() == 2
        and list(over or ()) in ([0], [-2])
        and node.meta["val"].dtype == torch.float32
    )


def _last_cast(node: fx.Node) -> fx.Node:
    """Of casts behind a node, each the only reader of the one before; or the node."""
    while len(node.users) == 1:
        user = next(iter(node.users))
        value = user.meta.get("val")
        if user.target not in _CASTS or value is None or value.dtype not in DTYPES:
            break
        if value.device != node.meta["val"].device:
            break
        node = user
    return node


def _summed(node: fx.Node, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]] | None:
    """The op that sums columns, too, and its arguments, in the place of a quantiser; None where
    there is none."""
    if is_q2(node, "rht_quantize_both"):
        op: Any = _q2.rht_quantize_both_summed.default
        args = (*node.args, dtype)
        seed = node.args[2]
    elif is_q2(node, "rht_quantize") and named_arguments(node)["transpose"]:
        x, seed, scheme, transform, _, stream = node.args
        op, args = _q2.rht_quantize_summed.default, (x, seed, scheme, transform, stream, dtype)
    else:
        return None
    of_rows, of_columns = args[0].meta["val"].stride()  # type: ignore[union-attr]
    in_columns = statically_known_true(of_rows == 1) and statically_known_true(of_columns != 1)
    if seed is None or in_columns or not is_served_by(op, args, CUDA):
        return None
    return op, args


def _outputs(node: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    for output in list(node.users):
        index: Any = output.args[1]
        yield index, output


def _replace(
    graph: fx.Graph, quantiser: fx.Node, op: Any, args: tuple[Any, ...], sums: fx.Node
) -> None:
    parts = quantiser.meta["val"]
    with graph.inserting_before(quantiser):
        summed = graph.call_function(op, args)
        summed.meta = {**quantiser.meta, "val": (*parts, sums.meta["val"])}
        for index, output in [*_outputs(quantiser), (len(parts), sums)]:
            new = graph.call_function(operator.getitem, (summed, index))
            new.meta = dict(output.meta)
            output.replace_all_uses_with(new)
    for output in list(quantiser.users):
        graph.erase_node(output)
    graph.erase_node(quantiser)
    while sums is not args[0]:
        before: Any = sums.args[0]
        graph.erase_node(sums)
        sums = before
