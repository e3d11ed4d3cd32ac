# SPDX-License-Identifier: Apache-2.0
"""Turns an expression of Inductor's into a prologue expression for our kernel: data from which
rotate_quantize.cu's source is written (runtime_kernels/cuda/quantize/prologue_expression.py).

`inner_fn` computes the element at row r and column c. It is run once with symbols, under a handler
that records Inductor's ops as steps. Each op has the precision that it would have in Triton: fp32
for every float, with a rounding to bf16 only where `to_dtype` is called with
use_compute_types=False (emulate_precision_casts). So the bits are those of Inductor's kernel,
except for

- sums of products: ptxas decides there, and shorter_steps.py here, whether a product is rounded;
  neither contracts under emulate_precision_casts,
- exp, 2^(x log2 e) here and libdevice's there; sigmoid; and 1 + erf (prologue.cuh);
  x / (1 + exp(-x)) is x * sigmoid(x) here.

These differences are some ulp of fp32, before the rounding to the operand's dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import sympy
import torch
import torch._inductor.config as inductor_config
from torch import fx
from torch._inductor import ir
from torch._inductor.inductor_prims import force_stride_order
from torch._inductor.ops_handler import DefaultHandler
from torch._inductor.virtualized import OpsValue, V
from torch.utils._sympy.functions import FloorDiv, Identity, Mod, ModularIndexing, PythonMod

from q2compile.graph.views import ELEMENTS, is_pointwise, kind_of
from q2compile.lowering.prologue.indices import COLUMN, ROW, CannotFuse, Index, index_of
from q2compile.lowering.prologue.shorter_steps import RecordedSteps, contracted, shorter
from q2compile.runtime_kernels.cuda.quantize.prologue_expression import (
    KIND_OF,
    OPERATIONS,
    PrologueExpression,
    Step,
    arguments_of,
    renumbered,
    uniform_steps,
)

_MOST_STEPS = 96  # more would not fit into a thread's registers, whatever the rule thinks of it
_MOST_INPUTS = 8
_AS = {"bitwise_and": "logical_and", "bitwise_or": "logical_or", "bitwise_not": "logical_not"}
_OF_INTEGERS = ("add", "sub", "mul", "neg", "where", "lt", "le", "gt", "ge", "eq", "ne")
_ROUNDED = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_WIDE = 2**31


class Prologue(NamedTuple):
    """A prologue expression, and the names of its input buffers."""

    expression: PrologueExpression
    buffers: tuple[str, ...]


def pointwise(x: ir.TensorBox) -> ir.Pointwise | None:
    """The expression of x, if x is a matrix that is not in memory yet."""
    data = x.data
    while isinstance(data, ir.BaseView | ir.StorageBox):
        data = data.data
    return data if isinstance(data, ir.Pointwise) and len(x.get_size()) == 2 else None


def prologue_of(x: ir.TensorBox, *others: ir.TensorBox) -> Prologue:
    """The prologue that computes x, and others of the same size and dtype, in the graph that is
    lowered. All are `pointwise`.

    Raises:
        CannotFuse: rotate_quantize.cu can't compute it.
    """
    dtype, (rows, cols) = x.get_dtype(), x.get_size()
    if not dtype.is_floating_point or dtype.itemsize > 4:
        raise CannotFuse(f"operands of {dtype} are not fused")
    if not inductor_config.triton.codegen_upcast_to_fp32:
        raise CannotFuse("triton.codegen_upcast_to_fp32 is off")
    piece = 16 // dtype.itemsize
    if not all(isinstance(size, int | sympy.Integer) for size in (rows, cols)):
        raise CannotFuse(f"the size, {rows} x {cols}, is symbolic")
    if cols % piece:
        raise CannotFuse(f"{cols} columns are not a multiple of {piece}")
    recorder = StepRecorder({ROW: sympy.Integer(rows), COLUMN: sympy.Integer(cols)}, piece)
    with patch.object(ir.FlexibleLayout, "allow_indexing", True), V.set_ops_handler(recorder):
        loaded = [matrix.make_loader()([ROW, COLUMN]) for matrix in (x, *others)]
        roots = [recorder.step_of(value) for value in loaded]
    if any(recorder.made.kinds[root] != "float" for root in roots):
        raise CannotFuse("the expression is not floating-point")
    inputs = tuple(recorder.inputs)
    steps, results = _needed(recorder.with_halves_merged(), roots, inputs)
    if not inductor_config.emulate_precision_casts:
        made, number = contracted(steps, inputs)
        steps, results = _needed(made, [number[result] for result in results], inputs)
    if len(steps) > _MOST_STEPS:
        raise CannotFuse(f"the expression has {len(steps)} steps, more than {_MOST_STEPS}")
    buffers = [*map(_buffer, recorder.buffers)]
    if not 0 < len(buffers) <= _MOST_INPUTS:
        raise CannotFuse(f"it reads {len(buffers)} tensors, not 1 to {_MOST_INPUTS}")
    for buffer in buffers:  # the recorded indices assume its current strides
        if isinstance(buffer.get_layout(), ir.FlexibleLayout):
            buffer.freeze_layout()
    extents = [rows * cols, *(buffer.get_layout().storage_size() for buffer in buffers)]
    narrow = (V.graph.sizevars.statically_known_lt(extent, _WIDE) for extent in extents)
    expression = PrologueExpression(
        dtype=dtype,
        rows=int(rows),
        cols=int(cols),
        inputs=inputs,
        wide=not all(narrow),
        steps=steps,
        results=results,
    )
    return Prologue(expression, tuple(recorder.buffers))


def _needed(
    steps: Sequence[Step], results: Sequence[int], inputs: Sequence[torch.dtype]
) -> tuple[tuple[Step, ...], tuple[int, ...]]:
    """The distinct steps that results depend on, and all loads."""
    needed = set(results)
    for i in reversed(range(len(steps))):
        if i in needed or steps[i][0] == "load":
            needed |= {i, *arguments_of(steps[i])}
    made, number = RecordedSteps(inputs), dict[int, int]()
    for i in sorted(needed):
        number[i] = made.add(renumbered(steps[i], number))
    return tuple(made.steps), tuple(number[result] for result in results)


def _buffer(name: str) -> ir.Buffer:
    buffer: Any = V.graph.get_buffer(name)
    while isinstance(buffer, ir.TensorBox | ir.StorageBox):
        buffer = buffer.data
    if name in V.graph.constants or not isinstance(buffer, ir.Buffer):
        raise CannotFuse(f"{name} is not a buffer")
    return buffer


def _inlined_producer(name: str) -> ir.Pointwise | None:
    """The expression of a buffer that Inductor has realized only for other element-wise readers, to
    avoid computing it twice (the sigmoid in silu's backward). Fused with all of them, it is never
    written."""
    buffer = _buffer(name)
    if not isinstance(buffer, ir.ComputedBuffer) or not isinstance(buffer.data, ir.Pointwise):
        return None
    layout, node = buffer.get_layout(), buffer.get_origin_node()
    # Buffers that other kernels fill have ranges of 0.
    if list(buffer.data.ranges) != list(layout.size) or name in V.graph.mutated_buffers:
        return None
    if node is None or node.target is force_stride_order:  # a table (passes/post_grad/tabulate.py)
        return None
    read_pointwise = all(map(_is_pointwise, node.users))
    contiguous = list(layout.stride) == ir.FlexibleLayout.contiguous_strides(layout.size)
    return buffer.data if read_pointwise and contiguous and layout.offset == 0 else None


def _is_pointwise(reader: fx.Node) -> bool:
    """Whether it computes element by element, or its readers do."""
    if is_pointwise(reader):
        return True
    return bool(kind_of(reader) & ELEMENTS) and all(map(_is_pointwise, reader.users))


class _StepIndex(int):
    """The index of a step, unlike a constant argument of an op."""


class _MaskedLoad(NamedTuple):
    """A load where two indices compare: input, index, and lt or ge of an index and a number."""

    input: int
    index: sympy.Expr
    comparison: str
    compared: list[sympy.Expr]


class StepRecorder(DefaultHandler):
    """Records Inductor's ops as steps."""

    def __init__(self, ranges: dict, piece: int) -> None:
        self.buffers: list[str] = []
        self.inputs: list[torch.dtype] = []
        self.made = RecordedSteps(self.inputs)
        self._ranges, self._piece = ranges, piece
        self._mask = _StepIndex(-1)
        self._indices: dict[int, sympy.Expr] = {}  # those of steps that are indices
        self._masked: dict[int, _MaskedLoad] = {}  # by step

    # Ops

    def _default(self, name: str, args: tuple, kwargs: dict) -> _StepIndex:
        name = _AS.get(name, name)
        if name not in OPERATIONS or kwargs:
            raise CannotFuse(f"there is no rule for ops.{name}")
        given = [a for a in map(_unwrapped, args[name == "where" :]) if isinstance(a, _StepIndex)]
        kind = self.made.kinds[given[0]] if given else "float"
        return self._operation(name, [self.step_of(a, kind) for a in args])

    def _operation(self, name: str, steps: Sequence[_StepIndex]) -> _StepIndex:
        values = steps[name == "where" :]
        kinds = {self.made.kinds[s] for s in values}
        if kinds == {"float", "int"}:
            values = [self._cast(s, "float") for s in values]
            steps, kinds = [*steps[: name == "where"], *values], {"float"}
        allowed = {"float", "int"} if name in _OF_INTEGERS else {"float"}
        if name == "where" or name.startswith("logical"):
            allowed = {"bool"} | (allowed if name == "where" else set())
        if len(kinds) > 1 or not kinds <= allowed:
            raise CannotFuse(f"ops.{name} of {' and '.join(sorted(kinds))}")
        if name in ("lt", "ge"):
            steps = self._at_pieces(steps)
        way = shorter(self.made.steps, name, steps)
        return self._step(name, *steps) if way is None else _StepIndex(self.made.add(way))

    def load(self, name: str, index: sympy.Expr) -> _StepIndex:
        inlined = _inlined_producer(name)
        if inlined is not None:
            return self.step_of(inlined.inner_fn(self._position(index, inlined.ranges)))
        dtype = V.graph.get_dtype(name)
        if dtype not in KIND_OF:
            raise CannotFuse(f"{name} is of {dtype}")
        index, mask = self._simplified(index), self._mask
        way = index_of(index, self._piece)
        if way.lanes and way.divisor % self._piece:
            raise CannotFuse(f"rows of {name} do not begin on 16 bytes: {index}")
        if mask >= 0 and way.lanes and not uniform_steps(self.made.steps)[mask]:
            raise CannotFuse(f"a part of {name} is read that does not begin on 16 bytes")
        if name not in self.buffers:
            self.buffers.append(name)
            self.inputs.append(dtype)
        source = self.buffers.index(name)
        step = self._step("load", source, way.text, "lanes" if way.lanes else "one", int(mask))
        compared, *of = self.made.steps[mask] if mask >= 0 else ("",)
        if compared in ("lt", "ge") and all(arg in self._indices for arg in of):
            indices = [self._indices[arg] for arg in of]
            self._masked[step] = _MaskedLoad(source, index, compared, indices)
        return step

    def constant(self, value: Any, dtype: torch.dtype) -> _StepIndex:
        return self._constant(value, _kind(dtype))

    def index_expr(self, expr: sympy.Expr, dtype: torch.dtype) -> _StepIndex:
        expr = self._simplified(sympy.sympify(expr))
        index = index_of(expr, self._piece)
        step = self._step("index", index.text, "lanes" if index.lanes else "one")
        self._indices[step] = expr
        return self._cast(step, _kind(dtype))

    def masked(self, mask: Any, body: Callable, other: Any) -> _StepIndex:
        outer, mask = self._mask, self.step_of(mask)
        if outer >= 0:
            mask = self._operation("logical_and", [outer, mask])
        self._mask = mask
        try:
            inside = self.step_of(body())
        finally:
            self._mask = outer
        other = self.step_of(other, self.made.kinds[inside])
        return self._operation("where", [mask, inside, other])

    def to_dtype(
        self,
        x: Any,
        dtype: torch.dtype,
        src_dtype: torch.dtype | None = None,
        use_compute_types: bool = True,
    ) -> _StepIndex:
        step = self.step_of(x)
        if dtype in _ROUNDED and not use_compute_types:
            return self._step("round", self._cast(step, "float"), _ROUNDED[dtype])
        kind = _kind(dtype)
        if kind == "int" and (self.made.kinds[step] == "float" or dtype.itemsize < 4):
            raise CannotFuse(f"a value is converted to {dtype}")
        return self._cast(step, kind)

    def truediv(self, x: Any, y: Any) -> _StepIndex:
        exact = inductor_config.eager_numerics.division_rounding
        return self._default("div_rn" if exact else "truediv", (x, y), {})

    def identity(self, x: Any) -> _StepIndex:
        return self.step_of(x)

    def indirect_indexing(self, *args: Any, **kwargs: Any) -> sympy.Symbol:
        raise CannotFuse("an index is read from memory")

    # Steps

    def step_of(self, value: Any, kind: str = "float") -> _StepIndex:
        """The step of an op's argument: an earlier step, or a constant."""
        value = _unwrapped(value)
        if isinstance(value, _StepIndex):
            return value
        if isinstance(value, bool | int | float):
            return self._constant(value, kind)
        raise CannotFuse(f"an op has the argument {value!r}")

    def _step(self, name: str, *args: Any) -> _StepIndex:
        plain = (int(a) if isinstance(a, _StepIndex) else a for a in args)
        return _StepIndex(self.made.add((name, *plain)))

    def _cast(self, step: _StepIndex, kind: str) -> _StepIndex:
        return step if self.made.kinds[step] == kind else self._step("cast", step, kind)

    def _constant(self, value: Any, kind: str) -> _StepIndex:
        text = float(value).hex() if kind == "float" else str(int(value))
        return self._step("constant", text, kind)

    def _at_pieces(self, steps: Sequence[_StepIndex]) -> Sequence[_StepIndex]:
        """Comparisons of an index that counts through a piece, from a multiple of the piece's
        length, with such a multiple: the result is the same for the whole piece, so its first
        element is compared."""
        ways = [self._way_of(step) for step in steps]
        if any(way is None or way.divisor % self._piece for way in ways):
            return steps
        firsts = []
        for step, way in zip(steps, ways, strict=True):
            if way is not None and way.lanes:
                first = self._step("index", way.text, "first")
                self._indices[first] = self._indices[step]
                step = first
            firsts.append(step)
        return firsts

    def _way_of(self, step: int) -> Index | None:
        if step in self._indices:
            return index_of(self._indices[step], self._piece)
        name, *args = self.made.steps[step]
        is_number = name == "constant" and args[1] == "int"
        return Index(args[0], False, int(args[0])) if is_number else None

    def with_halves_merged(self) -> list[Step]:
        """The steps. The two halves of a head (RoPE), each loaded from the place of the other, are
        one load:

        before   load(x, i) where e < n, load(x, j) where e >= n; e is something modulo 2 n
        after    load(x, i + (j - i) * (e // n)), twice the same
        """
        steps = [*self.made.steps]
        for (a, one), (b, other) in itertools.permutations(self._masked.items(), 2):
            (source, i, below, (e, n)), (other_source, j, above, same) = one, other
            if source != other_source or (below, above) != ("lt", "ge") or same != [e, n]:
                continue
            apart = sympy.expand(j - i)
            whole = n.is_Integer and n % self._piece == 0 and apart.is_Integer
            if whole and isinstance(e, Mod | PythonMod | ModularIndexing) and e.args[-1] == 2 * n:
                index = index_of(i + apart * FloorDiv(e, n), self._piece)
                steps[a] = steps[b] = ("load", source, index.text, "lanes", -1)
        return steps

    # Indices

    def _position(self, index: sympy.Expr, sizes: Any) -> list[sympy.Expr]:
        """The position of a linear index in a contiguous tensor of these sizes."""
        position, stride = [], sympy.S.One
        for i, size in reversed([*enumerate(sizes)]):
            last = FloorDiv(index, stride) if i == 0 else ModularIndexing(index, stride, size)
            position.append(self._simplified(last))
            stride = stride * size
        return position[::-1]

    def _simplified(self, index: sympy.Expr) -> sympy.Expr:
        index = V.graph.sizevars.simplify_with_ranges(index, self._ranges)
        return index.replace(Identity, lambda x: x) if index.has(Identity) else index


def _unwrapped(value: Any) -> Any:
    return value.value if isinstance(value, OpsValue) else value


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    if dtype.is_floating_point and dtype.itemsize <= 4 and dtype.itemsize > 1:
        return "float"
    if dtype in (torch.int32, torch.int64):
        return "int"
    raise CannotFuse(f"it computes in {dtype}")
