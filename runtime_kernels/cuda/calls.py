# SPDX-License-Identifier: Apache-2.0
"""Calls of ops that are launches of our own kernels, worked out once for each kind of operands.

A kernel of the registry made by `launching` is a function from an op's arguments to a Call: which
outputs it has, and which launches write them. Who calls the op has the outputs made and the
launches enqueued; generated code brings buffers that Inductor has planned, and enqueues the
launches into them (site.py). Both end in the same Ready, in which nothing is left to be done but
to ask the tensors for their addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from q2compile.runtime_kernels.cuda.jit.launch import Launch, empty, wait
from q2compile.runtime_kernels.registry import CUDA, kernel

_MOST_READY = 4096  # of a program whose shapes never repeat
ALIGNMENT = 16  # bytes: of what the kernels load at once
_address_of = torch.Tensor.data_ptr
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # no build for CPUs has it


class Form(Enum):
    """How the kernels want an operand to lie."""

    LINES = "a matrix whose rows or columns are contiguous"
    ROWS = "a matrix whose rows are contiguous"
    CONTIGUOUS = "contiguous"
    ALIGNED = "contiguous, on 16 bytes"


class At(NamedTuple):
    """A field of a launch's parameters that is an address: `past` bytes into tensor number
    `tensor` of the call, whose tensors are its operands, its outputs and its workspace."""

    tensor: int
    past: int = 0

    def __add__(self, more: int) -> At:  # type: ignore[override]
        return At(self.tensor, self.past + more)


class Step(NamedTuple):
    """A launch, its thread blocks in x and y, and the fields of its parameter struct: numbers, and
    At.

    several: does what equal launches of several calls do, with MOST_SIDES of their structs and a y
        for each; None where each is better by itself, or where there is none.
    """

    launch: Launch
    grid: tuple[int, int]
    values: Sequence[Any]
    several: Launch | None = None


MOST_SIDES = 4  # of an Ending


@dataclass(frozen=True)
class Ending:
    """The last step of a call, where it can end other calls as well (quantize/together.py).

    launch: calls whose endings have the same can end in one.
    sides: what it does for each operand, as the launch's parameter struct has them: MOST_SIDES.
    """

    launch: Launch
    sides: tuple[Any, ...]

    @property
    def step(self) -> Step:
        raise NotImplementedError


def in_places(structs: Sequence[Sequence[Any]]) -> list[Any]:
    """Their fields, and zeros for those up to MOST_SIDES that nobody reads."""
    assert len(structs) <= MOST_SIDES
    fields = [field for struct in structs for field in struct]
    return fields + [0] * (MOST_SIDES - len(structs)) * len(structs[0])


class Output(NamedTuple):
    """A contiguous tensor that a call writes."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def strides(self) -> tuple[int, ...]:
        strides = [1]
        for size in self.shape[:0:-1]:
            strides.append(strides[-1] * size)
        return tuple(reversed(strides)) if self.shape else ()

    @property
    def bytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Call:
    """What a call of an op is: operands tensors in, outputs out, steps between.

    workspace: bytes of memory that the steps need besides; the last tensor, if they need any.
    ending: what the last step is made of, where it can end other calls as well.
    """

    operands: int
    outputs: tuple[Output, ...]
    workspace: int
    steps: tuple[Step, ...]
    ending: Ending | None = None


