# SPDX-License-Identifier: Apache-2.0
"""compressed-tensors reads each layer of an exported folder as the weight of the forward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import q2compile
from q2compile.errors import ConfigError
from q2compile.runtime_kernels.numerics.schemes import SCHEMES
from q2compile.tools.export.shards import size_in_bytes
from tests.support.exported import (
    CONFIGS,
    NO_ROTATION,
    by_module,
    decompressed,
    dequantized,
    e2m1_values,
    forward_weights,
    model_of,
    modules,
    tensors,
    tokens,
)

pytest.importorskip("compressed_tensors", reason="compressed-tensors is in the extra 'dev'")

INPUTS = {"input_ids": tokens()}
RECIPES = {
    "quartet2": ("quartet2", "nvfp4_46_pow2"),
    "nvfp4": ("nvfp4", "nvfp4_16x16_pow2"),
    "tetrajet2": ("tetrajet2", "nvfp4_pow2"),
    "mxfp4": (NO_ROTATION, "mxfp4_rtn"),
    "mxfp4_2d": ("mxfp4_2d", "mxfp4_rceil_32x32"),
}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name].to(torch.bfloat16), weight), name


# Every recipe; each mixture of experts has both formats.
CASES = (
    ("llama", "nvfp4"),
    ("qwen3", "tetrajet2"),
    ("gpt2", "mxfp4_2d"),
    ("qwen3_moe", "quartet2"),
    ("qwen3_moe", "mxfp4"),
    ("mixtral", "quartet2"),
    ("mixtral", "mxfp4"),
    ("gpt_oss", "quartet2"),
    ("gpt_oss", "mxfp4_2d"),
)


def test_cases_have_every_model_and_recipe() -> None:
    assert {name for name, _ in CASES} == set(CONFIGS)
    assert {recipe for _, recipe in CASES} == set(RECIPES)


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_every_model(name: str, recipe: str, tmp_path: Path) -> None:
    spec, scheme = RECIPES[recipe]
    model, options = model_of(name), {"recipe": spec}
    done = q2compile.export(model, tmp_path / "out", options=options, example_inputs=INPUTS)
    weights = forward_weights(model, scheme)
    assert done.layers.keys() == weights.keys()
    same(decompressed(tmp_path / "out"), by_module(model, weights))
    assert not any("router" in n or n.endswith("mlp.gate") for n in done.layers)
    held = tensors(tmp_path / "out")
    for layer in modules(tmp_path / "out", "weight_packed").values():
        codes = layer["weight_packed"]
        assert not ((codes & 15) == 8).any() and not ((codes >> 4) == 8).any(), "minus zero"
    exported = [n for n in held if "weight_" in n or n.endswith(".weight_packed")]
    with_global = ("weight_global_scale",) if SCHEMES[scheme].format == "nvfp4" else ()
    leaves = {n.rpartition(".")[2] for n in exported}
    assert leaves == {"weight_packed", "weight_scale", *with_global}
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == f"{SCHEMES[scheme].format}-pack-quantized" == done.variant
    for key, tensor in model.state_dict().items():  # everything else as it is
        if key in held:
            assert torch.equal(held[key], tensor)


@pytest.mark.parametrize("recipe", ["quartet2", "mxfp4"])
def test_a_head_in_bf16(recipe: str, tmp_path: Path) -> None:
    spec, scheme = RECIPES[recipe]
    model = model_of("llama")
    options = {"recipe": spec, "policy": {"*lm_head*": "bf16"}}
    q2compile.export(model, tmp_path / "out", options=options, example_inputs=INPUTS)
    weights = by_module(model, forward_weights(model, scheme))
    head = weights.pop("lm_head")
    same(decompressed(tmp_path / "out"), weights)
    assert not torch.equal(model.lm_head.weight, head), "the check can fail"
    assert torch.equal(tensors(tmp_path / "out")["lm_head.weight"], model.lm_head.weight)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head"]


def test_mxfp4_as_nvfp4(tmp_path: Path) -> None:
    """For ModelOpt, which has no MXFP4 here, and for policies with both formats. A block of 32
    becomes two of 16; its power of two is an e4m3 value."""
    model = model_of("llama")
    with torch.no_grad():
        model.lm_head.weight[:, 32:] = 0  # a block of zeros has e8m0's least scale
    options = {"recipe": RECIPES["mxfp4"][0], "policy": {"*down_proj": "quartet2"}}
    expected = by_module(model, forward_weights(model, "mxfp4_rtn"))
    for format, codes in (("modelopt", "weight"), ("compressed-tensors", "weight_packed")):
        out = tmp_path / format
        q2compile.export(model, out, format=format, options=options, example_inputs=INPUTS)
        for module, held in modules(out, codes).items():
            if "weight_scale" not in held or module.endswith("down_proj"):
                continue
            assert held["weight_scale"].dtype == torch.float8_e4m3fn
            packed = format == "compressed-tensors"
            scale = 1 / held["weight_global_scale"] if packed else held["weight_scale_2"]
            found = e2m1_values(held[codes], held["weight_scale"], scale)
            assert torch.equal(found, expected[module]), module
    down = "model.layers.0.mlp.down_proj"
    own = dequantized(model.get_parameter(f"{down}.weight"), "nvfp4_46_pow2")
    assert torch.equal(decompressed(tmp_path / "compressed-tensors")[down], own)


def test_mxfp4_that_nvfp4_does_not_hold(tmp_path: Path) -> None:
    """Block scales 2^20 apart. e4m3 spans 2^17."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 32)).bfloat16()
    with torch.no_grad():
        model[0].weight[3] *= 2.0**-20
    arguments = {
        "options": {"recipe": RECIPES["mxfp4"][0]},
        "example_inputs": (torch.ones(2, 64).bfloat16(),),
    }
    with pytest.raises(ValueError, match="4 of 128 block scales"):
        q2compile.export(model, tmp_path / "modelopt", format="modelopt", **arguments)
    q2compile.export(model, tmp_path / "out", **arguments)
    own = dequantized(model[0].weight, "mxfp4_rtn")
    assert torch.equal(decompressed(tmp_path / "out")["0"], own)


