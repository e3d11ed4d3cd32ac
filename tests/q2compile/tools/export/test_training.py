# SPDX-License-Identifier: Apache-2.0
"""Models as training has them: compiled, in the middle of a run, of any kind of layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import q2compile
from q2compile.errors import ConfigError
from tests.support import model_zoo as zoo
from tests.support.exported import (
    NO_ROTATION,
    dequantized,
    e2m1_values,
    model_of,
    modules,
    tensors,
    tokens,
)
from tests.support.new_process import restart_clock
from tests.support.small_model import LINEARS, batch, loss_of, new_model

EAGER = {"inner": "eager"}
SCHEME = "nvfp4_46_pow2"
pytestmark = pytest.mark.usefixtures("fresh_compiler")


def train(model: Any, steps: int = 3, called: Any = None) -> list[float]:
    """Trains like the demo: fp32 masters, AdamW, bf16 autocast."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, betas=(0.9, 0.95))
    losses = []
    for i in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model if called is None else called, *batch(i))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def schemes(done: Any) -> set[str]:
    return {layer["scheme"] for layer in done.layers.values()}


@pytest.mark.parametrize("how", ["module", "function", "blocks"])
def test_options_are_those_of_the_compiled_model(how: str, tmp_path: Path) -> None:
    """Only blocks were compiled: the head, which the training ran in BF16, is left."""
    model = new_model()
    options = {**EAGER, "recipe": "nvfp4"}
    called: Any = model
    if how == "module":
        model.compile(backend="quartet2", options=options)
    elif how == "function":
        called = torch.compile(model, backend="quartet2", options=options)
    else:
        for block in model.layers:
            block.compile(backend="quartet2", options=options)
    train(model, 1, called)
    inputs = {"example_inputs": batch()[0], "autocast": torch.bfloat16}
    done = q2compile.export(called, tmp_path / "out", **inputs, format="safetensors")
    assert schemes(done) == {"nvfp4_16x16_pow2"}
    outside = {"head": "it is in no module that was compiled"} if how == "blocks" else {}
    assert done.left == outside
    assert done.layers.keys() == {f"{name}.weight" for name in LINEARS if name not in outside}
    assert torch.equal(tensors(tmp_path / "out")["embed.weight"], model.embed.weight)


def test_options_of_a_compiled_step(tmp_path: Path) -> None:
    """The step leaves nothing in the model, which is exported by the policy it was trained with."""
    model = new_model()
    inputs = {"example_inputs": batch()[0], "autocast": torch.bfloat16, "format": "safetensors"}

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    for i, policy in enumerate(({"head": "bf16"}, {"head": "nvfp4"})):
        options = {**EAGER, "policy": policy}
        torch.compile(step, backend="quartet2", options=options)(*batch()).backward()
        if i == 0:
            done = q2compile.export(model, tmp_path / "out", **inputs)
            assert done.layers.keys() == {f"{n}.weight" for n in LINEARS if n != "head"}
    with pytest.raises(ConfigError, match="compiled with 2 different options; pass options="):
        q2compile.export(model, tmp_path / "both", **inputs)
    with pytest.raises(ConfigError, match="options of the training are not known.*layers.\\*.up"):
        q2compile.export(new_model(), tmp_path / "other", **inputs)


@pytest.mark.parametrize("around", ["function of two models", "larger module"])
def test_a_policy_of_longer_names(around: str, tmp_path: Path) -> None:
    """Training kept the head in bf16, by a name that the exported model does not have."""
    student, teacher = new_model(), new_model(seed=1)
    inputs = {"example_inputs": batch()[0], "autocast": torch.bfloat16, "format": "safetensors"}
    options = {**EAGER, "policy": {"student.head": "bf16"}, "strict": True}
    if around == "larger module":
        larger = nn.ModuleDict({"student": student})
        larger.forward = lambda tokens: larger["student"](tokens)  # type: ignore[method-assign]
        student.compile(backend="quartet2", options=options)
        larger(batch()[0]).sum().backward()
    else:

        def step(tokens: Tensor) -> Tensor:
            return F.mse_loss(student(tokens), teacher(tokens))

        torch.compile(step, backend="quartet2", options=options)(batch()[0]).backward()
    with pytest.raises(ConfigError, match="began with 'student', because"):
        q2compile.export(student, tmp_path / "out", **inputs)
    done = q2compile.export(
        student, tmp_path / "out", **inputs, options={"policy": {"head": "bf16"}}
    )
    assert "head.weight" not in done.layers


