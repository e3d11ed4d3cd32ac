# SPDX-License-Identifier: Apache-2.0
"""Small instances, randomly initialized, of the models that people train.

Each builder returns a model and the keyword arguments of one training step; the model returns its
loss, or an output that has one. Initialized as their authors do it, no dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

Built = tuple[nn.Module, dict[str, Any]]

WIDTH, HIDDEN, VOCAB = 64, 128, 96
BATCH, TOKENS = 2, 64

# One layer, where all are alike; llama has two of them.
DECODER = {
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": TOKENS,
}


def _tokens() -> Tensor:
    """Random ones, none of them 0: that is padding, whose embedding is zero.

    RMSNorm's derivative at zero is 1/sqrt(eps): unmasked padding has a gradient 1000 times that of
    the others, and the Hadamard transform along the tokens spreads its rounding error over all of
    them. Gemma 3, which norms its queries, had a gradient cosine of 0.4 there with a 0 among the
    tokens.
    """
    return torch.randint(1, VOCAB, (BATCH, TOKENS))


def _language_model(config: transformers.PretrainedConfig) -> Built:
    """The Hugging Face language model of ``config`` on random tokens."""
    tokens = _tokens()
    inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    return transformers.AutoModelForCausalLM.from_config(config), inputs


def llama() -> Built:
    return _language_model(transformers.LlamaConfig(**{**DECODER, "num_hidden_layers": 2}))


def llama_tied() -> Built:
    """The embedding is the head's weight, too."""
    return _language_model(transformers.LlamaConfig(**DECODER, tie_word_embeddings=True))


def qwen3() -> Built:
    return _language_model(transformers.Qwen3Config(**DECODER, head_dim=16))


def qwen3_moe() -> Built:
    """Experts by transformers' default, which is a custom op if torch has no grouped_mm."""
    return _language_model(
        transformers.Qwen3MoeConfig(
            **DECODER,
            head_dim=16,
            moe_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
        )
    )


def qwen3_moe_bf16() -> Built:
    """All in bf16: experts by torch._grouped_mm, the offsets of whose groups the routing makes."""
    model, inputs = qwen3_moe()
    return model.bfloat16(), inputs


def mixtral() -> Built:
    """Experts by a loop over those that got tokens, which breaks the graph."""
    config = transformers.MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2)
    model, inputs = _language_model(config)
    model.set_experts_implementation("eager")
    return model, inputs


def deepseek_v3() -> Built:
    """Multi-head latent attention; experts by bmm. The first layer of others is dense."""
    model, inputs = _language_model(
        transformers.DeepseekV3Config(
            **{**DECODER, "num_key_value_heads": 4},
            moe_intermediate_size=32,
            first_k_dense_replace=0,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            n_shared_experts=1,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=16,
        )
    )
    model.set_experts_implementation("batched_mm")
    return model, inputs


