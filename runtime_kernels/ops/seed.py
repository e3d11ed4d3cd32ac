# SPDX-License-Identifier: Apache-2.0
"""Seeds of random bits, and where they come from.

    seed(anchor, seed_index, key=None) -> int64, 0-dim
    draw(anchor, key, count) -> int64, 0-dim

`seed` is one 64-bit draw: from the default generator of anchor's device, or, if the option ``seed``
gives a key, from that key's counter on the device (numerics/seeds.py). `draw` takes ``count`` seeds
of a key at once: it returns how many were drawn before, and increases the counter by ``count``.

The anchor is the incoming gradient. It keeps the op in the backward graph: the partitioner would
hoist randomness that does not depend on the gradient into forward, and draw it a second time in
backward, so that the operands of one GEMM would have different signs. The seed index keeps
common-subexpression elimination from merging the seeds of two matmuls with the same gradient.

A counter is on its device, and is created before a graph is compiled. So it is not in a CUDA
graph's memory, and each replay increases it.
"""

import torch

from q2compile.runtime_kernels.numerics.seeds import seeds
from q2compile.runtime_kernels.registry import define

COUNTERS: dict[tuple[int, torch.device], torch.Tensor] = {}  # of the process, for good


def counter(key: int, device: torch.device) -> torch.Tensor:
    """How many seeds of a key were drawn on a device: int64, 0-dim, one tensor for good."""
    if (key, device) not in COUNTERS:
        with torch.inference_mode(False):  # a later training step increases it
            COUNTERS[key, device] = torch.zeros((), dtype=torch.int64, device=device)
    return COUNTERS[key, device]


def fake(anchor, *_):
    return anchor.new_empty((), dtype=torch.int64)


_RANDOM = (torch.Tag.nondeterministic_seeded,)


@define("seed(Tensor anchor, int seed_index, int? key=None) -> Tensor", fake=fake, tags=_RANDOM)
def seed(anchor: torch.Tensor, seed_index: int, key: int | None) -> torch.Tensor:
    """See above. int64, 0-dim, on anchor's device."""
    if key is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=anchor.device)
    return seeds(draw(anchor, key, 1), 1, key)[0]


@define("draw(Tensor anchor, int key, int count) -> Tensor", fake=fake, tags=_RANDOM)
def draw(anchor: torch.Tensor, key: int, count: int) -> torch.Tensor:
    """See above."""
    of_key = counter(key, anchor.device)
    before = of_key.clone()
    of_key += count
    return before
