# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of `export`: small models, and readers of the written folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import q2compile
from tests.support import model_zoo as zoo

VOCAB = zoo.VOCAB
SMALL = {**zoo.DECODER, "num_hidden_layers": 1}
MOE = {"num_experts_per_tok": 2}
# MXFP4 as loaders have it: the forward's operands are not rotated.
NO_ROTATION = {
    "base": "quartet",
    "fprop": {role: {"scheme": "mxfp4_rtn", "transform": "none"} for role in ("x", "w")},
}
CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, **MOE, head_dim=16, moe_intermediate_size=32, num_experts=4
    ),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=64, n_layer=1, n_head=4, vocab_size=VOCAB, n_positions=64, bos_token_id=0,
        eos_token_id=0,
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, **MOE, num_local_experts=4),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **{**SMALL, "intermediate_size": 64}, **MOE, head_dim=16, num_local_experts=4,
        sliding_window=16, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
}  # fmt: skip


def model_of(name: str, seed: int = 0) -> Any:
    """In bf16, as from_pretrained makes it: buffers keep their dtype. Scales of siblings differ."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.bfloat16)
    with torch.no_grad():
        for i, parameter in enumerate(p for p in model.parameters() if p.ndim > 1):
            parameter.mul_(2.0 ** (i % 3))  # q, k and v have other global scales
            parameter.view(-1)[:16] = -0.0
    return model.eval()


def tokens(rows: int = 2, length: int = 16) -> Tensor:
    return torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(3))


def tensors(folder: Path) -> dict[str, Tensor]:
    """All files of a folder, and its index if there is one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    where = json.loads(index.read_text())["weight_map"]
    files = {file: load_file(folder / file) for file in sorted(set(where.values()))}
    assert {n for t in files.values() for n in t} == set(where)
    return {name: files[file][name] for name, file in where.items()}


def modules(folder: Path, codes: str) -> dict[str, dict[str, Tensor]]:
    """Module -> the tensors of it, of the modules that have one called ``codes``."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors(folder).items():
        module, _, leaf = name.rpartition(".")
        found.setdefault(module, {})[leaf] = tensor
    return {name: held for name, held in found.items() if codes in held}


def decompressed(folder: Path) -> dict[str, Tensor]:
    """Module -> its weight, by compressed-tensors' own compressor and the scheme that config.json
    has for it."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is in the extra 'dev'")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    groups = QuantizationConfig.model_validate(said).config_groups.values()
    found = {}
    for module, held in modules(folder, "weight_scale").items():
        scheme = next(g for g in groups if {module, "Linear"} & set(g.targets))
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        found[module] = compressor.decompress(held, scheme)["weight"]
    return found


def dequantized(w: Tensor, scheme: str) -> Tensor:
    """bf16 [..., K]: what the codes of a matrix, or of a stack of them, stand for."""
    matrix = w.detach().bfloat16().reshape(-1, w.shape[-1])
    return q2compile.quantize(matrix, scheme).dequantize(torch.bfloat16).view(w.shape)


def forward_weights(model: nn.Module, scheme: str) -> dict[str, Tensor]:
    """Name of a parameter -> the weight that the forward multiplies, where the default policy takes
    it: linears, Conv1D, and stacks of experts. Routers of 4 experts are too small."""
    found = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        dot = f"{name}." if name else ""
        if isinstance(module, nn.Linear) and min(module.weight.shape) >= 16:
            found[f"{dot}weight"] = dequantized(module.weight, scheme)
        elif kind == "Conv1D":
            found[f"{dot}weight"] = dequantized(module.weight.t(), scheme).t()
        elif kind.endswith("Experts"):
            for leaf in ("gate_up_proj", "down_proj"):
                w = getattr(module, leaf)
                transposed = kind == "GptOssExperts"  # [E, K, N]
                made = dequantized(w.mT if transposed else w, scheme)
                found[f"{dot}{leaf}"] = made.mT if transposed else made
    return found


def by_module(model: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """`forward_weights` by the modules of a checkpoint, written down by hand, model by model."""
    found = {}
    for name, w in weights.items():
        prefix, _, leaf = name.rpartition(".")
        if ".experts" not in name:
            found[prefix] = w.t() if "transformer.h." in name else w
            continue
        w, kind = (w.mT if model.config.model_type == "gpt_oss" else w), model.config.model_type
        for e, matrix in enumerate(w):
            if kind == "mixtral":
                prefix = prefix.replace(".mlp.", ".block_sparse_moe.")
            half = matrix.shape[0] // 2
            if leaf == "down_proj":
                parts = {"w2" if kind == "mixtral" else "down_proj": matrix}
            elif kind == "gpt_oss":
                parts = {"gate_proj": matrix[0::2], "up_proj": matrix[1::2]}
            else:
                gate, up = ("w1", "w3") if kind == "mixtral" else ("gate_proj", "up_proj")
                parts = {gate: matrix[:half], up: matrix[half:]}
            found |= {f"{prefix}.{e}.{part}": w for part, w in parts.items()}
    return found


def with_weights(model: Any, weights: dict[str, Tensor]) -> Any:
    """The model with these parameters replaced: the weights of the forward, in bf16. A tied head
    gets a weight of its own."""
    with torch.no_grad():
        for name, w in weights.items():
            module = model.get_submodule(name.rpartition(".")[0])
            setattr(module, name.rpartition(".")[2], nn.Parameter(w.clone(), requires_grad=False))
    return model


def e2m1_values(codes: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    """bf16: code * scale * global scale, from the definition of the format."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    values = table[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
    width = values.shape[-1] // scales.shape[-1]
    wide = scales.float().repeat_interleave(width, -1)
    return (values * wide * global_scale).bfloat16()
