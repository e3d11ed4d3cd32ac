# SPDX-License-Identifier: Apache-2.0
"""The Triton fp4 GEMMs on a GPU without fp4 tensor cores, at sizes of training: Triton dequantizes
the operands of tl.dot_scaled there. Addresses, scales, masks and epilogues are those of a
Blackwell; the tensor-core instruction is not. Triton before 3.8 does so for MXFP4 alone."""

from __future__ import annotations

import pytest
import torch

import q2compile.runtime_kernels as runtime_kernels
from q2compile.runtime_kernels.cuda.gemm import triton_fp4
from q2compile.runtime_kernels.numerics.layout import pack_bits
from q2compile.runtime_kernels.registry import REFERENCE, select
from q2compile.runtime_kernels.selfcheck import GEMM_ERROR
from tests.support.new_process import forget_checks

assert runtime_kernels  # importing it registers the ops
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="on a Blackwell the self-checks run them",
    ),
]
BF16 = torch.bfloat16
SCHEMES = ["mxfp4_rtn"]
if (triton_fp4.triton_version() or (0, 0)) >= (3, 8):
    SCHEMES.append("nvfp4_46_pow2")
# M, N, K: whole tiles, and none of them whole.
SIZES = [(8192, 4096, 4096), (4100, 1440, 4160)]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path))
    forget_checks()


def quantized(rows: int, columns: int, scheme: str) -> tuple[torch.Tensor, ...]:
    x = torch.randn(rows, columns, device="cuda").to(BF16)
    return tuple(torch.ops.q2.quantize(x, scheme=scheme, rowwise=True, columnwise=False))


def assert_is(op: str, got: torch.Tensor, want: torch.Tensor, tmp_path) -> None:
    """Up to one rounding of each; and the comparison of the op's first large launch has passed."""
    error = (got.float() - want.float()).norm() / want.float().norm()
    assert error <= GEMM_ERROR[BF16], error
    assert len(list(tmp_path.glob(f"{op}-*.checked"))) == 1


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("m, n, k", SIZES)
def test_products(m, n, k, scheme, tmp_path) -> None:
    bias = torch.randn(n, device="cuda").to(BF16)
    args = (*quantized(m, k, scheme), *quantized(n, k, scheme), bias, scheme, scheme, BF16)
    got, want = triton_fp4.gemm_triton(*args), select("gemm", args, REFERENCE)(*args)
    assert_is("gemm", got, want, tmp_path)


@pytest.mark.parametrize("m, n, k", SIZES)
def test_products_masked_and_rotated_back(m, n, k, tmp_path) -> None:
    scheme, mask = SCHEMES[0], pack_bits(torch.randn(m, n, device="cuda") > 0)
    operands = *quantized(m, k, scheme), *quantized(n, k, scheme)
    args = (*operands, mask, scheme, scheme, "h32", BF16)
    want = select("gemm_masked_unrotate", args, REFERENCE)(*args)
    got = triton_fp4.gemm_masked_unrotate_triton(*args)
    assert_is("gemm_masked_unrotate", got, want, tmp_path)


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_grouped_products(gemm, scheme, tmp_path) -> None:
    """Eight experts of 1024 x 2048, of which one has no rows."""
    ends = torch.tensor([900, 900, 2000, 3100, 4111, 5000, 6002, 8000]).to("cuda", torch.int32)
    rows, experts = 8192, len(ends)
    chunks = 128 * torch.tensor([7, 7, 16, 25, 33, 40, 48, 64]).to("cuda", torch.int32)
    a, b = {
        "fprop": ((rows, 2048), (experts * 1024, 2048)),
        "dgrad": ((rows, 1024), (2048, experts * 1024)),
        "wgrad": ((1024, rows), (2048, rows)),
    }[gemm]
    operands = *quantized(*a, scheme), *quantized(*b, scheme)
    args = (*operands, chunks if gemm == "wgrad" else ends, scheme, scheme, gemm, BF16)
    want = select("grouped_gemm", args, REFERENCE)(*args)
    got = triton_fp4.grouped_gemm_triton(*args)
    if gemm != "wgrad":  # rows of no group: 192, which the reference may leave
        assert not got[8000:].any()
        got, want = got[:8000], want[:8000]
    assert_is("grouped_gemm", got, want, tmp_path)
