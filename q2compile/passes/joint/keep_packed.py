# SPDX-License-Identifier: Apache-2.0
"""Under activation checkpointing: keep what is packed, compute again only what is not."""

from __future__ import annotations

import operator

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from q2compile.passes.graph_queries import is_forward_operand
from q2compile.runtime_kernels.ops.table import quantizers

RECOMPUTE = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def keep_packed_pass(graph: fx.Graph) -> int:
    """A checkpointed region keeps its inputs, and backward computes the rest again: the quantized
    operands too, though they are a quarter of the size that checkpointing saves.

    before, as the partitioner sees it            after
        q = quantize(x, ...)    # recompute           q = quantize(x, ...)    # save
        y = gemm(q, qw)         # recompute           y = gemm(q, qw)         # recompute

    What backward is spared is the quantization of each linear's operands and, where nothing else
    needs it, what led there. The GEMMs of the forward are computed again either way, for the
    attention and the activation functions that stand on them; and a product whose result backward
    does not need is never computed again, with or without this pass. What it costs is 4.5 bits for
    each of those numbers. For the inputs of a Llama block of width d and MLP 4d that is
    4.5 * (d + d + d + 4d) = 31.5 d bits a token, twice the 16 d bits of the block's input that
    checkpointing keeps; of the time it saves about 4% (d = 2048, 16384 tokens, B200, by
    `q2compile.cost_model`: 108 us of quantizers out of 2.8 ms for the block with its forward
    repeated). So it is an option, for those who have the memory: who checkpoints asks for memory.

    Precondition: the joint graph, with the tags that torch.utils.checkpoint left.

    Exact: the forward quantizers are deterministic, so what is kept equals what would have been
    computed.
    """
    marked = 0
    for node, call in quantizers(graph):
        if is_forward_operand(call) and node.meta.get("recompute") in RECOMPUTE:
            for saved in (node, *(n for n in node.users if n.target is operator.getitem)):
                saved.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            marked += 1
    return marked
