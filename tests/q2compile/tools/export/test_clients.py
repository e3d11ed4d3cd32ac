# SPDX-License-Identifier: Apache-2.0
"""Exported folders, read by those who will: transformers, torchao, ModelOpt, and vLLM's rules.

vLLM itself needs a GPU. These tests replay how its loaders of compressed-tensors and ModelOpt
checkpoints handle names and scales, from `vllm/model_executor/layers/quantization/
compressed_tensors/schemes/compressed_tensors_w4a16_nvfp4.py`, `.../compressed_tensors_moe_w4a4_
nvfp4.py` and `.../modelopt.py` as published in 2026.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import q2compile
from tests.support.exported import (
    NO_ROTATION,
    by_module,
    dequantized,
    e2m1_values,
    forward_weights,
    model_of,
    modules,
    tensors,
    tokens,
    with_weights,
)

INPUTS = {"input_ids": tokens()}
CODES, SCHEME = {"compressed-tensors": "weight_packed", "modelopt": "weight"}, "nvfp4_46_pow2"


def exported(model: Any, folder: Path, **arguments: Any) -> Path:
    q2compile.export(model, folder / "out", options={}, example_inputs=INPUTS, **arguments)
    return folder / "out"


@pytest.mark.parametrize("name", ["llama", "qwen3", "mxfp4"])
def test_transformers(name: str, tmp_path: Path) -> None:
    """The loaded model's logits are those of a model of the forward's weights, bit for bit; qwen3's
    head is tied to an embedding that stays in bf16."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is in the extra 'dev'")
    model = model_of("llama" if name == "mxfp4" else name)
    recipe, scheme = ({}, SCHEME) if name != "mxfp4" else ({"recipe": NO_ROTATION}, "mxfp4_rtn")
    q2compile.export(model, tmp_path / "out", options=recipe, example_inputs=INPUTS)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        before = model(**INPUTS).logits
        expected = with_weights(model, forward_weights(model, scheme))(**INPUTS).logits
        assert loaded.dtype == torch.bfloat16
        assert torch.equal(loaded(**INPUTS).logits, expected)
    assert not torch.equal(before, expected), "the check can fail"


@pytest.mark.parametrize("format", CODES)
def test_torchao(format: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="torchao is in the extra 'dev'")
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    model = model_of("llama")
    expected = by_module(model, forward_weights(model, SCHEME))
    found = modules(exported(model, tmp_path, format=format), CODES[format])
    assert expected.keys() <= found.keys()
    for module, weight in expected.items():
        held = found[module]
        packed = "weight_packed" in held
        scale = 1 / held["weight_global_scale"] if packed else held["weight_scale_2"]
        codes = (held[CODES[format]], held["weight_scale"], 16, torch.bfloat16)
        assert torch.equal(
            NVFP4Tensor(*codes, per_tensor_scale=scale.view(())).dequantize(), weight
        )


def test_modelopt(tmp_path: Path) -> None:
    qtensor = pytest.importorskip(
        "modelopt.torch.quantization.qtensor", reason="needs nvidia-modelopt"
    )
    model = model_of("llama")
    expected = by_module(model, forward_weights(model, SCHEME))
    found = modules(exported(model, tmp_path, format="modelopt"), "weight_scale_2")
    assert expected.keys() == found.keys()
    for module, weight in expected.items():
        held = found[module]
        tensor = qtensor.NVFP4QTensor(weight.shape, torch.bfloat16, held["weight"])
        scales = {"scale": held["weight_scale"], "double_scale": held["weight_scale_2"]}
        assert torch.equal(tensor.dequantize(block_sizes={-1: 16}, **scales), weight)


# vLLM's names of fused layers, and their parts in order.
PACKED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "w13": ["w1", "w3"],
    "experts": ["gate_proj", "up_proj"],
}
LEAVES = {
    "compressed-tensors": {"weight_packed", "weight_scale", "weight_global_scale"},
    "modelopt": {"weight", "weight_scale", "weight_scale_2"},
}


