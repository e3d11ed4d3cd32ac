# SPDX-License-Identifier: Apache-2.0
"""The option ``telemetry``: what quantizing does to each operand, recorded while a model trains.

    of_graph     whether a graph is recorded
    clock        which step it is
    into_graph   what a compiled graph is given to note
    recorder     one graph: which variant runs, and its memory on the device
    watch        the first NaN or Inf
    folder       records on the host: JSONL, CSV, TensorBoard
    read         a folder read back, for the report's page

May import capture, graph, recipes, runtime_kernels, torch_internals and the lock of report.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from q2compile.telemetry.clock import step as step
    from q2compile.telemetry.folder import TelemetryWarning as TelemetryWarning
    from q2compile.telemetry.folder import flush as flush
    from q2compile.telemetry.of_graph import recorder_of as recorder_of

__all__ = ["TelemetryWarning", "flush", "step"]

_HOMES = {
    "TelemetryWarning": "folder",
    "flush": "folder",
    "step": "clock",
    "recorder_of": "of_graph",  # for the backend
}


if not TYPE_CHECKING:  # a checker would take any name for one that this finds

    def __getattr__(name: str) -> Any:
        """Load on first use: most programs record nothing."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"q2compile.telemetry.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
