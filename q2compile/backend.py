# SPDX-License-Identifier: Apache-2.0
"""The Dynamo backend ``quartet2``: the stages that a graph goes through, in order.

Registered by the entry point group ``torch_dynamo_backends``, so ``torch.compile(model,
backend="quartet2")`` needs no import.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from q2compile import telemetry
from q2compile.capture.inline_attention import inline_attention
from q2compile.capture.module_names import Names
from q2compile.compiler.compile_graph import compile_graph, compile_plain, holds_q2_ops
from q2compile.config import (
    CallArguments,
    Config,
    disable_named_kernels,
    raise_on_unsaved,
    telemetry_options,
    uses_cuda_graphs,
)
from q2compile.failures.stage_error import COMPILE, REWRITE, Faults
from q2compile.report import announce
from q2compile.report.graph_log import GraphLog
from q2compile.rewrite.rewrite_graph import rewrite
from q2compile.runtime_kernels.cpu import build
from q2compile.runtime_kernels.cuda.known_bad import warn_of_known_bad
from q2compile.runtime_kernels.kernel_states import why_disabled
from q2compile.runtime_kernels.ops.table import QUANTIZE
from q2compile.runtime_kernels.registry import CPP
from q2compile.torch_internals.aot_autograd import compiles_ahead_of_time
from q2compile.torch_internals.dynamo import (
    compile_call,
    control_flow,
    copied,
    forget_arguments,
    restore_arguments,
)
from q2compile.torch_internals.tested_versions import warn_if_untested
from q2compile.weight_cache.gathered_inputs import GatheredInputs


def quartet2(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | Config | None = None,
    name: str | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with its linear layers quantized as ``options`` say (see `Config`).
    ``name`` is that of torch.compile, which passes it on from 2.15; nothing depends on it.

    What is rewritten is a copy. A graph in which nothing is taken goes to Inductor as it came.

    Raises ValueError for options that can't be used as given, and for a policy that this graph
    can't keep; under ``strict`` RuntimeError for a matmul that the policy wanted and that was not
    taken; under ``on_error="raise"`` StageError, a RuntimeError too, when a stage fails.
    """
    announce.graph_came()
    warn_if_untested()
    config = Config.from_options(options, mode)
    disable_named_kernels(config)
    if call := compile_call(quartet2):  # calls are equal only if their options mean the same
        call.kwargs = CallArguments(config)
    if compiles_ahead_of_time():
        raise_on_unsaved(config)
    restore_arguments(gm, example_inputs)
    names = Names.of_graph(gm)
    log = GraphLog(config, names)
    faults = Faults(config, log.title, log.folder, names.by_id)
    rewritten = copied(gm)
    stage, gathered = REWRITE, None
    try:
        log.graph("0_dynamo", gm)
        inline_attention(rewritten)
        rows = rewrite(rewritten, config, names)
        gathered = GatheredInputs(rewritten, names.root)
        gathered.note_gathered(rows, uses_cuda_graphs(config))
        log.rewritten("1_rewritten", rewritten, rows, names)
        if not holds_q2_ops(rewritten):
            stage = ""
            plain = compile_plain(gm, example_inputs, config, gathered)
            return log.checked(plain, names)
        stage = COMPILE
        _prepare_devices(example_inputs)
        wanted = telemetry_options(config)
        recorder = None if wanted is None else telemetry.recorder_of(rewritten, wanted, rows, names)
        watcher, root = log.watcher, names.root
        compiled = compile_graph(
            rewritten,
            *(example_inputs, config, root, names.trained, watcher, faults.of_pass, recorder),
            gathered,
        )
    except control_flow():  # Dynamo will come again with another graph
        log.forget()
        raise
    except Exception as error:
        if not stage:  # Inductor's own error: what it compiled is no work of ours
            raise
        log.left_in_bf16(faults.raise_or_warn(stage, gm, error), names)
        compiled = compile_plain(gm, example_inputs, config, gathered)
    finally:
        forget_arguments(rewritten, dynamo=gm)
    return log.checked(compiled, names)


def _prepare_devices(example_inputs: Sequence[Any]) -> None:
    """Warns of versions that are known to be bad with a GPU. For a CPU, a thread compiles its
    kernels while Inductor compiles the graph."""
    types = {x.device.type for x in example_inputs if isinstance(x, torch.Tensor)}
    if "cuda" in types and torch.cuda.is_available():  # fake tensors need no GPU
        warn_of_known_bad(torch.cuda.current_device())
    elif "cpu" in types and why_disabled(QUANTIZE, CPP) is None:
        build.begin(os.getpid())
