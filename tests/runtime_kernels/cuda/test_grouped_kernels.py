# SPDX-License-Identifier: Apache-2.0
"""The kernels of experts on a GPU, against the torch reference on the CPU: the same bits, or for
GEMMs a derived error; and nothing of theirs waits for the device."""

from __future__ import annotations

import pytest
import torch

import q2compile.linear.experts
import q2compile.runtime_kernels as runtime_kernels
from q2compile.recipes.resolve import resolve
from q2compile.runtime_kernels.choice import kernels
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, get_scheme
from q2compile.runtime_kernels.ops.table import QuantizerCall
from q2compile.runtime_kernels.registry import REFERENCE, select
from tests.support import quantizer_calls
from tests.support.pairwise import pairwise
from tests.support.quantizer_calls import SEEDS

assert runtime_kernels and q2compile.linear.experts  # importing them registers the ops
pytestmark = pytest.mark.gpu

q2 = torch.ops.q2
POW2, EXACT = "nvfp4_ms_eden_pow2", "nvfp4_ms_eden"
SIZES = [0, 1, 3, 8, 9, 16, 17, 0, 33, 64, 65, 128, 130, 700, 257, 2, 0, *([5] * 20), 0]


def routed(extra: int = 300) -> tuple[int, tuple[torch.Tensor, torch.Tensor]]:
    """The number of rows, some of no group, and the ends of the groups."""
    offs = torch.tensor(SIZES).cumsum(0).to(torch.int32)
    return sum(SIZES) + extra, (offs, q2.padded_ends(offs))


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """N(0,1) in columns that differ by e^6, with ties and zeros."""
    generator = torch.Generator().manual_seed(rows + columns)
    x = torch.randn((rows, columns), generator=generator)
    x *= torch.exp(3 * torch.randn((1, columns), generator=generator))
    x[::3] = torch.randint(-6, 7, x[::3].shape, generator=generator).float()
    x[:40, :32] = 0
    return x.to(dtype)


def same_bits(call: QuantizerCall) -> None:
    op, args = call.spec.name, call.positional
    on_gpu = [a.cuda() if isinstance(a, torch.Tensor) else a for a in args]
    got, want = select(op, on_gpu, "cuda")(*on_gpu), select(op, args, REFERENCE)(*args)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype
        a, b = (t.cpu().reshape(-1).view(torch.uint8) for t in (a, b))
        wrong = (a != b).sum().item()
        assert wrong == 0, f"result {i}: {wrong} of {b.numel()} bytes differ"


def test_ms_eden() -> None:
    for columns, dtype, scheme in pairwise(
        [128, 392, 517],
        [torch.bfloat16, torch.float16, torch.float32],
        [POW2, EXACT, POW2 + DEQUANTIZED],
    ):
        rows, groups = routed()
        x = matrix(rows, columns, dtype)
        same_bits(quantizer_calls.grouped_both(x, *groups, *SEEDS, scheme, "rht128", 3))
        same_bits(quantizer_calls.grouped(x, *groups, SEEDS[1], scheme, "rht128", 3))


@pytest.mark.parametrize(
    "scheme, transform",
    [
        *((s, "rht16") for s in ("nvfp4_sr_pow2", "nvfp4_sr", "nvfp4_pow2", "nvfp4")),
        *(("mxfp4_sr", "rht64"), ("mxfp4_rtn34", "rht32"), ("nvfp4_sr_pow2", "rht128")),
        *((POW2, "none"), ("nvfp4_sr_pow2" + DEQUANTIZED, "rht16")),
    ],
)
def test_other_schemes(scheme, transform) -> None:
    rows, groups = routed()
    same_bits(
        quantizer_calls.grouped_both(matrix(rows, 392), *groups, *SEEDS, scheme, transform, 1)
    )


@pytest.mark.parametrize(
    "source, scheme, transform",
    [
        ("nvfp4_46_pow2", POW2, "rht128"),
        ("nvfp4_46_pow2", POW2 + DEQUANTIZED, "rht128"),
        ("nvfp4_46", EXACT, "rht128"),
        ("nvfp4_16x16_pow2", "nvfp4_sr_pow2", "rht16"),
        ("mxfp4_rtn", "mxfp4_rtn34", "rht32"),
    ],
)
def test_requantize(source, scheme, transform) -> None:
    rows, groups = routed()
    x = matrix(rows, 400)
    amax = q2.amax(x) if get_scheme(source).takes_amax else None
    packed = q2.quantize(x, scheme=source, rowwise=True, columnwise=False, amax=amax)
    args = (*packed, *groups, SEEDS[0], source, scheme, transform, 400, 1)
    same_bits(quantizer_calls.grouped_again(*args))


@pytest.mark.parametrize("scheme", ["nvfp4_46_pow2", "nvfp4_46", "mxfp4_rtn"])
def test_grouped_gemms(scheme) -> None:
    """Compared with the reference on the CPU, with groups of every size. Results are neighbors in
    bf16, because sums have another order; rounded twice where alpha is no power of two."""
    rows, (offs, padded) = routed()
    experts, n, k = len(SIZES), 48, 64

    def quantized(rows: int, columns: int) -> tuple[torch.Tensor, ...]:
        x = torch.randn(rows, columns)
        return q2.quantize(
            x,
            scheme=scheme,
            rowwise=True,
            columnwise=False,
            amax=q2.amax(x) if scheme == "nvfp4_46" else None,
        )

    width = 128 * (rows // 128 + experts + 1)
    for gemm, a, b, ends in (
        ("fprop", quantized(rows, k), quantized(experts * n, k), offs),
        ("dgrad", quantized(rows, n + 16), quantized(k, experts * (n + 16)), offs),
        ("wgrad", quantized(n, width), quantized(k, width), padded),
    ):
        args = (*a, *b, ends, scheme, scheme, gemm, torch.bfloat16)
        on_gpu = [t.cuda() if isinstance(t, torch.Tensor) else t for t in args]
        got = select("grouped_gemm", on_gpu, "cuda_bf16")(*on_gpu).cpu()
        want = q2.grouped_gemm(*args)
        torch.testing.assert_close(got, want, rtol=2**-6, atol=3e-2)
        if gemm != "wgrad":
            assert not got[int(offs[-1]) :].any()


def test_a_step_of_experts_waits_for_nothing() -> None:
    """Under torch's check of synchronizations, once kernels have been compiled; and each op by its
    own kernel."""
    rows, (offs, _) = routed()
    n, k, experts = 128, 256, len(SIZES)
    x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    w = torch.randn(experts, n, k, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    dy, ends = torch.randn(rows, n, dtype=torch.bfloat16, device="cuda"), offs.cuda()
    for name in ("quartet2", "nvfp4", "mxfp4", "tetrajet2"):
        texts = resolve(name).texts()
        for mode in ("default", "error"):
            torch.cuda.set_sync_debug_mode(mode)
            try:
                y = q2.grouped_linear(x, w, ends, *texts, 0)
                torch.autograd.grad(y, (x, w), dy)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_cuda_kernels_come_before_the_references() -> None:
    for op in ("quantize", "requantize"):
        assert [k.name for k in kernels(op) if k.name != "cpp"] == ["cuda", "reference"]
    names = ["scaled_grouped_mm", "triton_fp4", "cuda_bf16", "reference"]
    assert [k.name for k in kernels("grouped_gemm")] == names
    assert [k.name for k in kernels("grouped_mm")] == ["cuda", "reference"]
