# SPDX-License-Identifier: Apache-2.0
"""Calls of q2's ops in generated code, which enqueue launches past the dispatcher.

Generated code makes a Site when it is loaded and calls it with tensors:

    q2_site_0 = q2_Site('quantize', (...,), (1, 1, 1), fixed=True, scheme='nvfp4_sr',
                        transform='rht16', rowwise=False, columnwise=True, columnwise_seed=...)
    ...
    q2_site_0(buf0, buf1, buf2, buf3, buf4)

Several that end in one launch are Together (quantize/together.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import record_function

from q2compile.runtime_kernels.cuda.calls import ALIGNMENT, Ready, aligned, ready_once, tensors_of
from q2compile.runtime_kernels.cuda.quantize.together import Product, together
from q2compile.runtime_kernels.registry import bound, call_op, kernels_own, reject, serving

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

    args, keywords: the op's arguments; for one that is given at each call `...`, or a View of what
        is given.
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
        **keywords: Any,
    ) -> None:
        self.op, self._args, self._fixed = op, bound(op, args, keywords), fixed
        self.wanted = tuple(map(bool, wanted))
        self.open = [i for i, arg in enumerate(self._args) if arg is ... or isinstance(arg, View)]
        self._ready: Ready | None = None

    @property
    def counts(self) -> tuple[int, int]:
        """Of the open arguments, and of the wanted outputs."""
        return len(self.open), sum(self.wanted)

    def __call__(self, *given: Any) -> None:
        """Enqueues on the current stream of the current device, which is the operands'.

        given: for the arguments that are open, then the buffers of the wanted outputs, contiguous.
        """
        ready = self._ready
        if _profiler._is_profiler_enabled:
            with record_function(f"q2::{self.op}"):
                self.enqueue(given)
        elif ready is not None and not given[0].data_ptr() % ALIGNMENT:
            ready(given)  # past enqueue, since each call of Python's costs a share of a launch
        else:
            self.enqueue(given)

    def enqueue(self, given: Sequence[Any]) -> None:
        """The same, also where it is the first call, or operands are off 16 bytes."""
        if self._ready is not None and aligned(given[0]):
            self._ready(given)
            return
        args, buffers = self.arguments(given), given[len(self.open) :]
        kernel = serving(self.op, args)
        if kernel.launching is None:  # Inductor's caches remember what another process could run
            self._through_the_dispatcher(args, buffers)
            return
        formed = kernel.launching.in_form(args)
        operands = tensors_of(formed)
        try:
            ready = kernel.launching.ready(formed, self.wanted)
            ready([*operands, *buffers])
        except Exception as error:
            if not kernels_own(error, self.op, kernel.name, operands[0].device):
                raise
            reject(kernel, args, error)
            self._through_the_dispatcher(args, buffers)
            return
        same = all(a is b for a, b in zip(operands, tensors_of(args), strict=True))
        if self._fixed and same and aligned(operands[0]) and aligned(given[0]):
            self._ready = kernel.launching.ready(formed, self.wanted, self.pasts(args))

    def arguments(self, given: Sequence[Any]) -> list[Any]:
        """The op's arguments; of what is given, those that are open come first."""
        args = list(self._args)
        for i, base in zip(self.open, given, strict=False):
            args[i] = args[i].of(base) if isinstance(args[i], View) else base
        return args

    def pasts(self, args: Sequence[Any]) -> tuple[int, ...]:
        """For each tensor of the arguments, how many bytes past the beginning of what is given."""
        return tuple(
            view.offset * arg.element_size() if isinstance(view, View) else 0
            for view, arg in zip(self._args, args, strict=True)
            if isinstance(arg, torch.Tensor)
        )

    def _through_the_dispatcher(self, args: Sequence[Any], buffers: Sequence[torch.Tensor]) -> None:
        """By whichever kernel serves."""
        results = call_op(self.op, args)
        results = results if isinstance(results, tuple | list) else (results,)
        wanted = (r for r, has_buffer in zip(results, self.wanted, strict=True) if has_buffer)
        for buffer, result in zip(buffers, wanted, strict=True):
            buffer.copy_(result.view(buffer.shape))


