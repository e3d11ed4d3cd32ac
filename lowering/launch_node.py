# SPDX-License-Identifier: Apache-2.0
"""The node of a call in generated code that enqueues launches (launches.py,
prologue/fused_launches.py).

It has several outputs, which Inductor allocates for it. (A node of the scheduler for each of them,
which the launches mutate, would double the time that a graph is scheduled.)"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch._inductor import ir
from torch._inductor.virtualized import V

from q2compile.lowering.member import Member
from q2compile.lowering.state import lowering_state
from q2compile.runtime_kernels.registry import as_written, parameters

_MODULE = "q2compile.runtime_kernels.cuda.call_site"
_IMPORT = f"from {_MODULE} import CallSite as q2_CallSite, SiteCall as q2_Call"
_IMPORT_PROLOGUE = (
    "from q2compile.runtime_kernels.cuda.quantize.prologue_expression "
    "import PrologueExpression as q2_PrologueExpression"
)


class LaunchOutput(ir.InputsKernel):
    """A result of launches. Inductor allocates it before the call of the node that writes it. (It
    derives from `InputsKernel` because Inductor treats these as tensors in memory.)"""

    def __init__(self, like: torch.Tensor) -> None:
        size, stride = map(ir.convert_shape_to_inductor, (like.size(), like.stride()))
        layout = ir.FixedLayout(like.device, like.dtype, size, stride)
        super().__init__(name=None, layout=layout, inputs=[])
        self.name = V.graph.register_buffer(self)
        self.writer: Launches | None = None

    def get_defining_op(self) -> Any:
        return self.writer

    def should_allocate(self) -> bool:
        return True

    @property
    def is_read(self) -> bool:
        """True if a node reads this output. It is known when code is generated."""
        return self.name not in V.graph.removed_buffers


class AlphaProduct(NamedTuple):
    """alpha, a product of two global scales. own: (member, output) of one; other: the same for the
    other, or its tensor; buffer: the result."""

    own: tuple[int, int]
    other: Any
    buffer: Any


class Launches(ir.ExternKernel):
    """A call of a call site, which is defined at the top of generated code. It enqueues the
    launches of one call of an op, or of several that share launches.

    prologue: computes the operand of each call, whose x is None (a prologue/expressions.Prologue).
    """

    def __init__(
        self, members: Sequence[Member], products: Sequence[AlphaProduct] = (), prologue: Any = None
    ) -> None:
        self._members, self._products, self._prologue = members, products, prologue
        sources = [V.graph.get_buffer(name) for name in prologue.buffers] if prologue else []
        others = (p.other for p in products if is_tensor(p.other))
        self._tensors = [
            *map(ir.InputsKernel.unwrap_storage_for_input, sources),
            *map(_unwrapped, (*tensors_of(members), *others)),
        ]
        buffers = (b for member in members for b in member.buffers if b is not None)
        self._buffers: list[LaunchOutput] = [*buffers, *(p.buffer for p in products)]
        self._device = [*self._buffers, *self._tensors][0].get_device()
        super().__init__(None, ir.NoneLayout(device=self._device), [*self._tensors])
        for buffer in self._buffers:
            buffer.writer = self
        V.graph.register_operation(self)

    def get_outputs(self) -> list[ir.Buffer]:
        return [*self._buffers]

    def get_device(self) -> torch.device | None:
        return self._device

    def codegen(self, wrapper: Any) -> None:
        assert not lowering_state().waiting, "calls still wait to be launched"
        call_args = list(self._prologue.buffers) if self._prologue else []
        tensors = iter(self._tensors[len(call_args) :])
        parts = [_text_of(m, wrapper, tensors, call_args) for m in self._members]
        others, products = itertools.count(), []
        for own, other, _ in self._products:
            products.append((own, next(others) if is_tensor(other) else other))
        parts += [f"fixed={self._fixed()}"]
        if products:
            parts.append(f"products={tuple(products)}")
        if left := [x.codegen_reference() for x in tensors]:
            parts.append(f"others={len(left)}")
            call_args += left
        if self._prologue:
            parts.append(f"prologue=q2_{self._prologue.expression!r}")
        self._write(wrapper, f"q2_CallSite({', '.join(parts)})", call_args)

    def _write(self, wrapper: Any, site: str, call_args: Sequence[str]) -> None:
        """Write the call site at the top of the generated code, and its call. call_args: the
        operands."""
        root = wrapper
        while hasattr(root, "parent_wrapper"):
            root = root.parent_wrapper
        for line in (_IMPORT, _IMPORT_PROLOGUE) if self._prologue else (_IMPORT,):
            root.add_import_once(line)
        prefix = "q2_fused" if self._prologue else "q2_site"
        root.q2_sites = counts = getattr(root, "q2_sites", Counter())
        name = f"{prefix}_{counts[prefix]}"
        counts[prefix] += 1
        root.header.writeline(f"{name} = {site}")
        self.codegen_comment(wrapper, name)
        call_args = [*call_args, *(b.get_name() for b in self._buffers if b.is_read)]
        wrapper.writeline(f"{name}({', '.join(call_args)})")

    def _fixed(self) -> bool:
        """Whether no size is symbolic."""
        sizes = [a for m in self._members for a in m.args if not is_tensor(a)]
        for x in (*self._tensors, *self._buffers):
            sizes += [*x.get_size(), *x.get_stride(), x.get_layout().offset]
        return not any(map(_is_symbolic, sizes))


def tensors_of(members: Sequence[Member]) -> list[Any]:
    """The operands of these calls."""
    return [arg for member in members for arg in member.args if is_tensor(arg)]


def _text_of(member: Member, wrapper: Any, tensors: Iterator[Any], call_args: list[str]) -> str:
    """The text of a member in its call site. Arguments of its calls go to `call_args`. tensors:
    operands of this and of later members."""
    shown: dict[str, Any] = {}
    for (name, _), arg in zip(parameters(member.op), member.args, strict=True):
        shown[name] = arg
        if is_tensor(arg):
            call_args.append(next(tensors).codegen_reference())
        elif _is_symbolic(arg):
            call_args.append(wrapper.codegen_sizevar(arg))
        else:
            continue
        shown[name] = _Shown("...")
    args, keywords = as_written(member.op, shown)
    wanted = ", ".join(str(int(b is not None and b.is_read)) for b in member.buffers)
    of = [repr(member.op), f"({', '.join(map(repr, args))},)", f"({wanted},)"]
    of += [f"{name}={arg!r}" for name, arg in keywords.items()]
    return f"q2_Call({', '.join(of)})"


class _Shown(str):
    """The text of an argument in generated code."""

    def __repr__(self) -> str:
        return str(self)


def is_tensor(arg: Any) -> bool:
    return isinstance(arg, ir.IRNode)


def _is_symbolic(arg: Any) -> bool:
    return isinstance(arg, sympy.Expr) and not arg.is_number


def _unwrapped(x: Any) -> Any:
    """The buffer of a tensor, which is realized."""
    return ir.InputsKernel.unwrap_storage_for_input(ir.ExternKernel.realize_input(x))
