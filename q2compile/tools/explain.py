"""`explain`: what the backend would do with a model, as a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from q2compile.backend import quartet2
from q2compile.config import Config
from q2compile.report.model_coverage import Coverage
from q2compile.report.report import Report, collector
from q2compile.torch_internals.dynamo import not_compiled


def explain(
    model: Any, *args: Any, options: Mapping[str, Any] | Config | None = None, **kwargs: Any
) -> Report:
    """Compile ``model`` once, run ``model(*args, **kwargs)`` forward, and report every matmul.

    options: as for ``torch.compile(model, backend="quartet2", options=...)``.

    The report prints as a table, with one row per matmul: module, shape, the recipe of each GEMM,
    taken or not and why, and what is saved for backward (when the call runs with gradients
    enabled). Linears that the forward did not bring to the backend are rows too. Raises what the
    backend raises.
    """
    model = getattr(model, "_orig_mod", model)
    config = Config.from_options(options)

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        # A function of its own, so that code compiled before by the same options is not reused.
        return quartet2(gm, example_inputs, options=config)

    report = Report()
    token = collector.set(report)
    try:
        with not_compiled(model):
            torch.compile(model, backend=backend)(*args, **kwargs)
    finally:
        collector.reset(token)
    if isinstance(model, torch.nn.Module):
        report.add_coverage(Coverage.of(model, config))
    report.close()
    return report
