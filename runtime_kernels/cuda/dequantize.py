# SPDX-License-Identifier: Apache-2.0
"""q2::dequantize on CUDA (dequantize.cu), also the first half of the emulated GEMM."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from q2compile.runtime_kernels.cuda.calls import (
    MOST_SIDES,
    At,
    Call,
    Ending,
    Form,
    Output,
    Step,
    in_places,
    launching,
)
from q2compile.runtime_kernels.cuda.jit.launch import Launch, launch
from q2compile.runtime_kernels.cuda.selfcheck import refusal
from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.argument_checks import check_quantized
from q2compile.runtime_kernels.registry import CUDA

THREADS = 256
_MATRIX = "PPPPqiiii"
_OUT = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class Matrix(NamedTuple):
    """dequantize.cu has the same struct."""

    codes: At
    scales: At
    global_scale: At | int
    out: At
    groups: int
    groups_across: int
    cols: int
    row_shift: int
    blocks: int


@dataclass(frozen=True)
class Dequantizing(Ending):
    """All of a call: one launch, whose thread blocks are those of one matrix after the other's."""

    @property
    def step(self) -> Step:
        thread_blocks = sum(matrix.blocks for matrix in self.sides)
        return Step(self.launch, (thread_blocks, 1), in_places(self.sides))


@functools.cache
def dequantize_launch(dtype: torch.dtype, mx: bool, whole: bool) -> Launch:
    """The kernel for an output type; whole: all columns, and no scales shared between rows."""
    defines = {"Q2_OUT": _OUT[dtype], "Q2_MX": int(mx), "Q2_WHOLE": int(whole)}
    return launch("dequantize.cu", _MATRIX * MOST_SIDES, THREADS, defines=defines)


def _refuses(codes, scales, global_scale, scheme, cols, dtype) -> str | None:
    if dtype not in _OUT:
        return f"it writes bfloat16, float16 and float32, not {dtype}"
    if get_scheme(scheme).swizzled:
        return "dequantize.cu reads plain scales"
    return refusal("dequantize", CUDA, codes.device.index, scheme)


def launches(codes, scheme: str, cols, dtype: torch.dtype) -> Iterator[Launch]:
    """What a call with the like of codes, which may be fake, launches; whether all columns are
    wanted or not, where that is not known."""
    spec = get_scheme(scheme)
    same = cols == 2 * codes.shape[1]
    for whole in (True, False):
        if not statically_known_true(torch.sym_not(same) if whole else same):
            mx = spec.format == "mxfp4"
            yield dequantize_launch(dtype, mx, whole and spec.block[0] == 1)


@launching(
    "dequantize",
    refuses=_refuses,
    launches=lambda codes, scales, global_scale, *rest: launches(codes, *rest),
    forms={0: Form.CONTIGUOUS, 1: Form.CONTIGUOUS},
)
def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    scheme: str,
    cols: int,
    dtype: torch.dtype,
) -> Call:
    """See ops/dequantize.py."""
    check_quantized("dequantize", codes, scales, global_scale)
    spec = get_scheme(scheme)
    rows, half = codes.shape
    operands = 2 + (global_scale is not None)
    groups = rows * half // 4
    whole = cols == 2 * half and spec.block[0] == 1
    unit = 0 if global_scale is None else At(2)
    blocks = max(1, ceil_div(groups, THREADS))
    extents = groups, half // 4, cols, 4 if spec.block[0] == 16 else 0
    matrix = Matrix(At(0), At(1), unit, At(operands), *extents, blocks)
    launched = dequantize_launch(dtype, spec.format == "mxfp4", whole)
    ending = Dequantizing(launched, (matrix,))
    return Call(operands, (Output((rows, cols), dtype),), 0, (ending.step,), ending)
