# SPDX-License-Identifier: Apache-2.0
"""Whether a rotating quantizer should compute its operand: a model of the time with and without.

Without prologue fusion there are two kernels, the producer's and the quantizer's. Each takes the
longer of two times: to issue its instructions, and to move its bytes. With fusion there is one
kernel. It issues both sets of instructions, and waits for the producer's loads; the more rows are
in flight together, the shorter the wait.

The time of one element of 2 bytes, in bytes that the memory could move meanwhile:

    two kernels   max(P / i, R' + 2) + max(Q / i, 2 + W)
    one kernel    max((P + Q) / i + 1.1 R / rows ahead, R + W)

    i    instructions that are issued in the time of one byte
    P    instructions of the producer; Q, of the quantizer
    R    bytes that the producer reads; W, bytes that are written
    R'   R, or 0 where another quantizer of the graph reads the same operand (dg and du of a gated
         MLP): the producer's kernel runs then either way

An exact global scale needs a pass of its own for the largest magnitude, of A instructions. It adds
max(A / i, 2) to two kernels and (P + A) / i + 1.1 R / rows ahead to one, which computes the operand
a second time.

Inductor's kernel may need more instructions than ours, which approximates (`Operation.inductor`).
P of two kernels is Inductor's. So is P of one kernel if another quantizer reads the same operand.

A kernel that computes and quantizes two operands (n = 2, a SwiGLU):

    two kernels   max(P / i, R + 2 n) + n max(Q / i, 2 + W)
    one kernel    max((P + n Q) / i + 1.1 R / rows ahead, R + n W)

Measured, the ratio is within 0.1 of this one (examples/benchmarks/results/fusion.json, an H200, 4
rows ahead): SwiGLU's backward .79 and .80, GELU's .80 and .90, a residual sum .74 and .66.

i comes from data sheets; the H200's is measured (`examples/benchmarks/instructions.py`). Q comes
from machine code for sm_90a (KERNEL_LOG.md there), except the mask's part, which is fitted to SiLU
times u with QuEST. A is the time of tetrajet2's quantizer with an exact global scale less its time
with a power of two. P comes from tests/lowering/test_fused_static.py.
"""

from __future__ import annotations

from typing import Any

import torch

from q2compile.lowering.inductor_kernels.fusion_gain import INSTRUCTIONS_A_BYTE
from q2compile.runtime_kernels.choice import InGraph, choose, generated_kernel
from q2compile.runtime_kernels.cuda.quantize import fused
from q2compile.runtime_kernels.cuda.quantize.prologue_expression import PrologueExpression
from q2compile.runtime_kernels.cuda.quantize.prologue_source import (
    bytes_read,
    instructions,
    rows_ahead,
)
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import ScaleRule
from q2compile.runtime_kernels.numerics.schemes import Scheme
from q2compile.runtime_kernels.ops.table import QUANTIZE, QuantizerCall
from q2compile.runtime_kernels.registry import FUSED

_CHEAPEST = min(INSTRUCTIONS_A_BYTE.values())
MARGIN = 0.95  # for errors of the rule
# Q, of one operand and of both.
_QUANTIZER = {"ms_eden": (26.0, 49.0), "sr": (38.5, 77.5), "rtn": (17.0, 35.0)}
_DEQUANTIZING = 6.0  # instructions a direction
_MASK = 15.0  # of a trust mask
_LARGEST = 17.0  # A, a direction
_WRITTEN, _WRITTEN_DEQUANTIZED = 0.75, 2.25  # bytes an element and direction
_WAITED = 1.1  # of a byte's time, for each byte read and row of loads on its way


@generated_kernel(QUANTIZE, FUSED, lambda op, name, *call: fused.check_of(*call))
def why_not_fused(graph: InGraph, *args: Any) -> str | None:
    """None if a CUDA kernel computes the operand of a call, or the operands of two calls, and that
    is expected to pay; otherwise the reason in words."""
    call, prologue = QuantizerCall.of(QUANTIZE, args), graph.prologue
    if prologue is None:
        return "no expression of its operand is known"
    if choose(QUANTIZE, args).launching is None:
        return "no CUDA kernel of q2compile serves it here"
    operands, device = len(prologue.results), call.x.device
    reason = fused.no_pair(prologue, call, device.index or 0) if operands > 1 else None
    if reason is None:
        major = torch.cuda.get_device_capability(device)[0]
        how = call.scheme, len(call.operands), major, operands == 1 and graph.is_shared
        reason = why_not(prologue, *how)
    return reason


def why_not(
    expression: PrologueExpression,
    spec: Scheme,
    directions: int,
    capability: int,
    shared: bool = False,
) -> str | None:
    """None when computing the operand in the quantizer, or both operands in one, is expected to
    pay, otherwise the reason in words. capability: the major compute capability of the GPU.
    shared: another quantizer reads the same."""
    ratio = expected(expression, spec, directions, capability, shared)
    if ratio <= MARGIN:
        return None
    often = ", twice for an exact global scale," if ScaleRule.of(spec) == ScaleRule.EXACT else ""
    return (
        f"{bytes_read(expression):.1f} bytes and {instructions(expression):.0f} instructions per "
        f"element{often} are expected to take {ratio:.2f} of the time without fusing, more than "
        f"{MARGIN}"
    )


def expected(
    expression: PrologueExpression,
    spec: Scheme,
    directions: int,
    capability: int,
    shared: bool = False,
) -> float:
    """The time of the fused kernels over that of the others."""
    rate = INSTRUCTIONS_A_BYTE.get(capability, _CHEAPEST)
    size, read, made = expression.dtype.itemsize, bytes_read(expression), instructions(expression)
    # If another quantizer reads the operand, Inductor's longer code runs in that one's kernel.
    count, apart = len(expression.results), instructions(expression, by_inductor=not shared)
    rounded = _QUANTIZER.get(spec.rounding, _QUANTIZER["sr"])[directions - 1]
    rounded += _DEQUANTIZING * directions * spec.dequantized + _MASK * spec.masked
    written = directions * (_WRITTEN_DEQUANTIZED if spec.dequantized else _WRITTEN)
    own_read = 0.0 if shared else read
    unfused = max(apart / rate, own_read + count * size)
    unfused += count * max(rounded / rate, size + written)
    waited = _WAITED * read / rows_ahead(expression)
    fused = max((made + count * rounded) / rate + waited, read + count * written)
    if ScaleRule.of(spec) == ScaleRule.EXACT:
        largest = _LARGEST * directions
        unfused += max(largest / rate, size)
        fused += max((made + largest) / rate + waited, read)
    return fused / unfused
