# SPDX-License-Identifier: Apache-2.0
"""Which quantizers are launched together, and which launches make alpha for a GEMM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from q2compile.graph.launch_groups import adjacent_quantizers, global_scales
from q2compile.graph.node_meta import ALPHA_FROM, LAUNCH_GROUP
from q2compile.graph.nodes import choice_of, is_q2
from q2compile.graph.quantizers import quantizer_of
from q2compile.runtime_kernels.cuda.quantize.grouped_launch import Tail, groups_of
from q2compile.runtime_kernels.cuda.quantize.plan import tail_launch_of_scheme
from q2compile.runtime_kernels.ops.split_scales import splits_scales
from q2compile.runtime_kernels.ops.table import GEMM, QUANTIZE, SPLIT_SCALES, QuantizerCall
from q2compile.runtime_kernels.registry import CUBLASLT_FP4

_A, _B = 2, 5  # the global scales of a GEMM, among its arguments


def group_launches_pass(graph: fx.Graph) -> int:
    """Quantizers that nothing stands between end in one launch, which also multiplies the global
    scales that a GEMM of cuBLASLt's is given as alpha.

    before                                  after
        x = quantize(x, ..., S)                 x = quantize(x, ..., S)  # launch group 0
        w = quantize(w, ..., S)                 w = quantize(w, ..., S)  # launch group 0
        y = gemm(x..., w..., ...)               y = gemm(...)  # alpha from launch group 0

    launches
        rotate x, scales of x, rotate w,        rotate x, rotate w, scales of both and alpha, GEMM
        scales of w, alpha, GEMM

    Changes node.meta alone. The lowerings enqueue what has one number together, where the last of
    the group stands (lowering/launches.py). They split a group of which some are not launched by
    themselves (prologue fusion), or that later passes have taken apart.

    Preconditions: it is the last pass, since the others move and replace such nodes. The quantizers
    are adjacent; all end in the same launch, which has room for their operands.

    Exact: nothing is computed differently.
    """
    shared = 0
    for number, group in enumerate(_groups(graph)):
        for node in group:
            node.meta[LAUNCH_GROUP] = number
        _mark_products(group, number)
        shared += len(group) > 1
    return shared


def _groups(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    for run in adjacent_quantizers(graph.nodes):
        yield from (group for launch, group in groups_of(run, _tail) if launch is not None)


def _tail(node: fx.Node) -> Tail:
    call = quantizer_of(node)
    assert call is not None
    launch = tail_launch_of_scheme(call.scheme, call.transform)
    if launch is not None and not _is_launched(call):
        launch = None
    return Tail(launch, len(call.operands))


def _is_launched(call: QuantizerCall) -> bool:
    """Whether a kernel of ours serves it, or what follows an Inductor kernel in its place."""
    if choice_of(call.spec.name, call.positional).launching is not None:
        return True
    scheme = call.scheme
    if call.spec.name != QUANTIZE or scheme.dequantized or not splits_scales(scheme):
        return False
    raw_scales = call.x.meta["val"].new_empty((1, 1), dtype=torch.float32)
    return choice_of(SPLIT_SCALES, (raw_scales, scheme.name)).launching is not None


def _mark_products(group: list[fx.Node], number: int) -> None:
    """Marks the GEMMs whose alpha this group can make: one for each of its operands, of which the
    other global scale is the group's, too, or known before."""
    scales = dict.fromkeys(scale for node in group for _, scale in global_scales(node))
    for scale in scales:
        for gemm in scale.users:
            other: Any = _other_global_scale(gemm, scale)
            if other is None or ALPHA_FROM in gemm.meta:
                continue
            if other in scales or other < group[-1]:
                for same in (g for g in scale.users if _other_global_scale(g, scale) is other):
                    same.meta[ALPHA_FROM] = number
                break


def _other_global_scale(gemm: fx.Node, scale: fx.Node) -> fx.Node | None:
    """The global scale that a GEMM multiplies by this one, if cuBLASLt takes the product."""
    if not is_q2(gemm, GEMM):
        return None
    pair: Any = (gemm.args[_A], gemm.args[_B])
    if scale not in pair or pair[0] is pair[1]:
        return None
    if choice_of(GEMM, gemm.args).name != CUBLASLT_FP4:
        return None
    return pair[1] if pair[0] is scale else pair[0]
