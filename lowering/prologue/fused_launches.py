# SPDX-License-Identifier: Apache-2.0
"""Quantizers that compute their operand.

A quantizer is fused if the pass fuse_rotations has marked it, its operand has a prologue expression
(expressions.py), and fusing pays (fusion_rule.py). Its call then takes the inputs of the producer
instead of the operand, and the producer has no kernel of its own:

    before   triton_poi_fused_silu_backward.run(dh, u, g, buf0, ...)
             q2_site_0(buf0, seed, seed, buf1, buf2)
    after    q2_fused_0(dh, u, g, seed, seed, buf1, buf2)

Two operands computed from the same tensors, the dg and du of a SwiGLU, are one call if the rule
expects that to pay. It reads dh, u and g once. Otherwise they are two calls, which each read them.

    after    q2_fused_0(dh, u, g, seed, seed, seed, seed, buf1, buf2, buf3, buf4)

Not fused:

- an operand with another reader (a residual that is saved), which is written anyway;
- a quantizer with dbias or in groups, whose kernel reads its operand from memory;
- a graph with a C++ wrapper;
- any, on a GPU where the self-check of a small fused kernel has failed (cuda/quantize/fused.py).
"""

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
    """A quantizer: its node, and its call with lowered arguments."""

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
    """A quantizer to fuse. keywords: its arguments, tensors among them in memory. results: fakes.
    wanted: which results are read. buffers: one for each of those, else None."""

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
    """The outputs of the call that is lowered, with x computed in its kernel. None if the pass has
    not marked the node or a condition fails; the reason is noted in the record of the pass."""
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
    """The later quantizer that the pass has paired with this one, for one kernel."""
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
        CannotFuse: it is not possible, or would not pay.
    """
    if any(quantizer.call.dbias is not None for quantizer in calls):
        raise CannotFuse("it returns dbias, and that kernel reads the operand from memory")
    if V.graph.cpp_wrapper:
        raise CannotFuse("generated code is in C++")
    for node, quantizer in calls:
        if not is_expression(quantizer.x):
            raise CannotFuse("the operand is in memory already")
        readers = other_readers(node)
        if readers:
            raise CannotFuse(f"{', '.join(readers)} read the operand, too")
    made = [_quantized(each) for each in calls]
    found = prologue_of(*(quantizer.x for _, quantizer in calls))
    _raise_unless_it_pays(found.expression, calls[0])
    device = calls[0].call.x.get_device_or_error()
    if device.type == "cuda":
        fused.prepare(found.expression, made[0].keywords, device.index)
    for each in made:
        each.make_buffers()
    FusedLaunches(found, made)
    return [each.outputs for each in made]


def _quantized(quantizer: QuantizerNode) -> FusedQuantizer:
    """The quantizer to fuse, without buffers yet."""
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


def _raise_unless_it_pays(expression: PrologueExpression, quantizer: QuantizerNode) -> None:
    """Raises CannotFuse if fusing would not pay, or the kernel's self-check has failed."""
    node, call = quantizer
    operands = len(expression.results)
    device = call.x.get_device()
    index = device.index or 0
    _, keywords = call.written()
    capability = torch.cuda.get_device_capability(device)[0]
    reason = fused.no_pair(expression, keywords, index) if operands > 1 else None
    if reason is None:
        shared = operands == 1 and node.meta[READS_THE_SAME]
        how = call.scheme, len(call.operands), capability, shared
        reason = fusion_rule.why_not(expression, *how)
    if reason is None and device.type == "cuda":
        reason = fused.rejection(index, keywords, operands, expression.dtype)
    if reason is not None:
        raise CannotFuse(reason)


def other_readers(node: fx.Node) -> list[str]:
    """Other readers of a quantizer's operand, through views and casts: it would be written for them
    anyway, or computed twice."""
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
    """The names in aten of the operations that were fused."""
    data = x.data
    while isinstance(data, ir.BaseView | ir.StorageBox):
        data = data.data
    ops = {str(o.meta.get("original_aten", o.target)) for o in data.origins}
    names = {op.removeprefix("aten.").partition(".")[0] for op in ops}
    return ", ".join(sorted(names)) or "its producer"


class FusedLaunches(LaunchNode):
    """Enqueues the launches of one or two quantizers that compute their operands."""

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
            # In the order in which a FusedCallSite takes tensors.
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
