# SPDX-License-Identifier: Apache-2.0
"""`q2compile export`: a checkpoint's folder, or a function that returns a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers as hf
from torch import nn

from q2compile import explain
from q2compile.config import CONFIG_FILE_VARIABLE
from q2compile.tools import cli
from tests.support.exported import (
    SMALL,
    VOCAB,
    dequantized,
    e2m1_values,
    model_of,
    modules,
    tensors,
)

BUILD = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32)), [torch.ones(4, 64), 3 * torch.ones(4, 64)]

def empty():
    return nn.Linear(64, 32), []

def generator():
    model, batches = build()
    return model, (x for x in (1024 * batches[0], batches[0]))

def single():
    return build()[0], iter([1024 * torch.ones(4, 64)])

def loader():
    rows = torch.cat([1024 * torch.ones(4, 64), torch.ones(4, 64)])
    return build()[0], torch.utils.data.DataLoader(rows, batch_size=4)

def arguments():
    return build()[0], [(1024 * torch.ones(4, 64),), {"input": torch.ones(4, 64)}]

def tensor():
    return build()[0], torch.ones(4, 64)

def mapping():
    return build()[0], {"input": torch.ones(4, 64)}
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A model in fp32, its tokenizer and generation config."""
    model = model_of("llama").float()
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path / "trained")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "trained")
    return tmp_path / "trained"


def test_a_checkpoint(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "options.json").write_text('{"policy": {"*lm_head*": "bf16"}}')
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, str(tmp_path / "options.json"))
    out = tmp_path / "out"
    assert cli.main(["export", str(checkpoint), str(out), "--recipe", "nvfp4"]) == 0
    assert "7 quantized weights (nvfp4-pack-quantized, weight-only)" in capsys.readouterr().out
    found = modules(out, "weight_packed")["model.layers.0.self_attn.q_proj"]
    scales = found["weight_scale"], 1 / found["weight_global_scale"]
    weight = tensors(checkpoint)["model.layers.0.self_attn.q_proj.weight"]
    expected = dequantized(weight, "nvfp4_16x16_pow2")
    assert torch.equal(e2m1_values(found["weight_packed"], *scales), expected)
    assert json.loads((out / "generation_config.json").read_text())["max_new_tokens"] == 7
    assert hf.AutoTokenizer.from_pretrained(out)("b")["input_ids"] == [1]


def test_a_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "setup_export.py").write_text(BUILD)
    where, out = f"{tmp_path / 'setup_export.py'}:build", tmp_path / "out"
    arguments = ["--format", "safetensors", "--activations", "static", "--recipe", "quartet2"]
    assert cli.main(["export", where, str(out), *arguments]) == 0
    said = json.loads((out / "q2compile_export.json").read_text())["layers"]["0.weight"]
    assert said["input_scale"] == 2.0**-9, "3 / 6 / 448, up to a power of two"
    assert "1 quantized weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["{folder}", "{folder}/out"],
            "has no config.json; allowed: a folder that save_pretrained",
        ),
        (["nowhere", "{folder}/out"], "nowhere: there is no such folder; allowed: a folder that"),
        (["nowhere:", "{folder}/out"], "allowed: FILE.py:FUNCTION"),
        (["nowhere", "{folder}"], "is a folder that is not empty"),
        (["{folder}/setup_export.py:empty", "{folder}/out"], "there is no batch"),
        (["{folder}/setup_export.py:tensor", "{folder}/out"], "got a Tensor in place of"),
        (["{folder}/setup_export.py:mapping", "{folder}/out"], "Put a single batch into a list"),
        (["nowhere", "{folder}/out", "--recipe", "quartet3"], "did you mean 'quartet'"),
        (["nowhere", "{folder}/out", "--options", "none.json"], "none.json: No such file"),
    ],
)
def test_what_it_can_not_use(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "setup_export.py").write_text(BUILD)
    assert cli.main(["export", *(a.format(folder=tmp_path) for a in arguments)]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".py" and p.name[:2] != "__"] == []


@pytest.mark.parametrize("name", ["generator", "single", "loader", "arguments"])
def test_every_batch_counts(name: str, tmp_path: Path) -> None:
    """The first batch has the largest activations."""
    (tmp_path / "setup_export.py").write_text(BUILD)
    where = f"{tmp_path / 'setup_export.py'}:{name}"
    for activations, scale in (("static", 0.5), ("weight-only", None)):
        arguments = ["--format", "safetensors", "--activations", activations]
        out = tmp_path / activations
        assert cli.main(["export", where, str(out), *arguments, "--recipe", "quartet2"]) == 0
        said = json.loads((out / "q2compile_export.json").read_text())["layers"]["0.weight"]
        assert said.get("input_scale") == scale, "1024 / 6 / 448, up to a power of two"


