# SPDX-License-Identifier: Apache-2.0
"""Calls that consist of kernel launches alone. Inductor plans the buffers of their results, and a
line of generated code enqueues the launches, past torch's dispatcher
(runtime_kernels/cuda/call_site.py)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.lowering import empty_strided
from torch._inductor.virtualized import V

from q2compile.graph.gemms import is_read
from q2compile.graph.launch_groups import global_scales
from q2compile.graph.node_meta import ALPHA_FROM
from q2compile.graph.nodes import name_of
from q2compile.lowering.launch_node import AlphaProduct, Launches, LaunchOutput, is_tensor
from q2compile.lowering.member import Member, OpCall
from q2compile.lowering.state import lowering_state
from q2compile.runtime_kernels.choice import choose
from q2compile.runtime_kernels.cuda.calls import OperandLayout, is_in_layout
from q2compile.runtime_kernels.cuda.quantize import grouped_launch
from q2compile.runtime_kernels.cuda.quantize.grouped_check import GROUP
from q2compile.runtime_kernels.cuda.quantize.grouped_launch import can_share
from q2compile.runtime_kernels.ops.table import SPLIT_SCALES
from q2compile.runtime_kernels.registry import bound, call_op


def launch(call: OpCall) -> Any:
    """The last step of every op: its kernel is launched, or the op itself is called."""
    return launches_of(call.overload, *call.args, **call.kwargs)


def close_group(node: fx.Node) -> None:
    """Launch the waiting calls if this node is the last of its group, or in none."""
    group = lowering_state().groups.get(node)
    if group is None or group.last is node:
        _enqueue_waiting()


def launches_of(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """An op by the registry's kernel: its launches, if the kernel is nothing else and generated
    code is Python; otherwise a call of the op."""
    made = _member(op, bound(name_of(op), args, kwargs))
    if made is None:
        return _fallback(op, args, kwargs)
    member, outputs = made
    _enqueue(member)
    return outputs


def _member(op: torch._ops.OpOverload, args: Sequence[Any]) -> tuple[Member, Any] | None:
    """A call to be launched, and its outputs; None if it does not consist of launches alone."""
    name = name_of(op)
    if V.graph.cpp_wrapper:
        return None
    realized = [ir.ExternKernel.realize_input(a) if is_tensor(a) else a for a in args]
    by = launching(name, realized)
    if by is None:
        return None
    for i, layout in _layouts_of(name, realized).items():
        realized[i] = _laid_out(realized[i], layout)
    return member_with_outputs(V.current_node, op, realized)


def member_with_outputs(
    node: fx.Node, op: torch._ops.OpOverload, args: Sequence[Any]
) -> tuple[Member, Any]:
    """A call to be launched, with new buffers for the outputs that are read; and its outputs."""
    results = results_of(op, args)
    is_tuple = isinstance(results, tuple | list)
    results = results if is_tuple else (results,)
    wanted = _wanted_outputs(op, len(results), node)
    written = [w and _has_elements(r) for r, w in zip(results, wanted, strict=True)]
    buffers = [LaunchOutput(r) if w else None for r, w in zip(results, written, strict=True)]
    outputs = [
        ir.TensorBox.create(b) if b else without_elements(r) if w else None
        for b, r, w in zip(buffers, results, wanted, strict=True)
    ]
    return Member(node, name_of(op), args, buffers), tuple(outputs) if is_tuple else outputs[0]


def without_elements(like: torch.Tensor) -> Any:
    """A tensor without elements, such as the scales of fp8: one per graph."""
    size, stride = like.size(), like.stride()
    return lowering_state().once(
        (without_elements, *size, *stride, like.dtype, like.device),
        lambda: empty_strided(size, stride, dtype=like.dtype, device=like.device),
    )


def _has_elements(result: torch.Tensor) -> bool:
    return all(size != 0 for size in result.size() if isinstance(size, int))


def _once_a_kind(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: caches, per graph, a function of an op and its operands that depends only on their
    sizes, strides and types. Calls of equal layers are alike. The fake tensors that such functions
    make are most of the time of lowering a call."""

    @functools.wraps(function)
    def known(op: Any, args: Sequence[Any]) -> Any:
        alike = (function, op, *(_described(a) if is_tensor(a) else a for a in args))
        return lowering_state().once(alike, lambda: function(op, args))

    return known


def _described(x: Any) -> tuple[Any, ...]:
    stride = tuple(x.get_layout().stride) if ir.is_storage_and_layout(x) else None
    return x.get_device(), x.get_dtype(), tuple(x.get_size()), stride


@_once_a_kind
def launching(name: str, args: Sequence[Any]) -> Any:
    """The launches of the kernel that serves a call; None if the kernel is more than launches."""
    return choose(name, fakes(args)).launching


@_once_a_kind
def results_of(op: torch._ops.OpOverload, args: Sequence[Any]) -> Any:
    """Fake results of an op, for their sizes, strides and dtypes."""
    with V.graph.fake_mode:
        return call_op(name_of(op), fakes(args))


@_once_a_kind
def _layouts_of(name: str, args: Sequence[Any]) -> dict[int, OperandLayout]:
    """The layouts that the kernel needs, by position of the argument."""
    return launching(name, args).layouts(*fakes(args))


@_once_a_kind
def _asked(name: str, args: Sequence[Any]) -> tuple[Any, ...]:
    """A call as a group is chosen by it."""
    return name, *fakes(args)


