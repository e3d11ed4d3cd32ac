# SPDX-License-Identifier: Apache-2.0
"""The public quantizers, and the ops that have no scheme of their own."""

from itertools import product

import pytest
import torch

import q2compile
from q2compile import QuantizedTensor, quantize
from q2compile.runtime_kernels.numerics.layout import unpack, unpack_bits
from q2compile.runtime_kernels.numerics.schemes import SCHEMES
from q2compile.runtime_kernels.ops.table import rowwise_call
from q2compile.tools.quantize import swizzle_32x4x4
from tests.support.oracle import relative_error

q2 = torch.ops.q2


def op_args(q: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.codes, q.scales, q.global_scale


def test_leading_dimensions_are_rows():
    for scheme in SCHEMES:
        x = torch.randn(2, 3, 5, 64)
        q = quantize(x, scheme, seed=1)
        assert isinstance(q, q2compile.QuantizedTensor)
        assert q.codes.shape == (30, 64 // SCHEMES[scheme].packed)
        assert q.dequantize().shape == x.shape
        flat = quantize(x.view(30, 64), scheme, seed=1)
        assert torch.equal(q.dequantize().view(30, 64), flat.dequantize())


def test_a_vector_is_one_row():
    assert quantize(torch.randn(64)).codes.shape == (1, 32)


@pytest.mark.parametrize(
    ("scheme", "bits"), [("nvfp4_46", 4.5), ("nvfp4_16x16", 4 + 8 / 256), ("mxfp4_rtn", 4.25)]
)
def test_bytes(scheme, bits):
    q = quantize(torch.randn(256, 256), scheme)
    assert q.nbytes == 256 * 256 * bits / 8 + 4


def test_bytes_count_the_mask():
    assert quantize(torch.randn(8, 64), "mxfp4_quest").nbytes == 8 * (32 + 2 + 8) + 4


@pytest.mark.parametrize("transform", ["h32", "rht16", "rht128", "rht64_fixed"])
@pytest.mark.parametrize("transpose", [False, True])
def test_dequantize_rotates_back(transform, transpose):
    x = torch.randn(128, 256)
    q = quantize(x, "nvfp4_46", transform=transform, transpose=transpose, seed=9)
    assert relative_error(q.dequantize(), x) < 0.0085
    rotated = q.dequantize(rotate_back=False)
    assert relative_error(rotated, x.t() if transpose else x) > 0.5
    assert rotated.square().sum().item() == pytest.approx(x.square().sum().item(), rel=0.01)


def test_transpose_is_quantize_of_the_transposed():
    x = torch.randn(80, 48)
    one, other = quantize(x, "nvfp4", transpose=True), quantize(x.t(), "nvfp4")
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(one.dequantize(), other.dequantize().t())


def test_seeds():
    x = torch.randn(16, 64)
    by_int = quantize(x, "nvfp4_sr", seed=2**64 - 1)
    by_tensor = quantize(x, "nvfp4_sr", seed=torch.tensor(-1))
    assert torch.equal(by_int.codes, by_tensor.codes) and by_int.seed == -1
    torch.manual_seed(0)
    one, other = quantize(x, "nvfp4_sr"), quantize(x, "nvfp4_sr")
    assert not torch.equal(one.codes, other.codes)
    torch.manual_seed(0)
    assert torch.equal(one.codes, quantize(x, "nvfp4_sr").codes)
    assert quantize(x, "nvfp4").seed is None


def test_a_given_amax_is_the_scale():
    x = torch.randn(16, 64)
    q = quantize(x, "nvfp4", amax=torch.tensor(100.0))
    assert q.global_scale == torch.tensor(100.0) / (6 * 448)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: quantize(x, "nvfp4_4/6"), "Did you mean 'nvfp4_46'"),
        (lambda x: quantize(x, "nvfp4@bf16"), "Did you mean 'nvfp4"),
        (lambda x: quantize(x, transform="rht100"), "Did you mean 'rht"),
        (lambda x: quantize(x[0, 0]), "one dimension or more"),
        (lambda x: quantize(x[None], transpose=True), "takes a matrix, got 3"),
        (lambda x: quantize(x.int()), "float32, bfloat16 or float16, got torch.int32"),
        (lambda x: quantize(x, "nvfp4_16x16", transform="rht16", seed=0), "one row per block"),
        (lambda x: quantize(x, "nvfp4_sr", seed=2**64), "64 bits"),
        (lambda x: quantize(x, "nvfp4_sr", seed="3"), "seed: got '3'; allowed: an int"),
        (lambda x: quantize(x.tolist()[0]), r"x: got \[.*; allowed: a torch.Tensor"),
        (lambda x: quantize(x, amax=3), "amax: got 3; allowed: a torch.Tensor"),
        (lambda x: quantize(x, transform="h32", amax=x.max()), "pass no amax"),
    ],
)
def test_errors(call, said):
    with pytest.raises(ValueError, match=said):
        call(torch.randn(4, 32))


def test_quantize_takes_no_part_in_autograd():
    x = torch.randn(4, 32, requires_grad=True)
    assert not quantize(x).dequantize().requires_grad


def test_swizzle_is_public():
    assert swizzle_32x4x4(quantize(torch.randn(128, 64)).scales).shape == (512,)


def test_16x16_transposed_is_the_same_numbers():
    """NVIDIA's dgrad reuses the weight of fprop: exact, since a square block has one scale."""
    x = torch.randn(40, 70)
    q = quantize(x, "nvfp4_16x16")
    codes, scales = q2.transpose(q.codes, q.scales, "nvfp4_16x16", 70)
    assert codes.shape == (70, 24) and scales.shape == (5, 3)
    transposed = q2.dequantize(codes, scales, q.global_scale, "nvfp4_16x16", 40, torch.float32)
    assert torch.equal(transposed, q.dequantize().t())
    assert (unpack(codes)[:, 40:] == 0).all()


