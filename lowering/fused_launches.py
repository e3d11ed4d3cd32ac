"""Rotating quantisers that compute their operand.

Where one may (the pass fuse_rotations marks it), can (producers.py) and should (fusion_rule.py),
its call in generated code gets the producer's inputs in the operand's place, and the producer's own
kernel is not made:

    before   triton_poi_fused_silu_backward.run(dh, u, g, buf0, ...)
             q2_site_0(buf0, seed, seed, buf1, buf2)
    after    q2_fused_0(dh, u, g, seed, seed, buf1, buf2)

Two operands of one read, the dg and du of a SwiGLU, are one call where the rule says so, which
reads dh, u and g once; or else two, which read them each.

    after    q2_fused_0(dh, u, g, seed, seed, seed, seed, buf1, buf2, buf3, buf4)

Not fused is an operand with another reader (a residual that is kept), since then it is written all
the same; one whose columns are summed for dbias, by a kernel that reads it; one in a graph with a
C++ wrapper; and any on a GPU on which a small fused kernel has not agreed with the reference
(cuda/quantize/fused.py)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.lowering import register_lowering, view
from torch._inductor.virtualized import V

from q2compile.lowering import fusion_rule, launches
from q2compile.lowering.enqueued import Enqueued, given_as
from q2compile.lowering.launches import (
    is_tensor,
    launching,
    output_buffer,
    results_of,
    wanted_outputs,
)
from q2compile.lowering.producers import (
    Found,
    NotProduced,
    is_expression,
    producer_of,
)
from q2compile.runtime_kernels.cuda.quantize import fused
from q2compile.runtime_kernels.cuda.quantize.producer import Producer
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.fusing import MAY_FUSE, PAIR, READS_THE_SAME, is_same_numbers
from q2compile.runtime_kernels.ops.summed import SUMMED

_IMPORTS = (
    "from q2compile.runtime_kernels.cuda.fused_site import FusedSite as q2_FusedSite",
    "from q2compile.runtime_kernels.cuda.quantize.producer import Producer as q2_Producer",
    "from q2compile.runtime_kernels.cuda.site import View as q2_View",
)


def register() -> None:
    """In the place of launches.py's lowerings of the ops that are launches alone."""
    summing = ("rht_quantize_summed", "rht_quantize_both_summed")
    for name in ("rht_quantize_both", "quantize_masked", *summing):
        op = getattr(torch.ops.q2, name).default
        lowering = launches.ending(functools.partial(_fused_or_not, op))
        register_lowering(op, type_promotion_kind=None)(lowering)


# Of the graph that is lowered: what quantisers made that came in one call with another one.
_MADE: WeakKeyDictionary[Any, dict[fx.Node, tuple[Any, ...]]] = WeakKeyDictionary()


class Asked(NamedTuple):
    """A quantiser: its node, its operand, its arguments after that."""

    node: fx.Node
    x: ir.TensorBox
    args: Sequence[Any]

    def label(self, op: torch._ops.OpOverload) -> str:
        size = " x ".join(map(str, self.x.get_size()))
        return f"{self.node.name} ({op.name().partition('::')[2]} of {size})"

    def note(self, op: torch._ops.OpOverload) -> str:
        return f"{self.label(op)}: fused with {_origins(self.x)}"


class Quantised(NamedTuple):
    """A quantiser: its node, its arguments after x with tensors among them in memory, its results
    as fakes, which of them are read, and a buffer for each of those, else None."""

    node: fx.Node
    args: list[Any]
    results: Sequence[torch.Tensor]
    wanted: list[bool]
    buffers: list[Any]

    def make_buffers(self) -> None:
        pairs = zip(self.results, self.wanted, strict=True)
        self.buffers.extend(output_buffer(r) if w else None for r, w in pairs)

    @property
    def outputs(self) -> tuple[Any, ...]:
        return tuple(
            b if b is None or r.dim() else view(b, [])
            for b, r in zip(self.buffers, self.results, strict=True)
        )


def _fused_or_not(op: torch._ops.OpOverload, *args: Any) -> Any:
    made = call(op, *args)
    return launches.call(op, *args) if made is None else made


def call(op: torch._ops.OpOverload, x: ir.TensorBox, *args: Any) -> tuple[Any, ...] | None:
    """The outputs of the op with x computed in its kernel, or None where the pass has not marked
    the node or one of the conditions says no; which is noted for the record of the pass."""
    node = V.current_node
    notes = node.meta.get(MAY_FUSE)
    if notes is None or node.target is not op:
        return None
    made = _MADE.get(V.graph, {}).pop(node, None)
    if made is not None:
        return made
    first, second = Asked(node, x, args), _second_of_pair(node)
    if second is not None:
        try:
            made, second_made = _call(op, [first, second])
        except NotProduced as reason:
            notes.append(f"{node.name} and {second.node.name}: not in one kernel: {reason}")
        else:
            _MADE.setdefault(V.graph, {})[second.node] = second_made
            notes += [first.note(op), f"{second.note(op)}, in one kernel with {node.name}"]
            return made
    try:
        (made,) = _call(op, [first])
    except NotProduced as reason:
        notes.append(f"{first.label(op)}: not fused: {reason}")
        return None
    notes.append(first.note(op))
    return made


