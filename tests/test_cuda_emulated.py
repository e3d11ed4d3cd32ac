"""The CUDA kernels on a CPU (tests/emulation), against the torch reference, bit by bit: with the
fp4 conversions of Blackwell, and with the arithmetic that stands for them elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import emulation
import pytest
import torch

from q2compile.runtime_kernels.cuda import dequantize, gemm, rotation
from q2compile.runtime_kernels.cuda.launch import Launch
from q2compile.runtime_kernels.schemes import get_scheme
from q2compile.runtime_kernels.swizzle import swizzle_32x4x4

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

q2 = torch.ops.q2
POW2, EXACT = "nvfp4_ms_eden_pow2", "nvfp4_ms_eden"
SEEDS = torch.tensor(-1234567890123456789), torch.tensor(42)


@pytest.fixture
def hw_fp4() -> bool:
    return False


@pytest.fixture(autouse=True)
def on_cpu(hw_fp4, monkeypatch) -> Iterator[None]:
    """Launches go to the emulation, of a GPU with two multiprocessors."""

    def run(launch, device, grid, *values):
        emulation.emulate(launch, hw_fp4, grid, *values)

    monkeypatch.setattr(Launch, "__call__", run)
    monkeypatch.setattr(rotation, "multiprocessors", lambda index: 2)
    rotation._plan.cache_clear()
    yield
    rotation._plan.cache_clear()


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


@pytest.mark.parametrize("hw_fp4", [False, True])
@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (33, 517), (1, 1)])
def test_rht_quantize_both(hw_fp4, shape) -> None:
    x = matrix(*shape)
    args = (x, *SEEDS, POW2, "rht128", 3)
    assert_same_bits(rotation.rht_quantize_both(*args), q2.rht_quantize_both(*args))


@pytest.mark.parametrize("transpose", [False, True])
def test_rht_quantize(transpose) -> None:
    for x in (matrix(140, 136), matrix(136, 140).t(), matrix(1, 136).expand(140, 136)):
        args = (x, SEEDS[0], EXACT, "rht128", transpose, 0)
        assert_same_bits(rotation.rht_quantize(*args), q2.rht_quantize(*args))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype) -> None:
    args = (matrix(130, 140, dtype), *SEEDS, POW2, "rht128", 0)
    assert_same_bits(rotation.rht_quantize_both(*args), q2.rht_quantize_both(*args))


@pytest.mark.parametrize("transform", ["none", "rht32_fixed", "rht64"])
def test_other_transforms(transform) -> None:
    args = (matrix(136, 136), *SEEDS, POW2, transform, 0)
    assert_same_bits(rotation.rht_quantize_both(*args), q2.rht_quantize_both(*args))


def test_tiny_numbers() -> None:
    """Scales down to e4m3's subnormals, and blocks that count as zeros."""
    x = matrix(128, 128, torch.float32) * torch.logspace(-38, -3, 128)
    args = (x, SEEDS[0], POW2, "none", False, 0)
    assert_same_bits(rotation.rht_quantize(*args), q2.rht_quantize(*args))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_poison(value) -> None:
    x = matrix(130, 140)
    x[77, 88] = value
    results = rotation.rht_quantize_both(x, *SEEDS, POW2, "rht128", 0)
    assert results[2].isnan() and results[5].isnan()


@pytest.mark.parametrize("shape", [(0, 40), (40, 0)])
def test_empty(shape) -> None:
    args = (torch.empty(shape, dtype=torch.bfloat16), *SEEDS, POW2, "rht128", 0)
    assert_same_bits(rotation.rht_quantize_both(*args), q2.rht_quantize_both(*args))


@pytest.mark.parametrize("hw_fp4", [False, True])
@pytest.mark.parametrize("source", ["nvfp4_46_pow2", "nvfp4_46", "nvfp4_16x16"])
@pytest.mark.parametrize("scheme", [POW2, EXACT])
def test_requantize(hw_fp4, source, scheme) -> None:
    x = matrix(145, 200)
    amax = q2.amax(x) if get_scheme(source).takes_amax else None
    args = (*q2.quantize(x, amax, None, source, 0), SEEDS[0], source, scheme, "rht128", 200, 1)
    assert_same_bits(rotation.requantize(*args), q2.requantize(*args))


@pytest.mark.parametrize("scheme", ["nvfp4_46", "nvfp4_16x16_pow2", "mxfp4_rtn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dequantize(scheme, dtype) -> None:
    x = matrix(40, 72, torch.float32)
    spec = get_scheme(scheme)
    packed = q2.quantize(x, q2.amax(x) if spec.takes_amax else None, SEEDS[0], scheme, 0)
    for cols in (72, 2 * packed[0].shape[1]):
        args = (*packed, scheme, cols, dtype)
        assert_same_bits((dequantize.dequantize(*args),), (q2.dequantize(*args),))


@pytest.mark.parametrize("rows, blocks", [(1, 1), (128, 4), (200, 9)])
def test_swizzled_scales(rows, blocks) -> None:
    scales = torch.randint(0, 127, (rows, blocks), dtype=torch.uint8).view(torch.float8_e4m3fn)
    got = gemm.swizzled(scales, rows, get_scheme("nvfp4"))
    assert_same_bits((got,), (swizzle_32x4x4(scales),))
    shared = gemm.swizzled(scales, 16 * rows, get_scheme("nvfp4_16x16"))
    repeated = scales.view(torch.uint8).repeat_interleave(16, 0).view(scales.dtype)
    assert_same_bits((shared,), (swizzle_32x4x4(repeated),))
