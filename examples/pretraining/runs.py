# SPDX-License-Identifier: Apache-2.0
"""The compared runs: recipes with their options, under the names that tables and files use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LATE = 0.82  # of the steps: NVIDIA's late switch leaves the last 18% a forward in BF16


@dataclass(frozen=True)
class Run:
    """One line of a comparison.

    options    of `torch.compile(model, backend="quartet2", options=...)`
    late       options from step ``late_at`` (a share of the steps) on, by compiling again
    backwards  the sequences of each batch in reverse order (see `batches.Backwards`)
    perturbed  relative standard deviation of a perturbation of the stem's weights, in a branched
               run (see `branching`)
    linear     the linear layers that are quantized, another kind of them (see `linears`)
    against    the run whose difference to this one says something
    about      what it tells, for the page
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    late: Mapping[str, Any] | None = None
    late_at: float = LATE
    backwards: bool = False
    perturbed: float = 0.0
    linear: str = ""
    against: str = "bf16"
    about: str = ""

    def compile_options(self, layers: int, late: bool = False) -> dict[str, Any]:
        """Options for a model of so many layers; "{last}" in a pattern is the last one's number."""
        options = dict(self.late if late and self.late is not None else self.options)
        if "policy" in options:
            policy = options["policy"].items()
            options["policy"] = {key.replace("{last}", str(layers - 1)): v for key, v in policy}
        return options


HEAD_IN_BF16 = {"*lm_head*": "bf16"}  # as in the papers


def recipe(base: str, **changes: Any) -> dict[str, Any]:
    """Options: a recipe with what differs from it, and the output layer in bf16."""
    return {"recipe": {"base": base, **changes} if changes else base, "policy": HEAD_IN_BF16}


_FIXED = {"transform": "rht128_fixed"}

RUNS = {
    run.name: run
    for run in [
        Run("bf16", recipe("bf16")),
        Run(
            "bf16-backwards",
            recipe("bf16"),
            backwards=True,
            about="sums of each batch in another order: the floor of what a gap can mean",
        ),
        Run("quartet2", recipe("quartet2"), about="Quartet II, arXiv 2601.22813"),
        Run("nvfp4", recipe("nvfp4"), about="NVIDIA, arXiv 2509.25149, every linear in FP4"),
        Run("tetrajet2", recipe("tetrajet2"), about="TetraJet-v2, as Quartet II compares it"),
        Run("quartet", recipe("quartet"), about="Quartet, arXiv 2505.14669, MXFP4"),
        Run("mxfp4", recipe("mxfp4"), about="arXiv 2502.20586, backward alone"),
        Run(
            "quartet2-backwards",
            recipe("quartet2"),
            backwards=True,
            against="quartet2",
            about="other random bits and other sums: the same recipe once more",
        ),
        Run(
            "quartet2-forward",
            recipe("quartet2", dgrad="bf16", wgrad="bf16"),
            against="quartet2",
            about="forward alone in FP4",
        ),
        Run(
            "quartet2-backward",
            recipe("quartet2", fprop="bf16"),
            about="backward alone in FP4, MS-EDEN",
        ),
        Run(
            "tetrajet2-backward",
            recipe("tetrajet2", fprop="bf16"),
            against="quartet2-backward",
            about="backward alone in FP4, stochastic rounding",
        ),
        Run(
            "quartet2-rtn",
            recipe("quartet2", fprop="tetrajet2"),
            against="quartet2",
            about="without 4/6: RTN in the forward",
        ),
        Run(
            "quartet2-exact",
            {**recipe("quartet2"), "global_scale": "exact"},
            against="quartet2",
            about="the paper's global scale, from the tensor's amax",
        ),
        Run(
            "quartet2-fixed",
            recipe(
                "quartet2", dgrad={"dy": _FIXED, "w": _FIXED}, wgrad={"dy": _FIXED, "x": _FIXED}
            ),
            against="quartet2",
            about="one sign vector for ever in the rotations",
        ),
        Run(
            "nvfp4-last-bf16",
            {**recipe("nvfp4"), "policy": {**HEAD_IN_BF16, "model.layers.{last}.*": "bf16"}},
            against="nvfp4",
            about="its last layer in BF16",
        ),
        Run(
            "nvfp4-late",
            recipe("nvfp4"),
            late=recipe("nvfp4", fprop="bf16"),
            against="nvfp4",
            about="forward in BF16 for the last 18% of the steps",
        ),
        Run(
            "quartet2-late",
            recipe("quartet2"),
            late=recipe("quartet2", fprop="bf16"),
            against="quartet2",
            about="forward in BF16 for the last 18% of the steps",
        ),
    ]
}


def parse(name: str) -> Run:
    """A run of the table, or one written as NAME=JSON with the fields of `Run`.

    Raises ValueError naming what came and what is allowed.
    """
    if name in RUNS:
        return RUNS[name]
    title, separator, text = name.partition("=")
    if not separator:
        # A recipe's name that is wrong is named by q2compile, with the nearest right one.
        return Run(name, recipe(name))
    try:
        given = json.loads(text)
        given["options"] = {"policy": HEAD_IN_BF16, **given.get("options", {})}
        return Run(title, **given)
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(
            f"--runs {name}: {error}; a run of your own is NAME={{'options': {{...}}}} as JSON, "
            "with late, late_at, backwards, linear, against and about if wanted"
        ) from None
