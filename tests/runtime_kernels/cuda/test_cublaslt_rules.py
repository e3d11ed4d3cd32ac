# SPDX-License-Identifier: Apache-2.0
"""The GEMM on fp4 tensor cores by a libcublasLt that runs on a CPU and refuses what cuBLAS's manual
forbids (tests/support/cublaslt): results against the reference for random sizes, types and biases,
through the same ctypes code as on a GPU."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from q2compile.runtime_kernels.cuda.gemm import cublaslt, cublaslt_fp4
from q2compile.runtime_kernels.cuda.gemm.cublaslt import GemmKind
from q2compile.runtime_kernels.cuda.jit.launch import LaunchError
from q2compile.runtime_kernels.numerics.schemes import SWIZZLED, get_scheme
from tests.support.cublaslt import serve

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP4 = (cublaslt.E2M1, cublaslt.SCALES_OF_16)
CASES = int(os.environ.get("Q2COMPILE_FUZZ", "40"))
FUZZ = settings(max_examples=CASES, suppress_health_check=list(HealthCheck))
# Around 16 (alignment), 32 (rows of codes), 128 (tiles of scales) and 64 (their width along K).
SIZES = st.sampled_from((1, 2, 5, 8, 15, 16, 17, 31, 33, 64, 80, 127, 128, 129, 136, 200))


@pytest.fixture
def library(monkeypatch) -> ctypes.CDLL:
    yield serve(monkeypatch)
    cublaslt.PLANS.clear()


def operand(rows: int, k: int, scheme: str) -> list[torch.Tensor]:
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows * 1009 + k))
    amax = x.abs().amax() if get_scheme(scheme).takes_amax else None
    return torch.ops.q2.quantize(x, scheme=scheme, rowwise=True, columnwise=False, amax=amax)


def behind_three_bytes(x: torch.Tensor) -> torch.Tensor:
    bytes_ = x.view(torch.uint8).flatten()
    return torch.cat([bytes_.new_zeros(3), bytes_])[3:].view(x.dtype).view(x.shape)


@FUZZ
@given(
    m=SIZES,
    n=SIZES,
    k=SIZES,
    dtype=st.sampled_from((BF16, FP16, FP32)),
    bias=st.sampled_from((None, BF16, FP16, FP32)),
    a_scheme=st.sampled_from(("nvfp4_46_pow2", "nvfp4_46", "nvfp4_46_pow2" + SWIZZLED)),
    b_scheme=st.sampled_from(("nvfp4_46_pow2", "nvfp4_16x16", "nvfp4_46_pow2" + SWIZZLED)),
    shifted=st.booleans(),
)
@example(5, 128, 64, BF16, BF16, "nvfp4_46_pow2", "nvfp4_46_pow2", True)  # a bias without padding
def test_products_are_the_references(library, m, n, k, dtype, bias, a_scheme, b_scheme, shifted):
    """shifted: the bias, and the codes and scales of a, do not begin on 16 bytes."""
    a, b = operand(m, k, a_scheme), operand(n, k, b_scheme)
    added = None if bias is None else torch.linspace(-3, 3, n).to(bias)
    if shifted:
        a = [behind_three_bytes(a[0]), behind_three_bytes(a[1]), a[2]]
        added = None if added is None else torch.cat([added[:1], added])[1:]
    args = (*a, *b, added, a_scheme, b_scheme, dtype)
    got, want = cublaslt_fp4.gemm_fp4(*args), torch.ops.q2.gemm(*args)
    assert got.dtype == dtype and got.shape == (m, n) and got.is_contiguous()
    # Both round once, from sums in different orders: a unit in the last place, or of fp32 sums.
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


def refused(library: ctypes.CDLL, product: GemmKind, *tensors: torch.Tensor) -> str:
    with pytest.raises(LaunchError):
        a, a_scales, b, b_scales, alpha, out = tensors or [torch.zeros(16)] * 6
        bias = None if product.bias is None else torch.zeros(product.columns, dtype=product.bias)
        cublaslt.run(product, (a, a_scales), (b, b_scales), alpha, bias, out)
    return library.fake_refusal().decode()


@pytest.mark.parametrize(
    "product, why",
    [
        (GemmKind(0, 16, 16, 48, BF16, None), "K = 48 has rows that are no multiple of 16 bytes"),
        (GemmKind(0, 16, 12, 64, BF16, None), "matrix 2: leading dimension 12"),
        (GemmKind(0, 16, 16, 64, FP32, FP32), "a bias of type 0"),
        (GemmKind(0, 16, 16, 64, BF16, FP16), "a bias of type 2"),
        (GemmKind(0, 16, 16, 64, BF16, None, cublaslt.E2M1, 0), "scale modes 0 and 0 of type 33"),
        (GemmKind(0, 16, 16, 64, BF16, None, cublaslt.E4M3, 1), "scale modes 1 and 1 of type 28"),
    ],
)
def test_what_the_manual_forbids_is_refused(library, product, why):
    """The library that the other tests trust."""
    assert why in refused(library, product)


def test_memory_beyond_a_tensor_is_refused(library):
    product = GemmKind(0, 130, 16, 64, BF16, None)
    codes, scales = torch.zeros(130, 32, dtype=torch.uint8), torch.zeros(1024, dtype=torch.uint8)
    b, one = torch.zeros(16, 32, dtype=torch.uint8), torch.ones(())
    good = [codes, scales, b, scales[:512], one, torch.zeros(130, 16, dtype=BF16)]
    a, a_scales, b, b_scales, alpha, out = good
    cublaslt.run(product, (a, a_scales), (b, b_scales), alpha, None, out)
    for place, worse, why in (
        (1, scales[:512].clone(), "scales of B: 1024 bytes are not all in a tensor"),
        (0, codes[:129].clone(), "B: 4160 bytes"),
        (5, torch.zeros(129, 16, dtype=BF16), "D: 4160 bytes"),
        (0, torch.zeros(4176, dtype=torch.uint8)[8:], "B is not on 16 bytes"),
    ):
        library.fake_forget()
        cublaslt.PLANS.clear()
        assert why in refused(library, product, *good[:place], worse, *good[place + 1 :])


def test_fp8_with_one_scale_each(library):
    a, b = (torch.randn(rows, 32).to(torch.float8_e4m3fn) for rows in (3, 16))
    product = GemmKind(0, 3, 16, 32, FP32, None, cublaslt.E4M3, cublaslt.SCALES_ARE_ONE_FP32)
    scales, alpha, out = (
        (torch.tensor(0.5), torch.tensor(4.0)),
        torch.tensor(0.25),
        torch.ones(3, 16),
    )
    cublaslt.run(product, (a, scales[0]), (b, scales[1]), alpha, None, out)
    # fp32 of exact sums; torch's are of fp64, since 32 products of 8 bits fit into 53.
    assert torch.equal(out, (0.5 * a.double() @ b.double().t()).float())


def test_a_new_shape_in_a_capture_says_what_to_do(library):
    """cuBLASLt of CUDA 13.3 answers no look-up while a CUDA graph is captured."""
    scheme = "nvfp4_46_pow2"
    a, b = operand(24, 64, scheme), operand(48, 64, scheme)
    args = (*a, *b, None, scheme, scheme, BF16)
    library.fake_capture(1)
    message = r"\[24, 64\] times \[64, 48\] .* INTERNAL_ERROR \(14\)\): run the model once with"
    with pytest.raises(LaunchError, match=message):
        cublaslt_fp4.gemm_fp4(*args)
    assert library.fake_look_ups() == 1
    library.fake_capture(0)
    want = cublaslt_fp4.gemm_fp4(*args)
    library.fake_capture(1)
    assert torch.equal(cublaslt_fp4.gemm_fp4(*args), want)
    assert library.fake_look_ups() == 2, "the plan was made before the capture"
