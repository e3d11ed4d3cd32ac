# SPDX-License-Identifier: Apache-2.0
"""q2::gemm against the float64 product of the dequantized operands."""

import pytest
import torch

import q2compile.runtime_kernels  # noqa: F401
from q2compile import quantize
from q2compile.runtime_kernels.numerics.schemes import SCHEMES
from tests.support.pairwise import pairwise

q2 = torch.ops.q2


def product(a, b, bias, dtype):
    return q2.gemm(
        *(a.codes, a.scales, a.global_scale, b.codes, b.scales, b.global_scale),
        *(bias, a.scheme, b.scheme, dtype),
    )


def exact(a, b, bias):
    """The op's result in float64, and the largest error of fp32 sums in any order."""
    x, w = (q.dequantize(rotate_back=False).double() for q in (a, b))
    result = x @ w.t() + (0 if bias is None else bias.double())
    magnitude = x.abs() @ w.abs().t() + (0 if bias is None else bias.double().abs())
    return result, magnitude * x.shape[1] * 2.0**-24


def test_error_is_that_of_fp32_sums_and_one_rounding():
    for scheme, dtype in pairwise(SCHEMES, [torch.bfloat16, torch.float32, torch.float16]):
        a = quantize(torch.randn(33, 200), scheme, seed=1)
        b = quantize(torch.randn(48, 200), scheme, seed=2)
        bias = torch.randn(48).to(dtype)
        for add in (None, bias):
            out = product(a, b, add, dtype)
            assert out.dtype == dtype and out.is_contiguous()
            result, fp32_error = exact(a, b, add)
            rounding = result.abs() * torch.finfo(dtype).eps / 2
            # 1.01: the rounding is of the sum as computed; 1e-7: subnormals of float16
            assert ((out.double() - result).abs() <= 1.01 * (fp32_error + rounding) + 1e-7).all()


@pytest.mark.parametrize("scheme", ["nvfp4_46_pow2", "nvfp4_46", "mxfp4_rtn34"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_product_of_the_global_scales_in_place_of_both(scheme, dtype):
    a, b = (quantize(torch.randn(n, 200), scheme, seed=n) for n in (33, 48))
    scale, bias = a.global_scale * b.global_scale, torch.randn(48).to(dtype)
    operands = a.codes, a.scales, scale, b.codes, b.scales, None
    out = q2.gemm(*operands, bias, a.scheme, b.scheme, dtype)
    result, fp32_error = exact(a, b, bias)
    rounding = result.abs() * torch.finfo(dtype).eps / 2
    assert ((out.double() - result).abs() <= 1.01 * (fp32_error + rounding)).all()


def test_dequantized_operands_are_exact_in_bf16():
    """Trap 12: every e2m1 x e4m3 product, times any power of two, has at most 8 bits."""
    codes = torch.arange(16, dtype=torch.uint8)
    values = q2.dequantize(
        (codes | codes << 4).view(16, 1).expand(16, 8).contiguous(),
        torch.ones(16, 1).to(torch.float8_e4m3fn),
        torch.tensor(1.0),
        "nvfp4_pow2",
        1,
        torch.float32,
    )
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    products = values * scales * 2.0**-40
    assert torch.equal(products.bfloat16().float(), products)


def test_a_power_of_two_is_folded_without_error():
    """The bf16 path and the fp32 path of one operand pair agree to the last bit of bf16, on sums
    that fp32 holds exactly."""
    x = torch.randint(-4, 5, (64, 128)).float()
    w = torch.randint(-4, 5, (32, 128)).float()
    a, b = (quantize(t, "nvfp4_pow2") for t in (x, w))
    assert torch.equal(
        product(a, b, None, torch.bfloat16), product(a, b, None, torch.float32).bfloat16()
    )


def test_alpha_stays_in_fp32():
    """Trap 2: gradients of 1e-9 times weights of 1e-2, and 1e-30 times 1e30."""
    x, w = torch.randn(16, 64), torch.randn(16, 64)
    for scheme in ("nvfp4", "nvfp4_pow2", "mxfp4_rtn34"):
        reference = product(*(quantize(t, scheme) for t in (x, w)), None, torch.float32)
        for up, down in ((2.0**-30, 2.0**-7), (2.0**-100, 2.0**100)):
            a, b = quantize(x * up, scheme), quantize(w * down, scheme)
            scaled = product(a, b, None, torch.float32)
            torch.testing.assert_close(scaled, reference * up * down, rtol=1e-6, atol=0)


def test_a_three_quarters_pair_has_the_papers_alpha():
    a = quantize(torch.randn(4, 64), "mxfp4_rtn34")
    assert (a.global_scale * a.global_scale).item() == pytest.approx(16 / 9, rel=1e-6)


@pytest.mark.parametrize("rows", [(0, 8), (8, 0)])
def test_empty_operands(rows):
    a, b = (quantize(torch.randn(n, 32), "nvfp4_pow2") for n in rows)
    assert product(a, b, None, torch.bfloat16).shape == rows


def test_no_contraction_at_all():
    """wgrad of zero tokens is zero, not NaN."""
    a, b = (quantize(torch.randn(0, 8), "nvfp4_46_pow2", transpose=True) for _ in range(2))
    assert torch.equal(product(a, b, None, torch.bfloat16), torch.zeros(8, 8).bfloat16())


def test_operands_padded_differently_are_refused():
    a = quantize(torch.randn(4, 100), "nvfp4_pow2")
    b = quantize(torch.randn(4, 100), "nvfp4_pow2", transform="rht128", seed=1)
    with pytest.raises(AssertionError, match="contractions of 112 and 128"):
        product(a, b, None, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["nvfp4_46", "nvfp4_46_pow2", "mxfp4_sr"])
def test_on_cuda_as_on_cpu(scheme):
    a = quantize(torch.randn(64, 256), scheme, seed=1)
    b = quantize(torch.randn(32, 256), scheme, seed=2)
    result, fp32_error = exact(a, b, None)
    on_cuda = [t.cuda() for q in (a, b) for t in (q.codes, q.scales, q.global_scale)]
    for dtype in (torch.bfloat16, torch.float32):
        out = q2.gemm(*on_cuda, None, scheme, scheme, dtype).cpu().double()
        rounding = result.abs() * torch.finfo(dtype).eps / 2
        assert ((out - result).abs() <= 1.01 * (fp32_error + rounding)).all()
