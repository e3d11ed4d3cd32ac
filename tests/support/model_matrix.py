# SPDX-License-Identifier: Apache-2.0
"""The models of `model_zoo`: one training step under the backend, compared with the model's own.

    python -m tests.support.model_matrix [MODEL ...] [--write]

prints a row of the table in `tests/MODELS.md` for each model (all by default), or writes that file
anew. The rewritten graphs run eagerly.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from q2compile.report.report import RunReport, collector
from q2compile.report.row import Row
from tests.support import model_zoo

TABLE = Path(__file__).resolve().parents[1] / "MODELS.md"
PRODUCT = "activation × activation"  # why a matmul without a weight is left; not in the table


def step(model: nn.Module, inputs: dict[str, Any], call: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one step and the gradients by name."""
    model.zero_grad()
    out = call(**inputs)
    loss = out if isinstance(out, Tensor) else out.loss
    loss.backward()
    named = model.named_parameters()
    return loss.detach(), {name: p.grad for name, p in named if p.grad is not None}


def cosine(a: list[Tensor], b: list[Tensor]) -> float:
    """The cosine of the two vectors that the tensors of each list form."""
    vectors = (torch.cat([t.flatten().float() for t in tensors]) for tensors in (a, b))
    return F.cosine_similarity(*vectors, dim=0).item()


def step_and_report(
    model: nn.Module, inputs: dict[str, Any], inner: str
) -> tuple[Tensor, dict[str, Tensor], RunReport]:
    """A step under the backend, and its report."""
    torch._dynamo.reset()
    report = RunReport()
    token = collector.set(report)
    try:
        options = {"inner": inner}
        compiled = torch.compile(model, backend="quartet2", options=options)
        loss, grads = step(model, inputs, compiled)
    finally:
        collector.reset(token)
    return loss, grads, report


@dataclass(frozen=True)
class Result:
    """A model's step under the backend, compared with its own.

    rows: the report's; graphs: how many were compiled
    loss_change: relative
    cosines: of each weight's gradient with the model's own; whole: of all of them together
    """

    rows: list[Row]
    graphs: int
    loss_change: float
    cosines: dict[str, float]
    whole: float

    @property
    def taken(self) -> int:
        return sum(row.taken for row in self.rows)

    @property
    def weights(self) -> int:
        """Matmuls with a weight."""
        return sum(row.has_parameter for row in self.rows)

    def left(self) -> Counter[str]:
        """Why matmuls were left, and how often each reason was given."""
        return Counter(row.why for row in self.rows if not row.taken)


def run(name: str, inner: str) -> Result:
    """One model of the zoo. Raises ValueError if a weight gets a gradient in only one of the two
    steps.
    """
    torch.manual_seed(0)
    model, inputs = model_zoo.BUILDERS[name]()
    model.train()
    own_loss, own = step(model, inputs, model)
    loss, grads, report = step_and_report(model, inputs, inner)
    if grads.keys() != own.keys():
        raise ValueError(f"{name}: gradients of {grads.keys() ^ own.keys()} in one step alone")
    weights = [parameter for parameter, grad in own.items() if grad.ndim >= 2]
    return Result(
        report.rows,
        report.graphs,
        ((loss - own_loss).abs() / own_loss).item(),
        {p: cosine([grads[p]], [own[p]]) for p in weights},
        cosine([grads[p] for p in weights], [own[p] for p in weights]),
    )


def table_row(name: str, result: Result) -> str:
    """One line of the table; a reason is shown up to its first semicolon."""
    whys: Counter[str] = Counter()
    for why, count in result.left().items():
        if PRODUCT in why:
            continue
        whys[why.partition(";")[0].replace("|", "\\|")] += count
    left = "; ".join(f"{count} × {why}" for why, count in whys.items())
    return (
        f"| {name} | {result.taken} / {result.weights} | {left} | {100 * result.loss_change:.2f}% "
        f"| {result.whole:.3f} | {min(result.cosines.values()):.3f} |"
    )


def header() -> str:
    today = datetime.datetime.now(datetime.timezone.utc).date()
    return f"""# Unmodified models

One training step of each model in `tests/support/model_zoo.py` (random weights, tiny sizes, CPU).
Written by `python {" ".join(["-m tests.support.model_matrix", *sys.argv[1:]])}` on {today},
torch {torch.__version__}, transformers {transformers.__version__}, rewritten graphs run by
eager.

"Taken" counts quantized matmuls among those with a weight; "left" gives reasons for the others.
Products of two activations, as in attention, are left in all models. Loss and gradients are
compared with the uncompiled model's. `tests/end_to_end/test_models.py` checks all but the exact
figures.

| model | taken | left | loss differs | gradients' cosine | lowest weight's |
|---|---|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    args = parser.parse_args()
    lines = []
    for name in args.models or model_zoo.BUILDERS:
        lines.append(table_row(name, run(name, "eager")))
        print(lines[-1], flush=True)
    if args.write:
        TABLE.write_text(header() + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
