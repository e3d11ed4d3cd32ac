# SPDX-License-Identifier: Apache-2.0
"""Call sites of q2's ops in generated code. They enqueue launches without torch's dispatcher.

Generated code makes a CallSite when it is loaded, and calls it with tensors:

    q2_site_0 = q2_CallSite(q2_Call('quantize', (...,), (1, 1, 1), scheme='nvfp4_sr',
                            transform='rht16', columnwise_seed=...), fixed=True)
    ...
    q2_site_0(buf0, buf1, buf2, buf3, buf4)

Several calls in one site have one grouped launch (quantize/grouped_launch.py), or one kernel that
computes their operands (quantize/fused.py). If that is not possible, each call is launched alone;
if that is not possible, the op itself is called.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch.autograd.profiler import record_function

from q2compile.runtime_kernels.choice import Choice, choose
from q2compile.runtime_kernels.cuda.calls import (
    ALIGNMENT,
    BoundCall,
    aligned,
    bound_once,
    tensors_of,
)
from q2compile.runtime_kernels.cuda.quantize import fused
from q2compile.runtime_kernels.cuda.quantize.grouped_check import GROUP
from q2compile.runtime_kernels.cuda.quantize.grouped_launch import ScaleProduct, grouped_plan
from q2compile.runtime_kernels.cuda.quantize.prologue_expression import PrologueExpression
from q2compile.runtime_kernels.kernel_states import failure_text, kernels_own, warn_of_failure
from q2compile.runtime_kernels.ops.table import QUANTIZE, QuantizerCall
from q2compile.runtime_kernels.registry import FUSED, GROUPED, bound, call_op, reject

_profiler = torch.autograd.profiler


class SiteCall:
    """One call of an op in generated code.

    args, keywords: the op's arguments. `...` stands for one that each call gives.
    wanted: for each output of the op, whether the calls give a buffer for it.
    """

    def __init__(
        self, op: str, args: tuple[Any, ...], wanted: tuple[int, ...], **keywords: Any
    ) -> None:
        self.op, self._args = op, bound(op, args, keywords)
        self.wanted = tuple(map(bool, wanted))
        self.open = [i for i, arg in enumerate(self._args) if arg is ...]

    def with_outputs(self, places: Set[int]) -> SiteCall:
        """The same call, which also gives a buffer for these outputs."""
        made = copy.copy(self)
        made.wanted = tuple(w or i in places for i, w in enumerate(self.wanted))
        return made

    def arguments(self, given: Sequence[Any]) -> list[Any]:
        """The op's arguments. given: begins with tensors for the open ones."""
        args = list(self._args)
        for i, arg in zip(self.open, given, strict=False):
            args[i] = arg
        return args

    def through_the_dispatcher(self, args: Sequence[Any], buffers: Sequence[torch.Tensor]) -> None:
        """Run the op by any kernel that serves the call."""
        results = call_op(self.op, args)
        results = results if isinstance(results, tuple | list) else (results,)
        wanted = (r for r, has_buffer in zip(results, self.wanted, strict=True) if has_buffer)
        for buffer, result in zip(buffers, wanted, strict=True):
            buffer.copy_(result.view(buffer.shape))


