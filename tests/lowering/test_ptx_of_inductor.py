# SPDX-License-Identifier: Apache-2.0
"""Inductor's quantizer kernels as a GPU runs them: the PTX that Triton makes, run on a CPU
(tests/support/ptx), gives the reference's bits, for operands of every magnitude.

Left to a GPU: ptxas may contract a product and a sum that name no rounding into one operation.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from q2compile.runtime_kernels.numerics.schemes import get_scheme
from tests.support.emulation.inductor import triton_kernels
from tests.support.emulation.on_cpu import assert_same_bits
from tests.support.ptx import inductor as ptx
from tests.support.ptx.floats import flushed
from tests.support.ptx.instructions import TABLE

pytestmark = pytest.mark.usefixtures("fresh_compiler")
q2 = torch.ops.q2
ROWS, COLS = 40, 112  # 280 blocks: no whole number of tiles


def quantized(x: torch.Tensor, scheme: str) -> list[torch.Tensor]:
    return q2.quantize(x, scheme=scheme, rowwise=True, columnwise=False)


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
    "scheme, capability", [*product(SCHEMES, (80, 90, 100)), (SCHEMES[0], 120)]
)
def test_the_reference_s_bits(scheme, capability, monkeypatch, tmp_path) -> None:
    """Codes and raw scales come from one kernel; the reference splits the scales."""
    agree(scheme, capability, monkeypatch, tmp_path)


def test_a_flush_is_seen(monkeypatch, tmp_path) -> None:
    """Before Blackwell codes come from products that are subnormal (`Fp32.e2m1_code`)."""
    exact = TABLE["mul.f32"]
    flushing = exact._replace(compute=lambda a, b: flushed(exact.compute(a, b)))
    monkeypatch.setitem(TABLE, "mul.f32", flushing)
    with pytest.raises(AssertionError, match="differ"):
        agree("nvfp4_pow2", 90, monkeypatch, tmp_path)


def agree(scheme: str, capability: int, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    x = operand(torch.float32)

    def doubled(x: torch.Tensor) -> list[torch.Tensor]:
        return quantized(2 * x, scheme)

    (kernel,) = triton_kernels(monkeypatch, capability, doubled, x)
    codes = torch.empty((ROWS, COLS // 2), dtype=torch.uint8)
    raw = torch.empty((ROWS, COLS // get_scheme(scheme).width))
    ptx.run(kernel, capability, folder, [x, raw, codes])
    want = quantized(2 * x, scheme)
    assert_same_bits([codes, *q2.split_scales(raw, scheme)], want)
