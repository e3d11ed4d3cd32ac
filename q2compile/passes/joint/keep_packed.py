# SPDX-License-Identifier: Apache-2.0
"""Save quantized operands under activation checkpointing, and recompute the rest."""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from q2compile.graph.nodes import outputs_of
from q2compile.graph.quantizers import is_forward_operand, quantizers

RECOMPUTE = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def keep_packed_pass(graph: fx.Graph) -> int:
    """A checkpointed region saves its inputs, and the backward recomputes the rest. That includes
    the quantized operands, though they take a quarter of the bytes of the activations.

    before, as the partitioner sees it            after
        q = quantize(x, ...)    # recompute           q = quantize(x, ...)    # save
        y = gemm(q, qw)         # recompute           y = gemm(q, qw)         # recompute

    The backward then skips the quantizers of each linear's operands and, where nothing else needs
    it, the computation of those operands. GEMMs of the forward are recomputed either way: attention
    and activation functions read their results. A GEMM whose result the backward does not need is
    never recomputed, with or without this pass.

    The cost is 4.5 bits per element of each operand. For the inputs of a Llama block of width d and
    MLP 4d that is 4.5 * (d + d + d + 4d) = 31.5 d bits per token, twice the 16 d bits of the
    block's input that checkpointing saves. The gain is about 4% of the time (d = 2048, 16384
    tokens, B200, by `q2compile.cost_model`: 108 us of quantizers out of 2.8 ms for the block with
    its forward repeated). It is off by default, because checkpointing is used to save memory.

    Precondition: the joint graph, with the tags that torch.utils.checkpoint left.

    Exact: the forward quantizers are deterministic, so saved and recomputed codes are equal."""
    marked = 0
    for node, call in quantizers(graph):
        if is_forward_operand(call) and node.meta.get("recompute") in RECOMPUTE:
            for saved in (node, *outputs_of(node).values()):
                saved.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            marked += 1
    return marked
