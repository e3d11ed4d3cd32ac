# SPDX-License-Identifier: Apache-2.0
"""The gradient of a bias from the read of dy that quantizes it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from q2compile.graph.nodes import choice_of
from q2compile.graph.quantizers import quantizer_of, set_call
from q2compile.graph.views import CAST, kind_of
from q2compile.runtime_kernels.ops.quantize import DBIAS_DTYPES
from q2compile.runtime_kernels.ops.table import QuantizerCall
from q2compile.runtime_kernels.registry import CUDA

_aten = torch.ops.aten


def sum_columns_pass(graph: fx.Graph) -> int:
    """The quantizer of dy also returns dbias, the sums of its columns: no kernel of its own.

    before                                              after
        c = quantize(dy, rowwise, columnwise)               c = quantize(dy, rowwise, columnwise,
        c0, ..., c5 = c[0], ..., c[5]                                    dbias=bf16)
        ...                                                 c0, ..., c5 = c[0], ..., c[5]
        b = sum(dy, [0], dtype=float32)                     b = c[6]
        b = convert_element_type(b, bf16)

    Preconditions:

    - A columnwise quantizer reads the very node that is summed, and rotates or draws random bits.
      (Any other may be an Inductor kernel, fused with the producer of dy.)
    - dy is not contiguous along columns.
    - The CUDA kernel serves the op with dbias. Kernels of an exact global scale and of grouped rows
      do not.
    - All readers of the sums stand behind the quantizer.

    Not exact: the fp32 sums have another order (numerics/column_sums.py). They are rounded once, to
    the last of the types that they are cast to; Inductor's kernels drop the roundings between two
    casts, too."""
    matches = 0
    for node in list(graph.nodes):
        if not _sums_columns(node):
            continue
        last = _last_cast(node)
        readers = [user for user in last.users if user.op != "output"]
        for quantizer in list(node.args[0].users):
            call = _with_dbias(quantizer, last.meta["val"].dtype)
            if call is None or not all(quantizer < reader for reader in readers):
                continue
            _replace(graph, quantizer, call, last)
            matches += 1
            break
    return matches


def _sums_columns(node: fx.Node) -> bool:
    """Whether a node is the sum in fp32 over the rows of a matrix."""
    if node.target is not _aten.sum.dim_IntList or len(node.args) != 2:
        return False
    x: Any = node.args[0]
    over: Any = node.args[1]  # None, as norms are decomposed, or []: over all
    return (
        x.meta["val"].dim() == 2
        and list(over or ()) in ([0], [-2])
        and node.meta["val"].dtype == torch.float32
    )


def _last_cast(node: fx.Node) -> fx.Node:
    """The last of the casts behind a node, each the only reader of the one before it; else the
    node."""
    while len(node.users) == 1:
        user = next(iter(node.users))
        value = user.meta.get("val")
        if kind_of(user) != CAST or value is None or value.dtype not in DBIAS_DTYPES:
            break
        if value.device != node.meta["val"].device:
            break
        node = user
    return node


def _with_dbias(node: fx.Node, dtype: torch.dtype) -> QuantizerCall | None:
    """A quantizer's call that also sums columns; None if no kernel serves one."""
    call = quantizer_of(node)
    if call is None or call.source_scheme is not None or not call.columnwise or call.grouped:
        return None
    of_rows, of_columns = call.x.meta["val"].stride()
    in_columns = statically_known_true(of_rows == 1) and statically_known_true(of_columns != 1)
    call = call.replace(dbias=dtype)
    may_fuse = call.operands[-1].seed is None and not call.rotated
    if may_fuse or in_columns or choice_of(call.spec.name, call.positional).name != CUDA:
        return None
    return call


def _replace(graph: fx.Graph, quantizer: fx.Node, call: QuantizerCall, sums: fx.Node) -> None:
    set_call(quantizer, call)
    with graph.inserting_after(quantizer):
        output = graph.call_function(operator.getitem, (quantizer, call.outputs.index("dbias")))
    output.meta = dict(sums.meta)
    quantizer.meta["val"] = [*quantizer.meta["val"], sums.meta["val"]]
    sums.replace_all_uses_with(output)
    while sums is not call.x:
        before: Any = sums.args[0]
        graph.erase_node(sums)
        sums = before
