# SPDX-License-Identifier: Apache-2.0
"""When a stage of q2compile raises: the error for the user, and how the graph still runs."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path

from torch import fx

from q2compile.config import Config
from q2compile.errors import BackendError, StageError
from q2compile.failures import reproducer

REWRITE = "capture and rewrite"
COMPILE = "compilation of the rewritten graph"


class FaultWarning(RuntimeWarning):
    """A stage of q2compile raised, so the graph is compiled in bf16 by plain Inductor."""


class Faults:
    """Describes failures on one Dynamo graph.

    graph     how to call it: "graph 0/0 of Llama"
    folder    where reproducers are written; None: a temporary folder each
    by_id     id(parameter) -> its names, for the reproducers
    """

    def __init__(
        self, config: Config, graph: str, folder: Path | None, by_id: Mapping[int, list[str]]
    ) -> None:
        self.config, self.graph, self.folder, self.by_id = config, graph, folder, by_id

    def of_pass(self, stage: str, kind: str, graph: fx.GraphModule, error: Exception) -> StageError:
        """The error of a `PassRunner`; ``graph`` is its graph as it came."""
        hint = f" disable_passes=[{stage[5:]}] turns it off." if stage.startswith("pass ") else ""
        return self._error(stage, graph, error, f"passes({kind!r}, CONFIG)", hint, kind)

    def of_stage(self, stage: str, original: fx.GraphModule, error: Exception) -> StageError:
        """The error of any other stage; ``original`` is Dynamo's graph as it came."""
        call = "rewrite(CONFIG)" if stage == REWRITE else "compile(CONFIG)"
        runs_inductor = stage == COMPILE and self.config.inner != "eager"
        hint = " inner='eager' runs the rewritten graph without Inductor." if runs_inductor else ""
        return self._error(stage, original, error, call, hint)

    def raise_or_warn(self, stage: str, original: fx.GraphModule, error: Exception) -> StageError:
        """Handles ``error``. It is raised if only the user can fix its cause, or under
        on_error="raise"; else it becomes a warning and is returned."""
        error = getattr(error, "inner_exception", error)  # Inductor wraps what a pass raises
        if isinstance(error, BackendError) and not isinstance(error, StageError):
            raise  # for the user to fix
        if isinstance(error, StageError):
            fault, cause = error, error.__cause__
        else:
            fault, cause = self.of_stage(stage, original, error), error
        if self.config.on_error == "raise":
            raise fault from cause
        warn(fault)
        return fault

    def _error(
        self,
        stage: str,
        graph: fx.GraphModule,
        error: Exception,
        call: str,
        hint: str,
        kind: str = "",
    ) -> StageError:
        """call: what reproduces it (`reproducer.write`).  kind: of a graph that passes run on."""
        where = f"the {kind} graph of {self.graph}" if kind else self.graph
        what = f"{stage} failed on {where}"
        error_text = f"{type(error).__name__}: {error} (in {_innermost(error)})"
        path, name = None, _file_name(f"{stage} {kind}")
        try:
            path = reproducer.write(
                self.folder, name, what, error_text, call, graph, self.config, self.by_id
            )
            how = f"To reproduce: {path}."
        except Exception as second:  # it must not hide the first error
            how = f"No reproducer could be written ({type(second).__name__}: {second})."
        if self.config.on_error == "raise":
            hint += " on_error='bf16' compiles such a graph in bf16 instead of raising."
        message = f"{what}.\n{error_text}\n{how}{hint}"
        return StageError(message, stage, where, None if path is None else str(path))


def warn(fault: StageError) -> None:
    """Say that a graph will not be quantized."""
    warnings.warn(f"q2compile: {fault}\nThis graph runs in bf16.", FaultWarning, stacklevel=2)


def _innermost(error: BaseException) -> str:
    """Where an error was raised. Dynamo drops its cause, and with it the traceback."""
    while error.__cause__ is not None:  # fx raises anew what it met while running a graph
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown code"


def _file_name(text: str) -> str:
    """The text in letters, digits and underscores, so that it names one file in a folder."""
    return re.sub(r"[^a-z0-9]+", "_", text.removeprefix("pass ").lower()).strip("_")
