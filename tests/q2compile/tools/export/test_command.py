# SPDX-License-Identifier: Apache-2.0
"""`q2compile export`: a checkpoint's folder, or a function that returns a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from q2compile.config import CONFIG_FILE_VARIABLE
from q2compile.tools import cli
from tests.support.exported import dequantized, e2m1_values, model_of, modules, tensors

BUILD = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32)), [torch.ones(4, 64), 3 * torch.ones(4, 64)]

def empty():
    return nn.Linear(64, 32), []
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A model in fp32, its tokenizer and generation config."""
    model = model_of("llama").float()
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path / "trained")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(
        tmp_path / "trained"
    )
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
    assert "7 weights in 4 bits (nvfp4-pack-quantized, weight-only)" in capsys.readouterr().out
    found = modules(out, "weight_packed")["model.layers.0.self_attn.q_proj"]
    scales = found["weight_scale"], 1 / found["weight_global_scale"]
    weight = tensors(checkpoint)["model.layers.0.self_attn.q_proj.weight"]
    expected = dequantized(weight, "nvfp4_16x16_pow2")
    assert torch.equal(e2m1_values(found["weight_packed"], *scales), expected)
    assert json.loads((out / "generation_config.json").read_text())["max_new_tokens"] == 7
    assert transformers.AutoTokenizer.from_pretrained(out)("b")["input_ids"] == [1]


def test_a_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "setup_export.py").write_text(BUILD)
    where, out = f"{tmp_path / 'setup_export.py'}:build", tmp_path / "out"
    arguments = ["--format", "safetensors", "--activations", "static"]
    assert cli.main(["export", where, str(out), *arguments]) == 0
    said = json.loads((out / "q2compile_export.json").read_text())["layers"]["0.weight"]
    assert said["input_scale"] == 2.0**-9, "3 / 6 / 448, up to a power of two"
    assert "1 weights in 4 bits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["{folder}", "{folder}/out"],
            "has no config.json; allowed: a folder that save_pretrained",
        ),
        (["nowhere", "{folder}/out"], "allowed: FILE.py:FUNCTION"),
        (["nowhere", "{folder}"], "is a folder that is not empty"),
        (["{folder}/setup_export.py:empty", "{folder}/out"], "returned no batch"),
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
