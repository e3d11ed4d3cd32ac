# SPDX-License-Identifier: Apache-2.0
"""A model's matmuls among the rows of its compiled graphs.

A model is compiled more than once: for training and for inference, and for several input shapes.
One graph may also serve equal layers. So each module is counted once, by the rows of one graph: the
training graph that has the most work of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from q2compile.cost_model.devices import DEVICES

Data = Mapping[str, Any]


def rows_of_layers(rows: Iterable[Data]) -> list[dict[str, Any]]:
    """A row for each layer that a graph serves, as `Row.to_json` gives it, where ``served`` are the
    others; with these keys more:

    layer    a number for each matmul of the model
    counts   whether it is in the graph that the layer is counted by
    """
    single = [
        {**row, "module": name, "served": [other for other in names if other != name]}
        for row in rows
        for names in [dict.fromkeys((row["module"], *row["served"]))]
        for name in names
    ]
    trained = {_key(row, row["model"]) for row in single if row["training"]}
    of_layer: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in single:
        models = [row["model"], *sorted({k[0] for k in trained})]
        own = next((k for m in models if (k := _key(row, m)) in trained), _key(row, row["model"]))
        of_layer.setdefault(own, []).append(row)
    for number, (_, its_rows) in enumerate(of_layer.items()):
        graph = max(its_rows, key=_weight)["graph"]
        for row in its_rows:
            row["layer"], row["counts"] = number, row["graph"] == graph
    return single


def of_model(rows: Iterable[Data]) -> list[dict[str, Any]]:
    """The rows that count, of `rows_of_layers`."""
    return [row for row in rows_of_layers(rows) if row["counts"]]


def layers(rows: Iterable[Data]) -> list[Data]:
    """The first row of each layer, of rows that count."""
    found: dict[int, Data] = {}
    for row in rows:
        found.setdefault(row["layer"], row)
    return list(found.values())


def _key(row: Data, model: int) -> tuple[Any, ...]:
    """Equal for the rows of one matmul in several graphs: its number of rows may differ."""
    sizes = tuple(row["shape"][-2:]) if row["has_parameter"] else ()
    return model, row["module"], row["scope"], sizes


def _weight(row: Data) -> tuple[bool, bool, float, float]:
    """The key of a row by which the graph of a layer is chosen."""
    times = row["predicted"].get(DEVICES[0].column, {})
    known = all(isinstance(n, int) for n in row["shape"])
    work = prod(row["shape"]) if known else 0
    return row["training"], row["taken"], times.get("bf16_microseconds", 0.0), work