def _second_of_pair(node: fx.Node) -> Asked | None:
    """The quantiser behind this one that one kernel may serve with it."""
    other: Any = node.next
    pair = node.meta.get(PAIR)
    while pair is not None and other.op != "root":
        if other.meta.get(PAIR) == pair:
            x, *args = (V.graph.env[a] if isinstance(a, fx.Node) else a for a in other.args)
            return Asked(other, x, args)
        other = other.next
    return None


def _call(op: torch._ops.OpOverload, calls: Sequence[Asked]) -> list[tuple[Any, ...]]:
    """The outputs of one quantiser, or of two in one kernel.

    Raises:
        NotProduced: it cannot be, or would not pay.
    """
    name = op.name().partition("::")[2]
    if name.endswith(SUMMED):
        raise NotProduced("its columns are summed, too, by a kernel that reads the operand")
    if V.graph.cpp_wrapper:
        raise NotProduced("generated code is in C++")
    for node, x, _ in calls:
        if not is_expression(x):
            raise NotProduced("the operand is in memory already")
        readers = other_readers(node)
        if readers:
            raise NotProduced(f"{', '.join(readers)} read the operand, too")
    made = [quantised(op, each) for each in calls]
    found = producer_of(*(x for _, x, _ in calls))
    node, x, args = calls[0]
    device = x.get_device_or_error()
    refuse(name, found.producer, device, args, node)
    if device.type == "cuda":
        fused.prepare(name, found.producer, args, device.index)
    for each in made:
        each.make_buffers()
    FusedLaunches(name, found, made)
    return [each.outputs for each in made]


def quantised(op: torch._ops.OpOverload, asked: Asked) -> Quantised:
    """Without buffers as yet."""
    node, x, args = asked
    realized = [ir.ExternKernel.realize_input(a) if is_tensor(a) else a for a in args]
    if launching(op.name().partition("::")[2], [x, *realized]) is None:
        raise NotProduced("no CUDA kernel of q2compile serves it here")
    results = results_of(op, [x, *realized])
    return Quantised(node, realized, results, wanted_outputs(op, len(results), node), [])


def refuse(
    name: str, producer: Producer, device: torch.device, args: Sequence[Any], node: fx.Node
) -> None:
    """Raises NotProduced where the kernel would not pay, or does not do what it should."""
    operands = len(producer.results)
    index = device.index or 0
    scheme = get_scheme(fused.scheme_and_transform(name, args)[0])
    directions = fused.directions(name)
    capability = torch.cuda.get_device_capability(device)[0]
    reason = fused.no_pair(name, producer, args, index) if operands > 1 else None
    if reason is None:
        shared = operands == 1 and node.meta[READS_THE_SAME]
        reason = fusion_rule.why_not(producer, scheme, directions, capability, shared)
    if reason is None and device.type == "cuda":
        reason = fused.refusal(name, index, args, operands)
    if reason is not None:
        raise NotProduced(reason)


def other_readers(node: fx.Node) -> list[str]:
    """What else reads the operand of a quantiser, under whichever view or cast: it would be written
    for them all the same, or made twice."""
    read: Any = node.args[0]
    reader = node
    while True:
        others = [user.name for user in read.users if user is not reader]
        if others:
            return others
        if not is_same_numbers(read) or not read.args or not isinstance(read.args[0], fx.Node):
            return []
        read, reader = read.args[0], read


def _origins(x: ir.TensorBox) -> str:
    """What aten calls the operations that were fused."""
    data = x.data
    while isinstance(data, ir.BaseView | ir.StorageBox):
        data = data.data
    ops = {str(o.meta.get("original_aten", o.target)) for o in data.origins}
    names = {op.removeprefix("aten.").partition(".")[0] for op in ops}
    return ", ".join(sorted(names)) or "its producer"


class FusedLaunches(Enqueued):
    """Enqueues the launches of a quantiser that computes its operand, or of two."""

    _imports = _IMPORTS
    _called = "q2_fused"

    def __init__(self, op: str, found: Found, quantised: Sequence[Quantised]) -> None:
        self._op, self._found, self._quantised = op, found, quantised
        unwrapped = ir.InputsKernel.unwrap_storage_for_input
        sources = [unwrapped(V.graph.get_buffer(name)) for name in found.buffers]
        operands = [unwrapped(a) for each in quantised for a in each.args if is_tensor(a)]
        buffers = [b for each in quantised for b in each.buffers if b is not None]
        written = [unwrapped(ir.ExternKernel.realize_input(b)) for b in buffers]
        super().__init__([*sources, *operands], written)

    def codegen(self, wrapper: Any) -> None:
        producer = self._found.producer
        given = list(self._found.buffers)
        given += map(wrapper.codegen_sizevar, self._found.sizes)
        operands = iter(self._tensors[len(self._found.buffers) :])
        calls = []
        for each in self._quantised:
            args = []
            for arg in each.args:
                if is_tensor(arg):
                    shown, reference = given_as(next(operands), True)
                    given.append(reference)
                else:
                    shown = repr(arg)
                args.append(shown)
            wanted = ", ".join(str(int(w)) for w in each.wanted)
            calls.append(f"(({', '.join(args)},), ({wanted},))")
        site = f"q2_FusedSite('{self._op}', q2_{producer!r}, [{', '.join(calls)}])"
        self._write(wrapper, site, given)
