# SPDX-License-Identifier: Apache-2.0
"""A program: what a process with q2compile is like after models were trained in it, one with each
recipe and each option. Writes the changes as JSON: by plain torch.compile, run once more than it
takes to import everything, and by q2compile.

    python -m tests.support.neighbors_state FILE
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch import nn

from tests.support.process_state import changes, settings, state
from tests.support.small_model import Mlp

RECIPES = ("nvfp4", "quartet")  # beside those that Inductor compiles
EAGER = {"inner": "eager"}


def options(folder: str) -> dict[str, list[dict[str, Any]]]:
    """Options to compile models with, in groups. Changes stay, and are compared with the state
    before the first: settings after each training, all of it after each group. So options that do
    not exclude each other share a training.
    """
    recipes: list[dict[str, Any]] = [{"recipe": name} for name in ("bf16", "quartet2")]
    recipes += [{"recipe": name, **EAGER} for name in RECIPES]
    return {
        "recipes": [*recipes, {"policy": {"*": "bf16"}}],
        "cache_weights, dump, fuse_rotations, inductor": [
            {
                "cache_weights": True,
                "dump": f"{folder}/dump",
                "fuse_rotations": True,
                "inductor": {"nan_asserts": True},
            }
        ],
        "other options": [
            {"telemetry": {"every": 1, "to": f"{folder}/telemetry"}, "on_error": "bf16", **EAGER},
            {"keep_packed": True, **EAGER},
            {
                "strict": True,
                "recompute_weights": True,
                "disable_passes": ["share_operands"],
                "global_scale": "exact",
                **EAGER,
            },
        ],
    }


def names() -> list[str]:
    """The names of the cases that are written."""
    return [*options(""), "tools"]


def train(compiled: Callable[..., Any], model: nn.Module) -> None:
    """Two steps, an evaluation, and nothing is left of them."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        compiled(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        compiled(torch.randn(32, 64))


def train_with(backend: str, given: dict[str, Any] | None = None, checkpointed: bool = False):
    torch._dynamo.reset()
    model = Mlp(checkpointed)
    train(torch.compile(model, backend=backend, options=given), model)


def tools(q2compile: Any) -> None:
    """explain and compare."""
    torch._dynamo.reset()
    q2compile.explain(Mlp(), torch.randn(32, 64), options=EAGER)
    q2compile.compare(Mlp(), [torch.randn(32, 64)], options=EAGER, loss=lambda y: y.square().mean())


def main() -> None:
    gc.unfreeze()  # forked.py froze what it had imported, whose number is compared
    # A graph out of a cache would leave out what compiling it does to the process.
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    with tempfile.TemporaryDirectory() as folder:
        for checkpointed in (False, True, False, True):  # twice: the first imports
            train_with("inductor", None, checkpointed)
        torch.manual_seed(0)
        before, set_before = state(), settings()
        train_with("inductor")
        by_torch = changes(before, state())
        found: dict[str, dict[str, str]] = {}
        for name, group in options(folder).items():
            for given in group:
                train_with("quartet2", given, checkpointed="keep_packed" in given)
                found.setdefault(name, {}).update(changes(set_before, settings()))
            found[name].update(changes(before, state()))
        import q2compile

        tools(q2compile)
        q2compile.telemetry.flush()
        found["tools"] = changes(before, state())
    Path(sys.argv[1]).write_text(json.dumps({"by torch": by_torch, **found}))


if __name__ == "__main__":
    main()
