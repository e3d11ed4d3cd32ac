# SPDX-License-Identifier: Apache-2.0
"""The kernels' branch for Blackwell (Q2_HW_FP4) on a GPU without FP4 conversions: software replaces
these few instructions (software_fp4.cuh)."""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from q2compile.runtime_kernels.cuda import calls
from q2compile.runtime_kernels.cuda.jit import launch, nvrtc
from q2compile.runtime_kernels.cuda.jit.launch import Bound, Launch

FP4_CONVERSIONS = re.compile(r"(?<=#if Q2_HW_FP4\n).*?(?=#endif)", re.DOTALL)


def with_software_fp4(patch: pytest.MonkeyPatch) -> None:
    """Kernels that are compiled from now on have the branch Q2_HW_FP4, and no FP4 conversions."""
    software = Path(__file__).with_name("software_fp4.cuh").read_text()
    headers = dict(nvrtc.common_headers())
    headers["ptx.cuh"], replaced = FP4_CONVERSIONS.subn(software, headers["ptx.cuh"])
    assert replaced == 1
    conversions = ("Q2_HW_FP8", 1), ("Q2_HW_FP4", 1)
    patch.setattr(nvrtc, "common_headers", lambda: headers)
    patch.setattr(nvrtc, "conversions", lambda architecture: conversions)


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
        with_software_fp4(patch)
        patch.setattr(Launch, "bind", bind)
        patch.setattr(calls, "BOUND_CALLS", {})
        yield
