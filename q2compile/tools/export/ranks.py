# SPDX-License-Identifier: Apache-2.0
"""Work that one rank does for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from q2compile.errors import ConfigError

Result = TypeVar("Result")


def on_rank_0(call: Callable[[], Result], meanwhile: Callable[[], Any] = lambda: None) -> Result:
    """Runs ``call`` on rank 0 and returns its result on every rank of the default group; one
    process is rank 0.

    Every rank runs ``meanwhile``, rank 0 after ``call``, even if that raised: collectives that
    belong to it. An error is raised on all ranks, on the others as a ConfigError of its message.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return call()
    error: Exception | None = None
    outcome: list[Any] = [None, None]  # result, message
    if dist.get_rank() == 0:
        try:
            outcome[0] = call()
        except Exception as raised:
            error, outcome[1] = raised, str(raised)
    meanwhile()
    dist.broadcast_object_list(outcome)
    if error is not None:
        raise error
    if outcome[1] is not None:
        raise ConfigError(f"on rank 0: {outcome[1]}")
    return outcome[0]
