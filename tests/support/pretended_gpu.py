# SPDX-License-Identifier: Apache-2.0
"""A GPU that is not there: which kernels would serve it, on fake tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.device_interface import CudaInterface
from torch._subclasses import FakeTensorMode

from q2compile.runtime_kernels import check_results
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.runtime_kernels.cuda.jit.launch import target, unsupported
from q2compile.runtime_kernels.cuda.quantize import fused, rotate_quantize
from q2compile.runtime_kernels.ops.table import QuantizerVariant
from tests.support.checked_forms import arguments_of
from tests.support.new_process import forget_checks

_PROPERTIES = {
    "multi_processor_count": 132,
    "warp_size": 32,
    "max_threads_per_multi_processor": 2048,
    "regs_per_multiprocessor": 65536,
    "total_memory": 1 << 36,
}


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Makes all think that there is a GPU of a compute capability, as in a new process."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "a GPU that is not there")
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    major, minor = capability
    properties = SimpleNamespace(name="a GPU", major=major, minor=minor, **_PROPERTIES)
    for place in (torch.cuda, CudaInterface):
        of_device = staticmethod(lambda device=None: properties)
        monkeypatch.setattr(place, "get_device_properties", of_device)
    for module in (rotate_quantize, fused):
        monkeypatch.setattr(module, "shared_memory", lambda index: 228 * 1024)
    forget_checks()
    for name in ("store", "mark", "unmark", "take_unended"):
        monkeypatch.setattr(check_results, name, lambda *args: None)
    forget_checks()
    forget()


def forget() -> None:
    """Forgets the cached properties of this process's GPUs."""
    unsupported.cache_clear()
    target.cache_clear()


def on_gpu(of: str | QuantizerVariant, scheme: str, **more: Any) -> list:
    """The arguments of a self-check, as fake tensors of the GPU."""
    with FakeTensorMode():
        return [
            torch.empty(a.shape, dtype=a.dtype, device="cuda:0")
            if isinstance(a, torch.Tensor)
            else a
            for a in arguments_of(of, scheme, **more)
        ]
