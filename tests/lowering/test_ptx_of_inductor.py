# SPDX-License-Identifier: Apache-2.0
"""Inductor's quantizer kernels as a GPU runs them: the PTX that Triton makes, run on a CPU
(tests/support/ptx), gives the reference's bits, for operands of every magnitude.

Left to a GPU: ptxas may contract a product and a sum that name no rounding into one operation.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from q2compile.runtime_kernels.numerics.schemes import get_scheme
from tests.support.emulation.inductor import Kernel, triton_kernels
from tests.support.emulation.on_cpu import assert_same_bits
from tests.support.ptx import inductor as ptx
from tests.support.ptx.floats import flushed
from tests.support.ptx.instructions import TABLE

pytestmark = pytest.mark.usefixtures("fresh_compiler")
q2 = torch.ops.q2
ROWS, COLS = 40, 112  # 280 blocks: no whole number of tiles


def quantized(x: torch.Tensor, scheme: str, amax: torch.Tensor | None = None) -> list[torch.Tensor]:
    return q2.quantize(x, scheme=scheme, rowwise=True, columnwise=False, amax=amax)


def operand(dtype: torch.dtype) -> torch.Tensor:
    """Rows from fp32's smallest subnormal to a quarter of its largest number, ties, zeros of both
    signs."""
    x = torch.randn((ROWS, COLS), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[::5] = torch.linspace(-6, 6, COLS).mul(4).round().div(4).double()
    exponents = torch.linspace(-151, 122, ROWS).round().double()
    x = x.clamp(-6, 6) * exponents.exp2()[:, None]
    x[3, :16], x[4, :16] = 0.0, -0.0
    return x.to(dtype)


SCHEMES = ["nvfp4_46_pow2", "nvfp4_pow2", "nvfp4_search_pow2"]


@pytest.mark.parametrize(
    "scheme, capability",
    [*product(SCHEMES, (90, 100)), *product(SCHEMES[:1], (80, 120))],
)
def test_the_reference_s_bits(scheme, capability, monkeypatch, tmp_path) -> None:
    """Codes and raw scales come from one kernel; the reference splits the scales."""
    agree(scheme, capability, monkeypatch, tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_wider_and_narrower_loads(dtype, monkeypatch, tmp_path) -> None:
    """A thread has 8 or 2 neighbors. Of 2, each element has a result of its own (`packed`)."""
    agree(SCHEMES[0], 100, monkeypatch, tmp_path, operand(torch.float32).to(dtype))


def test_an_exact_global_scale(monkeypatch, tmp_path) -> None:
    x = operand(torch.float32)
    amax = q2.amax(2 * x)
    kernel = triton_kernels(monkeypatch, 100, lambda x, a: quantized(2 * x, "nvfp4_46", a), x, amax)
    want = quantized(2 * x, "nvfp4_46", amax)
    codes, scales = torch.empty_like(want[0]), torch.empty_like(want[1])
    ptx.run(kernel[-1], 100, tmp_path, [x, want[2], 1 / want[2], scales, codes])
    assert_same_bits([codes, scales], want[:2])


def test_square_blocks(monkeypatch, tmp_path) -> None:
    """One kernel for what a block has, and one for the codes."""
    scheme, x = "nvfp4_16x16_46_pow2", operand(torch.float32)[:32]
    blocks, codes = triton_kernels(monkeypatch, 100, lambda x: quantized(2 * x, scheme), x)
    want = quantized(2 * x, scheme)
    six, four, raw = (torch.empty(want[1].shape) for _ in range(3))
    takes_four, found = torch.empty(want[1].shape, dtype=torch.bool), torch.empty_like(want[0])
    ptx.run(tiled(blocks, 2, 1), 100, tmp_path, [x, six, four, takes_four, raw])
    ptx.run(tiled(codes, 8, 2), 100, tmp_path, [x, takes_four, four, six, found])
    assert_same_bits([found, *q2.split_scales(raw, scheme)], want)


def tiled(kernel: Kernel, blocks: int, warps: int) -> Kernel:
    """With a tile of so many blocks, for which Triton exchanges values by shuffles only."""
    source = re.sub(r"config=\{.*?\}, *", "", kernel.source)
    tile = {"XBLOCK": blocks, "num_warps": warps}
    decorator = re.compile(r"(@triton_heuristics\.\w+\()")
    return replace(kernel, source=decorator.sub(rf"\g<1>config={tile},", source))


def test_a_flush_is_seen(monkeypatch, tmp_path) -> None:
    """Before Blackwell codes come from products that are subnormal (`Fp32.e2m1_code`)."""
    exact = TABLE["mul.f32"]
    flushing = exact._replace(compute=lambda a, b: flushed(exact.compute(a, b)))
    monkeypatch.setitem(TABLE, "mul.f32", flushing)
    with pytest.raises(AssertionError, match="differ"):
        agree("nvfp4_pow2", 90, monkeypatch, tmp_path)


def agree(
    scheme: str,
    capability: int,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    x: torch.Tensor | None = None,
) -> None:
    x = operand(torch.float32) if x is None else x

    def doubled(x: torch.Tensor) -> list[torch.Tensor]:
        return quantized(2 * x.float(), scheme)

    (kernel,) = triton_kernels(monkeypatch, capability, doubled, x)
    codes = torch.empty((ROWS, COLS // 2), dtype=torch.uint8)
    raw = torch.empty((ROWS, COLS // get_scheme(scheme).width))
    ptx.run(kernel, capability, folder, [x, raw, codes])
    assert_same_bits([codes, *q2.split_scales(raw, scheme)], doubled(x))
