# SPDX-License-Identifier: Apache-2.0
"""Models that can't be exported raise a ValueError with the fix, and leave nothing on disk."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import q2compile
from q2compile.errors import ConfigError
from q2compile.tools.export import shards
from tests.support.exported import decompressed, dequantized, model_of, tensors, tokens

X = torch.ones(4, 64, dtype=torch.bfloat16)
INPUTS = {"input_ids": tokens()}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "o_proj"):
            setattr(self, name, nn.Linear(64, 64, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.q_proj(x) * self.k_proj(x))


def plain() -> nn.Module:
    return Attention().bfloat16()


def far_apart() -> nn.Module:
    """k is 2^-20 of q: e4m3 spans 2^17, and loses bits in the last 2^3."""
    model = plain()
    with torch.no_grad():
        model.k_proj.weight.mul_(2.0**-20)
    return model


def with_nan() -> nn.Module:
    model = plain()
    with torch.no_grad():
        model.o_proj.weight[3, 5] = torch.nan
    return model


def with_scale() -> nn.Module:
    model = plain()
    model.q_proj.register_buffer("weight_scale", torch.ones(1))
    return model


def meta() -> nn.Module:
    return plain().to("meta")


def odd() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 32)).bfloat16()


OPTIONS: dict[str, Any] = {"options": {}, "example_inputs": (X,)}
QUARTET = {"recipe": "quartet"}
REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "unknown format": (plain, {"format": "compressed-tensor"}, "did you mean 'compressed-tensors'"),
    "unknown activations": (plain, {"activations": "weights"}, "Allowed: weight-only, dynamic"),
    "unknown inexact": (plain, {"inexact": "skip"}, "Allowed: raise, leave"),
    "not compiled": (
        plain,
        {"options": None},
        "not compiled by the backend quartet2.*has q_proj, k_proj, o_proj. Pass the options",
    ),
    "no inputs": (plain, {"example_inputs": None}, "pass example_inputs="),
    "meta": (meta, {}, "3 parameters are on 'meta'.*'q_proj.weight' first; load the weights"),
    "no model": (dict, {}, "allowed: a torch.nn.Module"),
    "no taken layer": (plain, {"options": {"policy": {"*": "bf16"}}}, "policy: '.' says bf16"),
    "bf16 forward": (plain, {"options": {"recipe": "mxfp4"}}, "forward is bf16.*save_pretrained"),
    "rotated": (plain, {"options": QUARTET}, "rotated by h32.*format='safetensors'"),
    "float32": (
        lambda: plain().float(),
        {"example_inputs": (X.float(),)},
        "runs in float32 here.*autocast=torch.bfloat16",
    ),
    "siblings far apart": (
        far_apart,
        {},
        "k_proj.weight: 256 of 256 block scales are too small for e4m3.*inexact='leave'",
    ),
    "not finite": (with_nan, {}, "the weight of 'o_proj' holds a NaN or an Inf"),
    "no whole blocks": (
        odd,
        {"example_inputs": (X[:, :40],)},
        "its 40 columns are not whole blocks of 16.*format='safetensors' holds the padded",
    ),
    "dynamic NVFP4": (plain, {"activations": "dynamic"}, "no 'dynamic' activations.*use 'static'"),
    "static of nothing": (plain, {"activations": "static"}, "got neither"),
    "calibration for nothing": (plain, {"calibration": [(X,)]}, "is for activations='static'"),
    "no batch": (
        plain,
        {"activations": "static", "calibration": []},
        "export: calibration: there is no batch",
    ),
    "no autocast": (plain, {"autocast": torch.int8}, "autocast: got torch.int8"),
    "shards of None": (plain, {"max_shard_bytes": None}, "max_shard_bytes: got None; allowed"),
    "shards of 0": (plain, {"max_shard_bytes": 0}, "max_shard_bytes: got 0; allowed: a positive"),
    "shards of -1": (plain, {"max_shard_bytes": -1}, "got -1; allowed"),
    "shards of True": (plain, {"max_shard_bytes": True}, "got True; allowed"),
    "shards of 5 pounds": (plain, {"max_shard_bytes": "5 lb"}, "got '5 lb'.*such as '5GB'"),
    "a batch for batches": (
        plain,
        {"activations": "static", "calibration": X},
        "calibration: got a Tensor in place of batches",
    ),
    "batches for a batch": (
        plain,
        {"example_inputs": iter([X])},
        "example_inputs: got a list_iterator; allowed: one batch",
    ),
    "a name of the format": (with_scale, {}, "of its own that is called 'q_proj.weight_scale'"),
    "a parameter that is no module's weight": (
        lambda: nn.MultiheadAttention(64, 4).bfloat16(),
        {"example_inputs": (X, X, X)},
        "codes of modules, and 'in_proj_weight' is not.*format='safetensors'",
    ),
    "unknown option": (plain, {"options": {"recipes": "nvfp4"}}, "did you mean 'recipe'"),
}


def test_refused(tmp_path: Path) -> None:
    for what in REFUSED:
        build, arguments, message = REFUSED[what]
        with pytest.raises(ConfigError, match=f"(?s){message}"):
            q2compile.export(build(), tmp_path / "out", **{**OPTIONS, **arguments})
        assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    for folder in ("out", "out/mine.txt"):
        with pytest.raises(ConfigError, match="not empty|is no folder"):
            q2compile.export(plain(), tmp_path / folder, **OPTIONS)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine.txt"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["volume", "link"])
def test_an_empty_folder_is_written_into(kind: str, tmp_path: Path) -> None:
    """Nothing takes its place: it may be a mount point, which a rename can't replace."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "lost+found").mkdir()  # of a new file system
    out = tmp_path / ("real" if kind == "volume" else "link")
    if kind == "link":
        out.symlink_to("real")
    before = out.stat().st_ino
    q2compile.export(plain(), out, **OPTIONS)
    assert out.stat().st_ino == before and out.is_symlink() == (kind == "link")
    names = {"lost+found", "model.safetensors", "config.json", "q2compile_export.json"}
    assert {path.name for path in out.iterdir()} == names
    assert {path.name for path in tmp_path.iterdir()} == {"real", out.name}


