# SPDX-License-Identifier: Apache-2.0
"""q2::to_e4m3: every code under every scale, in the reference, the emulation of to_e4m3.cu and its
PTX; and on a GPU the products that fp8 tensor cores make of its elements."""

from __future__ import annotations

import pytest
import torch

from q2compile.runtime_kernels.cuda import other_ops
from q2compile.runtime_kernels.registry import SCALED_MM, select
from tests.support import ptx
from tests.support.emulation.on_cpu import assert_same_bits, launches_on_cpu

q2 = torch.ops.q2
RTN, RTN34, SQUARE = "mxfp4_rtn", "mxfp4_rtn34", "mxfp4_rceil_32x32"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E2M1 = torch.cat([E2M1, -E2M1])


def every_code(bits: torch.Tensor, scheme: str = RTN, rows: int = 1) -> tuple:
    """An operand of blocks that hold all 16 codes twice, with the e8m0 scales of these bits. rows:
    of codes for each row of scales."""
    codes = (torch.arange(8, dtype=torch.uint8) * 0x22 + 0x10).repeat(2)
    codes = codes.repeat(rows * bits.shape[0], bits.shape[1])
    factor = torch.tensor(4 / 3 if scheme == RTN34 else 1.0)
    return codes, bits.to(torch.uint8).view(torch.float8_e8m0fnu), factor, scheme


def exact(bits: torch.Tensor) -> torch.Tensor:
    """The values of `every_code`, fp64."""
    scale = torch.exp2(bits.double() - 127).where(bits < 255, torch.nan)
    return (scale[..., None] * E2M1.repeat(2)).flatten(1)


TOPS = torch.arange(255)
# Row by row the largest scale is each that there is; the other blocks lie 0 to 40 below it.
EVERY = (TOPS[:, None] - torch.arange(41)).clamp(min=0)


@pytest.mark.parametrize("scheme, factor", [(RTN, 1.0), (RTN34, 4 / 3)])
def test_every_code_under_every_scale(scheme, factor) -> None:
    """Exact in blocks at most 2^14 below the largest; below them off by at most half of e4m3's
    smallest subnormal, 2^-10 of the unit, and no more than the element itself. Scales below 2^-120
    count as one of 2^-120."""
    for bits in EVERY.split(1):
        elements, scale = q2.to_e4m3(*every_code(bits, scheme))
        unit = 2.0 ** (max(int(bits.max()), 7) - 127 - 6)
        assert scale.item() == torch.tensor(factor).item() * unit
        want = exact(bits)
        error = (elements.double() * unit - want).abs()
        lossless = (max(int(bits.max()), 7) - bits <= 14).flatten()
        assert (error <= want.abs().clamp(max=2.0**-10 * unit)).all()
        assert torch.equal(error.view(-1, 32).amax(1) == 0, lossless)


def test_zeros_keep_their_sign_and_nan_is_no_largest_scale() -> None:
    bits = torch.tensor([[127, 255, 121]])
    elements, scale = q2.to_e4m3(*every_code(bits))
    got = elements.float()
    assert scale.item() == 2.0**-6 and got[:, 32:64].isnan().all()
    assert torch.equal(got[0, :16].double() * 2.0**-6, E2M1)
    assert got[0, 8].signbit() and not got[0, 0].signbit()
    for none in (every_code(torch.full((1, 3), 255)), every_code(torch.zeros((0, 3)))):
        assert q2.to_e4m3(*none)[1].item() == 2.0**-126


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8", "mxfp4_rtn@32x4x4", "mxfp4_rtn@bf16"])
def test_other_operands_are_refused(scheme) -> None:
    with pytest.raises(AssertionError, match=f"takes no codes of {scheme}"):
        q2.to_e4m3(*every_code(TOPS[None, :2])[:3], scheme)


def operands() -> list[tuple]:
    """Every code under every distance; one row; square blocks, of which the last has 8 rows; an
    operand without elements; scales that end within a load of 16."""
    square = every_code(torch.arange(100, 115).view(3, 5), SQUARE, rows=32)
    return [
        every_code(EVERY[[0, 7, 14, 15, 100, 254]], RTN34),
        every_code(torch.tensor([[255, 120, 100]])),
        (square[0][:72], *square[1:]),
        every_code(torch.zeros((0, 4))),
    ]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90a"])
def test_the_kernel_has_the_bits_of_the_reference(architecture, monkeypatch) -> None:
    launches_on_cpu(monkeypatch, architecture)
    for args in operands():
        assert_same_bits(other_ops.to_e4m3(*args), q2.to_e4m3(*args))


def test_its_ptx_has_too(monkeypatch) -> None:
    """The second launch may begin during the first; the interpreter checks what it reads before it
    waits."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings", exc_type=ImportError)
    ptx.serve(monkeypatch, "sm_90a")
    for args in operands()[1:]:
        assert_same_bits(other_ops.to_e4m3(*args), q2.to_e4m3(*args))


def e4m3_gpu() -> str:
    if torch.cuda.get_device_capability() not in ((8, 9), (9, 0)):
        pytest.skip("other GPUs multiply codes, or have no fp8 tensor cores")
    return "cuda"


@pytest.mark.gpu
def test_a_gpu_has_the_bits_of_the_reference() -> None:
    device = e4m3_gpu()
    for args in (*operands(), every_code(EVERY)):
        on_gpu = [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]
        got = select("to_e4m3", on_gpu, "cuda")(*on_gpu)
        assert_same_bits([t.cpu() for t in got], q2.to_e4m3(*args))


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [384, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gpu_multiplies_them(columns, dtype, has_bias) -> None:
    """Operands without a block that is rounded. The error of rounding a result to bf16 once is
    .00166 of its norm, also in BF16's GEMMs (KERNEL_LOG.md); in fp32 that of the sums is left."""
    device, generator = e4m3_gpu(), torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 1024, generator=generator) for rows in (300, columns))
    bias = torch.randn(columns, generator=generator).to(dtype) if has_bias else None
    quantized = [q2.quantize(x, scheme=RTN34, rowwise=True, columnwise=False)[:3] for x in (a, b)]
    values = [q2.dequantize(*parts, RTN34, 1024, torch.float32).double() for parts in quantized]
    want = values[0] @ values[1].t() + (0 if bias is None else bias.double())
    args = [*quantized[0], *quantized[1], bias, RTN34, RTN34, dtype]
    on_gpu = [x.to(device) if isinstance(x, torch.Tensor) else x for x in args]
    got = select("gemm", on_gpu, SCALED_MM)(*on_gpu).cpu().double()
    assert got.shape == want.shape
    assert (got - want).norm() / want.norm() < 0.002
