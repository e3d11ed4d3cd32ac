# SPDX-License-Identifier: Apache-2.0
"""A block of a Llama in plain torch: what `q2compile bench` times where transformers may not be."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Block:
    """A block's sizes: width, the MLP's width, heads of queries and keys, sequences and length."""

    width: int
    inner: int
    heads: int
    key_values: int
    batch: int
    length: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def linears(self) -> list[tuple[int, int, int, bool]]:
        """(N, K, how many take the same x, whether something computes that x) of each."""
        narrow = self.width // self.heads * self.key_values
        return [
            (self.width, self.width, 3, True),
            (narrow, self.width, 3, True),
            (narrow, self.width, 3, True),
            (self.width, self.width, 1, False),
            (self.inner, self.width, 2, True),
            (self.inner, self.width, 2, True),
            (self.width, self.inner, 1, True),
        ]


class LlamaBlock(nn.Module):
    """x [batch, length, width] -> the same: attention and SwiGLU behind RMSNorms, without rotary
    embeddings."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block
        made = (nn.Linear(k, n, bias=False) for n, k, *_ in block.linears)
        self.q, self.k, self.v, self.o, self.gate, self.up, self.down = made
        self.before, self.between = nn.RMSNorm(block.width), nn.RMSNorm(block.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = self.block.width // self.block.heads
        normed = self.before(x)
        q, k, v = (
            of(normed).unflatten(-1, (-1, size)).transpose(1, 2) for of in (self.q, self.k, self.v)
        )
        grouped = self.block.heads != self.block.key_values
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        normed = self.between(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))
