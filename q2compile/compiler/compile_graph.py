# SPDX-License-Identifier: Apache-2.0
"""Compile a rewritten graph: AOTAutograd, the passes, and Inductor or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from q2compile import lowering
from q2compile.compiler.instrumentation import Instrumentation
from q2compile.compiler.joint_passes import JointPasses
from q2compile.compiler.partitioner import Partitioner
from q2compile.compiler.pass_runner import Fault
from q2compile.compiler.post_grad_passes import Insertion, PostGradPasses
from q2compile.compiler.watcher import Watcher
from q2compile.config import Config, saves_weights_by_peak, uses_cuda_graphs
from q2compile.graph.nodes import q2_nodes
from q2compile.runtime_kernels.checks import awaited_together
from q2compile.runtime_kernels.ops.seed import counter
from q2compile.torch_internals.aot_autograd import (
    aot_eager_compile,
    backward_at_once,
    checkpoints_left_on_error,
    compiles_buckets,
)
from q2compile.torch_internals.dynamo import called_graphs, copied, forget_arguments
from q2compile.torch_internals.inductor import (
    JOINT_PASS_SLOT,
    PASS_SLOT,
    inductor_compile,
    inductor_options_of_mode,
    pass_in_slot,
    short_sums_unrolled,
)
from q2compile.torch_internals.partitioner import PARTITIONER_SLOT, partitioner_in_slot
from q2compile.torch_internals.patches import patched
from q2compile.weight_cache.gathered_inputs import GatheredInputs
from q2compile.weight_cache.graph_inputs import CachedInputs


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    config: Config,
    root: nn.Module | None,
    parameters: int = 0,
    watcher: Watcher | None = None,
    fault: Fault | None = None,
    instrumentation: Instrumentation | None = None,
    gathered: GatheredInputs | None = None,
) -> Callable[..., Any]:
    """Compile a rewritten graph. With on_error="bf16" its backward is compiled at once, so that a
    failure there is caught as well.

    root     the model that the graph belongs to, None if it is not known
    parameters  how many that model trains, if this graph holds them all; else 0
    watcher  notified of every stage; caches are off then, since a hit would skip the stages
    fault    see `PostGradPasses`
    instrumentation  has the graph compiled a second time, to record what it computes
    gathered  the weights whose codes may be gathered (`weight_cache.gathered_inputs.Gathered`)
    """
    if config.seed is not None:  # before any CUDA graph, whose memory they would be
        for device in {x.device for x in example_inputs if isinstance(x, torch.Tensor)}:
            counter(config.seed, device)
    if gathered and gathered.takes_codes and uses_cuda_graphs(config):
        config = replace(config, inductor={**config.inductor, "triton.cudagraphs": False})
    one = partial(_compiled, config=config, parameters=parameters, fault=fault)
    two_backwards = instrumentation is not None and compiles_buckets()
    at_once = backward_at_once(config.on_error == "bf16" or two_backwards)
    with checkpoints_left_on_error(), at_once:
        supply: GatheredInputs | CachedInputs | None = gathered or None
        if supply is None and config.cache_weights:
            supply = CachedInputs(root, uses_cuda_graphs(config))
        if supply is None:
            return _variants(gm, example_inputs, one, watcher, instrumentation)
        gm, inputs, sites = supply.take_codes(gm, example_inputs)
        if watcher is not None:
            watcher.graph("1_rewritten", gm)
        try:
            compiled = _variants(gm, inputs, one, watcher, instrumentation)
        finally:
            forget_arguments(gm)
        return supply.with_codes(compiled, sites, inputs, partial(_compiled_form, config))


def compile_plain(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    config: Config,
    gathered: GatheredInputs | None = None,
) -> Callable[..., Any]:
    """Compile Dynamo's graph as it came: no pass, no patch and no setting of ours, so that Inductor
    generates what it does for backend="inductor".
    """
    if config.inner == "eager":
        compiled = aot_eager_compile(gm, example_inputs, lambda g: None)
    else:
        compiled = inductor_compile(gm, example_inputs, _settings(config))
    return gathered.with_values(compiled) if gathered else compiled


def holds_q2_ops(gm: fx.GraphModule) -> bool:
    """Whether a graph, or one that it calls, has an op of ours: what the rewrite put there, a call
    of the user's, or the backward of an earlier graph that compiled autograd hands over.
    """
    return any(next(q2_nodes(g.graph), None) is not None for g in called_graphs(gm))


def _settings(config: Config) -> dict[str, Any]:
    return {**inductor_options_of_mode(config.mode), **config.inductor}


def _variants(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    one: Callable[..., Callable[..., Any]],
    watcher: Watcher | None,
    instrumentation: Instrumentation | None,
) -> Callable[..., Any]:
    """The compiled graph, or the choice between it and one that records. Both at once, so that
    what can't be compiled, or does not fit, fails in the first step. Only the plain one is watched.
    """
    if instrumentation is None:
        return one(gm, example_inputs, watcher)
    compiled: list[Callable[..., Any]] = []
    for recording in (True, False) if instrumentation.records else (False,):
        insertion = Insertion(instrumentation, recording)
        if not recording:
            compiled.append(one(gm, example_inputs, watcher, insertion))
            continue
        own = copied(gm)
        try:
            compiled.append(one(own, example_inputs, None, insertion))
        finally:
            forget_arguments(own)
    return instrumentation.choose(compiled[-1], compiled[0])


def _compiled(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    watcher: Watcher | None,
    insertion: Insertion | None = None,
    *,
    config: Config,
    parameters: int,
    fault: Fault | None,
) -> Callable[..., Any]:
    passes = PostGradPasses(config, watcher, pass_in_slot(), fault, insertion)
    joint = JointPasses(config, passes.records, pass_in_slot(JOINT_PASS_SLOT), fault)
    cut = None
    if saves_weights_by_peak(config):
        base = config.inductor.get(PARTITIONER_SLOT) or partitioner_in_slot()
        cut = Partitioner(base, parameters, watcher, by_scales=config.telemetry is None)
    if config.inner == "eager":
        run = lambda g: passes(g.graph)  # noqa: E731
        return aot_eager_compile(gm, example_inputs, run, joint, cut, within=patched)
    lowering.register()
    settings = {**short_sums_unrolled(), **_settings(config), PASS_SLOT: passes}
    if cut is not None:
        settings[PARTITIONER_SLOT] = cut
    settings[JOINT_PASS_SLOT] = joint
    on_code = None
    if watcher is not None:  # a cache hit would skip the passes, and with them what is to be shown
        settings["fx_graph_cache"], on_code = False, watcher.output_code
    return inductor_compile(gm, example_inputs, settings, on_code, _checked, passes.forget)


def _compiled_form(config: Config, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """The compiled function that makes a weight's codes. They are cached between calls, so they
    must not be in a CUDA graph's memory."""
    passes = PostGradPasses(config)
    if config.inner == "eager":
        return aot_eager_compile(gm, inputs, lambda g: passes(g.graph), within=patched)
    lowering.register()
    settings = {**_settings(config), PASS_SLOT: passes, "triton.cudagraphs": False}
    return inductor_compile(gm, inputs, settings, within=_checked, on_again=passes.forget)


@contextmanager
def _checked() -> Iterator[Any]:
    """Self-checks of kernels run while Inductor compiles a graph, with our patches of it. Yields
    what is not empty at the end if a kernel is rejected that the graph was compiled for."""
    with awaited_together() as rejected, patched():
        yield rejected
