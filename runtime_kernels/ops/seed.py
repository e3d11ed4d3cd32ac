"""q2::seed(anchor, salt): one 64-bit draw from the default generator of anchor's device.

The anchor is the incoming gradient. It gives the op its place: randomness in a backward graph that
does not depend on the gradient is hoisted into forward by the partitioner and drawn again in
backward, and the operands of one GEMM then disagree on their signs. The salt keeps
common-subexpression elimination from merging the seeds of two sites that receive the same gradient.
"""

import torch

from q2compile.runtime_kernels.registry import REFERENCE, define, kernel


def fake(anchor, salt):
    return anchor.new_empty((), dtype=torch.int64)


define(
    "seed(Tensor anchor, int salt) -> Tensor", fake=fake, tags=(torch.Tag.nondeterministic_seeded,)
)


@kernel("seed", REFERENCE)
def seed(anchor: torch.Tensor, salt: int) -> torch.Tensor:
    """See above. int64, 0-dim, on anchor's device."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=anchor.device)