class Ready:
    """A call on CUDA device `index`, its kernels loaded.

    wanted: for each output, whether the caller has a tensor for it. The others are written into
        the workspace.
    pasts: for each operand, how many bytes past the beginning of what is given for it.
    """

    def __init__(
        self,
        call: Call,
        index: int,
        wanted: Sequence[bool] | None = None,
        pasts: Sequence[int] | None = None,
    ) -> None:
        wanted = wanted or [True] * len(call.outputs)
        pasts = pasts or [0] * call.operands
        self.outputs = call.outputs
        self._index = index
        given = call.operands + sum(wanted)
        self._bytes = call.workspace
        place: dict[int, At] = {i: At(i, past) for i, past in enumerate(pasts)}
        place[call.operands + len(call.outputs)] = At(given)
        for i, (output, has_tensor) in enumerate(zip(call.outputs, wanted, strict=True)):
            if has_tensor:
                place[call.operands + i] = At(call.operands + sum(wanted[:i]))
            else:
                self._bytes = -(-self._bytes // ALIGNMENT) * ALIGNMENT
                place[call.operands + i] = At(given, self._bytes)
                self._bytes += output.bytes
        self._pasts: list[At] = []
        slots: dict[At, int] = {}
        for field in (v for step in call.steps for v in step.values if isinstance(v, At)):
            at = place[field.tensor] + field.past
            if field not in slots:
                slots[field] = at.tensor
                if at.past:
                    slots[field] = given + 1 + len(self._pasts)
                    self._pasts.append(at)
        self._launches = [
            step.launch.bind(index, step.grid, step.values, slots) for step in call.steps
        ]
        self._unproven = [s.launch for s in call.steps if index not in s.launch.proven]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Enqueues the launches on the current stream of the device, which is the current one.

        tensors: the operands and the wanted outputs, in order.
        """
        addresses = list(map(_address_of, tensors))  # a comprehension would be a call of its own
        # It may be freed at once: what its memory is used for next is behind this in the stream.
        if self._bytes:
            workspace = empty((self._bytes,), (1,), torch.uint8)
            addresses.append(workspace.data_ptr())
        else:
            addresses.append(0)
        for tensor, past in self._pasts:
            addresses.append(addresses[tensor] + past)
        stream = _raw_stream(self._index)
        for launch in self._launches:
            launch(stream, addresses)
        if self._unproven:
            self._wait()

    def _wait(self) -> None:
        """For kernels that run for the first time in this process, and not in a CUDA graph capture:
        where the device fails, it is known at which call."""
        if wait(self._index):
            for launch in self._unproven:
                launch.proven.add(self._index)
            self._unproven = []


@dataclass(frozen=True)
class Launching:
    """The `launches` of a registry's kernel.

    call: from the op's arguments, in their forms, to the Call.
    launches: what it launches, from arguments whose tensors may be fake; where a size is not known,
        for any it may have.
    forms_of: from the op's arguments to how those of them, by position, must lie; or that itself,
        where it is the same for all.
    """

    call: Callable[..., Call]
    launches: Callable[..., Iterable[Launch]]
    forms_of: dict[int, Form] | Callable[..., dict[int, Form]]

    def forms(self, *args: Any) -> dict[int, Form]:
        """How arguments must lie, by position."""
        return self.forms_of(*args) if callable(self.forms_of) else self.forms_of

    def prepare(self, *args: Any) -> None:
        """Loads what a call with the like of these arguments, which may be fake, will launch."""
        load(self.launches(*args), tensors_of(args)[0].device.index)

    def ready(
        self,
        args: Sequence[Any],
        wanted: tuple[bool, ...] | None = None,
        pasts: tuple[int, ...] | None = None,
    ) -> Ready:
        """That of an earlier call like this one, or a new one; for arguments in their forms."""
        key = (self.kind(args), wanted, pasts)
        index = tensors_of(args)[0].device.index
        return ready_once(key, lambda: Ready(self.call(*args), index, wanted, pasts))

    def kind(self, args: Sequence[Any]) -> Hashable:
        """What calls have in common that have the same Call."""
        return self.call, *map(_kind, args)

    def in_form(self, args: Sequence[Any]) -> list[Any]:
        """The arguments, copied where they have another form than the kernels want."""
        args = list(args)
        for i, form in self.forms(*args).items():
            args[i] = _formed(args[i], form)
        return args

    def __call__(self, *args: Any) -> Any:
        """What the op returns: tensors, or one alone."""
        return self._run(self.in_form(args), self.ready)

    def planned_anew(self, *args: Any) -> Any:
        """The same, as if it were the first call of its kind."""

        def ready(args: Sequence[Any]) -> Ready:
            return Ready(self.call(*args), tensors_of(args)[0].device.index)

        return self._run(self.in_form(args), ready)

    def _run(self, args: Sequence[Any], ready_for: Callable[[Sequence[Any]], Ready]) -> Any:
        operands = tensors_of(args)
        with on_device(operands[0].device.index):
            ready = ready_for(args)
            outputs = [empty(o.shape, o.strides, o.dtype) for o in ready.outputs]
            ready([*operands, *outputs])
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


READY: dict[Hashable, Ready] = {}
_HERE = nullcontext()


def ready_once(key: Hashable, make: Callable[[], Ready]) -> Ready:
    """That of an earlier call of this key, or a new one."""
    ready = READY.get(key)
    if ready is None:
        ready = make()
        if len(READY) >= _MOST_READY:
            READY.clear()
        READY[key] = ready
    return ready


def on_device(index: int) -> AbstractContextManager[Any]:
    """CUDA device `index` as the current one, which costs nothing where it is that already."""
    return _HERE if index == torch._C._cuda_getDevice() else torch.cuda.device(index)


def load(launches: Iterable[Launch], index: int) -> None:
    """Compiles and loads them on CUDA device `index`, those that are not yet."""
    for launch in launches:
        launch.warm_up(index)


def tensors_of(args: Sequence[Any]) -> list[torch.Tensor]:
    return [a for a in args if isinstance(a, torch.Tensor)]


def launching(
    op: str,
    *,
    refuses: Callable[..., str | None],
    launches: Callable[..., Iterable[Launch]],
    forms: dict[int, Form] | Callable[..., dict[int, Form]] | None = None,
) -> Callable[[Callable[..., Call]], Launching]:
    """Decorator: registers a function from the arguments of an op to its Call as the op's kernel
    CUDA. Equal kinds of arguments must give equal Calls: the same types, sizes, strides and names,
    and addresses that are on 16 bytes alike."""

    def register(call: Callable[..., Call]) -> Launching:
        made = Launching(call, launches, forms or {})
        how: Any = {"refuses": refuses, "prepare": made.prepare, "launching": made}
        kernel(op, CUDA, device_type="cuda", **how)(made)
        return made

    return register


def aligned(x: torch.Tensor) -> bool:
    return x.data_ptr() % ALIGNMENT == 0


def _kind(arg: Any) -> Hashable:
    if isinstance(arg, torch.Tensor):
        return arg.device.index, arg.dtype, arg.shape, arg.stride(), aligned(arg)
    return arg


def lies(strides: Sequence[Any], form: Form, is_one: Callable[[Any], bool] = (1).__eq__) -> bool:
    """Whether a matrix of these strides, which may be symbols, has the form for their sake."""
    if form is Form.LINES:
        return is_one(strides[0]) or is_one(strides[1])
    return form is Form.ROWS and is_one(strides[1])


def _formed(x: torch.Tensor, form: Form) -> torch.Tensor:
    if x.dim() == 2 and lies(x.stride(), form):
        return x
    x = x.contiguous()
    return x.clone() if form is Form.ALIGNED and not aligned(x) else x