# ---- the options of training ---------------------------------------------------------------------

POLICY = {"policy": {"*lm_head*": "bf16"}}


def dumped(folder: Path, *options: dict[str, Any]) -> Path:
    """The dump of a program that compiled graphs with these options."""
    for each in options:
        model = nn.Sequential(nn.Linear(32, 32))
        explain(model, torch.ones(2, 32), options={**each, "inner": "eager", "dump": str(folder)})
    return folder


@pytest.mark.parametrize("kind", ["options", "run.json", "dump", "ranks", "recipe"])
def test_options_of_training(
    kind: str, checkpoint: Path, tmp_path: Path, fresh_compiler: None
) -> None:
    given = tmp_path / "options.json"
    given.write_text(json.dumps({**POLICY, "recipe": "nvfp4"}))
    if kind in ("run.json", "dump", "ranks"):
        of_rank = "dump/rank0" if kind == "ranks" else "dump"
        given = dumped(tmp_path / of_rank, {**POLICY, "recipe": "nvfp4", "mode": None})
        given = given / "run.json" if kind == "run.json" else tmp_path / "dump"
    arguments = ["--options", str(given)] if kind != "recipe" else ["--recipe", "nvfp4"]
    out = tmp_path / "out"
    assert cli.main(["export", str(checkpoint), str(out), *arguments]) == 0
    said = json.loads((out / "q2compile_export.json").read_text())
    assert {layer["scheme"] for layer in said["layers"].values()} == {"nvfp4_16x16_pow2"}
    assert ("lm_head.weight" in said["layers"]) == (kind == "recipe")


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert cli.main(["export", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_a_checkpoint_without_options(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fresh_compiler: None
) -> None:
    """The error names the layers that a policy may have kept; so do those of mistaken options."""
    out = tmp_path / "out"
    said = refused(capsys, checkpoint, out)
    assert "model.layers.*.self_attn.q_proj" in said and ", lm_head. Pass the options" in said
    assert "--options" in said and "--recipe quartet2" in said
    run = dumped(tmp_path / "dump", POLICY, {"recipe": "nvfp4"}) / "run.json"
    assert "2 different options" in refused(capsys, checkpoint, out, "--options", run)
    options = tmp_path / "options.json"
    options.write_text('{"policy": {"lm_haed": "bf16"}, "strict": true}')
    said = refused(capsys, checkpoint, out, "--options", options)
    assert "strict: the policy's pattern(s) 'lm_haed' match no module" in said
    assert "did you mean 'lm_head'" in said and not out.exists()


def test_mistaken_options_are_reported_before_the_model_is_loaded(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "options.json").write_text('{"recipee": "nvfp4"}')
    monkeypatch.setattr(hf.AutoConfig, "from_pretrained", lambda *_: 1 / 0)
    assert "--options" in refused(
        capsys, checkpoint, tmp_path / "out", "--options", tmp_path / "options.json"
    )
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, str(tmp_path / "options.json"))
    assert "did you mean 'recipe'" in refused(capsys, checkpoint, tmp_path / "out")


# ---- classes of models ---------------------------------------------------------------------------

TEXT = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
PICTURES = {**TEXT, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8}
ENCODER = {**TEXT, "num_hidden_layers": 1, "max_position_embeddings": 32}
T5 = {"vocab_size": VOCAB, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4}
BART = {"vocab_size": VOCAB, "d_model": 64, "max_position_embeddings": 64}
BART |= {
    f"{part}_{n}": v
    for part in ("encoder", "decoder")
    for n, v in (("layers", 1), ("ffn_dim", 128), ("attention_heads", 4))
}
# The model, how many of its matrices are in 4 bits, its head, and whether transformers loads it.
TASKS: dict[str, tuple[Callable[[], Any], int, str, bool]] = {
    "reward model": (
        lambda: hf.LlamaForSequenceClassification(hf.LlamaConfig(**SMALL, num_labels=1)),
        *(7, "score", True),
    ),
    "tokens": (
        lambda: hf.LlamaForTokenClassification(hf.LlamaConfig(**SMALL, num_labels=32)),
        *(8, "score", True),
    ),
    "answers": (
        lambda: hf.LlamaForQuestionAnswering(hf.LlamaConfig(**SMALL)),
        *(7, "qa_outputs", True),
    ),
    "masked, tied": (
        lambda: hf.BertForMaskedLM(hf.BertConfig(**ENCODER)),
        8,
        "cls.predictions.transform.dense",
        True,
    ),
    "pictures": (
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**PICTURES, num_labels=32)),
        *(7, "classifier", True),
    ),
    "two towers": (
        lambda: hf.CLIPModel(
            hf.CLIPConfig(
                text_config={**ENCODER, "projection_dim": 32},
                vision_config={**PICTURES, "projection_dim": 32},
                projection_dim=32,
            )
        ),
        *(14, "visual_projection", True),
    ),
    "BART, tied": (
        lambda: hf.BartForConditionalGeneration(hf.BartConfig(**BART)),
        17,
        "lm_head",
        True,
    ),
    "T5": (
        lambda: hf.T5EncoderModel(hf.T5Config(**T5)),
        6,
        "encoder.block.0.layer.1.DenseReluDense.wo",
        False,
    ),
}


