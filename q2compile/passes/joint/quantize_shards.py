# SPDX-License-Identifier: Apache-2.0
"""Quantize the shards of a weight that the graph gathers, so that their codes are gathered."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from q2compile.graph.new_node import new_constant, new_node
from q2compile.graph.node_meta import GATHERS, NOTE, seed_index_of, site_of
from q2compile.graph.nodes import GEMM_OPS, is_q2, outputs_of
from q2compile.graph.quantizers import quantizers
from q2compile.graph.views import CAST, VIEWS, behind
from q2compile.passes.joint.gathered_weight import GatheredWeight, gather_behind, gathered_weight
from q2compile.runtime_kernels.numerics import shards
from q2compile.runtime_kernels.ops.table import QuantizerCall

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional


def quantize_shards_pass(graph: fx.Graph) -> int:
    """An all-gather of codes and block scales moves 0.5625 bytes per element; in bf16 it moves 2.

    before                                       after
        t = all_gather_into_tensor(s, n, ranks)      p = pad(s, one block of rows)
        w = wait_tensor(t)                           a = quantize(p, scheme=S, rowwise)
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

    Exact: `weight_cache/shard_codes.py` has the argument, and the rows that set g. The passes can't
    import it: here the same is written as nodes.
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
            _Moved(graph, node, *found[node]).write()
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
    columns = weight.sizes[2]
    both = (columns, columns * weight.ranks) if weight.dim == 2 else None
    dtypes = {call.x.meta["val"].dtype}
    return shards.why_not(scheme, call.transform, dtypes, weight.rows_in_one, both)


class _Moved:
    """One quantizer of a gathered weight, and what replaces it."""

    def __init__(
        self, graph: fx.Graph, node: fx.Node, call: QuantizerCall, weight: GatheredWeight
    ) -> None:
        self.graph, self.node, self.call, self.weight = graph, node, call, weight
        self.ranks, self.group = weight.ranks, weight.gather.args[2]
        self.rows, self.height = weight.sizes[0] * weight.sizes[1], call.scheme.block[0]

    def write(self) -> None:
        outputs = outputs_of(self.node)
        with self.graph.inserting_before(self.node):
            self.shard = self._in_its_dtype(self.weight.shard_as_matrix(self._new))
            if self.call.scheme.global_scale == "none":
                made = self._quantized(self.shard, outputs)
                g = made[2]
            else:
                g = self._global_scale()
                made = self._quantized(self._with_rows(g), outputs)
            parts = {2: g}
            for i in outputs:
                if i != 2:
                    parts[i] = self._gathered(made[i], self.height if i == 1 else 1)
        for i, output in outputs.items():
            output.replace_all_uses_with(parts[i])
            self.graph.erase_node(output)
        self.graph.erase_node(self.node)

    def _in_its_dtype(self, shard: fx.Node) -> fx.Node:
        """The shard in its own dtype. Before the pass the gather had it in memory; now the kernel
        that quantizes it may cast it, and Inductor keeps the fp32 value of a cast to bf16 unless
        its bits are asked for."""
        dtype = shard.meta["val"].dtype
        if dtype.itemsize != 2 or shard.op == "placeholder":
            return shard
        return self._new(_aten.view.dtype, self._new(_aten.view.dtype, shard, torch.int16), dtype)

    def _quantized(self, x: Any, wanted: Any) -> dict[Any, fx.Node]:
        args, kwargs = self.call.replace(x=x).written()
        made = self._new(self.node.target, *args, **kwargs)
        return {i: self._new(operator.getitem, made, i) for i in sorted({1, 2, *wanted})}

    def _global_scale(self) -> fx.Node:
        """The global scale 2^k, the ranks' maximum; a rank of zeros contributes none."""
        padded = self._new(_aten.constant_pad_nd.default, self.shard, [0, 0, 0, self.height])
        made = self._quantized(padded, ())
        scales, g = self._new(_aten.view.dtype, made[1], torch.uint8), made[2]
        scale, number = (
            self._new(_aten.ne.Scalar, scales, value) for value in (0, shards.NAN_SCALE)
        )
        some = self._new(_aten.any.default, self._new(_aten.logical_and.default, scale, number))
        is_nan = self._new(_aten.ne.Tensor, g, g)
        some = self._new(_aten.logical_or.default, some, is_nan)
        bits = self._new(_aten.view.dtype, g, torch.int32)
        bits = self._new(_aten.where.self, some, bits, self._constant(0, bits))
        found = self._collective(_c10d.all_reduce.default, bits, "max", self.group)
        g = self._new(_aten.view.dtype, found, torch.float32)
        is_zero = self._new(_aten.eq.Scalar, g, 0)
        g = self._new(_aten.where.self, is_zero, self._constant(1.0, g), g)
        beyond = self._new(_aten.gt.Scalar, g, shards.LARGEST_G)
        return self._new(_aten.where.self, beyond, self._constant(float("nan"), g), g)

    def _with_rows(self, g: fx.Node) -> fx.Node:
        shard: Any = self.shard
        columns, dtype = shard.meta["val"].shape[1], shard.meta["val"].dtype
        value = self._new(_aten.mul.Tensor, g, 1536.0)
        value = self._new(torch.ops.prims.convert_element_type.default, value, dtype)
        rows = self._new(_aten.expand.default, value, [self.height, columns])
        return self._new(_aten.cat.default, [shard, rows])

    def _gathered(self, part: fx.Node, height: int) -> fx.Node:
        part = self._new(_aten.slice.Tensor, part, 0, 0, self.rows // height)
        dtype = part.meta["val"].dtype
        if dtype != torch.uint8:
            part = self._new(_aten.view.dtype, part, torch.uint8)
        name = _c10d.all_gather_into_tensor.default
        part = self._collective(name, part, self.ranks, self.group)
        part = self.weight.joined(part, self.ranks, height, self._new)
        return part if dtype == torch.uint8 else self._new(_aten.view.dtype, part, dtype)

    def _collective(self, target: Any, *args: Any) -> fx.Node:
        """A collective, saved or recomputed as the gathered values would have been."""
        gather = self.weight.gather
        begun = self._new(target, *args)
        if target is _c10d.all_gather_into_tensor.default:
            _note(begun, self.node, "gathers codes")
        ended = self._new(_c10d.wait_tensor.default, begun)
        for node in (begun, ended):
            for tag in ("recompute", "ac_graph_id"):
                if tag in gather.meta:
                    node.meta[tag] = gather.meta[tag]
        return ended

    def _constant(self, value: Any, like: fx.Node) -> fx.Node:
        return new_constant(self.node, [], value, like)

    def _new(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return new_node(self.node, target, *args, **kwargs)
