# SPDX-License-Identifier: Apache-2.0
"""Quantizers that compute their operand.

Where one may (the pass fuse_rotations marks it), can (expressions.py) and should (fusion_rule.py),
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

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.lowering import view
from torch._inductor.virtualized import V

from q2compile.lowering.launch_node import LaunchNode, call_argument
from q2compile.lowering.launches import (
    is_tensor,
    launching,
    output_buffer,
    results_of,
    wanted_outputs,
)
from q2compile.lowering.member import OpCall
from q2compile.lowering.prologue import fusion_rule
from q2compile.lowering.prologue.expressions import (
    CannotFuse,
    Prologue,
    is_expression,
    prologue_of,
)
from q2compile.lowering.state import lowering_state
from q2compile.runtime_kernels.cuda.quantize import fused
from q2compile.runtime_kernels.cuda.quantize.prologue_expression import PrologueExpression
from q2compile.runtime_kernels.ops.fusing import MAY_FUSE, PAIR, READS_THE_SAME, is_view_or_cast
from q2compile.runtime_kernels.ops.table import QUANTIZE, QuantizerCall, quantizer_of

_IMPORTS = (
    "from q2compile.runtime_kernels.cuda.fused_call_site import FusedCallSite as q2_FusedCallSite",
    "from q2compile.runtime_kernels.cuda.quantize.prologue_expression "
    "import PrologueExpression as q2_PrologueExpression",
    "from q2compile.runtime_kernels.cuda.call_site import View as q2_View",
)


class QuantizerNode(NamedTuple):
    """A quantizer: its node, and the call that it is, of what is lowered."""

    node: fx.Node
    call: QuantizerCall

    @property
    def label(self) -> str:
        size = " x ".join(map(str, self.call.x.get_size()))
        return f"{self.node.name} ({self.call.label} of {size})"

    @property
    def note(self) -> str:
        return f"{self.label}: fused with {_origins(self.call.x)}"


class FusedQuantizer(NamedTuple):
    """A quantizer: its node, its keywords with tensors among them in memory, its results as fakes,
    which of them are read, and a buffer for each of those, else None."""

    node: fx.Node
    keywords: dict[str, Any]
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


def prologue(call: OpCall) -> tuple[Any, ...] | None:
    """The outputs of a call, of the node that is lowered, with x computed in its kernel; or None
    where the pass has not marked the node or one of the conditions says no, which is noted for the
    record of the pass."""
    node, quantizer = V.current_node, call.quantizer
    notes = node.meta.get(MAY_FUSE)
    if notes is None or quantizer_of(node) is None or quantizer.recorded:
        return None
    made = lowering_state().made.pop(node, None)
    if made is not None:
        return made
    first, second = QuantizerNode(node, quantizer), _second_of_pair(node)
    if second is not None:
        try:
            made, second_made = _fused([first, second])
        except CannotFuse as reason:
            notes.append(f"{node.name} and {second.node.name}: not in one kernel: {reason}")
        else:
            lowering_state().made[second.node] = second_made
            notes += [first.note, f"{second.note}, in one kernel with {node.name}"]
            return made
    try:
        (made,) = _fused([first])
    except CannotFuse as reason:
        notes.append(f"{first.label}: not fused: {reason}")
        return None
    notes.append(first.note)
    return made


def _second_of_pair(node: fx.Node) -> QuantizerNode | None:
    """The quantizer behind this one that one kernel may serve with it."""
    other: Any = node.next
    pair = node.meta.get(PAIR)
    while pair is not None and other.op != "root":
        found = quantizer_of(other) if other.meta.get(PAIR) == pair else None
        if found is not None and not found.recorded:
            lowered = {
                name: V.graph.env[a] if isinstance(a, fx.Node) else a
                for name, a in found.args.items()
            }
            return QuantizerNode(other, found.replace(**lowered))
        other = other.next
    return None


def _fused(calls: Sequence[QuantizerNode]) -> list[tuple[Any, ...]]:
    """The outputs of one quantizer, or of two in one kernel.

    Raises:
        CannotFuse: it cannot be, or would not pay.
    """
    if any(quantizer.call.dbias is not None for quantizer in calls):
        raise CannotFuse("its columns are summed, too, by a kernel that reads the operand")
    if V.graph.cpp_wrapper:
        raise CannotFuse("generated code is in C++")
    for node, quantizer in calls:
        if not is_expression(quantizer.x):
            raise CannotFuse("the operand is in memory already")
        readers = other_readers(node)
        if readers:
            raise CannotFuse(f"{', '.join(readers)} read the operand, too")
    made = [quantized(each) for each in calls]
    found = prologue_of(*(quantizer.x for _, quantizer in calls))
    raise_unless_it_pays(found.expression, calls[0])
    device = calls[0].call.x.get_device_or_error()
    if device.type == "cuda":
        fused.prepare(found.expression, made[0].keywords, device.index)
    for each in made:
        each.make_buffers()
    FusedLaunches(found, made)
    return [each.outputs for each in made]


def quantized(quantizer: QuantizerNode) -> FusedQuantizer:
    """Without buffers as yet."""
    node, call = quantizer
    in_memory = {
        name: ir.ExternKernel.realize_input(a) if is_tensor(a) and name != "x" else a
        for name, a in call.args.items()
    }
    call = call.replace(**in_memory)
    if launching(QUANTIZE, call.positional) is None:
        raise CannotFuse("no CUDA kernel of q2compile serves it here")
    results = results_of(call.spec.overload, call.positional)
    wanted = wanted_outputs(call.spec.overload, len(results), node)
    _, keywords = call.written()
    return FusedQuantizer(node, keywords, results, wanted, [])


def raise_unless_it_pays(expression: PrologueExpression, quantizer: QuantizerNode) -> None:
    """Raises CannotFuse where the kernel would not pay, or does not do what it should."""
    node, call = quantizer
    operands = len(expression.results)
    device = call.x.meta["val"].device if isinstance(call.x, fx.Node) else call.x.get_device()
    index = device.index or 0
    _, keywords = call.written()
    capability = torch.cuda.get_device_capability(device)[0]
    reason = fused.no_pair(expression, keywords, index) if operands > 1 else None
    if reason is None:
        shared = operands == 1 and node.meta[READS_THE_SAME]
        how = call.scheme, len(call.operands), capability, shared
        reason = fusion_rule.why_not(expression, *how)
    if reason is None and device.type == "cuda":
        reason = fused.rejection(index, keywords, operands)
    if reason is not None:
        raise CannotFuse(reason)


def other_readers(node: fx.Node) -> list[str]:
    """What else reads the operand of a quantizer, under whichever view or cast: it would be written
    for them all the same, or made twice."""
    read: Any = node.args[0]
    reader = node
    while True:
        others = [user.name for user in read.users if user is not reader]
        if others:
            return others
        if not is_view_or_cast(read) or not read.args or not isinstance(read.args[0], fx.Node):
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


class FusedLaunches(LaunchNode):
    """Enqueues the launches of a quantizer that computes its operand, or of two."""

    _imports = _IMPORTS
    _prefix = "q2_fused"

    def __init__(self, found: Prologue, quantized: Sequence[FusedQuantizer]) -> None:
        self._found, self._quantized = found, quantized
        unwrapped = ir.InputsKernel.unwrap_storage_for_input
        sources = [unwrapped(V.graph.get_buffer(name)) for name in found.buffers]
        operands = [unwrapped(a) for each in quantized for a in fused.tensors_in(each.keywords)]
        buffers = [b for each in quantized for b in each.buffers if b is not None]
        written = [unwrapped(ir.ExternKernel.realize_input(b)) for b in buffers]
        super().__init__([*sources, *operands], written)

    def codegen(self, wrapper: Any) -> None:
        expression = self._found.expression
        call_args = list(self._found.buffers)
        call_args += map(wrapper.codegen_sizevar, self._found.sizes)
        operands = iter(self._tensors[len(self._found.buffers) :])
        calls = []
        for each in self._quantized:
            # In the order in which a FusedCallSite is given tensors.
            call = fused.call_of(each.keywords)
            shown = {}
            for name, arg in call.args.items():
                if is_tensor(arg):
                    text, reference = call_argument(next(operands), True)
                    call_args.append(reference)
                    shown[name] = text
                elif name in each.keywords:
                    shown[name] = repr(arg)
            keywords = ", ".join(f"{name}={text}" for name, text in shown.items())
            wanted = ", ".join(str(int(w)) for w in each.wanted)
            calls.append(f"(dict({keywords}), ({wanted},))")
        site = f"q2_FusedCallSite(q2_{expression!r}, [{', '.join(calls)}])"
        self._write(wrapper, site, call_args)
