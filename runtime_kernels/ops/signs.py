# SPDX-License-Identifier: Apache-2.0
"""q2::signs: the diagonal of a randomized Hadamard transform, as the rotating quantizers draw it.

    signs(seed int64 0-dim, transform) -> fp32 [size], +1 and -1

Telemetry rotates operands by it, as they were rotated before rounding. In torch's arithmetic Philox
takes some 160 small operations.
"""

import torch

from q2compile.runtime_kernels.numerics.transforms import Transform, get_transform, signs_of
from q2compile.runtime_kernels.registry import define


def checked_signs(transform: str) -> Transform:
    """The transform by name, which draws signs."""
    rotation = get_transform(transform)
    assert rotation.seeded, f"{transform} draws no signs"
    return rotation


@define(
    "signs(Tensor seed, str transform) -> Tensor",
    fake=lambda seed, transform: seed.new_empty(
        (checked_signs(transform).size,), dtype=torch.float32
    ),
)
def signs(seed: torch.Tensor, transform: str) -> torch.Tensor:
    """The reference: see the top of this file."""
    drawn = signs_of(checked_signs(transform), seed, seed.device)
    assert drawn is not None
    return drawn
