# SPDX-License-Identifier: Apache-2.0
"""Save the codes of weights, or their scales, in graphs that are already cut."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from q2compile.graph.nodes import choice_of, outputs_of
from q2compile.graph.quantizers import quantizer_of, quantizers, set_call
from q2compile.graph.views import CAST, VIEWS, behind
from q2compile.runtime_kernels.ops.requantize import rounds_by_scales
from q2compile.runtime_kernels.ops.table import QuantizerCall
from q2compile.runtime_kernels.registry import CUDA
from q2compile.torch_internals.partitioner import save_instead


def save_codes(forward: fx.Graph, backward: fx.Graph, names: Collection[str], results: int) -> None:
    """Let the backward take the codes of weights from the forward.

    before    forward                       backward
                  q = quantize(w, ...)          w = placeholder
                  y = gemm(qx, q)               q = quantize(w, ...)
                  return y, qx, w               r = requantize(q, s)

    after         q = quantize(w, ...)          q = placeholder
                  y = gemm(qx, q)               r = requantize(q, s)
                  return y, q, qx

    names    of the nodes that quantize the weights, alike in both graphs
    results  how many outputs of the forward are the model's; the rest is saved

    Unmarking them in the joint graph and cutting it a second time has the same result and takes
    longer: 5.8 s for 32 layers of a Llama, where one cut takes 2.6 (torch 2.11, one CPU core,
    2026-11-23).

    Precondition: the graphs are cut, with the marks of `recompute_weights_pass`, and not lowered.

    Exact: the backward would recompute the same codes."""
    save_instead(forward, backward, results, _outputs_of_both(forward, backward, names))


def save_scales(
    forward: fx.Graph, backward: fx.Graph, names: Collection[str], results: int
) -> None:
    """Let the backward take the block scales of some weights from the forward, and round the
    weights by them. Scales take an eighth of the bytes of the codes. Rounding by known scales is
    cheaper than quantizing: no search for scales, and no codes in memory between two ops.

    before    forward                       backward
                  q = quantize(w, ...)          w = placeholder
                  y = gemm(qx, q)               q = quantize(w, ...)
                  return y, qx, w               r = requantize(q, s)

    after         q = quantize(w, ...)          s, g, w = placeholders
                  y = gemm(qx, q)               r = requantize(w, s, g, by_scales)
                  return y, q[1], q[2], qx, w

    names, results  as above; the names are of `known_by_scales`

    Exact but for blocks whose scale is an e4m3 subnormal (ops/requantize.py).
    """
    for weight in [node for node in backward.nodes if node.name in names]:
        for reader in {reader for output in weight.users for reader in output.users}:
            call = quantizer_of(reader)
            assert call is not None
            set_call(reader, call.replace(source=weight.args[0], by_scales=True))
        for output in list(weight.users):
            if not output.users:
                backward.erase_node(output)
    save_instead(forward, backward, results, _outputs_of_both(forward, backward, names))


def known_by_scales(backward: fx.Graph, names: Collection[str]) -> set[str]:
    """Which of the nodes that recompute codes of weights in a backward `save_scales` can serve.

    These quantize bf16 parameters as they are (a cast or a copy would be written for the op to read
    it, and takes as long as is saved), in a scheme whose codes follow from their scales, which
    nothing reads but requantizations of the whole weight; on CUDA where its kernel serves those.
    """
    weights = [(node, call) for node, call in quantizers(backward) if node.name in names]
    return {node.name for node, call in weights if _known_by_scales(node, call)}


def _known_by_scales(weight: fx.Node, call: QuantizerCall) -> bool:
    x = call.x
    like = x.meta["val"]
    parameter = behind(x, VIEWS | CAST)  # as recompute_weights has found it
    if like.dtype != torch.bfloat16 or parameter.meta["val"].dtype != like.dtype:
        return False
    if not like.is_contiguous() or not rounds_by_scales(call.scheme) or call.rotated:
        return False
    parts = outputs_of(weight)
    readers = {reader for output in weight.users for reader in output.users}
    return bool(readers) and all(
        (recomputed := quantizer_of(reader)) is not None
        and recomputed.reads_codes
        and not recomputed.grouped
        and all(reader.args[i] is parts.get(i) for i in range(3))
        and recomputed.args["rows"] == like.shape[1]
        and _served(recomputed.replace(source=x, by_scales=True))
        for reader in readers
    )


def _served(call: QuantizerCall) -> bool:
    if call.x.meta["val"].device.type != "cuda":
        return True
    return choice_of(call.spec.name, call.positional).name == CUDA


def _outputs_of_both(
    forward: fx.Graph, backward: fx.Graph, names: Collection[str]
) -> list[tuple[fx.Node, fx.Node]]:
    """The outputs of these nodes that the backward reads, as (forward's, backward's)."""
    recomputed = {node.name: node for node in backward.nodes if node.name in names}
    pairs = []
    for weight in [node for node in forward.nodes if node.name in recomputed]:
        made = outputs_of(weight)
        for taken in recomputed[weight.name].users:
            index: Any = taken.args[1]
            pairs.append((made.get(index) or _output(forward, weight, index, taken), taken))
    return pairs


def _output(graph: fx.Graph, op: fx.Node, index: int, like: fx.Node) -> fx.Node:
    """An output that the forward itself does not read, as QuEST's mask of w."""
    with graph.inserting_after(op):
        output = graph.call_function(operator.getitem, (op, index))
    output.meta.update(like.meta)
    return output
