"""Passes over FX graphs. May import runtime_kernels and torch_internals.

Two tables list them all, in order: PASSES over forward and backward graphs before Inductor lowers
them, JOINT_PASSES over both in one, before the partitioner cuts it. A pass is a function
``xxx_pass(graph) -> int`` that changes an FX graph in place and returns how often it matched; the
runners (`q2compile.compiler`) time it, count ops before and after, dump, and leave it out when
disabled by name.

The last four joint passes change nothing that is computed. They tag nodes with torch's
CheckpointPolicy, in ``node.meta["recompute"]``, which is how torch.utils.checkpoint tells the
partitioner what to save and what to compute again; see ``_functorch/partitioners.py`` of torch 2.11
to 2.13. The min-cut partitioner looks at the op, the default one at the getitems, so both carry the
tag.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from q2compile.passes.joint.anchor_seeds import anchor_seeds_pass
from q2compile.passes.joint.gather_codes import gather_codes_pass, gathering_notes
from q2compile.passes.joint.gather_scattered import gather_scattered_pass
from q2compile.passes.joint.keep_packed import keep_packed_pass
from q2compile.passes.joint.mask_again import mask_again_pass
from q2compile.passes.joint.recompute_weights import recompute_weights_pass
from q2compile.passes.joint.turn_in_backward import turn_in_backward_pass
from q2compile.passes.post_grad.concatenate_last import concatenate_last_pass
from q2compile.passes.post_grad.fuse_rotations import fuse_rotations_pass, fusion_notes
from q2compile.passes.post_grad.gather_quantisers import gather_quantisers_pass
from q2compile.passes.post_grad.merge_seeds import merge_seeds_pass
from q2compile.passes.post_grad.pair_directions import pair_directions_pass
from q2compile.passes.post_grad.part_directions import part_directions_pass
from q2compile.passes.post_grad.share_operands import share_operands_pass
from q2compile.passes.post_grad.share_rotations import (
    share_rotations_pass,
    share_saved_rotations_pass,
)
from q2compile.passes.post_grad.sum_columns import sum_columns_pass
from q2compile.passes.post_grad.swizzle_scales import swizzle_saved_scales_pass, swizzle_scales_pass
from q2compile.passes.post_grad.tabulate import tabulate_pass
from q2compile.passes.post_grad.unrotate_in_gemm import unrotate_in_gemm_pass
from q2compile.passes.post_grad.widen_operands import widen_operands_pass

Pass = Callable[[fx.Graph], int]

PASSES: dict[str, Pass] = {
    # Those two of inference; of training the joint passes have done it.
    "gather_scattered": gather_scattered_pass,
    "gather_codes": gather_codes_pass,
    "share_operands": share_operands_pass,
    "merge_seeds": merge_seeds_pass,
    "pair_directions": pair_directions_pass,  # after merge_seeds, which puts all seeds up front
    "share_rotations": share_rotations_pass,  # after it: a pair has one stream for both directions
    # After those: they name schemes that those do not know. No GEMM is a case for both.
    "swizzle_scales": swizzle_scales_pass,
    "widen_operands": widen_operands_pass,
    "unrotate_in_gemm": unrotate_in_gemm_pass,  # those two look for gemm nodes
    "part_directions": part_directions_pass,  # looks at sizes, which those change
    "sum_columns": sum_columns_pass,  # after all that rewrite the quantisers that it replaces
    "gather_quantisers": gather_quantisers_pass,  # after all that make quantisers, or part them
    "concatenate_last": concatenate_last_pass,  # looks at the quantisers that are left
    "tabulate": tabulate_pass,  # before the next, whose kernels have no sine but read a table
    "fuse_rotations": fuse_rotations_pass,  # marks what the others leave, and pairs it
}

JOINT_PASSES: dict[str, Pass] = {
    "anchor_seeds": anchor_seeds_pass,  # first: it says which ops are of the backward
    "gather_scattered": gather_scattered_pass,
    "share_operands": share_operands_pass,  # for the next one: views of one x become one
    "gather_codes": gather_codes_pass,  # before those that name schemes it does not know
    "share_saved_rotations": share_saved_rotations_pass,
    "swizzle_saved_scales": swizzle_saved_scales_pass,  # names schemes that those do not know
    "turn_in_backward": turn_in_backward_pass,
    "mask_again": mask_again_pass,
    # In this order: asked for both, the packed activations are kept and the weights' codes are not.
    "keep_packed": keep_packed_pass,
    "recompute_weights": recompute_weights_pass,
}

# Of passes that say more than how often they matched: sentences of a graph that they have changed.
NOTES: dict[str, Callable[[fx.Graph], list[str]]] = {
    "gather_codes": gathering_notes,
    "fuse_rotations": fusion_notes,
}
