# SPDX-License-Identifier: Apache-2.0
"""Launch plans of ops that consist of launches of our own kernels, computed once for each kind of
arguments.

`launching` registers a function from an op's arguments to a LaunchPlan: the outputs of the call,
and the launches that write them. There are three callers:

- the op itself, which allocates the outputs
- generated code (call_site.py), which brings buffers that Inductor has planned
- a self-check, whose kernels are compiled ahead of it (launches_of)

The first two execute a BoundCall: the plan on one device, its kernels loaded. All that is left to
do for each call is to read the addresses of the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from q2compile.runtime_kernels.choice import device_of, nothing
from q2compile.runtime_kernels.cuda import recent_launches
from q2compile.runtime_kernels.cuda.jit.launch import (
    Launch,
    begin_compiling,
    empty,
    unsupported,
    wait,
)
from q2compile.runtime_kernels.kernel_states import (
    ONE_MULTIPROCESSOR,
    assumed_capability,
    on_one_multiprocessor,
)
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.table import QUANTIZE, TRANSPOSE
from q2compile.runtime_kernels.registry import CUDA, kernel
from q2compile.runtime_kernels.selfcheck import apart, check_of
from q2compile.runtime_kernels.small_calls import places_of_schemes

_MOST_BOUND_CALLS = 4096  # for a program whose shapes never repeat
ALIGNMENT = 16  # bytes that the kernels load at once
_note = recent_launches.note
# The addresses and the stream of a launch; an emulation on a CPU has others.
address_of = torch.Tensor.data_ptr
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # no build for CPUs has it


class OperandLayout(Enum):
    """Memory layouts that kernels require of an operand."""

    ROWS_OR_COLUMNS = "a matrix whose rows or columns are contiguous"
    ROWS = "a matrix whose rows are contiguous"
    CONTIGUOUS = "contiguous"
    ALIGNED = "contiguous, on 16 bytes"


class BufferSlot(NamedTuple):
    """A pointer in the parameters of a launch: `byte_offset` bytes into tensor number `tensor` of
    the call. The tensors of a call are its inputs, its outputs and its workspace."""

    tensor: int
    byte_offset: int = 0

    def __add__(self, more: int) -> BufferSlot:  # type: ignore[override]
        return BufferSlot(self.tensor, self.byte_offset + more)


class LaunchStep(NamedTuple):
    """A launch, its thread blocks in x and y, and the fields of its parameter struct: constants,
    and BufferSlots for pointers.

    batched: the launch that does this step for several calls at once, with MOST_OPERANDS parameter
        structs and a blockIdx.y for each. None where there is none, or where separate launches are
        faster.
    """

    launch: Launch
    grid: tuple[int, int]
    values: Sequence[Any]
    batched: Launch | None = None


MOST_OPERANDS = 4  # of a batched launch


def in_places(structs: Sequence[Sequence[Any]]) -> list[Any]:
    """The fields of up to MOST_OPERANDS structs; zeros fill the places of absent ones."""
    assert len(structs) <= MOST_OPERANDS
    fields = [field for struct in structs for field in struct]
    return fields + [0] * (MOST_OPERANDS - len(structs)) * len(structs[0])


class Output(NamedTuple):
    """A contiguous tensor that a plan writes."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def strides(self) -> tuple[int, ...]:
        strides = [1]
        for size in self.shape[:0:-1]:
            strides.append(strides[-1] * max(size, 1))  # as torch's, also without elements
        return tuple(reversed(strides)) if self.shape else ()

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class LaunchPlan:
    """The launches of one kind of call of an op.

    inputs: how many tensors the op is given.
    outputs: what it returns.
    workspace: bytes of scratch memory that the steps need; it is the last tensor, if there is any.
    steps: the launches, in order.
    tail: the last step, where other plans can share it (quantize/align_scales.py, Alignment).
    """

    inputs: int
    outputs: tuple[Output, ...]
    workspace: int
    steps: tuple[LaunchStep, ...]
    tail: Any = None


