# SPDX-License-Identifier: Apache-2.0
"""The self-check of Inductor kernels of quantizers: compared with the torch reference before their
first use on a machine.

Tests check the rounding rules; Inductor, Triton and ptxas stand between them and a GPU. So a small
graph is compiled for the device: a multiplication by one half and the quantizer, fused with it. Its
codes and scales must have the reference's bits. That costs a small compilation, once for each
scheme of a recipe's forward.

It is compiled in a thread of its own, since Inductor stores its current graph per thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from q2compile.lowering import register
from q2compile.runtime_kernels.check_results import Request
from q2compile.runtime_kernels.choice import InGraph
from q2compile.runtime_kernels.ops.table import QUANTIZE, QuantizerCall, rowwise_call
from q2compile.runtime_kernels.registry import INDUCTOR
from q2compile.runtime_kernels.selfcheck import apart, difference_of_bits
from q2compile.runtime_kernels.small_calls import Form, arguments, form_of
from q2compile.torch_internals.inductor import compile_by_itself
from q2compile.torch_internals.patches import patched


def check_of(op: str, name: str, graph: InGraph, *args: Any) -> Request | None:
    """The self-check of the Inductor kernel of such a call."""
    call = QuantizerCall.of(QUANTIZE, args)
    return request_of(call.x.device, call) if needs_check(call.x.device) else None


def request_of(device: torch.device, call: QuantizerCall) -> Request:
    """The self-check of the Inductor kernel of a call, which only its scheme selects."""
    plain = rowwise_call(call.scheme.name, ..., amax=... if call.scheme.takes_amax else None)
    form = form_of(QUANTIZE, plain.positional)
    sources = (str(Path(__file__).parents[1]),)
    return Request((QUANTIZE, INDUCTOR, device, form), __name__, (device, form), sources)


def needs_check(device: torch.device) -> bool:
    """Whether a device needs the check. A CPU does not: tests check Inductor's code for it."""
    return device.type == "cuda"


def disagreement(device: torch.device, form: Form) -> str | None:
    """Compiles the Inductor kernel of such a call for a device and runs it. None if it agrees with
    the reference, otherwise how it differs.

    Raises:
        Exception: whatever Inductor, Triton or the driver raises.
    """
    register()
    settings = copy_context()  # the caller's, of Inductor
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(settings.run, _disagreement, device, form).result()


def _disagreement(device: torch.device, form: Form) -> str | None:
    with apart(device):
        x, call = arguments(form)[0], form.call
        amax = (x / 2).abs().amax().float() if call.scheme.takes_amax else None

        def function(x: torch.Tensor, amax: torch.Tensor | None) -> list:
            return call.replace(x=x / 2, amax=amax)()

        want = function(x, amax)
        inputs = [None if a is None else a.to(device) for a in (x, amax)]
        return difference_of_bits(_compiled(function, inputs)(*inputs), want, call.outputs)


def _compiled(function: Callable, inputs: list) -> Callable:
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    with patched():
        return compile_by_itself(graph, inputs)
