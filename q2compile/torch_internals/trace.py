# SPDX-License-Identifier: Apache-2.0
"""torch's structured trace, which TORCH_TRACE=folder writes and tlparse shows."""

from __future__ import annotations

from collections.abc import Callable

import torch._logging
from torch._logging._internal import trace_log


def is_traced() -> bool:
    """Whether anybody reads the trace."""
    return bool(trace_log.handlers)


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """A file of that name beside Inductor's, of the graph that is compiled now. ``text`` is called
    if there is a trace."""
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,
    )
