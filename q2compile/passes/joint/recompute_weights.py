# SPDX-License-Identifier: Apache-2.0
"""Codes of weights: recomputed from the parameter in the backward instead of saved."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from q2compile.graph.nodes import (
    GEMM_OPS,
    depending_on_tangents,
    is_q2,
    outputs_of,
    producer,
    q2_nodes,
)
from q2compile.graph.quantizers import is_forward_operand, quantizer_of
from q2compile.graph.views import CAST, VIEWS, kind_of
from q2compile.runtime_kernels.ops.table import TRANSPOSE


def recompute_weights_pass(graph: fx.Graph) -> int:
    """fprop's codes of w would be saved for dgrad, 4.5 bits per parameter. The parameter itself
    stays in memory until the optimizer changes it, so quantize it a second time instead.

    before, as the partitioner sees it            after
        c = to(w, bf16)                               c = to(w, bf16)         # recompute
        q = quantize(c, ...)    # save                q = quantize(c, ...)    # recompute
        y = gemm(qx, q)                               y = gemm(qx, q)
        r = requantize(q, s)                          r = requantize(q, s)

    saved: x's codes, q                           saved: x's codes, w (the parameter: no memory)

    The cost is the second quantization, in every micro-batch: by `q2compile.cost_model`, for a
    4096x4096 linear on a B200, 11% of its time at 2048 tokens, 2% at 16384 and 0.6% at 65536.
    `choose_saved` decides whether that pays. Under recompute_weights="auto" this pass marks all
    weights, and `save_codes` or `save_scales` may save something after the cut.

    The cast is marked too, since saved it would cost 16 bits. A tensor-wide amax of w, for an exact
    global scale, is one element and stays saved.

    Precondition: the joint graph; w's quantization is reached from a graph input by views and casts
    alone (a weight that an adapter or a parametrization computes is not in memory anyway).

    Exact: quantization in the forward is deterministic. If w is changed in place between forward
    and backward, autograd raises, as it does for a plain linear.
    """
    weights = packed_weights(graph)
    for nodes in weights.values():
        for node in nodes:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return len(weights)


def packed_weights(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The ops that quantize a weight for a GEMM of the forward -> all nodes that recomputing it
    takes: the views and casts of the parameter, the op and its outputs, and its transposed codes.
    """
    backward = depending_on_tangents(graph)
    found: dict[fx.Node, list[fx.Node]] = {}
    for gemm in q2_nodes(graph, *GEMM_OPS):
        operands: Any = gemm.args
        weight = producer(operands[3])
        if gemm in backward or weight in found:
            continue
        chain = _chain_to_input(weight)
        if chain is not None:
            codes = _with_outputs(weight)
            # The partitioner would save codes that dgrad reuses transposed in that form.
            readers = dict.fromkeys(user for output in codes for user in output.users)
            transposed = [n for t in readers if is_q2(t, TRANSPOSE) for n in _with_outputs(t)]
            found[weight] = [*chain, *codes, *transposed]
    return found


def _with_outputs(op: fx.Node) -> list[fx.Node]:
    return [op, *outputs_of(op).values()]


def _chain_to_input(weight: fx.Node) -> list[fx.Node] | None:
    """The views and casts between a graph input and its quantization; None if there is more."""
    if not is_forward_operand(quantizer_of(weight)):
        return None
    chain: list[fx.Node] = []
    node: Any = weight.args[0]
    while isinstance(node, fx.Node) and kind_of(node) & (VIEWS | CAST):
        chain.append(node)
        node = node.args[0]
    return chain if isinstance(node, fx.Node) and node.op == "placeholder" else None
