# SPDX-License-Identifier: Apache-2.0
"""Prologue expressions of models, as lowering/prologue/expressions.py writes them down, and the
quantizers that compute their operand by them. tests/lowering/test_fused_launches.py holds the
expressions to what the lowering makes."""

from __future__ import annotations

import torch

from q2compile.runtime_kernels.cuda.jit.launch import Launch
from q2compile.runtime_kernels.cuda.quantize.prologue_expression import PrologueExpression
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import (
    SOURCES,
    RotatingKernel,
    rotate_launch,
)
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.numerics.transforms import get_transform

_AT = "(c + (4096 * r))"
BF16 = torch.bfloat16


def _loads(*numbers: int) -> tuple:
    return tuple(("load", i, _AT, "lanes", -1) for i in numbers)


def _expression(inputs: tuple, *steps: tuple, results: tuple[int, ...] = ()) -> PrologueExpression:
    """Without `results` the last step is the result."""
    results = results or (len(steps) - 1,)
    return PrologueExpression(BF16, 8192, 4096, inputs, False, steps, results)


ONE = ("constant", "0x1.0000000000000p+0", "float")
SWIGLU = _expression(
    (BF16,) * 3,
    *_loads(0, 1, 2),
    *(("mul", 0, 1), ("sigmoid", 2), ONE, ("sub", 5, 4), ("mul", 2, 4)),
    *(("fma", 7, 6, 4), ("mul", 3, 8)),
)
# And du of the same read: dh * (g * sigmoid(g)).
GATED = _expression(SWIGLU.inputs, *SWIGLU.steps, ("mul", 0, 7), results=(9, 10))
GELU = _expression(
    (BF16,) * 2,
    *_loads(0, 1),
    *(("constant", "0x1.6a09e667f3bcdp-1", "float"), ("mul", 1, 2), ("erf_plus_one", 3)),
    *(("constant", "0x1.0000000000000p-1", "float"), ("mul", 1, 1)),
    *(("constant", "-0x1.0000000000000p-1", "float"), ("mul", 6, 7), ("exp", 8)),
    *(("constant", "0x1.9884533d43651p-2", "float"), ("mul", 9, 10), ("mul", 1, 11)),
    *(("fma", 4, 5, 12), ("mul", 0, 13)),
)
SILU = _expression((BF16,) * 2, *(*_loads(0, 1), ("sigmoid", 1), ("mul", 1, 2), ("mul", 0, 3)))
SUM = _expression((BF16, torch.float32), *_loads(0, 1), ("add", 0, 1))
NORM = _expression(
    (BF16, BF16, BF16, torch.float32, torch.float32),
    *_loads(0),
    ("load", 1, "c", "lanes", -1),
    *_loads(2),
    *(("load", 3, "r", "one", -1), ("mul", 2, 3), ("neg", 4), ("fma", 0, 1, 5)),
    *(("load", 4, "r", "one", -1), ("mul", 6, 7)),
)
_HALF = "floordiv(mod(c, 128), 64)"
_TABLE_AT = "((128 * mod(r, 64)) + mod(c, 128))"
_ROPE_AT = f"({_TABLE_AT} + (8192 * floordiv(c, 128)) + (262144 * floordiv(r, 64)))"
ROPE = _expression(
    (BF16,) * 3,
    *(("load", 0, _ROPE_AT, "lanes", -1), ("load", 1, _TABLE_AT, "lanes", -1)),
    *(("index", "mod(c, 128)", "first"), ("index", "64", "one"), ("lt", 2, 3)),
    ("load", 0, f"(64 + ((-128) * {_HALF}) + {_ROPE_AT})", "lanes", -1),
    ("load", 2, f"(64 + ((-128) * {_HALF}) + {_TABLE_AT})", "lanes", -1),
    *(("mul", 5, 6), ("constant", "0x0.0p+0", "float"), ("neg", 7), ("where", 4, 7, 9)),
    *(("fma", 0, 1, 10), ("add", 11, 8)),
)
DROPOUT = _expression((BF16, torch.bool), *_loads(0, 1), ("cast", 1, "float"), ("mul", 0, 2))
CAST = _expression((torch.float32,), *_loads(0))
EXPRESSIONS = {
    "swiglu": SWIGLU,
    "gated": GATED,
    "gelu": GELU,
    "silu": SILU,
    "sum": SUM,
    "norm": NORM,
    "rope": ROPE,
    "dropout": DROPOUT,
    "cast": CAST,
}


def fused_launch(
    expression: PrologueExpression, scheme: str, directions: tuple[bool, bool]
) -> Launch:
    """The quantizer that rotates and rounds what the expression computes."""
    transform, spec = get_transform("rht128"), get_scheme(scheme)
    kernel = RotatingKernel(SOURCES[BF16], transform, spec, *directions, prologue=expression)
    return rotate_launch(kernel)
