# SPDX-License-Identifier: Apache-2.0
"""`explain`: what the backend would do with a model, as a report; and the command of that name."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from q2compile.backend import quartet2
from q2compile.capture.callers import models_that_run
from q2compile.capture.frames import running
from q2compile.capture.module_tree import unwrapped
from q2compile.config import Config
from q2compile.errors import ConfigError, shown
from q2compile.report.model_coverage import Coverage
from q2compile.report.report import RunReport, collector
from q2compile.tools.as_it_was import as_it_was
from q2compile.tools.given import arguments_of, built, given_options, refuse_no_page
from q2compile.torch_internals.dynamo import not_compiled, original_module


class Report(RunReport):
    """The report that `explain` returns. Print it to see the table; ``to_json()`` returns the rows
    as plain mappings, and ``to_html(path)`` writes the page."""

    def to_html(self, path: str | Path | None = None) -> str:
        """The report as one HTML page; written to ``path`` when given. Returns the page."""
        from q2compile.tools.page.document import report_page  # only who wants a page needs it

        run = self.run.to_json()
        page = report_page("explain", self.to_json(), self.notes, self.graph_files, run=run)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page


def explain(
    model: Any, *args: Any, options: Mapping[str, Any] | Config | None = None, **kwargs: Any
) -> Report:
    """Compile ``model`` once, run ``model(*args, **kwargs)`` forward, and report every matmul.

    options: as for ``torch.compile(model, backend="quartet2", options=...)``.

    The report prints as a table with one row per matmul: module, shape, the recipe of each GEMM,
    whether it is taken and why not, and what is saved for the backward (if gradients are enabled).
    Linears that never reached the backend have rows, too. Errors of the backend are raised.
    Buffers, attributes, gradients, training flags and torch's random state are restored
    afterwards. If ``model`` is a function that steps an optimizer, the optimizer steps.
    """
    if not callable(model):
        raise ConfigError(
            f"explain: model: got {shown(model)}; allowed: a torch.nn.Module or a function"
        )
    is_model = isinstance(model, torch.nn.Module)
    original = original_module(model) if is_model else None
    model = model if original is None else original
    config = Config.from_options(options)
    on_meta = is_model and any(parameter.is_meta for parameter in model.parameters())
    if on_meta and config.inner == "inductor":
        # Together with constants, Inductor folds all meta tensors that a graph returns: nothing
        # would be saved for the backward.
        inductor = {**config.inductor, "joint_graph_constant_folding": False}
        config = replace(config, inductor=inductor)

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        # A function of its own, so that code compiled before by the same options is not reused.
        for running_model in models_that_run(running()):  # by a function, which is not known before
            state.keep_model(running_model)
        state.keep_tensors(example_inputs)
        return quartet2(gm, example_inputs, options=config)

    report = Report()
    token = collector.set(report)
    try:
        with as_it_was(model if is_model else None) as state, not_compiled(model):
            torch.compile(model, backend=backend)(*args, **kwargs)
    finally:
        collector.reset(token)
    if is_model:
        report.add_coverage(Coverage.of(unwrapped(model), config, by_root=report.by_root))
    report.close()
    return report


def run(arguments: Namespace) -> int:
    """`q2compile explain FILE.py:FUNCTION`: prints the report, and writes its page if asked."""
    options = given_options(arguments)
    if arguments.output is not None:
        refuse_no_page(arguments.output)
    model, batches, _ = built(arguments.build)
    args, kwargs = arguments_of(next(batches))
    device = next(model.parameters()).device.type
    dtype = getattr(torch, arguments.autocast) if arguments.autocast else None
    if dtype and device == "meta":
        raise ConfigError("--autocast: torch has none on 'meta'; build the model in that dtype")
    with nullcontext() if dtype is None else torch.autocast(device, dtype):
        report = explain(model, *args, options=options, **kwargs)
    print(report)
    if arguments.output is not None:
        report.to_html(arguments.output)
        print(f"wrote {arguments.output}")
    return 0