def test_patterns_that_match_nothing(tmp_path: Path) -> None:
    inputs = {"example_inputs": batch()[0], "autocast": torch.bfloat16, "format": "safetensors"}
    options: dict[str, Any] = {"policy": {"haed": "bf16"}}
    done = q2compile.export(new_model(), tmp_path / "out", **inputs, options=options)
    assert done.notes[0].startswith("the policy's pattern 'haed' matches no module")
    with pytest.raises(ConfigError, match="strict: the policy's pattern.*did you mean 'head'"):
        q2compile.export(
            new_model(), tmp_path / "strict", **inputs, options={**options, "strict": True}
        )
    with pytest.raises(q2compile.NotTakenError, match="strict: 1 matmul.*too small"):
        small = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
        inputs["example_inputs"] = torch.ones(4, 64)
        q2compile.export(small, tmp_path / "small", **inputs, options={"strict": True})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


class Counting(nn.Module):
    """Its forward updates buffers: in place, and by putting another in place of one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 32)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.seen = torch.maximum(self.seen, x.detach().abs().amax(0))
        return self.up(x)


@pytest.mark.parametrize("calibrates", [False, True])
def test_buffers_are_those_of_the_training(calibrates: bool, tmp_path: Path) -> None:
    model, x = Counting(), torch.ones(4, 64)
    model(x)
    arguments: dict[str, Any] = {}
    if calibrates:
        arguments = {"activations": "static", "calibration": [2 * x, 3 * x]}
    arguments |= {"example_inputs": 2 * x, "autocast": torch.bfloat16, "format": "safetensors"}
    q2compile.export(model, tmp_path / "out", options={}, **arguments)
    held = tensors(tmp_path / "out")
    for of in (dict(model.named_buffers()), held):
        assert of["steps"] == 1 and torch.equal(of["seen"], torch.ones(64))


def test_parts_compiled_by_different_options(tmp_path: Path) -> None:
    model = new_model()
    model.layers[0].compile(backend="quartet2", options={**EAGER, "recipe": "nvfp4"})
    model.layers[1].compile(backend="quartet2", options=EAGER)
    with pytest.raises(ConfigError, match="2 different options; pass options="):
        q2compile.export(model, tmp_path / "out", example_inputs=batch()[0])


def test_training_goes_on_as_if_nothing_had_been_exported(tmp_path: Path) -> None:
    """The same bits, with dropout and batch norm in the model, which keeps its mode."""

    def run(exports: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(), nn.Linear(64, 64))
        net[2].eval()  # one that is not in the mode of the others
        called = torch.compile(net, backend="quartet2", options=EAGER)
        x = torch.randn(32, 64)
        for i in range(3):
            called(x).square().mean().backward()
            if exports:
                out = tmp_path / f"out{i}"
                arguments = {"example_inputs": (x,), "autocast": torch.float32}
                q2compile.export(called, out, format="safetensors", **arguments)
        assert [m.training for m in net] == [True, True, False, True]
        return [*(p.grad for p in net.parameters()), *net.buffers(), torch.rand(3)]

    for own, plain in zip(run(True), run(False), strict=True):
        assert torch.equal(own, plain)


def test_many_exports_are_within_dynamos_limit(tmp_path: Path) -> None:
    model = new_model()
    for i in range(torch._dynamo.config.recompile_limit + 2):
        arguments = {"options": {}, "example_inputs": batch()[0], "autocast": torch.bfloat16}
        done = q2compile.export(model, tmp_path / str(i), format="safetensors", **arguments)
        assert len(done.layers) == len(LINEARS)


def test_the_late_switch(tmp_path: Path) -> None:
    """A run that ends with a bf16 forward has no codes; by the earlier options it is quantized, as
    after training."""
    model = new_model()
    before = {**EAGER, "recipe": "quartet2"}
    model.compile(backend="quartet2", options=before)
    train(model, 1)
    model.compile(
        backend="quartet2", options={**EAGER, "recipe": {"base": "quartet2", "fprop": "bf16"}}
    )
    train(model, 1)
    inputs = {"example_inputs": batch()[0], "autocast": torch.bfloat16, "format": "safetensors"}
    with pytest.raises(ConfigError, match="forward is bf16.*pass options="):
        q2compile.export(model, tmp_path / "out", **inputs)
    done = q2compile.export(model, tmp_path / "out", **inputs, options=before)
    assert schemes(done) == {SCHEME}


def exported_plain(net: nn.Module, inputs: Any, folder: Path) -> tuple[Any, dict[str, Tensor]]:
    done = q2compile.export(
        net.bfloat16(), folder, format="safetensors", options={}, example_inputs=inputs
    )
    held = tensors(folder)
    found = {
        name: e2m1_values(
            held[f"{name}.codes"], held[f"{name}.scales"], held[f"{name}.global_scale"]
        )
        for name in done.layers
    }
    return done, found


class LoRA(nn.Module):
    """LoRA with PEFT's module names."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(64, 32).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(64, 16, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(16, 32, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_lora_is_left_alone(tmp_path: Path) -> None:
    model = LoRA()
    done, found = exported_plain(model, (torch.randn(4, 64).bfloat16(),), tmp_path / "out")
    assert found.keys() == {"base_layer.weight"}
    assert torch.equal(found["base_layer.weight"], dequantized(model.base_layer.weight, SCHEME))
    for name in ("lora_A.default.weight", "lora_B.default.weight"):
        assert "adapter" in done.left[name]
        assert torch.equal(tensors(tmp_path / "out")[name], model.get_parameter(name))


