# SPDX-License-Identifier: Apache-2.0
"""Ops that compute an operand of the backward, as functions of torch, with inputs for each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

ROWS, COLS = 150, 200  # no whole tiles
BF16, FP32 = torch.bfloat16, torch.float32


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def matrices(count: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    return [normal(ROWS, COLS, seed=i, dtype=dtype) for i in range(count)]


def swiglu_gate(dh, g, u):
    g = g.float()
    s = torch.sigmoid(g)
    return (dh.float() * u.float() * s * (1 + g * (1 - s))).to(dh.dtype)


def gelu(dy, x):
    return torch.ops.aten.gelu_backward(dy.float(), x.float()).to(dy.dtype)


def residual(a, b, c):
    return (a.float() + b.float() + c).to(a.dtype)


def rope(dq, cos, sin):
    """dq [B, H, S, D], tables [S, D], to [B * S, H * D], as autograd has it."""
    cos, sin, dq = cos.float(), sin.float(), dq.float()
    first, second = (dq * sin).chunk(2, -1)
    half, whole = dq.shape[-1] // 2, dq.shape[-1]
    of_second = torch.ops.aten.slice_backward(second, dq.shape, 3, 0, half, 1)
    of_first = torch.ops.aten.slice_backward(-first, dq.shape, 3, half, whole, 1)
    dx = dq * cos + of_second + of_first
    return dx.transpose(1, 2).flatten(2).flatten(0, 1).bfloat16()


def rmsnorm(dy, w, x, rstd, mean):
    return ((dy.float() * w.float() - x.float() * mean) * rstd).to(dy.dtype)


def dropout(dy, kept):
    return (dy.float() * kept.float() * (1 / 0.9)).to(dy.dtype)


def silu_mul(g, u):
    return (F.silu(g.float()) * u.float()).to(g.dtype)


def rope_tables() -> list[torch.Tensor]:
    angle = torch.arange(40)[:, None] / (1 + torch.arange(32).repeat(2))
    return [normal(2, 2, 40, 64), angle.cos().bfloat16(), angle.sin().bfloat16()]


def norm_operands() -> list[torch.Tensor]:
    rows = [normal(ROWS, 1, seed=i, dtype=FP32).abs() for i in (7, 8)]
    return [normal(ROWS, COLS), normal(COLS, seed=5), normal(ROWS, COLS, seed=6), *rows]


# name -> the function, its operands, whether all it does is exact or rounded once in fp32.
PROLOGUES: dict[str, tuple[Callable, Callable[[], list], bool]] = {
    "swiglu": (swiglu_gate, lambda: matrices(3), False),
    "gelu": (gelu, lambda: matrices(2), False),
    "residual": (residual, lambda: [*matrices(2), normal(ROWS, COLS, dtype=FP32)], True),
    "rope": (rope, rope_tables, True),
    "rmsnorm": (rmsnorm, norm_operands, True),
    "dropout": (dropout, lambda: [normal(ROWS, COLS), normal(ROWS, COLS, seed=3) > -1], True),
}
