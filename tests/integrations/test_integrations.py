# SPDX-License-Identifier: Apache-2.0
"""Libraries with models of their own, each used as in examples/trainers/README.md, at tiny sizes
and without a file from a hub. `make test-integrations` runs them in an environment with these
libraries; elsewhere tests of missing libraries are skipped.

Each model is expected to be compiled (`q2compile.expect`), so the backward raises where it was not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import q2compile
from q2compile.report import expect

OPTIONS: dict[str, Any] = {"inner": "eager"}
VOCABULARY = 64


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch, fresh_compiler: None) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def tokens(rows: int = 4, length: int = 16) -> torch.Tensor:
    return (torch.arange(rows)[:, None] + torch.arange(length)) % VOCABULARY


def learns(model: nn.Module, loss: Callable[[], torch.Tensor]) -> None:
    """Ten steps on one batch reduce its loss, and the model was compiled as expected."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(10):
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    assert losses[-1] < losses[0], losses
    assert model not in expect._expected


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {str(i): i for i in range(VOCABULARY - 2)} | {"<pad>": 62, "<eos>": 63}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    model = llama()
    q2compile.expect(model)
    model.compile(backend="quartet2", options={**OPTIONS, "policy": {"lm_head": "bf16"}})
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path),
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    data = Dataset.from_dict({"input_ids": tokens(64).tolist()})
    trainer = trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
    assert trainer.train().training_loss < 4.16  # ln 64


def test_peft() -> None:
    """The base in 4 bits, the adapters in BF16."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(llama(), config)
    options = {**OPTIONS, "policy": {"*lora_*": "bf16", "*lm_head": "bf16"}, "strict": True}
    ids = tokens()
    rows = q2compile.explain(model, input_ids=ids, labels=ids, options=options).rows
    taken = {row.module for row in rows if row.taken}
    assert len(taken) == 14 and not any("lora_" in name for name in taken)
    q2compile.expect(model)
    model.compile(backend="quartet2", options=options)
    learns(model, lambda: model(input_ids=ids, labels=ids).loss)


def test_diffusers() -> None:
    """A denoiser, block by block."""
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    q2compile.expect(model)
    model.compile_repeated_blocks(backend="quartet2", options=OPTIONS)
    inputs = {
        "hidden_states": torch.randn(2, 16, 16),
        "encoder_hidden_states": torch.randn(2, 8, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.rand(2),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
    }
    noise = torch.randn(2, 16, 16)
    learns(model, lambda: (model(**inputs).sample - noise).square().mean())


def test_sentence_transformers(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from transformers import BertConfig, BertModel, BertTokenizerFast

    config = BertConfig(
        vocab_size=100,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(tmp_path)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(95))]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    model = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    features = model.tokenize([f"{i} {i + 1} {i + 2}" for i in range(8)])
    goal = torch.randn(8, 64)

    def loss() -> torch.Tensor:
        return (model(dict(features))["sentence_embedding"] - goal).square().mean()

    q2compile.expect(model)
    model.compile(backend="quartet2", options=OPTIONS)
    learns(model, loss)


def test_x_transformers() -> None:
    x_transformers = pytest.importorskip("x_transformers")
    model = x_transformers.TransformerWrapper(
        num_tokens=VOCABULARY,
        max_seq_len=32,
        attn_layers=x_transformers.Decoder(dim=64, depth=2, heads=4, attn_dim_head=16),
    )
    q2compile.expect(model)
    model.compile(backend="quartet2", options=OPTIONS)
    ids = tokens()
    learns(model, lambda: next_token_loss(model(ids), ids))


def test_litgpt() -> None:
    pytest.importorskip("litgpt")
    from litgpt import GPT, Config

    config = Config(
        block_size=32,
        padded_vocab_size=VOCABULARY,
        n_layer=2,
        n_head=4,
        n_embd=64,
        intermediate_size=128,
    )
    model = GPT(config)
    q2compile.expect(model)
    model.compile(backend="quartet2", options=OPTIONS)
    ids = tokens()
    learns(model, lambda: next_token_loss(model(ids), ids))


def test_torchtune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that torchtune's recipes make for `compile: True`. It takes the name of the backend,
    but no options."""
    torchao = "0.6.1 takes torchao 0.14; make test-integrations runs this test once more with it"
    pytest.importorskip("torchtune.training", reason=torchao, exc_type=ImportError)
    from torchtune.models.llama3_2 import llama3_2
    from torchtune.training import compile_model

    (tmp_path / "q2.toml").write_text('inner = "eager"\nrecipe = "quartet2_search"\n')
    monkeypatch.setenv("Q2COMPILE_CONFIG", str(tmp_path / "q2.toml"))
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "quartet2")
    model = llama3_2(
        vocab_size=VOCABULARY,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=64,
        max_seq_len=32,
        intermediate_dim=128,
    )
    q2compile.expect(model)
    compile_model(model)
    ids = tokens()
    learns(model, lambda: next_token_loss(model(ids), ids))


def test_timm() -> None:
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=8, **sizes)
    q2compile.expect(model)
    model.compile(backend="quartet2", options=OPTIONS)
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8)
    learns(model, lambda: nn.functional.cross_entropy(model(images), labels))


def test_open_clip() -> None:
    """Both towers, by the contrastive loss."""
    open_clip = pytest.importorskip("open_clip")
    model = open_clip.CLIP(
        embed_dim=32,
        vision_cfg={"image_size": 32, "patch_size": 8, "width": 64, "layers": 2, "head_width": 16},
        text_cfg={
            "context_length": 16,
            "vocab_size": VOCABULARY,
            "width": 64,
            "heads": 4,
            "layers": 2,
        },
    )
    q2compile.expect(model)
    model.compile(backend="quartet2", options=OPTIONS)
    images, texts = torch.randn(8, 3, 32, 32), tokens(8)
    loss = open_clip.ClipLoss()
    learns(model, lambda: loss(*model(images, texts)))
