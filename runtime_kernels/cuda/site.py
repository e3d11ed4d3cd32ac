"""Calls of q2's ops in generated code, which enqueue launches past the dispatcher.

Generated code makes a Site when it is loaded and calls it with tensors:

    q2_site_0 = q2_Site('rht_quantize', (..., ..., 'nvfp4_sr', 'rht16', True, 0),
                        (1, 1, 1), fixed=True)
    ...
    q2_site_0(buf0, buf1, buf2, buf3, buf4)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import record_function

from q2compile.runtime_kernels.cuda.calls import Ready, aligned, tensors_of
from q2compile.runtime_kernels.registry import give_up, kernels_own, serving

_profiler = torch.autograd.profiler


class View(NamedTuple):
    """An argument that is a view of the tensor that is given for it; offset in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, base: torch.Tensor) -> torch.Tensor:
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


class Site:
    """One call of op in generated code.

    args: the op's arguments; for one that is given at each call `...`, or a View of what is given.
    wanted: for each output of the op, whether the calls give a buffer for it.
    fixed: sizes and strides are the same in all calls, so that only addresses have to be asked for
        after the first one.
    """

    def __init__(
        self,
        op: str,
        args: tuple[Any, ...],
        wanted: tuple[int, ...],
        *,
        fixed: bool,
    ) -> None:
        self._op, self._args, self._fixed = op, args, fixed
        self._wanted = tuple(map(bool, wanted))
        self._open = [i for i, arg in enumerate(args) if arg is ... or isinstance(arg, View)]
        self._ready: Ready | None = None

    def __call__(self, *given: Any) -> None:
        """Enqueues on the current stream of the current device, which is the operands'.

        given: for the arguments that are open, then the buffers of the wanted outputs, contiguous.
        """
        if _profiler._is_profiler_enabled:
            with record_function(f"q2::{self._op}"):
                self._call(given)
        else:
            self._call(given)

    def _call(self, given: Sequence[Any]) -> None:
        if self._ready is not None and aligned(given[0]):
            self._ready(given)
            return
        bases, buffers = given[: len(self._open)], given[len(self._open) :]
        args = list(self._args)
        for i, base in zip(self._open, bases, strict=True):
            args[i] = args[i].of(base) if isinstance(args[i], View) else base
        kernel = serving(self._op, args)
        if kernel.launching is None:  # Inductor's caches remember what another process could run
            self._through_the_dispatcher(args, buffers)
            return
        formed = kernel.launching.in_form(args)
        operands = tensors_of(formed)
        try:
            ready = kernel.launching.ready(formed, self._wanted)
            ready([*operands, *buffers])
        except Exception as error:
            if not kernels_own(error, operands[0].device):
                raise
            give_up(kernel, args, error)
            self._through_the_dispatcher(args, buffers)
            return
        same = all(a is b for a, b in zip(operands, tensors_of(args), strict=True))
        if self._fixed and same and aligned(operands[0]) and aligned(given[0]):
            self._ready = kernel.launching.ready(formed, self._wanted, self._pasts(args))

    def _pasts(self, args: Sequence[Any]) -> tuple[int, ...]:
        return tuple(
            view.offset * arg.element_size() if isinstance(view, View) else 0
            for view, arg in zip(self._args, args, strict=True)
            if isinstance(arg, torch.Tensor)
        )

    def _through_the_dispatcher(self, args: Sequence[Any], buffers: Sequence[torch.Tensor]) -> None:
        """By whichever kernel serves."""
        results = getattr(torch.ops.q2, self._op)(*args)
        results = results if isinstance(results, tuple) else (results,)
        wanted = (r for r, has_buffer in zip(results, self._wanted, strict=True) if has_buffer)
        for buffer, result in zip(buffers, wanted, strict=True):
            buffer.copy_(result.view(buffer.shape))
