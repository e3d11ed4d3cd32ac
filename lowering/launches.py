"""Calls of kernels that are launches alone: buffers that Inductor plans, and a line of generated
code that enqueues the launches into them, past torch's dispatcher (runtime_kernels/cuda/site.py).

The node is one that changes buffers made for it, as a Triton kernel of a user's does, which all
versions of torch that are supported have. (An out variant of each op would need a second schema.)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.lowering import empty_strided, fallback_handler, register_lowering, view
from torch._inductor.virtualized import V

from q2compile.lowering.gemm_operands import is_read
from q2compile.runtime_kernels.cuda.calls import Form, lies
from q2compile.runtime_kernels.ops.recorded import RECORDED
from q2compile.runtime_kernels.registry import serving

_IMPORT = "from q2compile.runtime_kernels.cuda.site import Site as q2_Site, View as q2_View"

# Those that are never loops (quantize.py has the lowerings of the others).
_QUANTISERS = (
    *("rht_quantize_both", "requantize", "quantize_masked"),
    *("rht_quantize_groups", "rht_quantize_groups_both", "requantize_groups"),
)
_NEVER_LOOPS = (*_QUANTISERS, "split_scales", "dequantize", "masked_unrotate")


def register() -> None:
    """Tell Inductor how to lower the ops that are never loops, and the recorded ones: an op that it
    meets without a lowering has its operands in memory from then on, which an operand that other
    loops read as well is rounded by."""
    recorded = (name + RECORDED for name in (*_QUANTISERS, "rht_quantize"))
    for name in (*_NEVER_LOOPS, *recorded):
        op = getattr(torch.ops.q2, name).default
        register_lowering(op, type_promotion_kind=None)(functools.partial(call, op))


def call(op: torch._ops.OpOverload, *args: Any) -> Any:
    """An op by the registry's kernel: its launches, where it is nothing else and generated code is
    in Python; otherwise the op itself."""
    name = op.name().partition("::")[2]
    if V.graph.cpp_wrapper:
        return _fallback(op, args)
    realized = [ir.ExternKernel.realize_input(a) if is_tensor(a) else a for a in args]
    kernel = serving(name, fakes(realized))
    if kernel.launching is None:
        return _fallback(op, args)
    for i, form in kernel.launching.forms.items():
        realized[i] = _formed(realized[i], form)
    with V.graph.fake_mode:
        results = op(*fakes(realized))
    several = isinstance(results, tuple)
    results = results if several else (results,)
    wanted = wanted_outputs(op, len(results))
    buffers = [output_buffer(r) if w else None for r, w in zip(results, wanted, strict=True)]
    Launches(name, realized, [b for b in buffers if b is not None], wanted)
    shaped = [
        b if b is None or r.dim() else view(b, []) for b, r in zip(buffers, results, strict=True)
    ]
    return tuple(shaped) if several else shaped[0]


def _fallback(op: torch._ops.OpOverload, args: Sequence[Any]) -> Any:
    return fallback_handler(op, add_to_fallback_set=False)(*args)


def is_tensor(arg: Any) -> bool:
    return isinstance(arg, ir.IRNode)


def _is_symbolic(arg: Any) -> bool:
    return isinstance(arg, sympy.Expr) and not arg.is_number


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


def _formed(x: Any, form: Form) -> Any:
    if ir.is_storage_and_layout(x):
        ir.as_storage_and_layout(x, freeze=True)
    is_one = functools.partial(V.graph.sizevars.statically_known_equals, 1)
    if len(x.get_size()) == 2 and lies(x.get_stride(), form, is_one):
        return x
    return ir.ExternKernel.require_contiguous(x)


def wanted_outputs(op: torch._ops.OpOverload, count: int) -> list[bool]:
    """Which outputs of the node that is lowered are read; all, where the call is one of several
    that it is lowered to."""
    node = V.current_node
    if count == 1 or node.target is not op:
        return [True] * count
    used = {output.args[1] for output in node.users if is_read(output)}
    return [i in used for i in range(count)]


def output_buffer(like: torch.Tensor) -> Any:
    size, stride = map(ir.convert_shape_to_inductor, (like.size(), like.stride()))
    # No kernel may fill it: one of no dimensions would be filled, since none of its ranges is 0.
    return empty_strided(size or [1], stride or [1], dtype=like.dtype, device=like.device)


class Launches(ir.ExternKernel):
    """Enqueues the launches of one call of an op."""

    def __init__(
        self, op: str, args: Sequence[Any], buffers: Sequence[Any], wanted: Sequence[bool]
    ) -> None:
        tensors = [a for a in args if is_tensor(a)] + [
            ir.ExternKernel.realize_input(b) for b in buffers
        ]
        inputs = [ir.InputsKernel.unwrap_storage_for_input(t) for t in tensors]
        self._device, self._tensors = inputs[0].get_device(), inputs
        super().__init__(None, ir.NoneLayout(device=self._device), inputs)
        self._op, self._wanted = op, wanted
        operands = iter(inputs)
        self._args = [next(operands) if is_tensor(a) else a for a in args]
        self._buffers = list(operands)
        self.mutation_outputs = [
            ir.MutationOutput(ir.NoneLayout(device=self._device), b, self) for b in self._buffers
        ]
        V.graph.register_operation(self)

    def get_outputs(self) -> list[ir.Buffer]:
        return list(self.mutation_outputs)

    def get_device(self) -> torch.device | None:
        return self._device

    def codegen(self, wrapper: Any) -> None:
        """A Site at the top of the generated code, and its call."""
        root = wrapper
        while hasattr(root, "parent_wrapper"):
            root = root.parent_wrapper
        root.add_import_once(_IMPORT)
        root.q2_sites = number = getattr(root, "q2_sites", -1) + 1
        fixed = self._fixed()
        args, given = [], []
        for arg in self._args:
            if is_tensor(arg):
                shown, reference = given_as(arg, fixed)
            elif _is_symbolic(arg):
                shown, reference = "...", wrapper.codegen_sizevar(arg)
            else:
                args.append(repr(arg))
                continue
            args.append(shown)
            given.append(reference)
        given += [b.codegen_reference() for b in self._buffers]
        wanted = ", ".join(str(int(w)) for w in self._wanted)
        root.header.writeline(
            f"q2_site_{number} = q2_Site('{self._op}', ({', '.join(args)},), ({wanted},), "
            f"fixed={fixed})"
        )
        self.codegen_comment(wrapper, f"q2_site_{number}")
        wrapper.writeline(f"q2_site_{number}({', '.join(given)})")

    def _fixed(self) -> bool:
        """Whether no size is symbolic."""
        numbers = [a for a in self._args if not is_tensor(a)]
        for x in self._tensors:
            numbers += [*x.get_size(), *x.get_stride(), x.get_layout().offset]
        return not any(map(_is_symbolic, numbers))


def given_as(x: Any, fixed: bool) -> tuple[str, str]:
    """What a Site has for an operand, and what its calls are given: of a view of known sizes the
    tensor that it is a view of, since a view takes the host as long as a launch's addresses."""
    if fixed and isinstance(x, ir.ReinterpretView):
        name = x.get_name()
        if V.graph.get_dtype(name) == x.get_dtype():
            size, stride = (tuple(map(int, numbers)) for numbers in (x.get_size(), x.get_stride()))
            return f"q2_View({size}, {stride}, {int(x.layout.offset)})", name
    return "...", x.codegen_reference()
