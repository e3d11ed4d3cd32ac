"""Out of a graph, without leaving it: how telemetry hears of what a graph computes.

    stack_marks(marks) -> fp32 [n]   one number of each operand, not finite where the operand is not
    block_mark(codes, scales, scheme) -> fp32 0-dim   such a number for a scheme of MXFP4
    note(noted!, place, layout)      hands tensors to the function that `SINKS` has for the place,
                                     with a text that says what they are

An NVFP4 operand with a NaN or Inf anywhere has a global scale of NaN, so its mark is that scale, and
costs nothing. MXFP4 has no scale for the whole; there the marks of all blocks are looked through.

``note`` says that it writes to what it is given, so that no compiler takes it for dead code; it does
not. Its function runs on the host when the graph is run or captured, so all that it does with the
tensors must be launched on their device and write to memory of its own: a replay of a CUDA graph
does the launches alone. A place that has no function is no error: cached code may outlive it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.registry import REFERENCE, define, kernel

SINKS: dict[str, Callable[[Sequence[torch.Tensor], str], None]] = {}
_NAN_E8M0 = 255

define(
    "stack_marks(Tensor[] marks) -> Tensor",
    fake=lambda marks: marks[0].new_empty((len(marks),), dtype=torch.float32),
)
define(
    "block_mark(Tensor codes, Tensor scales, str scheme) -> Tensor",
    fake=lambda codes, *_: codes.new_empty((), dtype=torch.float32),
)


@kernel("stack_marks", REFERENCE)
def stack_marks(marks: Sequence[torch.Tensor]) -> torch.Tensor:
    """See above; marks are fp32 0-dim."""
    return torch.stack(list(marks))


@kernel("block_mark", REFERENCE)
def block_mark(codes: torch.Tensor, scales: torch.Tensor, scheme: str) -> torch.Tensor:
    """NaN if a block has no finite scale, else 0. Widened codes have a NaN in the whole block then:
    one number of each is looked at."""
    spec = get_scheme(scheme)
    if spec.widened:
        bad = codes[:, :: spec.width].isnan().any()
    else:
        bad = (scales.view(torch.uint8) == _NAN_E8M0).any()
    return torch.where(bad, torch.nan, 0.0)


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
