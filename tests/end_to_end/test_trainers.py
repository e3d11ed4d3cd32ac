# SPDX-License-Identifier: Apache-2.0
"""The examples of examples/trainers, with real trainers, and torchtitan's way to call a backend."""

import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

import q2compile
from q2compile.config import CONFIG_FILE_VARIABLE
from tests.support.small_model import assert_close, gradients, new_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def examples(fresh_compiler, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples" / "trainers")


def example(name):
    """A module of examples/trainers; skipped where its trainer is not installed."""
    trainer = {"hf_trainer": "accelerate", "accelerate_loop": "accelerate"}.get(name, "lightning")
    pytest.importorskip(trainer)
    sys.modules.pop(name, None)
    return importlib.import_module(name)


def taken(folder):
    rows = json.loads((folder / "report.json").read_text())
    return [row["module"] for row in rows if row["taken"]]


def test_the_table_has_the_versions_of_this_suite():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    table = (ROOT / "examples" / "trainers" / "README.md").read_text()
    versions = (ROOT / "tests" / "VERSIONS.md").read_text()
    assert f"| Hugging Face Trainer | {pins['transformers']} (transformers) |" in table
    assert f"\n| accelerate | {pins['accelerate']} |" in table
    assert f"\n| Lightning | {pins['lightning']} |" in table
    for name, written in (("transformers", "transformers"), ("lightning", "Lightning")):
        assert f"{written} {pins[name]}" in versions


def test_hugging_face_trainer(tmp_path):
    """Six optimizer steps of two micro-batches under bf16 autocast, and a checkpoint that the plain
    model loads."""
    hf_trainer = example("hf_trainer")
    options = {"inner": "eager", "strict": True, "dump": str(tmp_path / "graphs")}
    options["policy"] = {"lm_head": "bf16"}
    model, loss = hf_trainer.train(str(tmp_path / "out"), 6, options)
    assert 1 < loss < 4.16  # ln 64: it learns
    names = taken(tmp_path / "graphs")
    assert len(set(names)) == 14 and "model.layers.1.mlp.down_proj" in names
    loaded = type(model).from_pretrained(tmp_path / "out")
    states = loaded.state_dict(), model.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


def test_hugging_face_trainer_on_a_corpus(tmp_path):
    """The program that the measured 100m Llama was trained with, tiny: every linear but the output
    layer is taken, and the loss is that of the held-out text."""
    example("hf_trainer")
    program = importlib.import_module("hf_pretrain")
    (tmp_path / "text").mkdir()
    for part in range(40):
        squares = (f"the square of {i} is {i * i}." for i in range(100 * part, 100 * part + 100))
        (tmp_path / "text" / f"{part}.txt").write_text("\n".join(squares))
    corpus = tmp_path / "corpus"
    from pretraining.corpus import build

    build([tmp_path / "text"], corpus, name="squares", vocab=300, val_bytes=4000, say=str)
    options = ["--size", "tiny", "--steps", "12", "--batch", "2", "--seq", "16"]
    options += ["--eval-batches", "2", "--dump", str(tmp_path / "graphs")]
    found = program.train(
        program.parse_args(["--corpus", str(corpus), *options, "--out", str(tmp_path / "out")]),
        inner="eager",
    )
    assert 0 < found["eval_loss"] < 5.71  # ln 300: it learns
    assert found["tokens"] == 12 * 2 * 16 and found["tokens_per_second"] > 0
    names = taken(tmp_path / "graphs")
    assert len(set(names)) == 7 and not any("lm_head" in name for name in names)


def test_the_trainer_takes_no_backend_that_accelerate_does_not_list(tmp_path):
    """Why the way in is Module.compile. When this fails, the name alone has become enough."""
    example("hf_trainer")
    from accelerate import Accelerator

    with pytest.raises(ValueError, match="(?i)quartet2"):
        Accelerator(dynamo_backend="quartet2", cpu=True)


def test_accelerate(tmp_path):
    loop = example("accelerate_loop")
    options = {"inner": "eager", "strict": True, "dump": str(tmp_path)}
    model, losses = loop.train(20, options, cpu=True)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert taken(tmp_path) == ["up", "down"]
    assert list(model.state_dict()) == ["up.weight", "up.bias", "down.weight", "down.bias"]


def test_lightning(tmp_path):
    example_module = example("lightning_module")
    options = {"inner": "eager", "strict": True, "dump": str(tmp_path)}
    module = example_module.train(40, options, accelerator="cpu")
    assert sum(module.losses[-5:]) < 0.8 * sum(module.losses[:5])
    assert taken(tmp_path) == ["network.up", "network.down"]
    assert list(module.state_dict())[0] == "network.up.weight"


def test_the_trainer_resumes_to_the_bit_with_a_seed(tmp_path, monkeypatch):
    """Five steps, the last of them after a checkpoint: the random bits of the backward go on
    where they were, which torch's generators do not say."""
    hf_trainer = example("hf_trainer")
    monkeypatch.setattr(hf_trainer, "SAVE_STEPS", 4)
    options = {"inner": "eager", "policy": {"lm_head": "bf16"}, "seed": 7}
    whole, _ = hf_trainer.train(str(tmp_path / "out"), 5, options)
    (saved,) = json.loads((tmp_path / "out/checkpoint-4/q2compile_rng.json").read_text()).values()
    assert saved["7"] > 0
    q2compile.set_rng_state({})
    torch._dynamo.reset()
    shutil.rmtree(tmp_path / "out" / "checkpoint-5", ignore_errors=True)
    resumed, _ = hf_trainer.train(str(tmp_path / "out"), 5, options, resume=True)
    states = resumed.state_dict(), whole.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


def test_checkpoints_of_accelerate_and_lightning_have_the_counter(tmp_path):
    options = {"inner": "eager", "seed": 7}
    loop = example("accelerate_loop")
    q2compile.set_rng_state({})
    loop.train(2, options, cpu=True, checkpoint=str(tmp_path / "accelerate"))
    (file,) = (tmp_path / "accelerate").glob("custom_checkpoint_*.pkl")
    state = torch.load(file, weights_only=True)
    assert state == q2compile.get_rng_state() and state["cpu"][7] > 0
    torch._dynamo.reset()
    module = example("lightning_module")
    trained = module.train(2, options, accelerator="cpu", checkpoint=str(tmp_path / "l.ckpt"))
    state = torch.load(tmp_path / "l.ckpt", weights_only=False)["q2compile"]
    assert state == q2compile.get_rng_state()
    q2compile.set_rng_state({})
    trained.on_load_checkpoint({"q2compile": state})
    assert q2compile.get_rng_state() == state


def test_a_backend_named_per_block_takes_its_options_from_the_file(tmp_path, monkeypatch):
    """torchtitan's call, which this repeats: each block compiled by the backend's name alone, with
    fullgraph=True. torchtitan itself is not installed here (examples/trainers/README.md)."""
    path, graphs = tmp_path / "q2.toml", tmp_path / "graphs"
    path.write_text(
        f'inner = "eager"\nstrict = true\ndump = "{graphs}"\n[policy]\n"*.down" = "bf16"\n'
        '"head" = "bf16"\n'
    )
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, str(path))
    model = new_model()
    for _, block in model.layers.named_children():
        block.compile(backend="quartet2", fullgraph=True)
    grads = gradients(model, model)
    assert taken(graphs) == ["layers.0.up"]
    note = (graphs / "report.txt").read_text()
    assert "also runs equal modules: layers.1.up, layers.1.down" in note
    plain = new_model()
    assert_close(grads, gradients(plain, plain))