def test_siblings_have_one_global_scale(tmp_path: Path) -> None:
    """`model_of` gives q, k and v other scales; o and down are of no group."""
    model = model_of("llama")
    done = q2compile.export(model, tmp_path / "out", options={}, example_inputs=INPUTS)
    layer = "model.layers.0"
    of = {name: layer["global_scale"] for name, layer in done.layers.items()}
    own = {
        name: float(q2compile.quantize(model.get_parameter(name), "nvfp4_46_pow2").global_scale)
        for name in of
    }
    for group in (("q", "k", "v"), ("gate", "up")):
        part = "self_attn" if "q" in group else "mlp"
        names = [f"{layer}.{part}.{g}_proj.weight" for g in group]
        assert len({own[n] for n in names}) > 1
        assert {of[n] for n in names} == {max(own[n] for n in names)}
    assert of[f"{layer}.self_attn.o_proj.weight"] == own[f"{layer}.self_attn.o_proj.weight"]


def test_fp32_masters_are_quantized_as_autocast_casts_them(tmp_path: Path) -> None:
    model = model_of("llama").float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.001)  # not representable in bf16
    done = q2compile.export(
        model, tmp_path / "out", options={}, example_inputs=INPUTS, autocast=torch.bfloat16
    )
    assert {layer["dtype"] for layer in done.layers.values()} == {"bfloat16"}
    w = model.model.layers[0].mlp.down_proj.weight
    found = decompressed(tmp_path / "out")["model.layers.0.mlp.down_proj"]
    assert torch.equal(found, dequantized(w.bfloat16(), "nvfp4_46_pow2"))
    of_fp32 = q2compile.quantize(w, "nvfp4_46_pow2").dequantize(torch.bfloat16)
    assert not torch.equal(found, of_fp32), "the check can fail"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_shards_and_their_index(tmp_path: Path) -> None:
    model, out = model_of("qwen3_moe"), tmp_path / "out"
    q2compile.export(model, out, options={}, example_inputs=INPUTS, max_shard_bytes="8 kB")
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2 and all(f"of-{len(files):05}" in f.name for f in files)
    same(decompressed(out), by_module(model, forward_weights(model, "nvfp4_46_pow2")))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("size", "expected"), [(7, 7), ("5GB", 5 * 10**9), ("1.5 MiB", 3 * 2**19)])
def test_sizes_of_files(size: int | str, expected: int) -> None:
    assert size_in_bytes(size) == expected


@pytest.mark.parametrize("recipe", ["quartet2", "quartet"])
def test_rows_of_parts_of_a_block(recipe: str, tmp_path: Path) -> None:
    """72 columns, padded with zeros as in training; the other formats have no place for that."""
    model = torch.nn.Sequential(torch.nn.Linear(72, 32)).bfloat16()
    inputs = {"example_inputs": (torch.ones(2, 72).bfloat16(),), "options": {"recipe": recipe}}
    q2compile.export(model, tmp_path / "out", format="safetensors", **inputs)
    held = tensors(tmp_path / "out")
    how = ("nvfp4_46_pow2", "none") if recipe == "quartet2" else ("mxfp4_quest", "h32")
    own = q2compile.quantize(model[0].weight, how[0], transform=how[1])
    assert own.codes.shape[1] == held["0.weight.codes"].shape[1] > 36
    codes = [held["0.weight.codes"], held["0.weight.scales"], held["0.weight.global_scale"]]
    expected = e2m1_values(own.codes, own.scales, own.global_scale)
    assert torch.equal(e2m1_values(*codes), expected)
    if recipe == "quartet2":
        found = q2compile.quantize(model[0].weight, how[0]).dequantize(torch.bfloat16)
        assert (
            torch.equal(e2m1_values(*codes)[:, :72], found)
            and not e2m1_values(*codes)[:, 72:].any()
        )
    for format in ("compressed-tensors", "modelopt"):
        with pytest.raises(ConfigError, match="format='safetensors'"):
            q2compile.export(model, tmp_path / format, format=format, **inputs)