def test_1x16_may_not_be_reused_transposed():
    """Trap 7."""
    q = quantize(torch.randn(32, 32), "nvfp4")
    with pytest.raises(ValueError, match="use q2::requantize"):
        q2.transpose(q.codes, q.scales, "nvfp4", 32)


def test_requantize_is_dequantize_then_rht_quantize():
    """The same bits where the source's global scale is a power of two. An exact one is applied
    late, to MS-EDEN's block scales (quantizer.py): other roundings of as good a quality."""
    for (scheme, transform), source in product(
        [("nvfp4_ms_eden_pow2", "rht128"), ("nvfp4_sr", "rht16"), ("mxfp4_rtn34", "rht32")],
        ["nvfp4_46_pow2", "nvfp4_46", "nvfp4_16x16", "mxfp4_quest"],
    ):
        x = torch.randn(96, 70)
        q = quantize(x, source)
        seed = torch.tensor(3)
        again = q2.requantize(
            *op_args(q),
            source_scheme=source,
            scheme=scheme,
            transform=transform,
            rows=70,
            columnwise_seed=seed,
            rng_offset=1,
        )
        plain = q2.quantize(
            q.dequantize(),
            scheme=scheme,
            transform=transform,
            rowwise=False,
            columnwise=True,
            rng_offset=1,
            columnwise_seed=seed,
        )
        if SCHEMES[source].has_pow2_scale:
            for one, other in zip(again, plain, strict=True):
                assert torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
        errors = [
            relative_error(
                QuantizedTensor(*t, None, scheme, transform, x.shape, True, seed).dequantize(),
                q.dequantize(),
            )
            for t in (again, plain)
        ]
        assert errors[0] == pytest.approx(errors[1], rel=0.1)


def test_masked_unrotate_is_the_adjoint():
    """<T(x) * mask, g> = <x, T^-1(g * mask)>, in the basis that quantize_masked rounds in."""
    x, grad = torch.randn(6, 64), torch.randn(6, 64)
    *_, mask = q2.quantize(
        x, scheme="mxfp4_quest", transform="h32", rowwise=True, columnwise=False, mask=True
    )
    back = q2.masked_unrotate(grad, mask, "h32")
    kept = grad * unpack_bits(mask)
    assert torch.equal(q2.masked_unrotate(kept, mask, "h32"), back)
    # orthogonal: norms do not change, and the transpose is the inverse
    torch.testing.assert_close(back.norm(), kept.norm())
    full = torch.full_like(mask, 255)
    torch.testing.assert_close(q2.masked_unrotate(back, full, "h32"), kept, atol=1e-6, rtol=0)


def test_masked_unrotate_keeps_the_dtype_and_drops_what_clipped():
    grad = torch.randn(4, 64).bfloat16()
    none = torch.zeros(4, 8, dtype=torch.uint8)
    out = q2.masked_unrotate(grad, none, "h32")
    assert out.dtype == torch.bfloat16 and (out == 0).all()
    # what the mask drops is dropped even if it is Inf: that element was not trusted
    grad[0, 0] = torch.inf
    assert (q2.masked_unrotate(grad, none, "h32") == 0).all()


def test_dgrad_is_of_the_quantized_weight():
    """Trap 11: the mean gradient of MS-EDEN goes to dy Q(w), and stays away from dy w."""
    dy, w = torch.randn(64, 96), torch.randn(96, 48)
    q = quantize(w, "nvfp4_46_pow2")
    scheme = "nvfp4_ms_eden_pow2"
    total, draws = torch.zeros(64, 48, dtype=torch.float64), 64
    for i in range(draws):
        seed = torch.tensor(i)
        a = q2.quantize(
            dy, scheme=scheme, transform="rht128", rowwise=True, columnwise=False, rowwise_seed=seed
        )
        b = q2.requantize(
            *op_args(q),
            source_scheme=q.scheme,
            scheme=scheme,
            transform="rht128",
            rows=48,
            columnwise_seed=seed,
            rng_offset=1,
        )
        total += q2.gemm(*a, *b, None, scheme, scheme, torch.float32)
    mean = total / draws
    assert relative_error(mean, dy @ q.dequantize()) < 5e-4
    assert relative_error(mean, dy @ w) > 5e-3


def test_forward_is_deterministic():
    """Trap 9: activation checkpointing computes it twice."""
    x = torch.randn(33, 80)
    for name, scheme in SCHEMES.items():
        if not scheme.stochastic:
            assert torch.equal(quantize(x, name).codes, quantize(x, name).codes)


@pytest.mark.gpu
def test_the_reference_gives_the_same_bits_on_cuda():
    from q2compile.runtime_kernels import registry

    for scheme in SCHEMES:
        x = torch.randn(48, 200)
        spec = SCHEMES[scheme]
        seed = torch.tensor(5) if spec.stochastic else None
        amax = q2.amax(x) if spec.takes_amax else None
        args = rowwise_call(scheme, x, amax=amax, rowwise_seed=seed).positional
        on_cuda = tuple(a.cuda() if isinstance(a, torch.Tensor) else a for a in args)
        expected = registry.select("quantize", args, "reference")(*args)
        result = registry.select("quantize", on_cuda, "reference")(*on_cuda)
        for one, other in zip(result[:2], expected[:2], strict=True):
            assert torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8))
        assert result[2].cpu() == expected[2]
