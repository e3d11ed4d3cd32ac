"""What a forward graph keeps for its backward, by matmul."""

from __future__ import annotations

from typing import Any

from torch import fx

from q2compile.passes.graphs import is_q2, producer
from q2compile.report import Row
from q2compile.rewrite import SALT

_QUANTIZING = ("quantize", "quantize_masked", "rht_quantize", "transpose")


def count_saved(graph: fx.Graph, rows: list[Row]) -> None:
    """Set ``saved_bytes`` and ``saved_elements`` of the rows from a forward graph's outputs.

    Counted are the outputs of quantising ops (codes, scales, global scale, masks). A tensor that
    several matmuls share belongs to the one whose ops made it: the first.
    """
    taken = {row.salt: row for row in rows if row.taken}
    bytes_of = dict.fromkeys(taken, 0)
    elements_of = dict.fromkeys(taken, 0)
    saved: Any = graph.output_node().args[0]
    for node in dict.fromkeys(saved):
        op: Any = producer(node) if isinstance(node, fx.Node) else None
        salt = op.meta.get("custom", {}).get(SALT) if op and is_q2(op, *_QUANTIZING) else None
        if salt not in taken:
            continue
        value = node.meta["val"]
        bytes_of[salt] += _concrete(value.numel()) * value.element_size()
        if node.args[1] == 0:  # the codes stand for the elements of what was quantised
            packed = 2 if is_q2(op, "transpose") else 1
            elements_of[salt] += packed * _concrete(op.args[0].meta["val"].numel())
    for salt, row in taken.items():
        row.saved_bytes, row.saved_elements = bytes_of[salt], elements_of[salt]


def _concrete(n: Any) -> int:
    """A size as a number: a symbol by the hint of the shapes that were traced."""
    hint = n if isinstance(n, int) else n.node.hint
    return int(hint or 0)
