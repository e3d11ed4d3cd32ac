"""A gradient quantised along its rows, and along its columns when those have been multiplied,
where both at once would be more memory than the step has at any other moment.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from q2compile.passes.graph_queries import BOTH_ROTATED, q2_nodes, serving_kernel
from q2compile.passes.live_bytes import LiveBytes, held_outside, storages, worth_time
from q2compile.passes.verify import named_arguments


def part_directions_pass(graph: fx.Graph) -> int:
    """Undoes pairs of `pair_directions` that stand at the peak of a backward graph.

    before                                         after
        c = rht_quantize_both(dy, s, t, S, R, i)       a = rht_quantize(dy, s, S, R, False, i)
        dx = gemm(c[0], c[1], c[2], ...)               dx = gemm(a[0], a[1], a[2], ...)
        dw = gemm(c[3], c[4], c[5], ...)               b = rht_quantize(dy, t, S, R, True, i)
                                                       dw = gemm(b[0], b[1], b[2], ...)

    Of the logits' gradient, at the start of the backward, where all activations are still there,
    both directions as bf16 numbers are twice the logits. Quantising only the dense layers of a
    mixture of experts raised its peak by that, more than by all their codes. The price is a second
    read of that one gradient.

    The rule: the model of memory (`live_bytes`) names the peak; the largest pair whose operands
    are alive there is parted if the peak falls by 2% or by 64 MiB, whichever is more, and so on
    with the next peak.

    Preconditions: the passes that name schemes have run; the same kernel serves both single ops
    under the pair's scheme.

    Exact: rht_quantize_both is defined as the two single ops, bit for bit, and its sister too.
    """
    pairs = [pair for pair in q2_nodes(graph, *BOTH_ROTATED) if _is_read(pair)]
    if not pairs:
        return 0
    resident = held_outside(graph)
    held = sum(resident.values())
    parted = 0
    while pairs:
        live = LiveBytes(graph, resident.keys())
        peak = max(live.alive)
        lower = {pair: max(_alive_parted(live, pair)) for pair in pairs}
        best = min(lower, key=lambda pair: lower[pair])
        if peak - lower[best] < worth_time(held + peak):
            break
        pairs.remove(best)
        if _served_alike(best):  # asked last: kernels are checked on their GPU when first asked for
            _part(graph, best)
            parted += 1
    return parted


def _directions(pair: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The outputs along rows and along columns, those first that are read first."""
    row, column = ([n for n in pair.users if n.args[1] in at] for at in ((0, 1, 2), (3, 4, 5)))
    return (row, column) if min(_readers(row)) < min(_readers(column)) else (column, row)


def _readers(outputs: list[fx.Node]) -> list[fx.Node]:
    return [reader for output in outputs for reader in output.users]


def _alive_parted(live: LiveBytes, pair: fx.Node) -> list[int]:
    """What would be alive if the direction that is read later were made when it is read."""
    x: Any = pair.args[0]
    _, later = _directions(pair)
    made, read = live.place[pair.name], live.place[min(_readers(later)).name]
    size = sum(n for output in later for n in storages(output).values())
    alive = list(live.alive)
    for i in range(made, read):
        alive[i] -= size
    for storage, size in storages(x).items():
        for i in range(live.last_read.get(storage, read) + 1, read + 1):
            alive[i] += size
    return alive


def _single_ops(pair: fx.Node) -> list[tuple[Any, tuple[Any, ...]]]:
    """The op along rows and the one along columns that ``pair`` is: what to call, with what."""
    args = named_arguments(pair)
    x, end = args["x"], (args["scheme"], args["transform"])
    row = (x, args["row_seed"], *end, False, args["stream"])
    ops = torch.ops.q2
    if "offs" not in args:
        column = (x, args["col_seed"], *end, True, args["stream"])
        return [(ops.rht_quantize.default, row), (ops.rht_quantize.default, column)]
    groups = (x, args["offs"], args["padded_offs"], args["col_seed"], *end, args["stream"])
    return [(ops.rht_quantize.default, row), (ops.rht_quantize_groups.default, groups)]


def _is_read(pair: fx.Node) -> bool:
    """Whether both directions are."""
    row, column = ([n for n in pair.users if n.args[1] in at] for at in ((0, 1, 2), (3, 4, 5)))
    return bool(_readers(row) and _readers(column))


def _served_alike(pair: fx.Node) -> bool:
    """Whether one kernel serves the pair and its single ops."""
    kernel = serving_kernel(pair.target, pair.args)
    return all(serving_kernel(op, args) == kernel for op, args in _single_ops(pair))


def _part(graph: fx.Graph, pair: fx.Node) -> None:
    for place, (op, args) in enumerate(_single_ops(pair)):
        outputs = [n for n in pair.users if n.args[1] // 3 == place]  # type: ignore[operator]
        with graph.inserting_before(min(_readers(outputs))):
            single = graph.call_function(op, args)
            single.meta = {**pair.meta, "val": pair.meta["val"][3 * place : 3 * place + 3]}
            for output in outputs:
                index: Any = output.args[1]
                new = graph.call_function(operator.getitem, (single, index - 3 * place))
                new.meta = dict(output.meta)
                output.replace_all_uses_with(new)
                graph.erase_node(output)
    graph.erase_node(pair)
