# SPDX-License-Identifier: Apache-2.0
"""Rows `telemetry_*` of steps.py: the time that telemetry adds to a step."""

from __future__ import annotations

import statistics
import tempfile
import time
from argparse import Namespace
from typing import Any

import torch
from rows import Row
from workloads import GPU, LLAMA, LLAMA_BATCH, LLAMA_SEQUENCE, TINY_LLAMA, Step, llama

from q2compile import telemetry

EVERY = 100


def _telemetry_steps(device: torch.device, mode: str | None, folder: str) -> dict[str, Step]:
    """Variant -> one training step of the same model."""
    on_gpu = device.type != "cpu"
    config = {**LLAMA, "num_hidden_layers": 2} if on_gpu else TINY_LLAMA
    model = llama(config, device=device)
    shape = (LLAMA_BATCH, LLAMA_SEQUENCE) if on_gpu else (2, 64)
    tokens = torch.randint(config["vocab_size"], shape, device=device)
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "idle": {"telemetry": {"every": 10**9, "to": f"{folder}/idle"}},
        "every": {"telemetry": {"every": EVERY, "to": f"{folder}/every"}},
    }

    def step_of(name: str) -> Step:
        own = {**variants[name], **({"mode": mode} if mode else {})}
        compiled: Any = torch.compile(model, backend="quartet2", options=own)

        def step() -> None:
            model.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16):
                loss = compiled(input_ids=tokens, labels=tokens).loss
            loss.backward()
            telemetry.step()

        return step

    return {name: step_of(name) for name in variants}


def telemetry_cost(args: Namespace) -> list[Row]:
    """From the wall clock over 100 steps, with a synchronization at their end."""
    device = GPU if torch.cuda.is_available() else torch.device("cpu")
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        steps = _telemetry_steps(device, args.mode, folder)
        for step in steps.values():
            # Both variants of both graphs, each often enough for a CUDA graph to be captured.
            for number in (0, 1, 2, EVERY, EVERY + 1, EVERY + 2, 0, 1, 2):
                telemetry.step(number)
                step()
        for _ in range(args.rounds):
            for name, step in steps.items():
                telemetry.step(1)
                _wait(device)
                start = time.perf_counter()
                for _ in range(EVERY):  # steps 1 to 100
                    step()
                _wait(device)
                times.setdefault(name, []).append((time.perf_counter() - start) / EVERY)
        telemetry.flush()
    plain, idle, every = (statistics.median(times[name]) for name in ("plain", "idle", "every"))
    found = {"every_100": every, "idle": idle, "recorded": idle + EVERY * (every - idle)}
    return [
        {
            "name": f"telemetry_{name}",
            "ratio": round(own / plain, 4),
            "unit": "times the step without telemetry",
            "milliseconds": round(1e3 * own, 3),
            "without": round(1e3 * plain, 3),
            "mode": args.mode or "default",
        }
        for name, own in found.items()
    ]


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()
