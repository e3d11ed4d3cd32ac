"""Rotating quantisers that compute their operand.

Where one may (the pass fuse_rotations marks it), can (producers.py) and should (fusion_rule.py),
its call in generated code gets the producer's inputs in the operand's place, and the producer's own
kernel is not made:

    before   triton_poi_fused_silu_backward.run(dh, u, g, buf0, ...)
             q2_site_0(buf0, seed, seed, buf1, buf2)
    after    q2_fused_0(dh, u, g, seed, seed, buf1, buf2)

Two operands of one read, the dg and du of a SwiGLU, are two such calls, which read dh, u and g
each. One kernel for both, which would read them once, needs both tiles and both results in one
thread block; it is not written.

Not fused is an operand with another reader (a residual that is kept), since then it is written all
the same; one whose columns are summed for dbias, by a kernel that reads it; one in a graph with a
C++ wrapper; and any on a GPU on which a small fused kernel has not agreed with the reference
(cuda/quantize/fused.py)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.lowering import register_lowering, view
from torch._inductor.virtualized import V

from q2compile.lowering import fusion_rule, launches
from q2compile.lowering.launches import (
    fakes,
    given_as,
    is_tensor,
    output_buffer,
    wanted_outputs,
)
from q2compile.lowering.producers import (
    Found,
    NotProduced,
    is_expression,
    is_same_numbers,
    producer_of,
)
from q2compile.runtime_kernels.cuda.quantize import fused
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.fusing import MAY_FUSE
from q2compile.runtime_kernels.ops.summed import SUMMED
from q2compile.runtime_kernels.registry import serving

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


def _fused_or_not(op: torch._ops.OpOverload, *args: Any) -> Any:
    made = call(op, *args)
    return launches.call(op, *args) if made is None else made


def call(op: torch._ops.OpOverload, x: ir.TensorBox, *args: Any) -> tuple[Any, ...] | None:
    """The outputs of the op with x computed in its kernel, or None where the pass has not marked
    the node or one of the conditions says no; which is noted for the record of the pass."""
    notes = V.current_node.meta.get(MAY_FUSE)
    if notes is None or V.current_node.target is not op:
        return None
    name = op.name().partition("::")[2]
    label = f"{V.current_node.name} ({name} of {_size(x)})"
    try:
        made = _call(op, name, x, args)
    except NotProduced as reason:
        notes.append(f"{label}: not fused: {reason}")
        return None
    notes.append(f"{label}: fused with {_origins(x)}")
    return made


def _call(
    op: torch._ops.OpOverload, name: str, x: ir.TensorBox, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    if name.endswith(SUMMED):
        raise NotProduced("its columns are summed, too, by a kernel that reads the operand")
    if V.graph.cpp_wrapper:
        raise NotProduced("generated code is in C++")
    if not is_expression(x):
        raise NotProduced("the operand is in memory already")
    readers = other_readers(V.current_node)
    if readers:
        raise NotProduced(f"{', '.join(readers)} read the operand, too")
    realized = [ir.ExternKernel.realize_input(a) if is_tensor(a) else a for a in args]
    with V.graph.fake_mode:
        shaped = [*fakes([x, *realized])]
        if serving(name, shaped).launching is None:
            raise NotProduced("no CUDA kernel of q2compile serves it here")
        results = op(*shaped)
    found = producer_of(x)
    scheme = get_scheme(fused.scheme_and_transform(name, args)[0])
    directions = 2 if name == "rht_quantize_both" else 1
    device = x.get_device_or_error()
    capability = torch.cuda.get_device_capability(device)[0]
    shared = reads_the_same(V.current_node)
    reason = fusion_rule.why_not(found.producer, scheme, directions, capability, shared)
    if reason is None and device.type == "cuda":
        reason = fused.refusal(name, device.index, args)
    if reason is not None:
        raise NotProduced(reason)
    if device.type == "cuda":
        fused.prepare(name, found.producer, args, device.index)
    wanted = wanted_outputs(op, len(results))
    buffers = [output_buffer(r) if w else None for r, w in zip(results, wanted, strict=True)]
    FusedLaunches(name, found, realized, [b for b in buffers if b is not None], wanted)
    return tuple(
        b if b is None or r.dim() else view(b, []) for b, r in zip(buffers, results, strict=True)
    )


def reads_the_same(node: fx.Node) -> bool:
    """Whether another marked quantiser's operand is made from half or more of what this one's is:
    Inductor would make one kernel of both producers."""
    own = _made_from(node)
    others = (n for n in node.graph.nodes if MAY_FUSE in n.meta and n is not node)
    return any(2 * len(own & _made_from(other)) >= len(own) for other in others)


def _made_from(node: fx.Node) -> set[fx.Node]:
    """What the expression of a quantiser's operand reads: where operations end that go element by
    element."""
    found: set[fx.Node] = set()
    pending, seen = [*_inputs(node)[:1]], set()
    while pending:
        at = pending.pop()
        if at in seen:
            continue
        seen.add(at)
        tags = getattr(at.target, "tags", ())
        if at.op == "call_function" and (torch.Tag.pointwise in tags or is_same_numbers(at)):
            pending += _inputs(at)
        else:
            found.add(at)
    return found


def _inputs(node: fx.Node) -> list[fx.Node]:
    return [a for a in node.args if isinstance(a, fx.Node)]


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


def _size(x: ir.TensorBox) -> str:
    return " x ".join(map(str, x.get_size()))


def _origins(x: ir.TensorBox) -> str:
    """What aten calls the operations that were fused."""
    data = x.data
    while isinstance(data, ir.BaseView | ir.StorageBox):
        data = data.data
    ops = {str(o.meta.get("original_aten", o.target)) for o in data.origins}
    names = {op.removeprefix("aten.").partition(".")[0] for op in ops}
    return ", ".join(sorted(names)) or "its producer"


class FusedLaunches(launches.Enqueued):
    """Enqueues the launches of a quantiser that computes its operand."""

    _imports = _IMPORTS
    _called = "q2_fused"

    def __init__(
        self,
        op: str,
        found: Found,
        args: Sequence[Any],
        buffers: Sequence[Any],
        wanted: Sequence[bool],
    ) -> None:
        """args: of the op, after x."""
        self._op, self._found, self._args, self._wanted = op, found, args, wanted
        unwrapped = ir.InputsKernel.unwrap_storage_for_input
        sources = [unwrapped(V.graph.get_buffer(name)) for name in found.buffers]
        operands = [unwrapped(a) for a in args if is_tensor(a)]
        written = [unwrapped(ir.ExternKernel.realize_input(b)) for b in buffers]
        super().__init__([*sources, *operands], written)

    def codegen(self, wrapper: Any) -> None:
        producer = self._found.producer
        given = list(self._found.buffers)
        given += map(wrapper.codegen_sizevar, self._found.sizes)
        operands = iter(self._tensors[len(self._found.buffers) :])
        args = []
        for arg in self._args:
            if is_tensor(arg):
                shown, reference = given_as(next(operands), True)
                given.append(reference)
            else:
                shown = repr(arg)
            args.append(shown)
        wanted = ", ".join(str(int(w)) for w in self._wanted)
        site = f"q2_FusedSite('{self._op}', q2_{producer!r}, ({', '.join(args)},), ({wanted},))"
        self._write(wrapper, site, given)
