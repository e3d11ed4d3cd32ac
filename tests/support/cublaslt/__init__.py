# SPDX-License-Identifier: Apache-2.0
"""A libcublasLt for a CPU, built from fake.c, which refuses what cuBLAS's manual forbids.

    library = serve(monkeypatch)
    cublaslt_fp4.gemm_fp4(...)            through the ctypes code of runtime_kernels/cuda/gemm
    library.fake_look_ups()

The same functions of torch that the GPU's path calls are served on the CPU: the stream, the
allocator and the current device. What only a GPU shows is whether the library does what its manual
says, and how fast.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from q2compile.runtime_kernels.cuda.gemm import cublaslt, cublaslt_fp4
from tests.support import emulation

SOURCE = Path(__file__).with_name("fake.c")
_OF_WORKSPACE = 256  # bytes that its address is a multiple of


@functools.cache
def built() -> ctypes.CDLL:
    """The library, compiled once for this process."""
    path = Path(os.environ["TESTS_COMPILED"]) / f"fake_cublaslt_{os.getpid()}.so"
    options = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror")
    command = ["gcc", *options, "-shared", "-fPIC", str(SOURCE), "-o", str(path), "-lm"]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(path))
    library.fake_refusal.restype = ctypes.c_char_p
    return library


def serve(monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """Products of cublaslt_fp4 on tensors of the CPU are computed by the library."""
    library = built()
    library.fake_forget()
    library.fake_capture(0)
    zero = torch.zeros(())

    def allocated(x: torch.Tensor | None) -> ctypes.c_void_p:
        if x is None:
            return ctypes.c_void_p()
        library.fake_allocated(ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(x.nbytes))
        return ctypes.c_void_p(x.data_ptr())

    def handle(index: int) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        made = ctypes.c_void_p()
        assert library.cublasLtCreate(ctypes.byref(made)) == 0
        return made, allocated(zero)

    def empty(size, stride, dtype) -> torch.Tensor:
        """As far from other alignments as CUDA's allocator, and full of NaN."""
        allocated(zero)  # again: the library knows the last 64 tensors
        count = torch.Size(size).numel() * dtype.itemsize
        bytes_ = torch.full((count + 2 * _OF_WORKSPACE,), 0xFF, dtype=torch.uint8)
        first = -bytes_.data_ptr() % _OF_WORKSPACE
        return bytes_[first : first + count].view(dtype).as_strided(size, stride)

    emulation.serve(monkeypatch, "sm_100a")  # for swizzle_scales.cu
    cublaslt.PLANS.clear()
    monkeypatch.setattr(cublaslt, "library", lambda: library)
    monkeypatch.setattr(cublaslt, "handle", handle)
    monkeypatch.setattr(cublaslt, "address", allocated)
    monkeypatch.setattr(cublaslt, "empty", empty)
    monkeypatch.setattr(cublaslt_fp4, "empty", empty)
    monkeypatch.setattr(cublaslt_fp4, "on_device", lambda index: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 99, raising=False)
    capturing = "is_current_stream_capturing"
    monkeypatch.setattr(torch.cuda, capturing, lambda: bool(library.fake_is_capturing()))
    return library
