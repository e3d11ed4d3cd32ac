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

Why a quantizer is not fused is noted in the record of the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import fx
from torch._inductor import ir
from torch._inductor.virtualized import V

from q2compile.graph.node_meta import MAY_FUSE, PAIR, READS_THE_SAME
from q2compile.graph.quantizers import quantizer_of
from q2compile.graph.views import ELEMENTS, kind_of
from q2compile.lowering.inductor_kernels.fusion_gain import ComputedOperand
from q2compile.lowering.launch_node import Launches, is_tensor
from q2compile.lowering.launches import fakes, member_with_outputs
from q2compile.lowering.member import OpCall
from q2compile.lowering.prologue import fusion_rule  # noqa: F401  registers kernel "fused"
from q2compile.lowering.prologue.expressions import CannotFuse, pointwise, prologue_of
from q2compile.lowering.state import lowering_state
from q2compile.runtime_kernels.choice import InGraph, choose
from q2compile.runtime_kernels.cuda.quantize import fused
from q2compile.runtime_kernels.ops.table import QUANTIZE, QuantizerCall
from q2compile.runtime_kernels.registry import FUSED


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
        """A line for the record of the pass, with the names in aten of the fused operations."""
        data = pointwise(self.call.x)
        ops = {str(o.meta.get("original_aten", o.target)) for o in getattr(data, "origins", ())}
        names = {op.removeprefix("aten.").partition(".")[0] for op in ops}
        return f"{self.label}: fused with {', '.join(sorted(names)) or 'its producer'}"


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
            made, lowering_state().made[second.node] = _fused([first, second])
        except CannotFuse as reason:
            notes.append(f"{node.name} and {second.node.name}: not in one kernel: {reason}")
        else:
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
    while PAIR in node.meta and other.op != "root":
        found = quantizer_of(other) if other.meta.get(PAIR) == node.meta[PAIR] else None
        if found is not None and not found.recorded:
            nodes = {name: a for name, a in found.args.items() if isinstance(a, fx.Node)}
            lowered = {name: V.graph.env[a] for name, a in nodes.items()}
            return QuantizerNode(other, found.replace(**lowered))
        other = other.next
    return None


def _fused(calls: Sequence[QuantizerNode]) -> list[tuple[Any, ...]]:
    """The outputs of one quantizer, or of two in one kernel.

    Raises:
        CannotFuse: it is not possible, or another kernel is chosen (fusion_rule.py).
    """
    if any(call.dbias is not None for _, call in calls):
        raise CannotFuse("it returns dbias, and that kernel reads the operand from memory")
    if V.graph.cpp_wrapper:
        raise CannotFuse("generated code is in C++")
    for node, call in calls:
        if pointwise(call.x) is None:
            raise CannotFuse("the operand is in memory already")
        readers = other_readers(node)
        if readers:
            raise CannotFuse(f"{', '.join(readers)} also read the operand")
    in_memory = [_with_inputs_in_memory(call) for _, call in calls]
    found = prologue_of(*(call.x for call in in_memory))
    graph = InGraph(ComputedOperand(), found.expression, calls[0].node.meta[READS_THE_SAME])
    chosen = choose(QUANTIZE, fakes(in_memory[0].positional), graph)
    if chosen.name != FUSED:
        raise CannotFuse(chosen.why_not[FUSED])
    device = in_memory[0].x.get_device()
    if device.type == "cuda":
        fused.prepare(found.expression, in_memory[0], device.index)
    members, outputs = [], []
    for (node, _), call in zip(calls, in_memory, strict=True):
        member, made = member_with_outputs(node, call.spec.overload, call.positional)
        members.append(member._replace(args=call.replace(x=None).positional))
        outputs.append(made)
    Launches(members, prologue=found)
    return outputs


def _with_inputs_in_memory(call: QuantizerCall) -> QuantizerCall:
    tensors = {name: a for name, a in call.args.items() if is_tensor(a) and name != "x"}
    return call.replace(**{name: ir.ExternKernel.realize_input(a) for name, a in tensors.items()})


def other_readers(node: fx.Node) -> list[str]:
    """Other readers of a quantizer's operand, through views and casts: it would be written for them
    anyway, or computed twice."""
    read: Any = node.args[0]
    reader = node
    while True:
        others = [user.name for user in read.users if user is not reader]
        if others:
            return others
        if not kind_of(read) & ELEMENTS:
            return []
        read, reader = read.args[0], read
