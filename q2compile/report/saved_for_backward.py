# SPDX-License-Identifier: Apache-2.0
"""Bytes that a forward graph saves for its backward, by matmul."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from q2compile.graph.node_meta import seed_index_of
from q2compile.graph.nodes import GEMM_OPS, is_q2, producer, q2_nodes
from q2compile.graph.quantizers import quantizer_of
from q2compile.graph.storages import hint_of
from q2compile.passes.joint.keep_packed import RECOMPUTE
from q2compile.report.graph_text import module_of, shape_of
from q2compile.report.row import Row
from q2compile.runtime_kernels.ops.table import QUANTIZE, TRANSPOSE


def count_saved(graph: fx.Graph, rows: list[Row]) -> None:
    """Set ``saved_bytes`` and ``saved_elements`` of the rows whose nodes are in ``graph``, from its
    outputs: a forward graph, or one that it calls.

    Counted are the outputs of quantizing ops (codes, scales, global scale, masks). A tensor that
    matmuls share counts for the one whose ops made it, the first."""
    seed_indices = {seed_index_of(node) for node in graph.nodes}  # of a forward left in bf16, too
    bytes_of = dict.fromkeys(seed_indices, 0)
    elements_of = dict.fromkeys(seed_indices, 0)
    saved: Any = graph.output_node().args[0]
    for node in dict.fromkeys(saved):
        op: Any = producer(node) if isinstance(node, fx.Node) else None
        if not op or not _quantizes(op):
            continue
        value = node.meta["val"]
        bytes_of[seed_index_of(op)] += hint_of(value.numel(), 0) * value.element_size()
        if node.args[1] == 0:  # the codes stand for the elements of what was quantized
            source = op.args[0].meta["val"]
            pairs = is_q2(op, TRANSPOSE) and source.dtype == torch.uint8  # two codes in each
            elements_of[seed_index_of(op)] += (2 if pairs else 1) * hint_of(source.numel(), 0)
    for row in rows:
        if row.taken and row.seed_index in seed_indices:
            row.saved_bytes, row.saved_elements = (
                bytes_of[row.seed_index],
                elements_of[row.seed_index],
            )


def note_weights(graph: fx.Graph, rows: list[Row], why: Mapping[str, str], otherwise: str) -> None:
    """Set ``weight`` of the rows whose weights ``graph``, a forward, quantizes: whether it keeps
    the codes for its backward.

    why        by the name of the node that makes the codes
    otherwise  of all others
    """
    outputs: Any = graph.output_node().args[0]
    saved = [node for node in outputs if isinstance(node, fx.Node)]
    saved_weights = {
        node.args[0] for node in saved if node.target is operator.getitem and not node.args[1]
    }
    weight_texts: dict[int | None, str] = {}
    for gemm in q2_nodes(graph, *GEMM_OPS):
        operands: Any = gemm.args
        weight = producer(operands[3])
        recomputed = weight.meta.get("recompute") in RECOMPUTE
        reason = why.get(weight.name, otherwise)
        if _quantizes(weight) and reason and (weight in saved_weights or recomputed):
            weight_texts[seed_index_of(weight)] = (
                f"{'saved' if weight in saved_weights else 'recomputed'}: {reason}"
            )
    for row in rows:
        if row.taken and row.seed_index in weight_texts:
            row.weight = weight_texts[row.seed_index]


def described(graph: fx.Graph) -> dict[str, list[Any]]:
    """Node's name -> [module, name, type, bytes, kind] of each tensor of a forward graph.

    kind   "quantized": a part of a quantized operand; "input": a parameter or an input of the
           graph, which exists anyway; "other": the rest
    bytes  None where a size is a symbol
    """
    found = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "output" or not isinstance(value, torch.Tensor):
            continue
        is_input = node.op == "placeholder"
        is_quantized = is_q2(producer(node), QUANTIZE, TRANSPOSE)
        kind = "input" if is_input else "quantized" if is_quantized else "other"
        is_known = all(isinstance(size, int) for size in value.shape)
        size = value.numel() * value.element_size() if is_known else None
        module = "" if is_input else module_of(node)
        found[node.name] = [module, node.name, shape_of(value), size, kind]
    return found


def _quantizes(op: fx.Node) -> bool:
    """Whether an op makes codes of a matrix, or transposes some."""
    call = quantizer_of(op)
    return is_q2(op, TRANSPOSE) if call is None else call.source_scheme is None