@pytest.mark.parametrize("format", LEAVES)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mixtral"])
def test_the_rules_of_vllm(format: str, name: str, tmp_path: Path) -> None:
    model = model_of(name)
    expected = by_module(model, forward_weights(model, SCHEME))
    out = exported(model, tmp_path, format=format)
    scalar = "weight_global_scale" if format == "compressed-tensors" else "weight_scale_2"
    found = modules(out, scalar)
    assert found.keys() == expected.keys()
    fused: dict[str, dict[str, Any]] = {}
    for module, held in found.items():
        assert held.keys() == LEAVES[format], "no tensor that the loader has no parameter for"
        assert held[CODES[format]].dtype == torch.uint8
        assert held["weight_scale"].dtype == torch.float8_e4m3fn
        assert held[scalar].dtype == torch.float32 and held[scalar].numel() == 1
        prefix, _, last = module.rpartition(".")
        key = next((k for k, parts in PACKED.items() if last in parts), last)
        fused.setdefault(f"{prefix}.{key}", {})[module] = held
    for parts in fused.values():
        read = torch.stack([held[scalar].reshape(()) for held in parts.values()])
        kept = read.max()  # of all parts of a fused layer
        kept = 1 / kept if format == "compressed-tensors" else kept
        for module, held in parts.items():
            values = e2m1_values(held[CODES[format]], held["weight_scale"], kept)
            assert torch.equal(values, expected[module]), module
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    ignored = set(config["ignore"])
    assert not ignored & found.keys()
    if name != "llama":
        router = "block_sparse_moe.gate" if name == "mixtral" else "mlp.gate"
        assert f"model.layers.0.{router}" in ignored
    if format == "modelopt":
        said = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
        assert said["quant_algo"] == config["quant_algo"] == "W4A16_NVFP4"
        assert {"group_size", "kv_cache_quant_algo", "exclude_modules"} <= said.keys()


def test_a_plain_model(tmp_path: Path) -> None:
    """Not a Hugging Face model: codes by parameter, described in JSON; every recipe, also a rotated
    one."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    model = model.bfloat16()
    x = torch.randn(4, 64).bfloat16()
    for recipe, scheme, transform in [
        ("quartet2", SCHEME, "none"),
        ("nvfp4", "nvfp4_16x16_pow2", "none"),
        ("quartet", "mxfp4_quest", "h32"),
    ]:
        out = tmp_path / recipe
        options = {"recipe": recipe}
        q2compile.export(model, out, format="safetensors", options=options, example_inputs=(x,))
        said = json.loads((out / "q2compile_export.json").read_text())
        assert said["layers"]["0.weight"]["scheme"] == scheme
        assert said["layers"]["0.weight"]["transform"] == transform
        assert re.match("too small", said["left"]["2"])
        held = tensors(out)
        own = q2compile.quantize(model[0].weight, scheme, transform=transform)
        scales = own.scales.view(torch.uint8)
        if scheme == "nvfp4_16x16_pow2":
            scales = scales.repeat_interleave(16, 0)
        assert torch.equal(held["0.weight.scales"].view(torch.uint8), scales)
        assert torch.equal(held["0.weight.global_scale"], own.global_scale)
        assert torch.equal(e2m1(held["0.weight.codes"]), e2m1(own.codes))
        assert torch.equal(held["2.weight"], model[2].weight)
        assert not (out / "config.json").exists()


def e2m1(codes: Tensor) -> Tensor:
    """Codes with no minus zero."""
    halves = torch.stack([codes & 15, codes >> 4])
    return torch.where(halves == 8, 0, halves)


def test_global_scale_exact_is_kept_as_it_is(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32)).bfloat16()
    x, options = torch.randn(4, 64).bfloat16(), {"global_scale": "exact"}
    with pytest.raises(ValueError, match=r"no power of two .*format='safetensors'"):
        q2compile.export(model, tmp_path / "ct", options=options, example_inputs=(x,))
    plain = tmp_path / "plain"
    q2compile.export(model, plain, format="safetensors", options=options, example_inputs=(x,))
    own = q2compile.quantize(model[0].weight, "nvfp4_46")
    assert torch.equal(tensors(plain)["0.weight.global_scale"], own.global_scale)
    assert not torch.equal(own.dequantize(), dequantized(model[0].weight, SCHEME).float())
