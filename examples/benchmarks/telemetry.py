"""What telemetry costs a training step: the same Llama with it and without, in one run.

    python examples/benchmarks/telemetry.py [--device cpu] [--mode reduce-overhead] [--out FILE]

    telemetry_every_100  a step with {"telemetry": {"every": 100}}, the mean of 100 steps of which
                         one is recorded; over the step without telemetry
    telemetry_idle       a step in which nothing is recorded; over the same
    telemetry_recorded   the recorded step alone, from those two; over the same

A step is forward and backward of Hugging Face's Llama; on a GPU that of models.py (width 2048, MLP
8192, 2 layers, 8 x 2048 tokens, bf16 autocast), on a CPU a very small one, which says how long the
program's own work takes, and nothing of a GPU. Times are of the wall clock over 100 steps, the
device waited for at their end; medians of rounds in which the three take turns.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from q2compile import telemetry

RESULTS = Path(__file__).parent / "results"
EVERY = 100
ON_GPU: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
ON_CPU: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}


def training_steps(
    device: torch.device, mode: str | None, folder: str
) -> dict[str, Callable[[], None]]:
    """Variant -> one training step of the same model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    on_gpu = device.type != "cpu"
    config = LlamaConfig(**(ON_GPU if on_gpu else ON_CPU), use_cache=False)
    model: torch.nn.Module = LlamaForCausalLM(config)
    model.to(device)
    shape = (8, 2048) if on_gpu else (2, 64)
    tokens = torch.randint(config.vocab_size, shape, device=device)
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "idle": {"telemetry": {"every": 10**9, "to": f"{folder}/idle"}},
        "every": {"telemetry": {"every": EVERY, "to": f"{folder}/every"}},
    }

    def step_of(name: str) -> Callable[[], None]:
        own = {**options[name], **({"mode": mode} if mode else {})}
        compiled = torch.compile(model, backend="quartet2", options=own)

        def step() -> None:
            model.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16):
                loss = compiled(input_ids=tokens, labels=tokens).loss
            loss.backward()
            telemetry.step()

        return step

    return {name: step_of(name) for name in options}


def measure(device: torch.device, mode: str | None, rounds: int) -> list[dict[str, Any]]:
    """The rows of the table above."""
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        steps = training_steps(device, mode, folder)
        for step in steps.values():
            # Both variants of both graphs, each often enough for a CUDA graph to be captured.
            for number in (0, 1, 2, EVERY, EVERY + 1, EVERY + 2, 0, 1, 2):
                telemetry.step(number)
                step()
        for _ in range(rounds):
            for name, step in steps.items():
                telemetry.step(1)
                _wait(device)
                start = time.perf_counter()
                for _ in range(EVERY):  # steps 1 to 100
                    step()
                _wait(device)
                times.setdefault(name, []).append((time.perf_counter() - start) / EVERY)
        telemetry.flush()
    seconds = {name: statistics.median(own) for name, own in times.items()}
    plain, idle, every = (seconds[name] for name in ("plain", "idle", "every"))
    recorded = idle + EVERY * (every - idle)
    found = {"every_100": every, "idle": idle, "recorded": recorded}
    return [
        {
            "name": f"telemetry_{name}",
            "ratio": round(own / plain, 4),
            "unit": "times the step without telemetry",
            "milliseconds": round(1e3 * own, 3),
            "without": round(1e3 * plain, 3),
            "mode": mode or "default",
        }
        for name, own in found.items()
    ]


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, type=torch.device)
    parser.add_argument("--mode", help="of Inductor, such as reduce-overhead")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "telemetry.json")
    args = parser.parse_args()
    device = torch.cuda.get_device_name() if args.device.type == "cuda" else str(args.device)
    about = {
        "device": device,
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "date": datetime.date.today().isoformat(),
        "command": "python examples/benchmarks/telemetry.py"
        + (f" --mode {args.mode}" if args.mode else ""),
    }
    rows = [{**row, **about} for row in measure(args.device, args.mode, args.rounds)]
    for row in rows:
        print(row, flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
