# SPDX-License-Identifier: Apache-2.0
"""All ranks export a sharded model. The file is that of one process, byte for byte if the forward
quantizes whole weights, shard by shard under tensor parallelism."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import q2compile
from tests.end_to_end.distributed.test_distributed import WORKERS, Ranks, run
from tests.support.exported import dequantized, e2m1_values, tensors

sys.path.insert(0, str(WORKERS))

from training import VOCAB, new_model

SCHEME = "nvfp4_46_pow2"
SCENARIOS = ("fails", "fsdp_plain", "fsdp_packed", "tensor_plain", "stages", "routed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> dict[str, Ranks]:
    return run("export_sharded.py", 2, folder)


def test_all_ranks_came_to_an_end(ranks: dict[str, Ranks]) -> None:
    assert {name: [r.error for r in of] for name, of in ranks.items()} == {
        name: ["", ""] for name in SCENARIOS
    }


def test_each_pipeline_stage_is_written(folder: Path, ranks: dict[str, Ranks]) -> None:
    model = new_model()
    for rank, prefix in enumerate(("", "0.")):
        held = tensors(folder / f"stage{rank}")
        stem = f"{prefix}up.weight"
        parts = (held[f"{stem}.{leaf}"] for leaf in ("codes", "scales", "global_scale"))
        expected = dequantized(model.layers[rank].up.weight, SCHEME)
        assert torch.equal(e2m1_values(*parts), expected)
    assert not (folder / "stages").exists()


def test_static_scales_of_layers_that_some_ranks_reach(
    folder: Path, ranks: dict[str, Ranks]
) -> None:
    said = json.loads((folder / "routed" / "q2compile_export.json").read_text())["layers"]
    scales = {name: layer["input_scale"] for name, layer in said.items()}
    assert scales == {"small.weight": 2.0**-11, "large.weight": 2.0**-9}, "1 and 4, / 6 / 448"


@pytest.mark.parametrize("format", ["safetensors", "compressed-tensors"])
def test_fsdp(format: str, folder: Path, ranks: dict[str, Ranks], tmp_path: Path) -> None:
    """The static scales are those of both ranks' batches. FSDP's hooks break the graph between the
    blocks, so the head is not taken, here as in training."""
    tokens = torch.arange(64).view(2, 32) % VOCAB
    q2compile.export(
        new_model(),
        tmp_path / "out",
        format=format,
        options={"policy": {"head": "bf16"}},
        autocast=torch.bfloat16,
        activations="static",
        calibration=[tokens, (tokens + 1) % VOCAB],
    )
    for file in (tmp_path / "out").iterdir():
        other = folder / f"fsdp_{format}" / file.name
        assert file.name.endswith(".json") or file.read_bytes() == other.read_bytes()
    assert len(list((folder / f"fsdp_{format}").iterdir())) == len(list(file.parent.iterdir()))


def test_tensor_parallel(folder: Path, ranks: dict[str, Ranks]) -> None:
    """gate and up are cut by rows, down by columns; norms and the head are whole on each rank."""
    held, model = tensors(folder / "tensor"), new_model()
    for name in ("gate", "up", "down"):
        w = model.get_parameter(f"layers.0.{name}.weight")
        dim = 1 if name == "down" else 0
        expected = torch.cat([dequantized(part, SCHEME) for part in w.chunk(2, dim)], dim)
        stem = f"layers.0.{name}.weight"
        parts = (held[f"{stem}.{leaf}"] for leaf in ("codes", "scales", "global_scale"))
        assert torch.equal(e2m1_values(*parts), expected), name
    assert torch.equal(held["embed.weight"], model.embed.weight)