def _group_of(members: Sequence[Member], products: Sequence[AlphaProduct]) -> tuple:
    calls = tuple(_asked(member.op, member.args) for member in members)
    others = itertools.count()
    pairs = tuple(
        grouped_launch.ScaleProduct(own, next(others) if is_tensor(other) else other)
        for own, other, _ in products
    )
    return calls, pairs, sum(is_tensor(product.other) for product in products)


def _enqueue(member: Member) -> None:
    """Let a call wait for the others of its group. It is launched at once if it has no group or no
    tail kernel to share."""
    state = lowering_state()
    if state.waiting and not _joins(state.waiting, member):
        _enqueue_waiting()
    state.waiting.append(member)
    if member.node not in state.groups or member.tail.launch is None:
        _enqueue_waiting()


def _joins(waiting: Sequence[Member], member: Member) -> bool:
    groups = lowering_state().groups
    one_group = groups.get(waiting[0].node) is groups.get(member.node)
    return one_group and can_share([each.tail for each in (*waiting, member)])


def _enqueue_waiting() -> None:
    waiting = lowering_state().waiting
    if waiting:
        members = list(waiting)
        waiting.clear()
        products = _products_of(members)
        if len(members) > 1 or products:
            choose(GROUP, _group_of(members, products))  # its call site asks again
        Launches(members, products)


def _products_of(members: Sequence[Member]) -> list[AlphaProduct]:
    """The products that this group computes for GEMMs: one for each of its operands."""
    state = lowering_state()
    group = state.groups.get(members[0].node)
    if group is None:
        return []
    makers = {
        scale: (i, 1 if member.op == SPLIT_SCALES else place)
        for i, member in enumerate(members)
        for place, scale in global_scales(member.node)
    }
    found: list[AlphaProduct] = []
    for scale, own in makers.items():
        if members[own[0]].buffers[own[1]] is None:
            continue
        for gemm in (user for user in scale.users if user.meta.get(ALPHA_FROM) == group.number):
            pair: Any = gemm.args[2], gemm.args[5]
            other = pair[1] if pair[0] is scale else pair[0]
            known: Any = makers.get(other) or V.graph.env.get(other)
            if known is None or pair in state.products:
                continue
            with V.graph.fake_mode:
                empty = torch.empty((), dtype=torch.float32, device=members[0].device)
            buffer = LaunchOutput(empty)
            state.products[pair] = ir.TensorBox.create(buffer)
            if not isinstance(known, tuple):
                known = ir.ExternKernel.realize_input(known)
            found.append(AlphaProduct(own, known, buffer))
            break
    return found


def _fallback(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    _enqueue_waiting()  # the op may read their results: statistics of a recorded operand do
    made: Any = OpNode.create(op, *args, **kwargs)
    return ir.TensorBox.create(made) if is_tensor(made) else tuple(map(ir.TensorBox.create, made))


# The result of `process_kernel`: a tuple before torch 2.15.
_PROCESSED: Any = getattr(ir, "ProcessKernelResult", lambda *parts: parts)


class OpNode(ir.FallbackKernel):
    """A call of the op itself. Its results are those of an equal call, where sizes are known: torch
    would make fakes of the operands and the results of each."""

    @classmethod
    def process_kernel(cls, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        """The results, the tensors and the other arguments of a call, and the function that puts
        these two into args and kwargs again. The last is None because no unbacked symbol is made.
        Our ops with a lowering take no lists."""
        flat = [*args, *kwargs.values()]
        if any(isinstance(a, sympy.Expr) for a in flat):
            return super().process_kernel(kernel, *args, **kwargs)
        tensors = [cls.realize_input(a) for a in flat if is_tensor(a)]
        for x in filter(ir.is_storage_and_layout, tensors):
            ir.as_storage_and_layout(x, freeze=True)

        def written(tensors: Sequence[Any], others: Sequence[Any]) -> Any:
            parts = iter(tensors), iter(others)
            given = [next(parts[not is_tensor(a)]) for a in flat]
            return given[: len(args)], dict(zip(kwargs, given[len(args) :], strict=True))

        others = [a for a in flat if not is_tensor(a)]
        results = results_of(kernel, bound(name_of(kernel), *written(tensors, others)))
        return _PROCESSED(results, tensors, others, written, None)

    @staticmethod
    def tensor_to_layout(output: torch.Tensor) -> ir.FixedLayout:
        """The layout of a result. torch also asks its fake whether it is pinned, which none is."""
        size, stride = map(ir.convert_shape_to_inductor, (output.size(), output.stride()))
        return ir.FixedLayout(output.device, output.dtype, size, stride)


def fakes(args: Sequence[Any]) -> list[Any]:
    """Fake tensors with the sizes and strides that the operands will have."""
    with V.graph.fake_mode:
        return [
            ir.ir_node_to_tensor(a)
            if is_tensor(a)
            else V.graph.sizevars.shape_env.create_symintnode(a, hint=None)
            if isinstance(a, sympy.Expr)
            else a
            for a in args
        ]


def _laid_out(x: Any, layout: OperandLayout) -> Any:
    if ir.is_storage_and_layout(x):
        ir.as_storage_and_layout(x, freeze=True)
    is_one = functools.partial(V.graph.sizevars.statically_known_equals, 1)
    if len(x.get_size()) == 2 and is_in_layout(x.get_stride(), layout, is_one):
        return x
    return ir.ExternKernel.require_contiguous(x)


def _wanted_outputs(op: torch._ops.OpOverload, count: int, node: fx.Node) -> list[bool]:
    """Which outputs of a node are read. All, if the node is lowered to more than one call."""
    if count == 1 or node.target is not op:
        return [True] * count
    used = {output.args[1] for output in node.users if is_read(output)}
    return [i in used for i in range(count)]