class Together:
    """Calls of quantizers that end in one launch.

    sites: of the calls, in order.
    products: of their global scales (quantize/together.py); the other tensors of these are `...`,
        or a View of what is given, in `others`.
    """

    def __init__(
        self,
        sites: tuple[Site, ...],
        products: tuple[tuple[Any, Any], ...],
        others: tuple[Any, ...],
        *,
        fixed: bool,
    ) -> None:
        self._sites, self._fixed, self._others = sites, fixed, others
        self._products = tuple(Product(*product) for product in products)
        self._name = " + ".join(f"q2::{site.op}" for site in sites)
        self._first: list[int] = [0]  # of each site's open arguments, then of the others
        for site in sites:
            self._first.append(self._first[-1] + site.counts[0])
        self._beginnings = tuple(self._first[:-1])
        self._wanted = tuple(w for site in sites for w in site.wanted) + (True,) * len(products)
        self._ready: Ready | None = None
        self._apart = False

    def __call__(self, *given: Any) -> None:
        """Enqueues as a Site does.

        given: for the open arguments of each site, for the others, then the buffers of each site's
            wanted outputs, and of the products.
        """
        if _profiler._is_profiler_enabled:
            with record_function(self._name):
                self.enqueue(given)
        else:
            self.enqueue(given)

    def enqueue(self, given: Sequence[Any]) -> None:
        """As of a Site."""
        first = self._first
        if self._ready is not None:
            for i in self._beginnings:  # a generator would cost twice as much
                if given[i].data_ptr() % ALIGNMENT:
                    break
            else:
                self._ready(given)
                return
        args = [
            site.arguments(given[at:end])
            for site, at, end in zip(self._sites, first, first[1:], strict=False)
        ]
        kernels = [serving(site.op, a) for site, a in zip(self._sites, args, strict=True)]
        if self._apart or any(kernel.launching is None for kernel in kernels):
            self._one_by_one(given)
            return
        formed = [k.launching.in_form(a) for k, a in zip(kernels, args, strict=True)]
        operands = [t for a in formed for t in tensors_of(a)]
        same = all(
            a is b for a, b in zip(operands, (t for a in args for t in tensors_of(a)), strict=True)
        )
        others = [
            of.of(given[i]) if isinstance(of, View) else given[i]
            for i, of in enumerate(self._others, first[-1])
        ]
        buffers = given[first[-1] + len(self._others) :]
        try:
            self._ready_for(kernels, formed, None)([*operands, *others, *buffers])
        except Exception as error:
            if not kernels_own(error, self._sites[0].op, kernels[0].name, operands[0].device):
                raise
            self._apart = True  # where each finds out whether it is the one that fails
            self._one_by_one(given)
            return
        beginnings = [given[i] for i in self._beginnings]
        firsts = [tensors_of(a)[0] for a in formed]
        if self._fixed and same and all(map(aligned, [*firsts, *beginnings])):
            pasts = [p for site, a in zip(self._sites, args, strict=True) for p in site.pasts(a)]
            pasts += [4 * of.offset if isinstance(of, View) else 0 for of in self._others]
            self._ready = self._ready_for(kernels, formed, tuple(pasts))

    def _ready_for(
        self, kernels: Sequence[Any], formed: Sequence[Any], pasts: tuple[int, ...] | None
    ) -> Ready:
        pairs = list(zip((kernel.launching for kernel in kernels), formed, strict=True))
        kinds = tuple(launching.kind(args) for launching, args in pairs)

        def make() -> Ready:
            calls = [launching.call(*args) for launching, args in pairs]
            call = together(calls, self._products, len(self._others))
            index = tensors_of(formed[0])[0].device.index
            return Ready(call, index, self._wanted, pasts)

        key = kinds, self._products, self._wanted, pasts
        return ready_once(key, make)

    def _one_by_one(self, given: Sequence[Any]) -> None:
        """Each by whichever kernel serves."""
        buffers = iter(given[self._first[-1] + len(self._others) :])
        outputs: list[list[Any]] = []
        for site, at, end in zip(self._sites, self._first, self._first[1:], strict=False):
            outputs.append([next(buffers) if wanted else None for wanted in site.wanted])
            site(*given[at:end], *(b for b in outputs[-1] if b is not None))
        for product in self._products:
            (i, own), other = product
            if isinstance(other, int):
                of, base = self._others[other], given[self._first[-1] + other]
                factor = of.of(base) if isinstance(of, View) else base
            else:
                factor = outputs[other[0]][other[1]]
            buffer = next(buffers)
            torch.mul(outputs[i][own], factor.view(buffer.shape), out=buffer)
