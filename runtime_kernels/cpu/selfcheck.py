# SPDX-License-Identifier: Apache-2.0
"""Self-checks of CPU kernels before their first use in a process: small calls, whose results must
have the reference's bits. They take milliseconds, run at once in this process, and are not stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from q2compile.runtime_kernels.cpu import build
from q2compile.runtime_kernels.cuda import checks, selfcheck
from q2compile.runtime_kernels.kernel_states import NotServedError
from q2compile.runtime_kernels.registry import CPP
from q2compile.runtime_kernels.small_calls import form_of

_CPU = torch.device("cpu")


def rejection(op: str, args: Sequence[Any]) -> str | None:
    """None if the CPU kernel of an op may be used for such a call, otherwise the reason in words.
    args: all arguments, which may be fake."""
    missing = build.why_missing()
    if missing is not None:
        return f"there is no library of CPU kernels: {missing}"
    try:
        request = selfcheck.request_of(CPP, _CPU, form_of(op, args))
        return checks.rejection(request._replace(here=True))
    except NotServedError as error:  # the call is wrong, and the reference says so
        return str(error)
