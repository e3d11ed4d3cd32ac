# SPDX-License-Identifier: Apache-2.0
"""Passes over FX graphs. May import graph, runtime_kernels and torch_internals.

PASSES lists all of them in the order in which they run. A pass is a function ``xxx_pass(graph) ->
int`` that changes an FX graph in place and returns how often it matched. One runner
(`q2compile.compiler.pass_runner`) asks each row whether it is wanted, times it, counts ops before
and after, and leaves it out when it is disabled by name.

A joint graph holds forward and backward, before the partitioner cuts it. A post-grad graph is a
forward or a backward, before Inductor lowers it. Three passes run over both: over joint graphs in
training, where they decide what is saved, and over post-grad graphs for inference.

Passes `recompute_mask`, `keep_packed` and `recompute_weights` change no result. They tag nodes with
torch's CheckpointPolicy, in ``node.meta["recompute"]``. That is how torch.utils.checkpoint tells
the partitioner what to save and what to recompute; see ``_functorch/partitioners.py`` of torch 2.11
to 2.13. The min-cut partitioner looks at the op, the default one at the getitems, so both carry the
tag.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from torch import fx

from q2compile.graph.node_meta import pop_notes
from q2compile.passes.joint.anchor_seeds import anchor_seeds_pass
from q2compile.passes.joint.gather_scattered import gather_scattered_pass
from q2compile.passes.joint.keep_packed import keep_packed_pass
from q2compile.passes.joint.own_seeds import own_seeds_pass
from q2compile.passes.joint.quantize_rows_once import quantize_rows_once_pass
from q2compile.passes.joint.quantize_shards import quantize_shards_pass
from q2compile.passes.joint.recompute_mask import recompute_mask_pass
from q2compile.passes.joint.recompute_weights import recompute_weights_pass
from q2compile.passes.post_grad.amax_in_quantizer import amax_in_quantizer_pass
from q2compile.passes.post_grad.dequantize_operands import dequantize_operands_pass
from q2compile.passes.post_grad.fuse_rotations import fuse_rotations_pass, fusion_notes
from q2compile.passes.post_grad.gather_quantizers import gather_quantizers_pass
from q2compile.passes.post_grad.group_launches import group_launches_pass
from q2compile.passes.post_grad.merge_seeds import merge_seeds_pass
from q2compile.passes.post_grad.pair_directions import pair_directions_pass
from q2compile.passes.post_grad.share_operands import share_operands_pass
from q2compile.passes.post_grad.share_rotations import (
    share_rotations_pass,
    share_saved_rotations_pass,
)
from q2compile.passes.post_grad.sum_columns import sum_columns_pass
from q2compile.passes.post_grad.swizzle_scales import swizzle_saved_scales_pass, swizzle_scales_pass
from q2compile.passes.post_grad.tabulate import tabulate_pass
from q2compile.passes.post_grad.unrotate_in_gemm import unrotate_in_gemm_pass

Kind = Literal["joint", "post_grad"]


@dataclass(frozen=True)
class PassConditions:
    """The facts of a configuration and a graph that decide which passes it gets.

    random_forward     a recipe of the policy draws random bits in its forward
    keep_packed        quantized operands of a checkpointed region are saved
    recompute_weights  codes of weights are recomputed in the backward
    fuse_rotations     rotating quantizers may compute their operand
    is_lowered         Inductor lowers the graph, and does not run it as it is
    seed               key of the counter that seeds come from; None: torch's default generator
    """

    random_forward: bool
    keep_packed: bool
    recompute_weights: bool
    fuse_rotations: bool
    is_lowered: bool = True
    seed: int | None = None


@dataclass(frozen=True)
class Pass:
    """One row of the table.

    graph   which kind of graph it runs over
    when    whether a graph gets it
    takes   what the function is called with besides the graph
    notes   sentences about a graph after the pass, for the record of the pass
    """

    name: str
    run: Callable[..., int]
    graph: Kind
    when: Callable[[PassConditions], bool] = lambda wanted: True
    takes: Callable[[PassConditions], tuple[Any, ...]] = lambda wanted: ()
    notes: Callable[[fx.Graph], list[str]] = lambda graph: []


_joint, _post_grad = (partial(Pass, graph=kind) for kind in get_args(Kind))

PASSES: tuple[Pass, ...] = (
    _joint("anchor_seeds", anchor_seeds_pass),  # first: it says which ops are of the backward
    _joint(
        "own_seeds",
        own_seeds_pass,
        when=lambda w: w.seed is not None,
        takes=lambda w: (w.seed,),
    ),
    _joint("gather_scattered", gather_scattered_pass),
    # Before quantize_rows_once: views of one x become one.
    _joint("share_operands", share_operands_pass, when=lambda w: w.random_forward),
    _joint("quantize_shards", quantize_shards_pass, notes=pop_notes),
    # Before the passes that introduce schemes it does not know.
    _joint("quantize_rows_once", quantize_rows_once_pass, notes=pop_notes),
    _joint("share_saved_rotations", share_saved_rotations_pass, when=lambda w: w.random_forward),
    # After those, which do not know the schemes that it introduces.
    _joint("swizzle_saved_scales", swizzle_saved_scales_pass),
    _joint("recompute_mask", recompute_mask_pass),
    # In this order: asked for both, packed activations are saved and codes of weights are not.
    _joint("keep_packed", keep_packed_pass, when=lambda w: w.keep_packed),
    _joint("recompute_weights", recompute_weights_pass, when=lambda w: w.recompute_weights),
    # These four for inference: in training the joint passes have done it.
    _post_grad("gather_scattered", gather_scattered_pass),
    _post_grad("quantize_rows_once", quantize_rows_once_pass, notes=pop_notes),
    _post_grad("share_operands", share_operands_pass),
    _post_grad("quantize_shards", quantize_shards_pass, notes=pop_notes),
    _post_grad("merge_seeds", merge_seeds_pass),
    _post_grad("pair_directions", pair_directions_pass),  # after merge_seeds: seeds stand up front
    _post_grad("share_rotations", share_rotations_pass),  # after it: a pair has one rng offset
    # After those, which do not know the schemes that these introduce. A GEMM gets one of the two.
    _post_grad("swizzle_scales", swizzle_scales_pass),
    _post_grad("dequantize_operands", dequantize_operands_pass),
    _post_grad("unrotate_in_gemm", unrotate_in_gemm_pass),  # those two look for gemm nodes
    # After all that rewrite the quantizers that it replaces.
    _post_grad("sum_columns", sum_columns_pass),
    _post_grad("amax_in_quantizer", amax_in_quantizer_pass),  # no pass after it looks for an amax
    # After all passes that create or split quantizers.
    _post_grad("gather_quantizers", gather_quantizers_pass),
    _post_grad("tabulate", tabulate_pass),  # before the next, whose kernels read a table of sines
    # Marks what the others leave, and pairs it.
    _post_grad(
        "fuse_rotations",
        fuse_rotations_pass,
        when=lambda w: w.fuse_rotations,
        notes=fusion_notes,
    ),
    # Last: it marks the quantizers where they stand now.
    _post_grad("group_launches", group_launches_pass, when=lambda w: w.is_lowered),
)


def pass_names() -> dict[str, None]:
    """The names that the option ``disable_passes`` takes, in the order of the table."""
    return dict.fromkeys(row.name for row in PASSES)


def passes_over(graph: Kind) -> list[Pass]:
    """The rows of one kind of graph."""
    return [row for row in PASSES if row.graph == graph]
