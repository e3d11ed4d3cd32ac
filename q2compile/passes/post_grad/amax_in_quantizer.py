# SPDX-License-Identifier: Apache-2.0
"""Let the kernel of a quantizer look for the largest element."""

from __future__ import annotations

from typing import Any

from torch import fx

from q2compile.graph.nodes import GEMM_OPS, choice_of, is_q2
from q2compile.graph.quantizers import quantizers, set_call
from q2compile.graph.views import ITEM, behind, kind_of
from q2compile.runtime_kernels.ops.table import AMAX
from q2compile.runtime_kernels.registry import CUDA


def amax_in_quantizer_pass(graph: fx.Graph) -> int:
    """Inductor fuses an amax with what computes the tensor. Of a tensor that is in memory it would
    be two generated kernels, which read no fewer bytes and make the first step longer.

    before                                       after
        a = amax(w)                                  q = quantize(w, scheme=S, ...)
        q = quantize(w, scheme=S, amax=a, ...)

    Preconditions: nothing else reads the amax; the tensor is a view of a graph input, of a product,
    or of an output of an op that has several (attention); without the amax, a CUDA kernel serves
    the call. So it runs after pair_directions, which compares calls.

    Exact: the amax that a quantizer computes inside is q2::amax.
    """
    found = 0
    for node, call in list(quantizers(graph)):
        amax: Any = call.args.get("amax")
        if amax is None or not is_q2(amax, AMAX) or amax.args[0] is not call.x:
            continue
        alone = call.replace(amax=None)
        if len(amax.users) > 1 or not _is_in_memory(call.x):
            continue
        if choice_of(call.spec.name, alone.positional).name == CUDA:
            set_call(node, alone)
            graph.erase_node(amax)
            found += 1
    return found


def _is_in_memory(x: fx.Node) -> bool:
    source = behind(x)
    return source.op == "placeholder" or is_q2(source, *GEMM_OPS) or kind_of(source) == ITEM
