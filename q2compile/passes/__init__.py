"""Post-grad passes: what is done to the forward and backward graphs before Inductor lowers them.

One table lists them all, in order. A pass is a function ``xxx_pass(graph) -> int`` that changes an
FX graph in place and returns how often it matched; the runner (`manager`) times it, counts ops
before and after, dumps, and leaves it out when disabled by name.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from q2compile.passes.merge_seeds import merge_seeds_pass
from q2compile.passes.pair_directions import pair_directions_pass
from q2compile.passes.share_operands import share_operands_pass
from q2compile.passes.share_rotations import share_rotations_pass
from q2compile.passes.swizzle_scales import swizzle_scales_pass
from q2compile.passes.widen_operands import widen_operands_pass

Pass = Callable[[fx.Graph], int]

PASSES: dict[str, Pass] = {
    "share_operands": share_operands_pass,
    "merge_seeds": merge_seeds_pass,
    "pair_directions": pair_directions_pass,  # after merge_seeds, which puts all seeds up front
    "share_rotations": share_rotations_pass,  # after it: a pair has one stream for both directions
    # Last: they name schemes that the others do not know. No GEMM is a case for both.
    "swizzle_scales": swizzle_scales_pass,
    "widen_operands": widen_operands_pass,
}
