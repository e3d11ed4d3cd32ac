# SPDX-License-Identifier: Apache-2.0
"""Writes what `q2compile bench` compares a machine with, as the references give it on this CPU:

python -m tests.support.bench_references codes       in some minutes on two cores
python -m tests.support.bench_references losses      in a minute on 16
"""

from __future__ import annotations

import json
import multiprocessing
import platform
import re
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from q2compile.recipes.published import RECIPES
from q2compile.runtime_kernels.registry import REFERENCE
from q2compile.tools.bench import codes
from q2compile.tools.bench.losses import LAST, train

SEEDS = 4
_FOLDER = Path(codes.__file__).parent


def codes_of_references() -> dict[str, Any]:
    """Hashes of the outputs of every quantizer, by shape and case."""
    result: dict[str, Any] = {
        "what": "sha256 of the outputs of quantizers, by the references on a CPU",
        "command": "python -m tests.support.bench_references codes",
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    for shape in (codes.SMALL, codes.SHAPE):
        key = "x".join(map(str, shape))
        result[key] = {}
        for name, make in codes.calls(torch.device("cpu"), shape):
            start = time.perf_counter()
            result[key][name] = codes.hashes(make(), REFERENCE)
            print(f"{key} {name}: {time.perf_counter() - start:.1f} s", flush=True)
    return result


def losses_of_references() -> dict[str, Any]:
    """The mean of some runs of each recipe, and how far their last losses differ."""
    seeds = {recipe: SEEDS if recipe != "bf16" else 1 for recipe in RECIPES}
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        runs = {
            recipe: [pool.submit(_run, recipe, seed) for seed in range(1, 1 + count)]
            for recipe, count in seeds.items()
        }
        curves = {name: _curve([run.result() for run in own]) for name, own in runs.items()}
    return {
        "what": f"losses of the model of losses.py, {SEEDS} runs with other random bits on a CPU",
        "command": "python -m tests.support.bench_references losses",
        "torch": torch.__version__,
        "curves": curves,
    }


def _run(recipe: str, seed: int) -> list[float]:
    torch.set_num_threads(1)
    return train(recipe, torch.device("cpu"), seed)


def _curve(runs: list[list[float]]) -> dict[str, Any]:
    lasts = [statistics.fmean(run[-LAST:]) for run in runs]
    return {
        "mean": [round(statistics.fmean(step), 4) for step in zip(*runs, strict=True)],
        "deviation": round(statistics.stdev(lasts), 5) if len(lasts) > 1 else 0.0,
    }


def main() -> None:
    """Write codes.json or losses.json, in which each curve is one line."""
    made = {"codes": codes_of_references, "losses": losses_of_references}[sys.argv[1]]()
    text = json.dumps(made, indent=1) + "\n"
    text = re.sub(r"\[[^]]*\]", lambda curve: " ".join(curve[0].split()), text)
    (_FOLDER / f"{sys.argv[1]}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