def gpt_oss() -> Built:
    """Experts with biases, their weights stored [E, K, N]; by the custom op of qwen3_moe."""
    config = transformers.GptOssConfig(
        **{**DECODER, "intermediate_size": 64},
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    return _language_model(config)


def llama4() -> Built:
    """Every expert gets every token, most of them times zero: one bmm of [E, T, K]."""
    config = transformers.Llama4TextConfig(
        **DECODER,
        head_dim=16,
        intermediate_size_mlp=HIDDEN,
        num_local_experts=4,
        interleave_moe_layer_step=1,
        pad_token_id=0,
    )
    return _language_model(config)


def gemma3() -> Built:
    """Text only; a layer of local attention."""
    config = {**DECODER, "head_dim": 16, "layer_types": ["sliding_attention"]}
    return _language_model(transformers.Gemma3TextConfig(**config, sliding_window=16))


def gpt2() -> Built:
    return _language_model(
        transformers.GPT2Config(
            n_embd=WIDTH,
            n_layer=1,
            n_head=4,
            n_positions=TOKENS,
            vocab_size=VOCAB,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def mamba2() -> Built:
    """Two linears and a convolution a layer; the scan multiplies activations."""
    return _language_model(
        transformers.Mamba2Config(
            hidden_size=WIDTH,
            num_hidden_layers=1,
            vocab_size=VOCAB,
            expand=2,
            num_heads=8,
            head_dim=16,
            state_size=16,
            n_groups=1,
            chunk_size=32,
        )
    )


def t5() -> Built:
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=WIDTH,
        d_kv=16,
        d_ff=HIDDEN,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    inputs = {"input_ids": _tokens(), "labels": _tokens(), "use_cache": False}
    return transformers.T5ForConditionalGeneration(config), inputs


def bert() -> Built:
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=HIDDEN,
        max_position_embeddings=TOKENS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[1, TOKENS // 2 :] = 0  # the second text is shorter
    inputs = {"input_ids": _tokens(), "labels": _tokens(), "attention_mask": mask}
    return transformers.BertForMaskedLM(config), inputs


def vit() -> Built:
    """The patches come from a convolution."""
    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=HIDDEN,
        image_size=32,
        patch_size=4,
        num_labels=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    images = torch.randn(BATCH, 3, 32, 32)
    labels = torch.randint(16, (BATCH,))
    return transformers.ViTForImageClassification(config), {
        "pixel_values": images,
        "labels": labels,
    }


def whisper() -> Built:
    config = transformers.WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=16,
        d_model=WIDTH,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=HIDDEN,
        decoder_ffn_dim=HIDDEN,
        max_source_positions=TOKENS,
        max_target_positions=TOKENS,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
    )
    sound = torch.randn(BATCH, 16, 2 * TOKENS)
    inputs = {"input_features": sound, "labels": _tokens(), "use_cache": False}
    return transformers.WhisperForConditionalGeneration(config), inputs


class Step(nn.Module):
    """Mean square between a module's output and a target."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.net(x), target)


def _on_vectors(net: nn.Module, out: int = WIDTH) -> Built:
    inputs = {"x": torch.randn(BATCH, TOKENS, WIDTH), "target": torch.randn(BATCH, TOKENS, out)}
    return Step(net), inputs


class NanoBlock(nn.Module):
    """A GPT block in the manner of nanoGPT: q, k and v from one linear, causal attention, MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            part.view(b, t, 4, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(WIDTH, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class NanoGPT(nn.Module):
    """A block between an embedding and a head that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))
        self.blocks = nn.Sequential(NanoBlock())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.embed(tokens) + self.position)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def nanogpt() -> Built:
    return NanoGPT(), {"tokens": _tokens()}


def encoder_layer() -> Built:
    return _on_vectors(nn.TransformerEncoderLayer(WIDTH, 4, HIDDEN, dropout=0.0, batch_first=True))


class CrossAttention(nn.Module):
    """nn.MultiheadAttention with keys and values of another width than the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Linear(WIDTH, 32)
        self.same = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.other = nn.MultiheadAttention(WIDTH, 4, kdim=32, vdim=32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.same(x, x, x, need_weights=False)[0]
        memory = self.memory(x)
        return x + self.other(x, memory, memory)[0]


def multihead_attention() -> Built:
    return _on_vectors(CrossAttention())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def lstm() -> Built:
    return _on_vectors(Recurrent())


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.conv2 = nn.Conv1d(WIDTH, WIDTH, 1)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv2(F.relu(self.conv1(x.mT)))).mT)


def convolutions() -> Built:
    return _on_vectors(Convolutions())


class LoRA(nn.Module):
    """A frozen linear and two small trained ones beside it."""

    def __init__(self, base: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.b.weight, std=0.1)  # 0 is usual; then a has no gradient to compare

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def lora() -> Built:
    up, down = LoRA(nn.Linear(WIDTH, HIDDEN)), LoRA(nn.Linear(HIDDEN, WIDTH))
    return _on_vectors(nn.Sequential(up, nn.GELU(), down))


class ByHand(nn.Module):
    """Three spellings of x wᵀ, two products of activations, no nn.Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / WIDTH**0.5)
        self.v = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.o = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k = F.linear(x, self.qk).chunk(2, dim=-1)
        v = x @ self.v
        weights = (q @ k.mT / WIDTH**0.5).softmax(-1)
        return x + torch.einsum("bst,btd,do->bso", weights, v, self.o)


def by_hand() -> Built:
    return _on_vectors(ByHand())


BUILDERS: dict[str, Callable[[], Built]] = {
    f.__name__: f
    for f in (llama, llama_tied, qwen3, qwen3_moe, qwen3_moe_bf16, mixtral, deepseek_v3, gpt_oss)
    + (llama4, gemma3, gpt2, mamba2, t5, bert, vit, whisper, nanogpt, encoder_layer)
    + (multihead_attention, lstm, convolutions, lora, by_hand)
}
