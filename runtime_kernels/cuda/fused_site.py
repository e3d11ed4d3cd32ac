# SPDX-License-Identifier: Apache-2.0
"""Calls of q2::quantize in generated code that compute their operand: as site.py's, with
what the operand is computed from in the operand's place. Two that compute theirs from one read are
one call.

    q2_fused_0 = q2_FusedSite(q2_Producer(...), [
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

from q2compile.runtime_kernels.cuda.calls import Ready, aligned
from q2compile.runtime_kernels.cuda.quantize import fused
from q2compile.runtime_kernels.cuda.quantize.producer import Producer
from q2compile.runtime_kernels.cuda.site import View
from q2compile.runtime_kernels.ops.table import QUANTIZE
from q2compile.runtime_kernels.registry import (
    FUSED,
    failure_text,
    kernels_own,
    serving,
    warn_of_failure,
)

_MOST_READY = 256  # of a program whose sizes never repeat
_profiler = torch.autograd.profiler


class FusedSite:
    """One call in generated code, or two at once.

    calls: for each matrix of the producer
        the op's keywords; for one that is given at each call `...`, or a View of what is given;
        for each output of the op, whether the calls give a buffer for it.
    """

    def __init__(
        self, producer: Producer, calls: Sequence[tuple[dict[str, Any], tuple[int, ...]]]
    ) -> None:
        self._producer = producer
        self._calls = [fused.call_of(keywords) for keywords, _ in calls]
        self._wanted = [tuple(map(bool, wanted)) for _, wanted in calls]
        self._name = " + ".join([f"q2::{QUANTIZE}"] * len(calls))
        self._open = [
            arg
            for call in self._calls
            for arg in call.args.values()
            if arg is ... or isinstance(arg, View)
        ]
        self._inputs = len(producer.inputs)
        self._ready: dict[tuple[int, ...], Ready] = {}  # by sizes
        self._failed = False

    def __call__(self, *given: Any) -> None:
        """Enqueues on the current stream of the current device, which is the inputs'.

        given: the producer's inputs and sizes, the arguments that are open, then the buffers of the
        wanted outputs, contiguous.
        """
        if _profiler._is_profiler_enabled:
            with record_function(self._name):
                self.enqueue(given)
        else:
            self.enqueue(given)

    def enqueue(self, given: Sequence[Any]) -> None:
        """As of a Site."""
        begin = self._inputs + len(self._producer.sizes)
        inputs, rest = given[: self._inputs], given[begin:]
        sizes = tuple(given[self._inputs : begin])
        bases, buffers = rest[: len(self._open)], rest[len(self._open) :]
        if not self._failed and all(map(aligned, inputs)):
            try:
                ready = self._ready.get(sizes)
                if ready is None:
                    ready = self._new_ready(inputs, sizes, self._filled(bases))
                if ready is not None:
                    ready([*inputs, *bases, *buffers])
                    return
            except Exception as error:
                device = inputs[0].device
                if not kernels_own(error, QUANTIZE, FUSED, device):
                    raise
                warn_of_failure(QUANTIZE, FUSED, device, failure_text(error))
            self._failed = True
        self._apart(inputs, sizes, self._filled(bases), buffers)

    def _filled(self, bases: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        """The keywords of each matrix."""
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

    def _new_ready(
        self,
        inputs: Sequence[torch.Tensor],
        sizes: tuple[int, ...],
        calls: Sequence[dict[str, Any]],
    ) -> Ready | None:
        """None where our kernels do not serve: Inductor's caches remember what another process
        could run."""
        like = inputs[0].new_empty((0, self._producer.width), dtype=self._producer.dtype)
        if serving(QUANTIZE, fused.call_of(calls[0]).replace(x=like).positional).launching is None:
            return None
        call = fused.fused_call(self._producer, inputs, sizes, calls)
        given = (arg for keywords in calls for arg in fused.tensors_in(keywords))
        pasts = [0] * len(inputs) + [
            view.offset * arg.element_size() if isinstance(view, View) else 0
            for view, arg in zip(self._open, given, strict=True)
        ]
        wanted = [each for of in self._wanted for each in of]
        ready = Ready(call, inputs[0].device.index, wanted, pasts)
        if len(self._ready) >= _MOST_READY:
            self._ready.clear()
        self._ready[sizes] = ready
        return ready

    def _apart(
        self,
        inputs: Sequence[torch.Tensor],
        sizes: tuple[int, ...],
        calls: Sequence[dict[str, Any]],
        buffers: Sequence[torch.Tensor],
    ) -> None:
        """The operands by torch, then the op by whichever kernel serves."""
        matrices = self._producer.evaluate(inputs, sizes)
        free = iter(buffers)
        for x, keywords, wanted in zip(matrices, calls, self._wanted, strict=True):
            results = fused.call_of(keywords).replace(x=x)()
            for result, has_buffer in zip(results, wanted, strict=True):
                if has_buffer:
                    buffer = next(free)
                    buffer.copy_(result.view(buffer.shape))
