# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of emulated kernels: launches on the CPU, test data, and equal bits."""

from __future__ import annotations

import os

import pytest
import torch

from q2compile.runtime_kernels.cuda import other_ops
from q2compile.runtime_kernels.cuda.gemm import grouped_mm
from q2compile.runtime_kernels.cuda.quantize import plan, rotate_quantize
from q2compile.runtime_kernels.ops.table import QuantizerCall
from tests.support import emulation, ptx
from tests.support.quantizer_calls import launched


def launches_on_cpu(
    monkeypatch: pytest.MonkeyPatch, architecture: str, room: int = 228 * 1024
) -> None:
    """Launches go to the emulation, of a GPU with two multiprocessors; with Q2_TEST_PTX=1 in the
    environment to the interpreter of their PTX (tests/support/ptx), which takes longer.

    room: bytes of shared memory of a multiprocessor.
    """
    if os.environ.get("Q2_TEST_PTX") == "1":
        ptx.serve(monkeypatch, architecture)
    else:
        emulation.serve(monkeypatch, architecture)
    pretend_device(monkeypatch, room)


def pretend_device(monkeypatch: pytest.MonkeyPatch, room: int, multiprocessors: int = 2) -> None:
    """Launches are planned for a GPU with so many multiprocessors, and this much shared memory in
    each."""
    for module in (plan, other_ops, grouped_mm):
        monkeypatch.setattr(module, "multiprocessors", lambda index: multiprocessors)
    monkeypatch.setattr(rotate_quantize, "shared_memory", lambda index: room)


def matrix(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Difficult cases of rounding: columns of very different size, exact ties, a zero block."""
    generator = torch.Generator().manual_seed(rows * 7919 + cols)
    x = torch.randn((rows, cols), generator=generator)
    x *= torch.exp(3 * torch.randn((1, cols), generator=generator))
    x[::3] = torch.randint(-6, 7, x[::3].shape, generator=generator).float()
    x[:32, :16] = 0
    return x.to(dtype)


def assert_same_bits(got, want) -> None:
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype
        wrong = (a.reshape(-1).view(torch.uint8) != b.reshape(-1).view(torch.uint8)).sum().item()
        assert wrong == 0, f"result {i}: {wrong} bytes of {b.numel()} numbers differ"


def assert_agrees(call: QuantizerCall) -> None:
    """The CUDA kernel of a quantizer gives the bits of the reference."""
    assert_same_bits(launched(call), call())
