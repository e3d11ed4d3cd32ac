# SPDX-License-Identifier: Apache-2.0
"""Ops by which telemetry reads what a graph computes.

    mark(codes, scales) -> 0-dim     shows whether an operand has a NaN or Inf
    stack_marks(marks) -> fp32 [n]   of several operands: NaN for those with a NaN or Inf
    note(noted!, place, layout)      hands tensors to the function that `SINKS` has for the place,
                                     with a text that says what they are

A NaN or Inf makes the scale of its block NaN (numerics/blocks.py), which is the largest byte of its
format. So a mark is the largest byte of the scales: one kernel that reads a byte for 16 elements.
Operands in the form that a bf16 GEMM reads (@bf16) have no scales; there it is the largest
magnitude. Codes of fp8 have none either; there it is the largest byte of the codes without signs.

``note`` declares that it writes to its tensors, so that no compiler removes it as dead code; it
does not write. Its function runs on the host when the graph is run or captured. All that it does
with the tensors must be launches on their device that write to memory of its own, since a replay of
a CUDA graph repeats only the launches. A place without a function is no error: cached code may
outlive the function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from q2compile.runtime_kernels.registry import define

SINKS: dict[str, Callable[[Sequence[torch.Tensor], str], None]] = {}


def _dtype_of_mark(codes: torch.Tensor, scales: torch.Tensor) -> torch.dtype:
    """The bytes as integers of which NaN is the largest; e4m3 as int8, without its sign bit."""
    if codes.dtype == torch.float8_e4m3fn:
        return torch.int8
    if codes.is_floating_point():
        return torch.float32
    return torch.int8 if scales.dtype == torch.float8_e4m3fn else torch.uint8


@define(
    "mark(Tensor codes, Tensor scales) -> Tensor",
    fake=lambda codes, scales: codes.new_empty((), dtype=_dtype_of_mark(codes, scales)),
)
def mark(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """See above."""
    dtype = _dtype_of_mark(codes, scales)
    if codes.dtype == torch.float8_e4m3fn:
        values = codes.view(dtype).bitwise_and(0x7F)
    else:
        values = codes if dtype == torch.float32 else scales.view(dtype)
    if values.numel() == 0:
        return values.new_zeros((), dtype=dtype)
    if dtype == torch.float32:
        return torch.linalg.vector_norm(values, torch.inf, dtype=dtype)
    return values.amax()


@define(
    "stack_marks(Tensor[] marks) -> Tensor",
    fake=lambda marks: marks[0].new_empty((len(marks),), dtype=torch.float32),
)
def stack_marks(marks: Sequence[torch.Tensor]) -> torch.Tensor:
    """See above. Takes a few kernels for any number of marks."""
    of_each: dict[int, torch.Tensor] = {}
    for dtype in {m.dtype: None for m in marks}:
        places = [i for i, m in enumerate(marks) if m.dtype == dtype]
        stacked = torch.stack([marks[i] for i in places])
        bytes_ = dtype != torch.float32
        bad = stacked == torch.iinfo(dtype).max if bytes_ else ~stacked.isfinite()
        shown = torch.zeros_like(stacked, dtype=torch.float32).masked_fill_(bad, torch.nan)
        of_each.update(zip(places, shown.unbind(), strict=True))
    return torch.stack([of_each[i] for i in range(len(marks))])


@define(
    "note(Tensor(a!)[] noted, str place, str layout) -> ()",
    fake=lambda noted, place, layout: None,
)
def note(noted: Sequence[torch.Tensor], place: str, layout: str) -> None:
    """See above."""
    sink = SINKS.get(place)
    if sink is not None:
        sink(noted, layout)