def test_a_failure_leaves_an_empty_folder_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def last_fails(source: Path, target: Path) -> None:
        if target.suffix == ".json":
            raise OSError(errno.EDQUOT, "Disk quota exceeded", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", last_fails)
    with pytest.raises(OSError, match="quota"):
        q2compile.export(plain(), tmp_path, **OPTIONS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["{folder}/file/out", "/proc/none/out", "{folder}/" + 300 * "x"])
def test_a_destination_is_checked_before_the_work(where: str, tmp_path: Path) -> None:
    """The model is on meta, which an export finds out afterwards."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't be written: .*; give the path of a new folder"):
        q2compile.export(meta(), where.format(folder=tmp_path), **OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["", "a\0b", 3])
def test_what_is_no_path(name: Any) -> None:
    with pytest.raises(ConfigError, match="export: folder: got .*; allowed: a path"):
        q2compile.export(meta(), name, **OPTIONS)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, value: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("q2compile.tools.export.write.write_json", full)
    with pytest.raises(OSError, match="No space left"):
        q2compile.export(plain(), tmp_path / "out", **OPTIONS)
    assert list(tmp_path.iterdir()) == []
    assert shards.checked_folder(tmp_path / "out") == tmp_path / "out"


def test_leave_says_what_and_why(tmp_path: Path) -> None:
    """q and k, which loaders fuse, stay in bf16; o is exported."""
    model = far_apart()
    done = q2compile.export(model, tmp_path / "out", **OPTIONS, inexact="leave")
    assert done.layers.keys() == {"o_proj.weight"}
    assert done.left.keys() == {"q_proj.weight", "k_proj.weight"}
    assert "256 of 256 block scales" in str(done)
    held = tensors(tmp_path / "out")
    assert torch.equal(held["k_proj.weight"], model.k_proj.weight)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["q_proj", "k_proj"]
    # Alone each is exact: a format whose loaders fuse nothing takes them.
    done = q2compile.export(model, tmp_path / "plain", **OPTIONS, format="safetensors")
    assert len(done.layers) == 3


@pytest.mark.parametrize("exponent", [-12, -16])
def test_siblings_apart_as_far_as_e4m3_spans(exponent: int, tmp_path: Path) -> None:
    """Scales of 4 bits down to 2^-6, of 1 bit down to 2^-9: one value per block, 1.0 in q and a
    power of two in k."""
    model = plain()
    with torch.no_grad():
        model.q_proj.weight.copy_(torch.eye(64).repeat_interleave(1, 0))
        model.k_proj.weight.copy_(model.q_proj.weight * 6 * 2.0**exponent)
    q2compile.export(model, tmp_path / "out", **OPTIONS)
    found = decompressed(tmp_path / "out")
    for name in ("q_proj", "k_proj"):
        own = dequantized(model.get_parameter(f"{name}.weight"), "nvfp4_46_pow2")
        assert torch.equal(found[name], own)


def test_part_of_what_vllm_fuses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = {"*v_proj": "bf16"}
    done = q2compile.export(
        model_of("llama"), tmp_path / "out", options={"policy": policy}, example_inputs=INPUTS
    )
    assert "vLLM fuses them and rejects that" in done.notes[0] and "v_proj" in done.notes[0]
    assert done.notes[0] in caplog.text


def test_what_transformers_does_not_read(tmp_path: Path) -> None:
    done = q2compile.export(
        model_of("qwen3_moe"), tmp_path / "moe", options={}, example_inputs=INPUTS
    )
    assert "ignores the global scale of experts" in done.notes[0]
    done = q2compile.export(model_of("gpt2"), tmp_path / "gpt2", options={}, example_inputs=INPUTS)
    assert "does not load codes into Conv1D" in done.notes[0]
    with pytest.raises(ConfigError, match="stored transposed.*use format='safetensors'"):
        q2compile.export(
            model_of("gpt2"),
            tmp_path / "modelopt",
            options={},
            example_inputs=INPUTS,
            format="modelopt",
        )
