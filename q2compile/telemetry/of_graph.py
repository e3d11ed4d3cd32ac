# SPDX-License-Identifier: Apache-2.0
"""The recorder for a rewritten Dynamo graph."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import fx

from q2compile.capture.module_names import Names
from q2compile.graph.nodes import LINEAR_OPS, q2_nodes
from q2compile.graph.views import example
from q2compile.recipes.recipe import Operand, parse
from q2compile.runtime_kernels.numerics.schemes import SCHEMES
from q2compile.runtime_kernels.numerics.statistics import CODES_SAMPLE, GROUP, sample_of
from q2compile.telemetry.folder import make
from q2compile.telemetry.options import TelemetryOptions
from q2compile.telemetry.recorder import Recorder, Site
from q2compile.torch_internals.dynamo import called_graphs, parameter_of


class Taken(Protocol):
    """The parts of a report's row that are read. seed_index: of the linear, if it was taken.
    served: equal layers that Dynamo will run with the same graph."""

    module: str
    taken: bool
    seed_index: Any
    served: list[str]


_UNIT = 128  # what a contraction is padded to, at most
_recorder_numbers = itertools.count()


def recorder_of(
    gm: fx.GraphModule, options: TelemetryOptions, rows: Iterable[Taken], names: Names
) -> Recorder | None:
    """The recorder of a graph; None if it does not train, or has no linear of ours.

    rows: its matmuls.
    """
    make(options)  # also where nothing is recorded, which is said at exit
    if not torch.is_grad_enabled():
        return None
    modules = {row.seed_index: (row.module, *row.served) for row in rows if row.taken}
    sites, device = {}, None
    for inner in called_graphs(gm):
        for node in q2_nodes(inner.graph, *LINEAR_OPS):
            args: Any = node.args
            *_, fprop, dgrad, wgrad, seed_index = args
            if seed_index not in modules:
                continue
            recipe = parse(fprop, dgrad, wgrad)
            w = example(args[1])
            codes = _sampled_bytes(w, recipe.fprop.b) if recipe.fprop is not None else 0
            sites[seed_index] = Site(modules[seed_index], recipe, codes)
            device = w.device
    if not sites or device is None:
        return None
    inputs = gm.graph.find_nodes(op="placeholder")
    parameters = [i for i, node in enumerate(inputs) if parameter_of(node) is not None]
    return Recorder(next(_recorder_numbers), sites, parameters, device, options, names.root)


def _sampled_bytes(w: Any, operand: Operand) -> int:
    """The bytes that a record keeps of this weight's codes, at most."""
    columns = int(w.shape[-1])
    rows, padded = w.numel() // max(columns, 1), -(-columns // _UNIT) * _UNIT
    sample, packed = sample_of(rows, columns, CODES_SAMPLE), SCHEMES[operand.scheme].packed
    return (int(rows) if sample is None else sample.rows + GROUP) * padded // packed
