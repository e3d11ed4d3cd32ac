# SPDX-License-Identifier: Apache-2.0
"""How long the matmuls of a report take on this machine, each alone, beside BF16."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.utils.benchmark import Timer

import q2compile.linear.dense  # noqa: F401  registers q2::linear
from q2compile.compiler.compile_graph import compile_graph, compile_plain
from q2compile.config import Config
from q2compile.errors import ConfigError

SECONDS = 0.2  # at least, of each


def measure(
    rows: Iterable[dict[str, Any]], inner: Literal["inductor", "eager"] = "inductor"
) -> None:
    """Set ``measured`` of the rows that were taken: {"device", "microseconds", "bf16_microseconds"}
    of one forward and backward in bf16, launches included, what is before and after not fused.

    Equal matmuls are timed once; experts, and shapes with a symbol, are left out. Raises ValueError
    where this machine lacks the device that the rows were compiled for.
    """
    config = Config(inner=inner)
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        if (
            not row["taken"]
            or len(row["shape"]) != 3
            or any(isinstance(n, str) for n in row["shape"])
        ):
            continue
        gemms = row["fprop"], row["dgrad"], row["wgrad"]
        key = *gemms, *row["shape"], row["device"]
        if key not in known:
            known[key] = _measured(config, gemms, row["shape"], _device(row["device"]))
        row["measured"] = known[key]


def _device(name: str) -> torch.device:
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name not in ("cpu", here.type if here else "cpu"):
        raise ConfigError(
            f"--measure: these matmuls were compiled for {name!r}, which this machine lacks; run "
            "the command on a machine that has it, or leave out --measure"
        )
    return torch.device(name)


def _measured(
    config: Config, gemms: tuple[str, str, str], shape: list[int], device: torch.device
) -> dict[str, Any]:
    t, n, k = shape
    x, w, dy = (
        torch.randn(size, dtype=torch.bfloat16, device=device) for size in ((t, k), (n, k), (t, n))
    )
    x.requires_grad_()
    w.requires_grad_()

    def quantized(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.ops.q2.linear(x, w, None, *gemms, 0)

    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w)

    times = {}
    for name, function, backend in (
        ("microseconds", quantized, partial(compile_graph, config=config, root=None)),
        ("bf16_microseconds", plain, partial(compile_plain, config=config)),
    ):
        torch.compiler.reset()  # or the next shape would be compiled for any shape
        linear = torch.compile(function, backend=backend, dynamic=False)
        times[name] = round(1e6 * _seconds(linear, x, w, dy), 2)
    return {"device": _name(device), **times}


def _seconds(linear: Callable[..., torch.Tensor], x: Any, w: Any, dy: Any) -> float:
    def step() -> None:
        torch.autograd.grad(linear(x, w), (x, w), dy)

    step()  # compiles
    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=SECONDS).median)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
