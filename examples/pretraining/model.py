# SPDX-License-Identifier: Apache-2.0
"""The Llamas that are trained: Hugging Face's `LlamaForCausalLM`, unmodified."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class ModelSize:
    """The shape of a Llama and the peak learning rate it trains with."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    learning_rate: float

    @property
    def parameters(self) -> int:
        """Parameters of the linear layers: those that "30M at 25 tokens a parameter" counts."""
        return self.layers * self.hidden * (4 * self.hidden + 3 * self.intermediate)


# 30m is the smallest model of the Quartet II paper (arXiv 2601.22813). The others are choices of
# these examples; demo (for a CPU) and wide (for a GPU) have few and wide layers, so that their time
# goes into matrix products and little of it into compiling.
SIZES = {
    "tiny": ModelSize(hidden=64, layers=1, heads=2, intermediate=128, learning_rate=3e-3),
    "demo": ModelSize(hidden=512, layers=2, heads=8, intermediate=1536, learning_rate=5e-4),
    "wide": ModelSize(hidden=4096, layers=2, heads=32, intermediate=14336, learning_rate=2e-4),
    "10m": ModelSize(hidden=384, layers=6, heads=3, intermediate=1024, learning_rate=1.2e-3),
    "30m": ModelSize(hidden=640, layers=6, heads=5, intermediate=1792, learning_rate=1.2e-3),
    "100m": ModelSize(hidden=1024, layers=8, heads=8, intermediate=2816, learning_rate=6e-4),
}


def build_model(size: ModelSize, vocab_size: int, seq: int) -> LlamaForCausalLM:
    """A Llama with weights drawn from the default generator; output layer not tied."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=seq,
        use_cache=False,
    )
    return LlamaForCausalLM(config)
