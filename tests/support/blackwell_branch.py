# SPDX-License-Identifier: Apache-2.0
"""The kernels' branch for Blackwell (Q2_HW_FP4) on a GPU without FP4 conversions: software replaces
these few instructions (csrc/include/ptx.cuh, Q2_SOFTWARE_FP4)."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from q2compile.runtime_kernels.cuda import calls
from q2compile.runtime_kernels.cuda.jit import launch, nvrtc
from q2compile.runtime_kernels.cuda.jit.launch import Bound, Launch

SOFTWARE_FP4 = (("Q2_HW_FP8", 1), ("Q2_HW_FP4", 1), ("Q2_SOFTWARE_FP4", 1))


@contextmanager
def blackwell_branch():
    """Kernels that are bound here are compiled with it; those bound before stay as they are. It
    needs the FP8 conversions, which begin with 8.9."""
    loaded: dict[Launch, Any] = {}

    def bind(self: Launch, index: int, grid, values, slots) -> Bound:
        if self not in loaded:
            with torch.cuda.device(index):
                loaded[self] = launch._load(self, index)
        return Bound(self, loaded[self], grid, values, slots)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "conversions", lambda architecture: SOFTWARE_FP4)
        patch.setattr(Launch, "bind", bind)
        patch.setattr(calls, "BOUND_CALLS", {})
        yield