@pytest.mark.parametrize("task", TASKS)
def test_the_class_that_was_saved(task: str, tmp_path: Path) -> None:
    """Its own head is exported, in 4 bits or as it is, and loaded; no other is made up."""
    build, count, head, loads = TASKS[task]
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "trained")
    (tmp_path / "trained" / "preprocessor_config.json").write_text('{"size": 32}')
    out = tmp_path / "out"
    assert cli.main(["export", str(tmp_path / "trained"), str(out), "--recipe", "quartet2"]) == 0
    assert (out / "preprocessor_config.json").read_text() == '{"size": 32}'
    said = json.loads((out / "q2compile_export.json").read_text())
    assert len(said["layers"]) == count
    weight = model.get_parameter(f"{head}.weight")
    if f"{head}.weight" in said["layers"]:
        found = modules(out, "weight_packed")[head]
        scales = found["weight_scale"], 1 / found["weight_global_scale"]
        codes = e2m1_values(found["weight_packed"], *scales)
        assert torch.equal(codes, dequantized(weight, "nvfp4_46_pow2"))
    else:
        assert min(weight.shape) < 16 and head in said["left"]
        assert torch.equal(tensors(out)[f"{head}.weight"], weight)
    if loads:
        _, info = type(model).from_pretrained(out, output_loading_info=True)
        assert not any(info.values()), info


def test_t5_keeps_its_tied_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = hf.T5ForConditionalGeneration(hf.T5Config(**T5, decoder_start_token_id=0))
    model.save_pretrained(tmp_path / "trained")
    arguments = [tmp_path / "trained", tmp_path / "out", "--recipe", "quartet2"]
    assert "lm_head.weight: it is tied to an embedding" in refused(capsys, *arguments)
    assert cli.main(["export", *map(str, arguments), "--inexact", "leave"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True
    held = tensors(tmp_path / "out")
    assert torch.equal(held["shared.weight"], model.shared.weight)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "missing keys: score.weight"),
        ({"architectures": ["LlamaModel"]}, "unexpected keys: lm_head.weight"),
        ({"architectures": ["MyLlama"]}, "names the classes ['MyLlama']"),
        ({"architectures": None}, "names the classes []"),
        ({"vocab_size": 2 * VOCAB}, "transformers can't load it"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantized already"),
        ({"model_type": "unheard of"}, "transformers can't load it"),
    ],
)
def test_other_weights_than_those_of_the_class(
    change: dict[str, Any],
    said: str,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, **change}))
    assert said in refused(capsys, checkpoint, tmp_path / "out", "--recipe", "quartet2")
    assert not (tmp_path / "out").exists()


def test_inputs_that_are_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model of sound; a policy that depends on sizes."""
    sound = hf.WhisperConfig(
        **BART, num_mel_bins=16, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    hf.WhisperForConditionalGeneration(sound).save_pretrained(tmp_path / "sound")
    said = refused(capsys, tmp_path / "sound", tmp_path / "out", "--recipe", "quartet2")
    assert "what WhisperForConditionalGeneration is called with is not known" in said
    model_of("llama").save_pretrained(tmp_path / "llama")
    (tmp_path / "options.toml").write_text("[policy]\n'*' = 'auto'\n")
    options = "--options", tmp_path / "options.toml"
    said = refused(capsys, tmp_path / "llama", tmp_path / "out", *options)
    assert "'auto' in the policy decides by the sizes of a training batch" in said
