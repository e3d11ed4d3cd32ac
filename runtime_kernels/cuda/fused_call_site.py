# SPDX-License-Identifier: Apache-2.0
"""Call sites of q2::quantize that compute their operand (prologue fusion). They are called like
those of call_site.py, with the inputs of the prologue in the place of the operand. Two calls that
compute their operands from one read are one call site.

    q2_fused_0 = q2_FusedCallSite(q2_PrologueExpression(...), [
        (dict(scheme='nvfp4_ms_eden_pow2', transform='rht128', rowwise=True, columnwise=True,
              rowwise_seed=..., columnwise_seed=...), (1, 0, 0, 1, 0, 0)),
    ])
    ...
    q2_fused_0(buf0, buf1, seed, seed, buf2, buf3)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.profiler import record_function

from q2compile.runtime_kernels.cuda.call_site import View
from q2compile.runtime_kernels.cuda.calls import BoundCall, aligned
from q2compile.runtime_kernels.cuda.quantize import fused
from q2compile.runtime_kernels.cuda.quantize.prologue_expression import PrologueExpression
from q2compile.runtime_kernels.ops.table import QUANTIZE
from q2compile.runtime_kernels.registry import (
    FUSED,
    failure_text,
    kernels_own,
    serving,
    warn_of_failure,
)

_MOST_BOUND_CALLS = 256  # for a program whose sizes never repeat
_profiler = torch.autograd.profiler


class FusedCallSite:
    """One call in generated code, or two at once.

    calls: for each matrix of the prologue expression, a pair:
        the op's keywords, where `...` or a View stands for a tensor that each call gives
        for each output of the op, whether the calls give a buffer for it
    """

    def __init__(
        self, prologue: PrologueExpression, calls: Sequence[tuple[dict[str, Any], tuple[int, ...]]]
    ) -> None:
        self._prologue = prologue
        self._calls = [fused.call_of(keywords) for keywords, _ in calls]
        self._wanted = [tuple(map(bool, wanted)) for _, wanted in calls]
        self._name = " + ".join([f"q2::{QUANTIZE}"] * len(calls))
        self._open = [
            arg
            for call in self._calls
            for arg in call.args.values()
            if arg is ... or isinstance(arg, View)
        ]
        self._inputs = len(prologue.inputs)
        self._bound: dict[tuple[int, ...], BoundCall] = {}  # by sizes
        self._failed = False

    def __call__(self, *given: Any) -> None:
        """Enqueues on the current stream of the current device, where the inputs must be.

        given: the inputs and sizes of the prologue, tensors for the open arguments, then contiguous
            buffers for the wanted outputs.
        """
        if _profiler._is_profiler_enabled:
            with record_function(self._name):
                self.enqueue(given)
        else:
            self.enqueue(given)

    def enqueue(self, given: Sequence[Any]) -> None:
        """As CallSite.enqueue."""
        begin = self._inputs + len(self._prologue.sizes)
        inputs, rest = given[: self._inputs], given[begin:]
        sizes = tuple(given[self._inputs : begin])
        bases, buffers = rest[: len(self._open)], rest[len(self._open) :]
        if not self._failed and all(map(aligned, inputs)):
            try:
                bound = self._bound.get(sizes)
                if bound is None:
                    bound = self._bind(inputs, sizes, self._filled(bases))
                if bound is not None:
                    bound([*inputs, *bases, *buffers])
                    return
            except Exception as error:
                device = inputs[0].device
                if not kernels_own(error, QUANTIZE, FUSED, device):
                    raise
                warn_of_failure(QUANTIZE, FUSED, device, failure_text(error))
            self._failed = True
        self._separately(inputs, sizes, self._filled(bases), buffers)

    def _filled(self, bases: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        """The keywords of each call, its open arguments filled in."""
        given = iter(bases)
        return [
            {name: self._argument(arg, given) for name, arg in call.args.items() if name != "x"}
            for call in self._calls
        ]

    @staticmethod
    def _argument(arg: Any, given: Iterator[torch.Tensor]) -> Any:
        if isinstance(arg, View):
            return arg.of(next(given))
        return next(given) if arg is ... else arg

    def _bind(
        self,
        inputs: Sequence[torch.Tensor],
        sizes: tuple[int, ...],
        calls: Sequence[dict[str, Any]],
    ) -> BoundCall | None:
        """None where our kernels do not serve the call: Inductor's caches may come from a process
        with other kernels."""
        like = inputs[0].new_empty((0, self._prologue.cols), dtype=self._prologue.dtype)
        if serving(QUANTIZE, fused.call_of(calls[0]).replace(x=like).positional).launching is None:
            return None
        plan = fused.fused_plan(self._prologue, inputs, sizes, calls)
        given = (arg for keywords in calls for arg in fused.tensors_in(keywords))
        byte_offsets = [0] * len(inputs) + [
            view.offset * arg.element_size() if isinstance(view, View) else 0
            for view, arg in zip(self._open, given, strict=True)
        ]
        wanted = [each for of in self._wanted for each in of]
        bound = BoundCall(plan, inputs[0].device.index, wanted, byte_offsets)
        if len(self._bound) >= _MOST_BOUND_CALLS:
            self._bound.clear()
        self._bound[sizes] = bound
        return bound

    def _separately(
        self,
        inputs: Sequence[torch.Tensor],
        sizes: tuple[int, ...],
        calls: Sequence[dict[str, Any]],
        buffers: Sequence[torch.Tensor],
    ) -> None:
        """Computes the operands by torch, then runs the op by any kernel that serves it."""
        matrices = self._prologue.evaluate(inputs, sizes)
        free = iter(buffers)
        for x, keywords, wanted in zip(matrices, calls, self._wanted, strict=True):
            results = fused.call_of(keywords).replace(x=x)()
            for result, has_buffer in zip(results, wanted, strict=True):
                if has_buffer:
                    buffer = next(free)
                    buffer.copy_(result.view(buffer.shape))
