# SPDX-License-Identifier: Apache-2.0
"""Which kernel runs a call? `choose` decides it, for each caller alike: the op itself, passes,
lowerings, call sites and reports. In the order of an op's kernels: what a kernel itself cannot do,
what a user has disabled, what a check or a call has found. The first without a reason is the
choice, and the reasons of those before it are kept in it.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from q2compile.runtime_kernels import checks
from q2compile.runtime_kernels.check_results import Request
from q2compile.runtime_kernels.kernel_states import (
    AWAITED,
    KNOWN,
    assumed_capability,
    why_disabled,
)

MOST_KINDS = 4096  # Calls that are remembered. The shapes of a program may never repeat.


def nothing(*args) -> None:
    return None


class InGraph(NamedTuple):
    """Further facts, which decide about a call that Inductor lowers.

    computed: instructions and bytes read, per element, of the expression that computes the first
        operand, and with which a generated kernel could be fused; None for an operand in memory.
    prologue: that expression, if a CUDA kernel could compute it (cuda/quantize/fused.py).
    is_shared: another quantizer reads what the prologue reads.
    """

    computed: tuple[float, float] | None = None
    prologue: Any = None
    is_shared: bool = False


@dataclass(frozen=True)
class Kernel:
    """One implementation of one op.

    device_type: "cpu", "cuda", ..., or None for any.
    function, and the callables after it, are called with all of the op's arguments, in the order of
        its schema.
    unsupported: None if the kernel serves the arguments, otherwise the reason in words.
    launching: how generated code enqueues the launches of the kernel without torch's dispatcher
        (cuda/calls.py); None where that is not possible.
    is_generated: it is a part of the code of a compiled graph, and there is no function. An InGraph
        precedes the arguments of `unsupported` and `check`.
    check: the self-check that a call needs, None if it needs none. The op and the kernel's name
        precede its arguments.
    """

    op: str
    name: str
    device_type: str | None = None
    function: Callable = nothing
    unsupported: Callable[..., str | None] = nothing
    launching: Any = None
    is_generated: bool = False
    check: Callable[..., Request | None] = nothing

    def why_not(self, *args, graph: InGraph | None = None) -> str | None:
        """None if this kernel runs with the arguments; otherwise why it is unsupported, rejected or
        disabled, in words. graph: as `choose` takes it."""
        device = device_of(args)
        if self.device_type not in (None, device.type):
            return f"it runs on {self.device_type}, the operands are on {device.type}"
        if self.is_generated and graph is None:
            return "it is a part of graphs that Inductor compiles"
        failed = KNOWN.calls if assumed_capability() is None else {}
        failure = failed.get(kind_of_call(self, args)) if failed else None
        given = (graph, *args) if self.is_generated else args
        why = failure or why_disabled(self.op, self.name) or self.unsupported(*given)
        check = None if why or assumed_capability() else self.check(self.op, self.name, *given)
        return why if check is None else checks.rejection(check)


@dataclass(frozen=True)
class Choice:
    """The kernel that runs a call, and why the kernels before it do not: their names, and reasons
    in words."""

    kernel: Kernel
    why_not: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def launching(self) -> Any:
        """How generated code enqueues its launches; None if the kernel is more than launches."""
        return self.kernel.launching


KERNELS: dict[str, list[Kernel]] = {}  # op -> its kernels, in the order in which they are tried


def choose(op: str, args: Sequence, graph: InGraph | None = None) -> Choice:
    """Decides which kernel runs an op on all these arguments, of which tensors may be fake: the
    first that is not unsupported, rejected or disabled.

    A choice is found once for each kind of call, until what is known about kernels changes. It is
    not kept while a check that it depends on is awaited, nor for sizes that are symbols.

    graph: what is known of a call that Inductor lowers; None for a call that runs as an op.
    """
    # Results of checks are only added, so their number says which were known.
    key = op, graph, assumed_capability(), len(KNOWN.checks), *map(_descriptor, args)
    try:
        found = KNOWN.choices.get(key)
    except TypeError:  # a symbol has no hash
        return first_of(kernels(op, graph), args, graph)
    if found is None:
        found = first_of(kernels(op, graph), args, graph)
        if not AWAITED.get():
            if len(KNOWN.choices) >= MOST_KINDS:
                KNOWN.choices.clear()
            KNOWN.choices[key] = found
    return found


def first_of(candidates: Sequence[Kernel], args: Sequence, graph: InGraph | None = None) -> Choice:
    reasons: dict[str, str] = {}
    for each in candidates:
        why = each.why_not(*args, graph=graph)
        if why is None:
            return Choice(each, reasons)
        reasons[each.name] = why
    raise AssertionError("an op has no reference")


def _descriptor(arg: Any) -> Hashable:
    if isinstance(arg, torch.Tensor):
        return arg.device, arg.dtype, arg.shape, arg.stride()
    return tuple(map(_descriptor, arg)) if isinstance(arg, list | tuple) else arg


def kernels(op: str, graph: InGraph | None = None) -> list[Kernel]:
    """The implementations of an op that a call runs, in the order in which they are tried. graph:
    those of a call that Inductor lowers, generated ones among them.

    Raises:
        ValueError: there is no such op.
    """
    if op not in KERNELS:
        raise ValueError(f"q2 has no op {op!r}; it has {', '.join(sorted(KERNELS))}.")
    return [each for each in KERNELS[op] if graph is not None or not each.is_generated]


def kernel_named(op: str, name: str) -> Kernel:
    """A kernel of an op.

    Raises:
        ValueError: there is no such kernel.
    """
    candidates = kernels(op)
    for each in candidates:
        if each.name == name:
            return each
    raise ValueError(
        f"q2::{op} has no kernel {name!r} on this machine; it has "
        f"{', '.join(k.name for k in candidates)}."
    )


def generated_kernel(
    op: str, name: str, check: Callable[..., Request | None] = nothing
) -> Callable[[Callable], Callable]:
    """Decorator: registers a kernel that is a part of compiled graphs, by the function that says
    why it does not serve a call (`unsupported`)."""

    def register(unsupported: Callable[..., str | None]) -> Callable[..., str | None]:
        add(Kernel(op, name, None, nothing, unsupported, is_generated=True, check=check))
        return unsupported

    return register


def add(added: Kernel) -> None:
    """Registers a kernel, to be tried before the others of its op."""
    op, name = added.op, added.name
    assert all(k.name != name for k in KERNELS[op]), f"q2::{op} already has a kernel {name!r}"
    KERNELS[op].insert(0, added)
    KNOWN.choices.clear()


def ops() -> tuple[str, ...]:
    """Names of the ops that have kernels, without their namespace."""
    return tuple(KERNELS)


def kind_of_call(kernel: Kernel, args: Sequence) -> Hashable:
    """A key that is equal for the calls that a kernel is rejected for at once."""
    return kernel.op, kernel.name, str([*map(_descriptor, args)])  # a symbol has no hash


def device_of(args: Sequence) -> torch.device:
    """The device of the first tensor among an op's arguments, and in lists among them."""
    return next(a.device for a in _flat(args) if isinstance(a, torch.Tensor))


def _flat(args: Sequence) -> Iterator[Any]:
    for arg in args:
        if isinstance(arg, list | tuple):
            yield from _flat(arg)
        else:
            yield arg