def test_parameters_that_are_multiplied_in_parts(tmp_path: Path) -> None:
    """The projections of an attention are one parameter, each quantized for itself: one global
    scale, the same values."""
    model, inputs = zoo.multihead_attention()
    with torch.no_grad():
        model.net.same.in_proj_weight[64:128] *= 8
    inputs = {name: t.bfloat16() for name, t in inputs.items()}
    _, found = exported_plain(model, inputs, tmp_path / "out")
    w = model.net.same.in_proj_weight
    parts = [dequantized(part, SCHEME) for part in w.chunk(3)]
    assert torch.equal(found["net.same.in_proj_weight"], torch.cat(parts))
    assert len({q2compile.quantize(p.bfloat16(), SCHEME).global_scale for p in w.chunk(3)}) > 1


def test_projections_of_cross_attention(tmp_path: Path) -> None:
    """Its parameter is multiplied in two parts, q apart from k and v, as split() returns them."""
    model = nn.MultiheadAttention(64, 4, batch_first=True)
    q, kv = torch.randn(2, 8, 64).bfloat16(), torch.randn(2, 16, 64).bfloat16()
    _, found = exported_plain(model, (q, kv, kv), tmp_path / "out")
    parts = [dequantized(part, SCHEME) for part in model.in_proj_weight.split([64, 128])]
    assert torch.equal(found["in_proj_weight"], torch.cat(parts))


def test_weights_stored_transposed_and_by_hand(tmp_path: Path) -> None:
    model, inputs = zoo.by_hand()
    inputs = {name: t.bfloat16() for name, t in inputs.items()}
    done, found = exported_plain(model, inputs, tmp_path / "out")
    assert {n: layer["transposed"] for n, layer in done.layers.items()} == {
        "net.qk": False,
        "net.v": True,
    }
    assert "einsum that is not of two operands" in done.left["net.o"]
    for name, weight in found.items():
        w = model.get_parameter(name)
        w = w.t() if done.layers[name]["transposed"] else w
        assert torch.equal(weight, dequantized(w, SCHEME)), name


