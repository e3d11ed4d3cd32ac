# SPDX-License-Identifier: Apache-2.0
"""Quantize the shards of a weight that the graph gathers, so that their codes are gathered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from q2compile.graph.new_node import write
from q2compile.graph.node_meta import GATHERS, NOTE, seed_index_of, site_of
from q2compile.graph.nodes import GEMM_OPS, is_q2, outputs_of
from q2compile.graph.quantizers import quantizers
from q2compile.graph.views import CAST, VIEWS, behind
from q2compile.passes.joint.gathered_weight import GatheredWeight, gather_behind, gathered_weight
from q2compile.runtime_kernels.numerics import shards
from q2compile.runtime_kernels.ops.table import QuantizerCall

_c10d = torch.ops._c10d_functional


def quantize_shards_pass(graph: fx.Graph) -> int:
    """An all-gather of codes and block scales moves 0.5625 bytes per element; in bf16 it moves 2.

    before                                       after
        t = all_gather_into_tensor(s, n, ranks)
        w = wait_tensor(t)                           a = quantize(s, scheme=S, rowwise)
        q = quantize(w, scheme=S, rowwise)           m = wait_tensor(all_reduce(bits of a[2], max))
        y = gemm(..., q[0], q[1], q[2])              g = 2^k with the bits m
                                                     b = quantize(cat([s, rows of 1536 * g]), ...)
                                                     c = wait_tensor(all_gather(b[0] without them))
                                                     d = wait_tensor(all_gather(b[1] without them))
                                                     y = gemm(..., c, d, g)

    SimpleFSDP and others gather weights by such a node of the graph. FSDP2 gathers outside of the
    graph; `q2compile.gather_codes` serves it.

    Preconditions: w is the weight of a GEMM, and s a rank's part of it, in whole blocks, reached
    from a graph input by views and casts; quantizers alone read w (`gathered_weight` has what may
    stand between them); a deterministic scheme with a global scale that is a power of two, and no
    rotation; or MXFP4, which has no global scale, so that s is quantized once and nothing is
    reduced. Activations that ranks gather stay as they are: one more collective would not pay
    there.

    Exact: `runtime_kernels/numerics/shards.py` has the argument, and the rows that set g.
    """
    found: dict[fx.Node, tuple[QuantizerCall, GatheredWeight]] = {}
    for node, call in quantizers(graph):
        gather = gather_behind(call.x) if _is_weight(node, call) else None
        if gather is None:
            continue
        weight = gathered_weight(call.x)
        why = _why_not(call, weight)
        if why or weight is None:
            _leave(node, gather, why)
        else:
            found[node] = call, weight
    moved: dict[fx.Node, list[fx.Node]] = {}  # a gather -> the quantizers of what it gathers
    for node, (_, weight) in found.items():
        if weight.readers <= found.keys():
            moved.setdefault(weight.gather, []).append(node)
        else:
            _leave(node, weight.gather, "something besides quantizers reads the gathered weight")
    for gather, nodes in moved.items():
        for node in nodes:
            _move(graph, node, *found[node])
        _erase(graph, gather)
    return sum(map(len, moved.values()))


def _leave(quantizer: fx.Node, gather: fx.Node, why: str) -> None:
    module = site_of(quantizer)
    of_module = f" of {module}" if module else ""
    quantizer.meta[NOTE] = f"{quantizer.name}{of_module} is left: {why}"
    _note(gather, quantizer, f"gathers values: {why}")


def _note(gather: fx.Node, quantizer: fx.Node, text: str) -> None:
    """Note a reason for the report."""
    gather.meta[GATHERS] = {**gather.meta.get(GATHERS, {}), seed_index_of(quantizer): text}


def _is_weight(quantizer: fx.Node, call: QuantizerCall) -> bool:
    """Whether fprop takes its codes as the second operand. dgrad and wgrad take columnwise codes,
    and other forms of a scheme are of later passes."""
    if call.columnwise or call.source_scheme is not None or call.scheme.form:
        return False
    codes = outputs_of(quantizer).get(0)
    return codes is not None and any(
        is_q2(user, *GEMM_OPS) and user.args[3] is codes for user in codes.users
    )


def _erase(graph: fx.Graph, gather: fx.Node) -> None:
    """Erase the gather and what only it needed: FX erases no collective on its own."""
    for user in list(gather.users):
        _erase(graph, user)
    graph.erase_node(gather)


def _why_not(call: QuantizerCall, weight: GatheredWeight | None) -> str:
    """Why its codes can't be made of shards; "" if they can."""
    scheme = call.scheme
    if weight is None:
        return "views between the gather and the quantizer cut or join it in another way"
    if call.draws:
        return "it draws random bits, which depend on the position"
    if behind(weight.shard, VIEWS | CAST).op != "placeholder":
        return "a rank's part of it is computed in the graph"
    if scheme.takes_amax or call.args["amax"] is not None:
        return "its global scale depends on the largest element of the whole weight"
    dtypes = {call.x.meta["val"].dtype}
    return shards.why_not(scheme, call.transform, dtypes, weight.layout)


def _move(graph: fx.Graph, node: fx.Node, call: QuantizerCall, weight: GatheredWeight) -> None:
    """Replace one quantizer of a gathered weight."""
    outputs = outputs_of(node)
    _, ranks, group = weight.gather.args

    def codes(shard: Tensor) -> dict[int, Tensor]:
        return dict(enumerate(_codes(weight.as_matrix(shard), call, weight.layout, ranks, group)))

    with graph.inserting_before(node):
        made, written = write(node, codes, weight.shard)
    for one in written:
        if getattr(one.target, "namespace", "") == "_c10d_functional":
            # Saved or recomputed as the gathered values would have been.
            tags = ("recompute", "ac_graph_id")
            one.meta.update(
                {tag: weight.gather.meta[tag] for tag in tags if tag in weight.gather.meta}
            )
        if one.target is _c10d.all_gather_into_tensor.default:
            _note(one, node, "gathers codes")
    for i, output in outputs.items():
        output.replace_all_uses_with(made[i])
        graph.erase_node(output)
    graph.erase_node(node)


def _codes(
    shard: Tensor, call: QuantizerCall, layout: shards.ShardLayout, ranks: Any, group: Any
) -> list[Tensor]:
    """The results of a quantizer of the whole weight, from a shard on each rank."""
    scheme, made = call.scheme, call.replace(x=shard)()
    g = made[2]
    if scheme.global_scale != "none":
        found = shards.agreement([shards.found_in(made)])
        agreed = _c10d.wait_tensor(_c10d.all_reduce(found, "max", group))
        (g,) = shards.global_scale(agreed)
        made = call.replace(x=shards.filled(shard, scheme, agreed[0], g))()
    sent = shards.of_shard(made, layout.rows, scheme)
    gathers = [_c10d.all_gather_into_tensor(part, ranks, group) for part in sent]
    codes, scales, *mask = shards.of_whole(list(map(_c10d.wait_tensor, gathers)), layout, scheme)
    return [codes, scales, g, *mask]
