"""Out of a graph, without leaving it: how telemetry hears of what a graph computes.

    stack_marks(marks) -> fp32 [n]   the global scales of operands, side by side
    note(noted!, place, layout)      hands tensors to the function that `SINKS` has for the place,
                                     with a text that says what they are

An operand with a NaN or Inf anywhere has a global scale of NaN, whatever its scheme and the form
of its codes (`blocks.finite_or_nan`): to know of all operands of a graph whether they are finite
costs one small kernel.

``note`` says that it writes to what it is given, so that no compiler takes it for dead code; it
does not. Its function runs on the host when the graph is run or captured, so all that it does with
the tensors must be launched on their device and write to memory of its own: a replay of a CUDA
graph does the launches alone. A place that has no function is no error: cached code may outlive it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from q2compile.runtime_kernels.registry import REFERENCE, define, kernel

SINKS: dict[str, Callable[[Sequence[torch.Tensor], str], None]] = {}

define(
    "stack_marks(Tensor[] marks) -> Tensor",
    fake=lambda marks: marks[0].new_empty((len(marks),), dtype=torch.float32),
)


@kernel("stack_marks", REFERENCE)
def stack_marks(marks: Sequence[torch.Tensor]) -> torch.Tensor:
    """See above; marks are fp32 0-dim."""
    return torch.stack(list(marks))


define(
    "note(Tensor(a!)[] noted, str place, str layout) -> ()",
    fake=lambda noted, place, layout: None,
)


@kernel("note", REFERENCE)
def note(noted: Sequence[torch.Tensor], place: str, layout: str) -> None:
    """See above."""
    sink = SINKS.get(place)
    if sink is not None:
        sink(noted, layout)
