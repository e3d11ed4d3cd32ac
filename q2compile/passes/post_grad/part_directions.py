# SPDX-License-Identifier: Apache-2.0
"""A gradient quantized along its rows, and along its columns when those have been multiplied,
where both at once would be more memory than the step has at any other moment.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from q2compile.passes.graph_queries import quantizer_served_by
from q2compile.passes.live_bytes import LiveBytes, held_outside, storages, worth_time
from q2compile.runtime_kernels.ops.table import QuantizerCall, quantizer_of, quantizers


def part_directions_pass(graph: fx.Graph) -> int:
    """Split rowwise and columnwise quantizers of `pair_directions` that stand at the peak of a
    backward graph.

    before                                         after
        c = quantize(dy, rowwise, columnwise)          a = quantize(dy, rowwise)
        dx = gemm(c[0], c[1], c[2], ...)               dx = gemm(a[0], a[1], a[2], ...)
        dw = gemm(c[3], c[4], c[5], ...)               b = quantize(dy, columnwise)
                                                       dw = gemm(b[0], b[1], b[2], ...)

    The gradient of the logits is quantized at the start of the backward, while all activations are
    alive. Dequantized, its rowwise and columnwise operands take twice the bytes of the logits. In a
    mixture of experts with quantized dense layers alone, this raised the peak by more than all
    their codes. Splitting costs a second read of that one gradient.

    The rule: the model of memory (`live_bytes`) finds the peak. The largest quantizer whose
    operands are alive there is split if the peak falls by 2% or 64 MiB, whichever is more. Then the
    same for the next peak.

    Preconditions: the passes that introduce schemes have run; the same kernel serves both calls
    under that scheme.

    Exact: rowwise and columnwise at once are defined as the two calls, bit for bit.
    """
    pairs = [node for node, call in quantizers(graph) if len(call.operands) == 2 and _is_read(node)]
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
    """The bytes alive at each moment if the operand that is read later were made only then."""
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


def _single_calls(pair: fx.Node) -> list[QuantizerCall]:
    """The call along rows and the one along columns that ``pair`` is."""
    call = quantizer_of(pair)
    assert call is not None
    alone: dict[str, Any] = {"columnwise_seed": None, "offs": None, "padded_offs": None}
    of_rows, _ = call.operands
    return [
        call.replace(columnwise=False, transform=of_rows.transform.name, rotate_rows=True, **alone),
        call.replace(rowwise=False, rowwise_seed=None, rotate_rows=True),
    ]


def _is_read(pair: fx.Node) -> bool:
    """Whether both operands are."""
    row, column = ([n for n in pair.users if n.args[1] in at] for at in ((0, 1, 2), (3, 4, 5)))
    return bool(_readers(row) and _readers(column))


def _served_alike(pair: fx.Node) -> bool:
    """Whether one kernel serves the pair and its single calls."""
    call = quantizer_of(pair)
    assert call is not None
    return len({quantizer_served_by(one) for one in (call, *_single_calls(pair))}) == 1


def _part(graph: fx.Graph, pair: fx.Node) -> None:
    for place, call in enumerate(_single_calls(pair)):
        outputs = [n for n in pair.users if n.args[1] // 3 == place]  # type: ignore[operator]
        with graph.inserting_before(min(_readers(outputs))):
            args, kwargs = call.written()
            single = graph.call_function(call.spec.overload, args, kwargs)
            single.meta = {**pair.meta, "val": pair.meta["val"][3 * place : 3 * place + 3]}
            for output in outputs:
                index: Any = output.args[1]
                new = graph.call_function(operator.getitem, (single, index - 3 * place))
                new.meta = dict(output.meta)
                output.replace_all_uses_with(new)
                graph.erase_node(output)
    graph.erase_node(pair)
