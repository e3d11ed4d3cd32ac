# SPDX-License-Identifier: Apache-2.0
"""The guides' `model`, `batches` and `optimizer`: a tiny model with a Llama's module names."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import q2compile

WIDTH, VOCABULARY = 32, 64


class Output(NamedTuple):
    loss: Tensor | None
    logits: Tensor


class Attention(nn.Module):
    """Each token sees itself: the projections of an attention without its products."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.q_proj(x) * self.k_proj(x))
        return self.o_proj(gate * self.v_proj(x))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(x)
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.model = Decoder(layers)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.lm_head(self.model(input_ids))
        if labels is None:
            return Output(None, logits)
        return Output(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


def prepared() -> dict[str, Any]:
    """The names that examples/guides/README.md promises to every page."""
    torch.manual_seed(0)
    model = Model()
    batches = [
        {"input_ids": tokens, "labels": (7 * tokens + 3) % VOCABULARY}
        for tokens in torch.randint(VOCABULARY, (4, 4, 16))
    ]
    return {
        "q2compile": q2compile,
        "torch": torch,
        "nn": nn,
        "model": model,
        "batches": batches,
        "tokens": batches[0]["input_ids"],
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
    }
