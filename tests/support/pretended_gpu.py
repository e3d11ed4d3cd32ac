# SPDX-License-Identifier: Apache-2.0
"""A GPU that is not there: which kernels would serve it, on fake tensors."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from q2compile.runtime_kernels.cuda import check_results, checked_cases
from q2compile.runtime_kernels.cuda.gemm import cublaslt_fp4
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.runtime_kernels.cuda.jit.launch import target, unsupported
from q2compile.runtime_kernels.ops.table import QuantizerVariant
from tests.support.new_process import forget_checks


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Makes all think that there is a GPU of a compute capability, as in a new process."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "a GPU that is not there")
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cublaslt_fp4, "ready", lambda product: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    forget_checks()
    for name in ("store", "mark", "unmark", "take_unended"):
        monkeypatch.setattr(check_results, name, lambda *args: None)
    forget_checks()
    forget()


def forget() -> None:
    """Forgets the cached properties of this process's GPUs."""
    unsupported.cache_clear()
    target.cache_clear()


def on_gpu(of: str | QuantizerVariant, scheme: str) -> list:
    """The arguments of a self-check, as fake tensors of the GPU."""
    with FakeTensorMode():
        return [
            torch.empty(a.shape, dtype=a.dtype, device="cuda:0")
            if isinstance(a, torch.Tensor)
            else a
            for a in checked_cases.arguments_of(of, scheme)
        ]
