# SPDX-License-Identifier: Apache-2.0
"""q2::padded_ends: where groups of rows end once each is padded to whole chunks of 128.

    padded_ends(offs int32 [E], filled) -> int32 [E]

filled: an empty group has a chunk, too. See numerics/groups.py. It is an op, so that passes can
find it: pair_directions moves it up.
"""

import torch

from q2compile.runtime_kernels.numerics import groups
from q2compile.runtime_kernels.ops.argument_checks import check_groups
from q2compile.runtime_kernels.registry import define


def fake(offs, filled):
    check_groups("padded_ends", offs)
    return torch.empty_like(offs)


@define("padded_ends(Tensor offs, bool filled=False) -> Tensor", fake=fake)
def padded_ends(offs: torch.Tensor, filled: bool) -> torch.Tensor:
    """The reference: see the top of this file."""
    check_groups("padded_ends", offs)
    return groups.padded_ends(offs, filled)
