# SPDX-License-Identifier: Apache-2.0
"""Whether a graph is recorded; nothing of the recording is loaded where none is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from q2compile.capture.module_names import Names
from q2compile.telemetry.options import TelemetryOptions


def recorder_of(
    gm: fx.GraphModule, options: TelemetryOptions | None, rows: Iterable[Any], names: Names
) -> Any:
    """The recorder for a rewritten graph whose matmuls have these rows of the report; None without
    the option telemetry, and for a graph that trains no linear of ours.
    """
    if options is None:
        return None
    from q2compile.telemetry import folder, of_graph

    recorder = of_graph.recorder_of(gm, options, rows, names)
    folder.make(options)  # also where nothing is recorded, which is said at exit
    return recorder
