# SPDX-License-Identifier: Apache-2.0
"""Prologue expressions. Each computes a matrix element by element, or two matrices of one size.
rotate_quantize.cu computes it in place of reading its operand. lowering/prologue/expressions.py
makes it from Inductor's IR.

Steps are numbered in order; an integer argument is the index of an earlier step. The result of a
matrix is the step that computes its element at row r and column c. That is then rounded to the
matrix's dtype.

    ("load", input, index, how, mask)   element `index` of an input; 0 where step `mask` is false
                                        (-1: no mask)
    ("index", index, how)               an index as an integer
    ("constant", text, kind)            text: Python's hex() of a float, inf, nan, an integer
    ("cast", step, kind)                to "float", "int" or "bool"
    ("round", step, type)               to "bfloat16" or "float16" and back to float
    (name, step, ...)                   arithmetic: OPERATIONS

An index is a text of +, *, floordiv(a, b), mod(a, b), r, c and numbers. Threads work on pieces
of a row: 16 bytes of the matrix, from a column that is a multiple of their length. `how` says what
an index does within a piece:

    "lanes"   it counts up with c, from a multiple of the length: loads of 16 bytes
    "one"     it is the same for the whole piece
    "first"   the index of the piece's first column, for the whole piece ("index" alone)

Values are fp32, integers and booleans, as in Inductor's Triton code.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

import torch

Step = tuple[Any, ...]


class Operation(NamedTuple):
    """kind: of the result; "" for that of the arguments.
    instructions: about how many it takes.
    cuda: the expression in C++.
    torch: the reference.
    inductor: how many instructions more it takes in Triton's code, from machine code for sm_90a
        (examples/benchmarks/KERNEL_LOG.md).
    """

    kind: str
    instructions: float
    cuda: str
    torch: Callable[..., torch.Tensor]
    inductor: int = 0


OPERATIONS: dict[str, Operation] = {
    "add": Operation("", 1, "({} + {})", operator.add),
    "sub": Operation("", 1, "({} - {})", operator.sub),
    "mul": Operation("", 1, "({} * {})", operator.mul),
    "neg": Operation("", 0.5, "(-{})", operator.neg),
    "fma": Operation("float", 1, "__fmaf_rn({}, {}, {})", lambda a, b, c: a * b.double() + c),
    "abs": Operation("float", 1, "fabsf({})", torch.abs),
    "truediv": Operation("float", 9, "divide_full({}, {})", operator.truediv),
    "div_rn": Operation("float", 12, "__fdiv_rn({}, {})", operator.truediv),
    "reciprocal": Operation("float", 9, "divide_full(1.0f, {})", torch.reciprocal),
    "sqrt": Operation("float", 10, "sqrtf({})", torch.sqrt),
    "rsqrt": Operation("float", 4, "rsqrtf({})", torch.rsqrt),
    "exp": Operation("float", 2, "approximate_exp({})", torch.exp, inductor=5),
    "log": Operation("float", 20, "logf({})", torch.log),
    "erf": Operation("float", 23, "erff({})", torch.erf),
    "erf_plus_one": Operation(
        "float", 13, "erf_plus_one({})", lambda x: torch.erf(x) + 1, inductor=11
    ),
    "tanh": Operation("float", 20, "tanhf({})", torch.tanh),
    "sigmoid": Operation("float", 5, "sigmoid({})", torch.sigmoid, inductor=12),
    "relu": Operation("float", 1, "max_or_nan({}, 0.0f)", torch.relu),
    "maximum": Operation("float", 1, "max_or_nan({}, {})", torch.maximum),
    "minimum": Operation("float", 2, "(-max_or_nan(-{}, -{}))", torch.minimum),
    "where": Operation("", 1, "({} ? {} : {})", torch.where),
    "lt": Operation("bool", 1, "({} < {})", operator.lt),
    "le": Operation("bool", 1, "({} <= {})", operator.le),
    "gt": Operation("bool", 1, "({} > {})", operator.gt),
    "ge": Operation("bool", 1, "({} >= {})", operator.ge),
    "eq": Operation("bool", 1, "({} == {})", operator.eq),
    "ne": Operation("bool", 1, "({} != {})", operator.ne),
    "logical_and": Operation("bool", 1, "({} && {})", torch.logical_and),
    "logical_or": Operation("bool", 1, "({} || {})", torch.logical_or),
    "logical_not": Operation("bool", 1, "(!{})", torch.logical_not),
}
KINDS = {"float": torch.float32, "int": torch.int64, "bool": torch.bool}
# Kinds of inputs. Inputs of other dtypes are not supported.
KIND_OF = {
    **dict.fromkeys((torch.bfloat16, torch.float16, torch.float32), "float"),
    torch.bool: "bool",
    torch.uint8: "int",
    torch.int8: "int",
}


def arguments_of(step: Step) -> tuple[int, ...]:
    """The steps whose results a step takes."""
    name, *args = step
    if name == "load":
        return tuple(mask for mask in args[3:] if mask >= 0)
    if name in ("index", "constant"):
        return ()
    return tuple(args[:1] if name in ("cast", "round") else args)


def renumbered(step: Step, number: Mapping[int, int]) -> Step:
    """The same step with the new numbers of other steps."""
    name, *args = step
    if name == "load":
        return (name, *args[:3], number.get(args[3], -1))
    count = len(arguments_of(step))
    return (name, *(number[arg] for arg in args[:count]), *args[count:])


def kind_of(step: Step, kinds: Sequence[str], inputs: Sequence[torch.dtype]) -> str:
    """The kind of a step's result: "float", "int" or "bool". kinds: of the steps before it."""
    name, *args = step
    if name == "load":
        return KIND_OF[inputs[args[0]]]
    if name in ("constant", "cast"):
        return args[1]
    if name in ("index", "round"):
        return "int" if name == "index" else "float"
    # `where` has the kind of its last argument; the first is a boolean.
    return OPERATIONS[name].kind or kinds[args[-1]]