class BoundCall:
    """A launch plan on CUDA device `index`, its kernels loaded.

    wanted: for each output, whether the caller brings a tensor for it. The others are written into
        the workspace.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        index: int,
        wanted: Sequence[bool] | None = None,
    ) -> None:
        wanted = wanted or [True] * len(plan.outputs)
        self.outputs = plan.outputs
        self._index, self._steps = index, plan.steps
        recent_launches.watch()
        given = plan.inputs + sum(wanted)
        self._bytes = plan.workspace
        place = {i: BufferSlot(i) for i in range(plan.inputs)}
        place[plan.inputs + len(plan.outputs)] = BufferSlot(given)
        for i, (output, has_tensor) in enumerate(zip(plan.outputs, wanted, strict=True)):
            if has_tensor:
                place[plan.inputs + i] = BufferSlot(plan.inputs + sum(wanted[:i]))
            else:
                self._bytes = -(-self._bytes // ALIGNMENT) * ALIGNMENT
                place[plan.inputs + i] = BufferSlot(given, self._bytes)
                self._bytes += output.bytes
        self._byte_offsets: list[BufferSlot] = []
        addresses: dict[BufferSlot, int] = {}
        for field in (v for step in plan.steps for v in step.values if isinstance(v, BufferSlot)):
            slot = place[field.tensor] + field.byte_offset
            if field not in addresses:
                addresses[field] = slot.tensor
                if slot.byte_offset:
                    addresses[field] = given + 1 + len(self._byte_offsets)
                    self._byte_offsets.append(slot)
        self._launches = [
            step.launch.bind(index, step.grid, step.values, addresses) for step in plan.steps
        ]
        self._unproven = [s.launch for s in plan.steps if index not in s.launch.proven]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Enqueues the launches on the current stream of the device, which must be current.

        tensors: the inputs and the wanted outputs, in order.
        """
        _note(self)
        addresses = list(map(address_of, tensors))  # a comprehension would be one more call
        # The workspace is freed at once. Whatever reuses its memory comes later in the stream.
        if self._bytes:
            workspace = empty((self._bytes,), (1,), torch.uint8)
            addresses.append(workspace.data_ptr())
        else:
            addresses.append(0)
        for tensor, offset in self._byte_offsets:
            addresses.append(addresses[tensor] + offset)
        stream = raw_stream(self._index)
        for launch in self._launches:
            launch(stream, addresses)
        if self._unproven:
            self._wait()

    def __str__(self) -> str:
        return " + ".join(step.launch.variant.file for step in self._steps)

    def outputs_of(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Enqueues the launches with new outputs, all of them wanted, and returns these."""
        outputs = [empty(o.shape, o.strides, o.dtype) for o in self.outputs]
        self([*inputs, *outputs])
        return outputs

    def _wait(self) -> None:
        """Waits for kernels that run for the first time in this process, unless a CUDA graph is
        captured: if the device fails, the failing call is known."""
        if wait(self._index):
            for launch in self._unproven:
                launch.proven.add(self._index)
            self._unproven = []


@dataclass(frozen=True)
class Launching:
    """How an op runs as launches of our kernels.

    plan: from the op's arguments, in the layouts that it requires, to the LaunchPlan.
    layouts_of: from the op's arguments to the layouts that tensors among them must have, by
        position; or a dictionary, where they are always the same.
    """

    plan: Callable[..., LaunchPlan]
    layouts_of: dict[int, OperandLayout] | Callable[..., dict[int, OperandLayout]]

    def layouts(self, *args: Any) -> dict[int, OperandLayout]:
        """The layouts that arguments must have, by position."""
        return self.layouts_of(*args) if callable(self.layouts_of) else self.layouts_of

    def launches_of(self, cases: Iterable[Sequence[Any]]) -> list[Launch]:
        """The launches of these calls. Arguments may be on the CPU; the launches are then those for
        the current GPU. No variant depends on the number of multiprocessors."""
        with apart(torch.device("cpu")), on_one_multiprocessor():
            plans = [self.plan(*self.in_layout(args)) for args in cases]
        return [step.launch for plan in plans for step in plan.steps]

    def begin_compiling(self, cases: Iterable[Sequence[Any]], device: torch.device) -> list[Future]:
        """Threads that compile the kernels of such calls."""
        return begin_compiling(self.launches_of(cases), device.index)

    def bind(
        self,
        args: Sequence[Any],
        wanted: tuple[bool, ...] | None = None,
    ) -> BoundCall:
        """The bound call of these arguments, whose layouts must be right. Calls of one kind share
        it."""
        key = (self.kind(args), wanted)
        index = tensors_of(args)[0].device.index
        return bound_once(key, lambda: BoundCall(self.plan(*args), index, wanted))

    def kind(self, args: Sequence[Any]) -> Hashable:
        """A key of a call. Calls with equal keys have equal launch plans."""
        return self.plan, ONE_MULTIPROCESSOR.get(), *map(_kind, args)

    def in_layout(self, args: Sequence[Any]) -> list[Any]:
        """The arguments, copied where their layout is not the one that the kernels require."""
        args = list(args)
        for i, layout in self.layouts(*args).items():
            args[i] = _laid_out(args[i], layout)
        return args

    def __call__(self, *args: Any) -> Any:
        """Runs the op. Returns a tensor or a tuple of tensors, as the op does."""
        given = self.in_layout(args)
        inputs = tensors_of(given)
        with on_device(inputs[0].device.index):
            outputs = self.bind(given).outputs_of(inputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


BOUND_CALLS: dict[Hashable, BoundCall] = {}
_HERE = nullcontext()


def bound_once(key: Hashable, make: Callable[[], BoundCall]) -> BoundCall:
    """The bound call of this key, made if there is none yet."""
    bound = BOUND_CALLS.get(key)
    if bound is None:
        bound = make()
        if len(BOUND_CALLS) >= _MOST_BOUND_CALLS:
            BOUND_CALLS.clear()
        BOUND_CALLS[key] = bound
    return bound


def on_device(index: int) -> AbstractContextManager[Any]:
    """Makes CUDA device `index` current; free if it is current already."""
    return _HERE if index == torch._C._cuda_getDevice() else torch.cuda.device(index)


def tensors_of(args: Sequence[Any]) -> list[torch.Tensor]:
    return [a for a in args if isinstance(a, torch.Tensor)]


def cuda_kernel(
    op: str,
    name: str,
    why_not: Callable[..., str | None] = nothing,
    launching: Launching | None = None,
) -> Callable[[Callable], Callable]:
    """Decorator: registers a kernel of this package, which is checked before its first use.
    why_not: None if it serves the arguments, otherwise the reason in words."""

    def unserved(*args: Any) -> str | None:
        why = why_not(*args)
        for place in places_of_schemes(op):
            spec = get_scheme(args[place])
            if why is None and spec.is_tensorwise and op not in (QUANTIZE, TRANSPOSE):
                why = f"it reads and writes FP4; PyTorch's own operations serve {args[place]}"
        return why if why or assumed_capability() else unsupported(device_of(args).index)

    how: Any = {"unsupported": unserved, "launching": launching}
    return kernel(op, name, device_type="cuda", check=check_of, **how)


def launching(
    op: str,
    *,
    why_not: Callable[..., str | None] = nothing,
    layouts: dict[int, OperandLayout] | Callable[..., dict[int, OperandLayout]] | None = None,
) -> Callable[[Callable[..., LaunchPlan]], Launching]:
    """Decorator: registers a function from the arguments of an op to its LaunchPlan as kernel CUDA
    of the op. Arguments of equal kind must give equal plans. Their kind is their types, sizes,
    strides and names, which addresses are multiples of 16 bytes, and whether grids are planned for
    one multiprocessor."""

    def register(plan: Callable[..., LaunchPlan]) -> Launching:
        made = Launching(plan, layouts or {})
        cuda_kernel(op, CUDA, why_not, made)(made)
        return made

    return register


def aligned(x: torch.Tensor) -> bool:
    return x.data_ptr() % ALIGNMENT == 0


def _kind(arg: Any) -> Hashable:
    if isinstance(arg, torch.Tensor):
        return arg.device.index, arg.dtype, arg.shape, arg.stride(), aligned(arg)
    return arg


def is_in_layout(
    strides: Sequence[Any], layout: OperandLayout, is_one: Callable[[Any], bool] = (1).__eq__
) -> bool:
    """Whether the strides of a matrix, which may be symbols, prove that it has the layout."""
    if layout is OperandLayout.ROWS_OR_COLUMNS:
        return is_one(strides[0]) or is_one(strides[1])
    return layout is OperandLayout.ROWS and is_one(strides[1])


def _laid_out(x: torch.Tensor, layout: OperandLayout) -> torch.Tensor:
    if x.dim() == 2 and is_in_layout(x.stride(), layout):
        return x
    x = x.contiguous()
    return x.clone() if layout is OperandLayout.ALIGNED and not aligned(x) else x
