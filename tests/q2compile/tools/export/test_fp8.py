# SPDX-License-Identifier: Apache-2.0
"""Layers whose forward is in FP8, alone and beside layers in 4 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import q2compile
from q2compile.errors import ConfigError
from tests.support.exported import (
    by_module,
    decompressed,
    dequantized,
    forward_weights,
    model_of,
    modules,
    tensors,
    tokens,
    with_weights,
)

INPUTS = {"input_ids": tokens()}
NVFP4 = "nvfp4_46_pow2"
FORMATS = {"fp8": "float-quantized", NVFP4: "nvfp4-pack-quantized"}


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


# The model, its options, the parameters in FP8 (the others are in NVFP4), and whether transformers
# has right values (it drops the global scale of experts in NVFP4).
CASES: dict[str, tuple[str, dict[str, Any], str, bool]] = {
    "fp8": ("llama", {"recipe": "fp8"}, "", True),
    "tied head": ("qwen3", {"recipe": "quartet2_fp8"}, "", True),
    "experts": ("qwen3_moe", {"recipe": "fp8"}, "", True),
    "only the mlp": ("llama", {"policy": {"*mlp*": "fp8"}}, "mlp", True),
    "only experts": ("qwen3_moe", {"policy": {"*experts*": {"fprop": "fp8"}}}, "experts", True),
    "all but experts": ("mixtral", {"policy": {"*self_attn*": "fp8"}}, "self_attn", False),
}


@pytest.mark.parametrize("case", CASES)
def test_reloads_with_every_weight(case: str, tmp_path: Path) -> None:
    """compressed-tensors has the forward's weights bit for bit, and transformers their logits."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is in the extra 'dev'")
    name, options, in_fp8, loads = CASES[case]
    model, out = model_of(name), tmp_path / "out"
    done = q2compile.export(model, out, options=options, example_inputs=INPUTS)
    weights = {
        of: w
        for scheme in FORMATS
        for of, w in forward_weights(model, scheme).items()
        if (in_fp8 in of) == (scheme == "fp8")
    }
    found, expected = decompressed(out), by_module(model, weights)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[module].bfloat16(), expected[module]) for module in expected)
    of_layers = {name: layer["format"] for name, layer in done.layers.items()}
    assert of_layers == {of: FORMATS["fp8" if in_fp8 in of else NVFP4] for of in weights}
    config = config_of(out)
    formats = [group["format"] for group in config["config_groups"].values()]
    assert sorted(formats) == sorted(set(of_layers.values()))
    mixed = len(formats) > 1
    assert config["format"] == done.variant == ("mixed-precision" if mixed else formats[0])
    targets = [t for group in config["config_groups"].values() for t in group["targets"]]
    assert sorted(targets) == (sorted(expected) if mixed else ["Linear"])
    load = transformers.AutoModelForCausalLM.from_pretrained
    loaded, info = load(out, output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        logits = with_weights(model, weights)(**INPUTS).logits
        assert torch.equal(loaded(**INPUTS).logits, logits) == loads


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("case", ["fp8", "tied head", "only the mlp"])
def test_the_loss_of_training(case: str, tmp_path: Path) -> None:
    """With static scales of the batch itself transformers rounds activations in FP8 to the codes of
    the training, so the loss is the same bit for bit. Weight-only leaves them in BF16, and those in
    NVFP4 are rounded without 4/6. Seen were differences of .004 for FP8 and .021 for NVFP4, and
    twice as much is allowed: it is the rounding error of one forward, whose sign is arbitrary."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is in the extra 'dev'")
    name, options, in_fp8, _ = CASES[case]
    model, batch, losses = model_of(name), {**INPUTS, "labels": INPUTS["input_ids"]}, {}
    for activations in ("static", "weight-only"):
        given = {"calibration": [INPUTS]} if activations == "static" else {"example_inputs": INPUTS}
        out = tmp_path / activations
        q2compile.export(model, out, options=options, activations=activations, **given)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
        with torch.no_grad():
            losses[activations] = float(loaded(**batch).loss)
    model.compile(backend="quartet2", options={**options, "inner": "eager"})
    with torch.no_grad():
        trained = float(model(**batch).loss)
    assert (losses["static"] == trained) == (not in_fp8)
    assert losses == pytest.approx(dict.fromkeys(losses, trained), abs=0.042 if in_fp8 else 0.008)
    assert losses["weight-only"] != trained, "the check can fail"


@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_activations(activations: str, tmp_path: Path) -> None:
    """One scale per tensor, as in training: the least power of two with amax / scale <= 448."""
    model, out = model_of("llama"), tmp_path / "out"
    given = {"calibration": [INPUTS]} if activations == "static" else {"example_inputs": INPUTS}
    done = q2compile.export(model, out, options={"recipe": "fp8"}, activations=activations, **given)
    group = config_of(out)["config_groups"]["group_0"]["input_activations"]
    assert group == {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor",
        "dynamic": activations == "dynamic",
    }
    scales = {n: float(t) for n, t in tensors(out).items() if n.endswith("input_scale")}
    if activations == "dynamic":
        assert not scales
        return
    assert len(scales) == len(done.layers) == 8
    seen: list[torch.Tensor] = []
    model.model.norm.register_forward_hook(lambda module, args, y: seen.append(y))
    with torch.no_grad():
        model(**INPUTS)
    assert scales["lm_head.input_scale"] == q2compile.quantize(seen[0], "fp8").global_scale


def test_scales_that_vllm_fuses(tmp_path: Path) -> None:
    """Each layer keeps its own scale, since codes near zero have no bits to spare."""
    arguments = {"options": {"recipe": "fp8"}, "example_inputs": INPUTS}
    done = q2compile.export(model_of("llama"), tmp_path / "out", **arguments)
    (note,) = done.notes
    assert "vLLM fuses layers to the largest of their FP8 scales" in note and "and 1 more" in note
    policy = {"*q_proj": "fp8"}
    done = q2compile.export(
        model_of("llama"), tmp_path / "mixed", options={"policy": policy}, example_inputs=INPUTS
    )
    assert "are in float-quantized and nvfp4-pack-quantized: vLLM fuses them" in done.notes[0]


def test_rows_of_parts_of_a_block(tmp_path: Path) -> None:
    """72 columns, which FP8 GEMMs pad to 80; a file needs no padding."""
    model = nn.Sequential(nn.Linear(72, 32)).bfloat16()
    arguments = {"options": {"recipe": "fp8"}, "example_inputs": (torch.ones(2, 72).bfloat16(),)}
    own = q2compile.quantize(model[0].weight, "fp8")
    for format, codes, scale in (
        ("safetensors", "0.weight.codes", "0.weight.global_scale"),
        ("compressed-tensors", "0.weight", "0.weight_scale"),
    ):
        q2compile.export(model, tmp_path / format, format=format, **arguments)
        held = tensors(tmp_path / format)
        assert held.keys() == {codes, scale, "0.bias"}
        assert torch.equal(held[codes].float() * held[scale], own.dequantize())


def test_a_parameter_multiplied_in_parts(tmp_path: Path) -> None:
    """Parts whose scales differ have a common one only if no code of theirs gets too small."""
    model, x = nn.MultiheadAttention(64, 4).bfloat16(), torch.randn(4, 64).bfloat16()
    arguments = {
        "options": {"recipe": "fp8"}, "example_inputs": (x, x, x), "format": "safetensors",
    }  # fmt: skip
    with torch.no_grad():
        model.in_proj_weight.fill_(-1.0)
        model.in_proj_weight[64:].mul_(2.0**-13)
    q2compile.export(model, tmp_path / "out", **arguments)
    held = tensors(tmp_path / "out")
    codes, scale = held["in_proj_weight.codes"], held["in_proj_weight.global_scale"]
    assert torch.equal((codes.float() * scale).bfloat16(), model.in_proj_weight)
    with torch.no_grad():
        model.in_proj_weight[64:].mul_(2.0**-7)
    with pytest.raises(ConfigError, match="part 1: 4096 of 4096 FP8 codes are too small for e4m3"):
        q2compile.export(model, tmp_path / "refused", **arguments)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "modelopt": (
        "llama",
        {"format": "modelopt"},
        "its codes are FP8, and modelopt is written with NVFP4 only; use.*inexact='leave'",
    ),
    "transposed": ("gpt2", {}, "stored transposed.*float-quantized calls its codes.*safetensors"),
    "dynamic NVFP4 beside it": (
        "llama",
        {"activations": "dynamic", "options": {"policy": {"*mlp*": "fp8"}}},
        "nvfp4-pack-quantized has no 'dynamic' activations",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str, tmp_path: Path) -> None:
    name, arguments, message = REFUSED[what]
    given = {"options": {"recipe": "fp8"}, "example_inputs": INPUTS, **arguments}
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        q2compile.export(model_of(name), tmp_path / "out", **given)
    assert list(tmp_path.iterdir()) == []


def test_leave(tmp_path: Path) -> None:
    """ModelOpt's folder has the layers in NVFP4, and those in FP8 as they are."""
    model, out = model_of("llama"), tmp_path / "out"
    options = {"policy": {"*mlp*": "fp8"}}
    arguments = {"options": options, "example_inputs": INPUTS, "format": "modelopt"}
    done = q2compile.export(model, out, inexact="leave", **arguments)
    assert done.variant == "NVFP4" and len(done.layers) == 5 and len(done.left) == 3
    assert {m for m in modules(out, "weight_scale") if "mlp" in m} == set()
    up = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(tensors(out)[up], model.get_parameter(up))
    assert dequantized(model.get_parameter(up), "fp8").shape == (128, 64)