# ---- activations --------------------------------------------------------------------------------


def test_static_scales_by_calibration(tmp_path: Path) -> None:
    """The scale covers all batches and is the same for layers with the same input. It is a power of
    two, and stored as 1 / scale."""
    model = model_of("llama")
    batches = [{"input_ids": tokens(1, 8)}, {"input_ids": tokens(2, 16)}]
    seen: dict[str, float] = {}

    def record(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen[name] = max(seen.get(name, 0.0), float(args[0].abs().max()))

        return hook

    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    hooks = [m.register_forward_pre_hook(record(n)) for n, m in linears.items()]
    with torch.no_grad():
        for one in batches:
            model(**one)
    for hook in hooks:
        hook.remove()
    arguments = {"activations": "static", "calibration": batches, "options": {}}
    q2compile.export(model, tmp_path / "ct", **arguments)
    for module, held in modules(tmp_path / "ct", "weight_packed").items():
        scale = 1 / held["input_global_scale"]
        assert scale.shape == (1,) and torch.frexp(scale).mantissa == 0.5
        assert seen[module] / 6 / scale <= 448 < 2 * seen[module] / 6 / scale, module
    q2compile.export(model, tmp_path / "modelopt", **arguments, format="modelopt")
    q = modules(tmp_path / "modelopt", "weight_scale_2")["model.layers.0.self_attn.q_proj"]
    assert q["input_scale"].shape == ()
    said = json.loads((tmp_path / "modelopt" / "hf_quant_config.json").read_text())
    assert said["quantization"]["quant_algo"] == "NVFP4"
    said = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]
    inputs = said["config_groups"]["group_0"]["input_activations"]
    assert inputs["dynamic"] == "local" and inputs["strategy"] == "tensor_group"


def test_static_scales_by_telemetry(tmp_path: Path) -> None:
    restart_clock()
    model, folder = new_model(), tmp_path / "telemetry"
    telemetry = {"every": 1, "to": str(folder)}
    model.compile(backend="quartet2", options={**EAGER, "telemetry": telemetry})
    train(model)
    q2compile.telemetry.flush()
    inputs = {"example_inputs": batch()[0], "autocast": torch.bfloat16, "activations": "static"}
    done = q2compile.export(model, tmp_path / "out", **inputs, telemetry=folder)
    lines = [json.loads(line) for line in (folder / "rank0.jsonl").read_text().splitlines()]
    for name, layer in done.layers.items():
        site = name.removesuffix(".weight")
        amax = [r["amax"] for r in lines if r.get("module") == site and r.get("operand") == "x"]
        assert len(amax) >= 3
        assert max(amax) / 6 / layer["input_scale"] <= 448 < max(amax) / 3 / layer["input_scale"]
    # A run that was killed: its last line is incomplete, and is left out.
    (folder / "rank0.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 9, "mod')
    again = q2compile.export(model, tmp_path / "again", **inputs, telemetry=folder)
    assert again.layers == done.layers
    with pytest.raises(ConfigError, match="has no record of an activation"):
        q2compile.export(model, tmp_path / "none", **inputs, telemetry=tmp_path)


def test_dynamic_activations_of_mxfp4(tmp_path: Path) -> None:
    """transformers runs it: activations are quantized as they come, so the logits differ from
    weight-only ones."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is in the extra 'dev'")

    model, logits = model_of("llama"), {}
    inputs = {"input_ids": tokens()}
    for activations in ("weight-only", "dynamic"):
        out = tmp_path / activations
        options = {"recipe": NO_ROTATION}
        q2compile.export(
            model, out, activations=activations, options=options, example_inputs=inputs
        )
        loaded = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
        with torch.no_grad():
            logits[activations] = loaded(**inputs).logits.float()
    assert not torch.equal(*logits.values())
    assert F.cosine_similarity(*(x.flatten() for x in logits.values()), dim=0) > 0.9