def uniform_steps(steps: Sequence[Step]) -> list[bool]:
    """Which steps are uniform within a piece."""
    uniform: list[bool] = []
    for step in steps:
        if step[0] in ("load", "index"):
            uniform.append("lanes" not in step[2:])
        else:
            uniform.append(all(uniform[arg] for arg in arguments_of(step)))
    return uniform


@dataclass(frozen=True)
class PrologueExpression:
    """dtype: of the matrices.
    rows, cols: their size.
    inputs: their dtypes.
    wide: an index may be 2^31 or more.
    results: the step of each matrix, one or two.
    """

    dtype: torch.dtype
    rows: int
    cols: int
    inputs: tuple[torch.dtype, ...]
    wide: bool
    steps: tuple[Step, ...]
    results: tuple[int, ...]

    @property
    def piece(self) -> int:
        """Elements of the matrix in 16 bytes."""
        return 16 // self.dtype.itemsize

    def evaluate(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The matrices that are quantized, computed by torch. inputs: tensors, whose first element
        has index 0."""
        size, device = (self.rows, self.cols), inputs[0].device
        c = torch.arange(self.cols, device=device).expand(size)
        r = torch.arange(self.rows, device=device)[:, None].expand(size)

        def index(text: str, c: torch.Tensor = c) -> torch.Tensor:
            return torch.as_tensor(index_value(text, r, c), device=device).expand(size)

        values: list[torch.Tensor] = []
        for name, *args in self.steps:
            if name == "load":
                source, text, _, mask = args
                there = torch.tensor(True, device=device) if mask < 0 else values[mask]
                at = torch.where(there, index(text), 0)
                extent = int(at.max()) + 1 if at.numel() else 0
                value = inputs[source].as_strided((extent,), (1,))[at]
                value = value.to(KINDS[KIND_OF[value.dtype]]).masked_fill(~there, 0)
            elif name == "index":
                value = index(args[0], c - c % self.piece if args[1] == "first" else c)
            elif name == "constant":
                constant = float.fromhex(args[0]) if args[1] == "float" else int(args[0])
                value = torch.full((), constant, dtype=KINDS[args[1]], device=device)
            elif name == "cast":
                value = values[args[0]].to(KINDS[args[1]])
            elif name == "round":
                value = values[args[0]].to(getattr(torch, args[1])).float()
            else:
                value = OPERATIONS[name].torch(*(values[arg] for arg in args))
                value = value.float() if value.is_floating_point() else value
            values.append(value)
        made = (values[step].to(self.dtype) for step in self.results)
        return [matrix.expand(size).contiguous() for matrix in made]


def index_value(text: str, r: Any, c: Any) -> Any:
    """The value of an index: for ints an int, for tensors a tensor or an int."""
    # With builtins: torch may import a module in the first division.
    names = {"floordiv": operator.floordiv, "mod": operator.mod}
    return eval(_code(text), names, {"r": r, "c": c})


@functools.lru_cache(maxsize=1024)
def _code(text: str) -> CodeType:
    """The compiled text of an index, parsed once, not for each value."""
    return compile(text, "<index>", "eval")
