# SPDX-License-Identifier: Apache-2.0
"""Call sites of q2's ops in generated code. They enqueue launches without torch's dispatcher.

Generated code makes a CallSite when it is loaded, and calls it with tensors:

    q2_site_0 = q2_CallSite('quantize', (...,), (1, 1, 1), fixed=True, scheme='nvfp4_sr',
                            transform='rht16', rowwise=False, columnwise=True, columnwise_seed=...)
    ...
    q2_site_0(buf0, buf1, buf2, buf3, buf4)

A GroupedCallSite makes one grouped launch of several calls (quantize/grouped_launch.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import record_function

from q2compile.runtime_kernels.cuda.calls import (
    ALIGNMENT,
    BoundCall,
    aligned,
    bound_once,
    tensors_of,
)
from q2compile.runtime_kernels.cuda.quantize.grouped_check import Group, in_group, rejection
from q2compile.runtime_kernels.cuda.quantize.grouped_launch import ScaleProduct, grouped_plan
from q2compile.runtime_kernels.registry import bound, call_op, kernels_own, reject, serving

_profiler = torch.autograd.profiler


class View(NamedTuple):
    """An argument that is a view of the tensor that the caller gives. offset: in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, base: torch.Tensor) -> torch.Tensor:
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


class CallSite:
    """One call of an op in generated code.

    args, keywords: the op's arguments. `...`, or a View, stands for a tensor that each call gives.
    wanted: for each output of the op, whether the calls give a buffer for it.
    fixed: all calls have the same sizes and strides, so later calls read addresses alone.
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
        self._bound: BoundCall | None = None

    def __call__(self, *given: Any) -> None:
        """Enqueues on the current stream of the current device, where the operands must be.

        given: tensors for the open arguments, then contiguous buffers for the wanted outputs.
        """
        bound = self._bound
        if _profiler._is_profiler_enabled:
            with record_function(f"q2::{self.op}"):
                self.enqueue(given)
        elif bound is not None and not given[0].data_ptr() % ALIGNMENT:
            bound(given)  # not by enqueue: a Python call costs a good part of a launch
        else:
            self.enqueue(given)

    def enqueue(self, given: Sequence[Any]) -> None:
        """As __call__, for the first call and for operands that are not on 16 bytes, too."""
        if self._bound is not None and aligned(given[0]):
            self._bound(given)
            return
        args, buffers = self.arguments(given), given[len(self.open) :]
        kernel = serving(self.op, args)
        if kernel.launching is None:  # Inductor's caches may come from a process with other kernels
            self.through_the_dispatcher(args, buffers)
            return
        laid_out = kernel.launching.in_layout(args)
        operands = tensors_of(laid_out)
        try:
            bound = kernel.launching.bind(laid_out, self.wanted)
            bound([*operands, *buffers])
        except Exception as error:
            if not kernels_own(error, self.op, kernel.name, operands[0].device):
                raise
            reject(kernel, args, error)
            self.through_the_dispatcher(args, buffers)
            return
        same = all(a is b for a, b in zip(operands, tensors_of(args), strict=True))
        if self._fixed and same and aligned(operands[0]) and aligned(given[0]):
            self._bound = kernel.launching.bind(laid_out, self.wanted, self.byte_offsets(args))

    def arguments(self, given: Sequence[Any]) -> list[Any]:
        """The op's arguments. given: begins with tensors for the open ones."""
        args = list(self._args)
        for i, base in zip(self.open, given, strict=False):
            args[i] = args[i].of(base) if isinstance(args[i], View) else base
        return args

    def byte_offsets(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Where each tensor of the arguments begins in the tensor that is given for it."""
        return tuple(
            view.offset * arg.element_size() if isinstance(view, View) else 0
            for view, arg in zip(self._args, args, strict=True)
            if isinstance(arg, torch.Tensor)
        )

    def through_the_dispatcher(self, args: Sequence[Any], buffers: Sequence[torch.Tensor]) -> None:
        """Run the op by any kernel that serves the call."""
        results = call_op(self.op, args)
        results = results if isinstance(results, tuple | list) else (results,)
        wanted = (r for r, has_buffer in zip(results, self.wanted, strict=True) if has_buffer)
        for buffer, result in zip(buffers, wanted, strict=True):
            buffer.copy_(result.view(buffer.shape))


class JointCallSite:
    """Call sites that are called as one.

    sites: in order.
    beginnings: where the open arguments of each site begin among those of all, and where they end.
    """

    def __init__(self, sites: tuple[CallSite, ...]) -> None:
        self.sites, self.beginnings = sites, [0]
        for site in sites:
            self.beginnings.append(self.beginnings[-1] + len(site.open))
        self._name = " + ".join(f"q2::{site.op}" for site in sites)

    def __call__(self, *given: Any) -> None:
        """Enqueues as a CallSite does. given: as `enqueue` takes it."""
        if _profiler._is_profiler_enabled:
            with record_function(self._name):
                self.enqueue(given)
        else:
            self.enqueue(given)

    def enqueue(self, given: Sequence[Any]) -> None:
        raise NotImplementedError

    def arguments(self, given: Sequence[Any]) -> list[list[Any]]:
        """The arguments of each op. given: begins with tensors for the open ones."""
        pairs = zip(self.sites, self.beginnings, strict=False)
        return [site.arguments(given[start : start + len(site.open)]) for site, start in pairs]


class GroupedCallSite(JointCallSite):
    """Calls with one grouped launch.

    sites: the call sites, in order.
    products: of their global scales (quantize/grouped_launch.py).
    others: `...` or a View for each tensor that products read and no call makes.
    """

    def __init__(
        self,
        sites: tuple[CallSite, ...],
        products: tuple[tuple[Any, Any], ...],
        others: tuple[Any, ...],
        *,
        fixed: bool,
    ) -> None:
        super().__init__(sites)
        self._fixed, self._others = fixed, others
        self._products = tuple(ScaleProduct(*product) for product in products)
        self._beginnings = tuple(self.beginnings[:-1])
        self._wanted = tuple(w for site in sites for w in site.wanted) + (True,) * len(products)
        self._bound: BoundCall | None = None
        self._separate = self._is_checked = False

    def enqueue(self, given: Sequence[Any]) -> None:
        """As CallSite.enqueue. given: tensors for the open arguments of each site, the others, then
        buffers for the wanted outputs of each site, and for the products."""
        if self._bound is not None:
            for i in self._beginnings:  # a generator would cost twice as much
                if given[i].data_ptr() % ALIGNMENT:
                    break
            else:
                self._bound(given)
                return
        args, end = self.arguments(given), self.beginnings[-1]
        kernels = [serving(site.op, a) for site, a in zip(self.sites, args, strict=True)]
        self._separate |= any(kernel.launching is None for kernel in kernels)
        if self._separate or self._is_rejected(args):
            self._one_by_one(given)
            return
        laid_out = [k.launching.in_layout(a) for k, a in zip(kernels, args, strict=True)]
        operands = [t for a in laid_out for t in tensors_of(a)]
        same = all(
            a is b for a, b in zip(operands, (t for a in args for t in tensors_of(a)), strict=True)
        )
        others = [
            of.of(given[i]) if isinstance(of, View) else given[i]
            for i, of in enumerate(self._others, end)
        ]
        buffers = given[end + len(self._others) :]
        try:
            self._bind(kernels, laid_out, None)([*operands, *others, *buffers])
        except Exception as error:
            if not kernels_own(error, self.sites[0].op, kernels[0].name, operands[0].device):
                raise
            self._separate = True  # each call finds out whether its kernel fails
            self._one_by_one(given)
            return
        beginnings = [given[i] for i in self._beginnings]
        firsts = [tensors_of(a)[0] for a in laid_out]
        if self._fixed and same and all(map(aligned, [*firsts, *beginnings])):
            byte_offsets = [
                p for site, a in zip(self.sites, args, strict=True) for p in site.byte_offsets(a)
            ]
            byte_offsets += [4 * of.offset if isinstance(of, View) else 0 for of in self._others]
            self._bound = self._bind(kernels, laid_out, tuple(byte_offsets))

    def _is_rejected(self, args: Sequence[Any]) -> bool:
        """Whether the self-check of this group failed. It is asked for at the first call."""
        if not self._is_checked:
            calls = tuple(in_group(site.op, a) for site, a in zip(self.sites, args, strict=True))
            group = Group(calls, self._products, len(self._others))
            device = tensors_of(args[0])[0].device
            self._is_checked, self._separate = True, rejection(group, device) is not None
        return self._separate

    def _bind(
        self, kernels: Sequence[Any], laid_out: Sequence[Any], byte_offsets: tuple[int, ...] | None
    ) -> BoundCall:
        pairs = list(zip((kernel.launching for kernel in kernels), laid_out, strict=True))
        kinds = tuple(launching.kind(args) for launching, args in pairs)

        def make() -> BoundCall:
            plans = [launching.plan(*args) for launching, args in pairs]
            plan = grouped_plan(plans, self._products, len(self._others))
            index = tensors_of(laid_out[0])[0].device.index
            return BoundCall(plan, index, self._wanted, byte_offsets)

        key = kinds, self._products, self._wanted, byte_offsets
        return bound_once(key, make)

    def _one_by_one(self, given: Sequence[Any]) -> None:
        """Run each call by itself, by any kernel that serves it."""
        buffers = iter(given[self.beginnings[-1] + len(self._others) :])
        outputs: list[list[Any]] = []
        for site, start, end in zip(self.sites, self.beginnings, self.beginnings[1:], strict=False):
            outputs.append([next(buffers) if wanted else None for wanted in site.wanted])
            site(*given[start:end], *(b for b in outputs[-1] if b is not None))
        for product in self._products:
            (i, own), other = product
            if isinstance(other, int):
                of, base = self._others[other], given[self.beginnings[-1] + other]
                factor = of.of(base) if isinstance(of, View) else base
            else:
                factor = outputs[other[0]][other[1]]
            buffer = next(buffers)
            torch.mul(outputs[i][own], factor.view(buffer.shape), out=buffer)
