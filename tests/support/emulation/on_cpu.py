"""What tests of emulated kernels share: launches on the CPU, test data, and equal bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from q2compile.runtime_kernels.cuda import dequantize, masked_unrotate
from q2compile.runtime_kernels.cuda.gemm import cublaslt_fp4
from q2compile.runtime_kernels.cuda.jit.launch import Launch
from q2compile.runtime_kernels.cuda.quantize import plan, rotating_ops
from q2compile.runtime_kernels.numerics.transforms import FIXED_SIGN_SEED
from tests.support import emulation


def launches_on_cpu(monkeypatch: pytest.MonkeyPatch, architecture: str) -> Iterator[None]:
    """For a fixture: launches go to the emulation, of a GPU with two multiprocessors."""

    def run(launch, index, grid, *values):
        emulation.emulate(launch, architecture, grid, *values)

    def empty(size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype)

    monkeypatch.setattr(Launch, "__call__", run)
    monkeypatch.setattr(plan, "multiprocessors", lambda index: 2)
    fixed = torch.tensor(FIXED_SIGN_SEED)
    monkeypatch.setattr(plan, "_fixed_seed", lambda index: fixed)
    functions = ((plan, "_run"), (dequantize, "_dequantize"), (cublaslt_fp4, "_swizzled"))
    for module, function in (*functions, (masked_unrotate, "_masked_unrotate")):
        monkeypatch.setattr(module, "empty", empty)
        monkeypatch.setattr(module, function, getattr(module, function).__wrapped__)
    rotating_ops._PLANS.clear()
    yield
    rotating_ops._PLANS.clear()


def matrix(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Columns of very different size, exact ties, a zero block: what rounding may stumble over."""
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