class CallSite:
    """Calls that are launched together, in generated code.

    fixed: all calls have the same sizes and strides, so later calls read addresses alone.
    products: of global scales (quantize/grouped_launch.py).
    others: how many tensors products read that no call makes.
    prologue: computes the operand of each call, whose x is None, from the first tensors given.
    """

    def __init__(
        self,
        *calls: SiteCall,
        fixed: bool,
        products: tuple[tuple[Any, Any], ...] = (),
        others: int = 0,
        prologue: PrologueExpression | None = None,
    ) -> None:
        self.calls, self._fixed, self._others, self._prologue = calls, fixed, others, prologue
        self._products = tuple(ScaleProduct(*product) for product in products)
        # Where the open arguments of each call begin among the given tensors, and where they end.
        self.beginnings = [len(prologue.inputs) if prologue else 0]
        for call in calls:
            self.beginnings.append(self.beginnings[-1] + len(call.open))
        # The tensors that kernels load by 16 bytes.
        self._loaded = tuple(range(self.beginnings[0]) if prologue else self.beginnings[:-1])
        self._wanted = tuple(w for call in calls for w in call.wanted) + (True,) * len(products)
        self._name = " + ".join(f"q2::{call.op}" for call in calls)
        self._alone: list[CallSite] = []
        if prologue is None and (products or len(calls) > 1):
            factors = [f for product in self._products for f in product if isinstance(f, tuple)]
            self._alone = [
                CallSite(call.with_outputs({place for j, place in factors if j == i}), fixed=fixed)
                for i, call in enumerate(calls)
            ]
        self._bound: BoundCall | None = None
        self._has_failed = False

    def __call__(self, *given: Any) -> None:
        """Enqueues on the current stream of the current device, where the operands must be.

        given: inputs of the prologue, tensors for the open arguments of each call, the others, then
            contiguous buffers for the wanted outputs of each call, and for the products.
        """
        if _profiler._is_profiler_enabled:
            with record_function(self._name):
                self.enqueue(given)
            return
        if self._bound is not None:
            for i in self._loaded:  # a generator, or a Python call, costs a good part of a launch
                if given[i].data_ptr() % ALIGNMENT:
                    break
            else:
                self._bound(given)
                return
        self.enqueue(given)

    def enqueue(self, given: Sequence[Any]) -> None:
        """As __call__, for the first call and for operands that are not on 16 bytes, too."""
        if self._bound is not None and all(aligned(given[i]) for i in self._loaded):
            self._bound(given)
        elif self._has_failed or not self._are_launched(given):
            self._one_by_one(given)

    def _are_launched(self, given: Sequence[Any]) -> bool:
        """Launches the calls together; False if their kernels are more than launches, if they are
        rejected, or if they fail. (Inductor's caches may come from a process with other kernels.)
        """
        args = [call.arguments(given[at:]) for call, at in self._places()]
        choices = [
            choose(c.op, self._asked(a, given)) for c, a in zip(self.calls, args, strict=True)
        ]
        if any(choice.launching is None for choice in choices):
            return False
        if self._prologue is not None and not all(aligned(given[i]) for i in self._loaded):
            return False
        inputs = list(given[: self.beginnings[0]])
        device = (inputs or tensors_of(args[0]))[0].device
        if self._alone and choose(GROUP, self._group(args)).name != GROUPED:
            return False
        end = self.beginnings[-1]
        laid_out = args
        if self._prologue is None:
            pairs = zip(choices, args, strict=True)
            laid_out = [choice.launching.in_layout(a) for choice, a in pairs]
        operands = [t for a in laid_out for t in tensors_of(a)]
        try:
            launched = self._bind(choices, laid_out, device.index)
            launched([*inputs, *operands, *given[end:]])
        except Exception as error:
            self._judge(error, choices[0], args[0], device)
            return False
        unchanged = (t for a in args for t in tensors_of(a))
        same = all(a is b for a, b in zip(operands, unchanged, strict=True))
        if self._fixed and same and all(aligned(given[i]) for i in self._loaded):
            self._bound = launched
        return True

    def _places(self) -> zip[tuple[SiteCall, int]]:
        return zip(self.calls, self.beginnings, strict=False)

    def _asked(self, args: list[Any], given: Sequence[Any]) -> list[Any]:
        """The arguments by which a kernel is chosen."""
        prologue = self._prologue
        if prologue is None:
            return args
        return [given[0].new_empty((0, prologue.cols), dtype=prologue.dtype), *args[1:]]

    def _group(self, args: Sequence[Any]) -> tuple:
        calls = tuple((call.op, *a) for call, a in zip(self.calls, args, strict=True))
        return calls, self._products, self._others

    def _bind(
        self,
        choices: Sequence[Choice],
        args: Sequence[Any],
        index: int,
    ) -> BoundCall:
        if self._prologue is not None:
            calls = [QuantizerCall.of(QUANTIZE, each) for each in args]
            plan = fused.fused_plan(self._prologue, index, calls)
            return BoundCall(plan, index, self._wanted)
        pairs = [(choice.launching, a) for choice, a in zip(choices, args, strict=True)]
        if not self._alone:
            return pairs[0][0].bind(pairs[0][1], self._wanted)

        def make() -> BoundCall:
            plans = [launching.plan(*a) for launching, a in pairs]
            plan = grouped_plan(plans, self._products, self._others)
            return BoundCall(plan, index, self._wanted)

        kinds = tuple(launching.kind(a) for launching, a in pairs)
        return bound_once((kinds, self._products, self._wanted), make)

    def _judge(
        self, error: Exception, choice: Choice, args: Sequence[Any], device: torch.device
    ) -> None:
        """A launch has failed. From now on its kernel is rejected; the calls of a group are
        launched one by one, and each finds out whether its kernel fails.

        Raises:
            Exception: the error, if it is not the kernel's.
        """
        name = FUSED if self._prologue is not None else choice.name
        if not kernels_own(error, self.calls[0].op, name, device):
            raise error
        if self._prologue is not None:
            warn_of_failure(QUANTIZE, FUSED, device, failure_text(error))
        elif not self._alone:
            reject(choice.kernel, args, error)
            return
        self._has_failed = True

    def _one_by_one(self, given: Sequence[Any]) -> None:
        """Run each call by itself, by any kernel that serves it."""
        end = self.beginnings[-1]
        buffers = iter(given[end + self._others :])
        prologue = self._prologue
        computed = [] if prologue is None else prologue.evaluate(given[: self.beginnings[0]])
        outputs: list[list[Any]] = []
        for i, (call, start) in enumerate(self._places()):
            outputs.append([next(buffers) if wanted else None for wanted in call.wanted])
            if self._alone:  # a factor that only products read has no buffer
                for at, wanted in enumerate(self._alone[i].calls[0].wanted):
                    if wanted and outputs[-1][at] is None:
                        outputs[-1][at] = given[start].new_empty((), dtype=torch.float32)
            own = [buffer for buffer in outputs[-1] if buffer is not None]
            if self._alone:
                self._alone[i](*given[start : start + len(call.open)], *own)
                continue
            args = call.arguments(given[start:])
            if computed:
                args[0] = computed[i]
            call.through_the_dispatcher(args, own)
        for product in self._products:
            (i, made), other = product
            factor = given[end + other] if isinstance(other, int) else outputs[other[0]][other[1]]
            buffer = next(buffers)
            torch.mul(outputs[i][made], factor.view(buffer.shape), out=buffer)
