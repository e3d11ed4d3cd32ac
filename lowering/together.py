# SPDX-License-Identifier: Apache-2.0
"""Which quantizers of a graph are launched together (cuda/quantize/together.py), and which products
of global scales they make, asked of the FX graph that Inductor lowers.

    qx = quantize(x); qw = quantize(w); y = gemm(*qx, *qw, ...)

x waits for w: nothing reads qx before qw is made. The launches of both are enqueued where w's are,
and multiply the two global scales, which is what cuBLASLt wants to be given.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from q2compile.lowering.gemm_operands import GEMM, is_emulated
from q2compile.runtime_kernels.ops.table import quantizer_of
from q2compile.runtime_kernels.registry import CUBLASLT_FP4, serving

_aten, _prims = torch.ops.aten, torch.ops.prims
# What may stand between quantizers that are launched together: it computes next to nothing, so
# that an operand which waits is not kept alive for long.
_BETWEEN = frozenset(
    [_aten.reshape.default, _aten.view.default, _aten.permute.default, _aten.t.default]
    + [_aten._to_copy.default, _prims.convert_element_type.default, _aten.select.int]
    + [operator.getitem]
)
_SCALARS = (2, 5)  # of a quantizer's outputs: the global scales


def may_share_launches(node: fx.Node) -> bool:
    """Whether a node is a quantizer whose launches may be those of others, too."""
    call = quantizer_of(node)
    return call is not None and not call.recorded


def waits(node: fx.Node) -> bool:
    """Whether a quantizer follows before anything reads what this one makes."""
    outputs = {node, *node.users}
    later = node.next
    while may_share_launches(later) or later.target in _BETWEEN:
        if later not in node.users and not outputs.isdisjoint(later.all_input_nodes):
            return False
        if may_share_launches(later):
            return True
        later = later.next
    return False


def global_scales(node: fx.Node) -> list[tuple[int, fx.Node]]:
    """Of a quantizer's outputs, with their numbers."""
    found = [(output.args[1], output) for output in node.users]
    return [(number, output) for number, output in found if number in _SCALARS]  # type: ignore[misc]


def multiplied_by(scale: fx.Node) -> list[tuple[tuple[fx.Node, fx.Node], fx.Node]]:
    """The global scales that one is multiplied by ahead of a GEMM of cuBLASLt's: for each, both as
    the GEMM has them, and the other alone."""
    found = []
    for reader in scale.users:
        if reader.target is not GEMM or is_emulated(reader):
            continue
        pair: Any = (reader.args[2], reader.args[5])
        args = map_arg(reader.args, lambda n: n.meta["val"])
        if scale in pair and serving("gemm", args).name == CUBLASLT_FP4:
            other = pair[1] if pair[0] is scale else pair[0]
            if other is not scale:
                found.append((pair, other))
    return found
