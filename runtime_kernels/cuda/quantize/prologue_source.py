# SPDX-License-Identifier: Apache-2.0
"""A prologue expression in CUDA: prologue_expression.cuh, included where rotate_quantize.cu
computes its operand.

    struct PrologueInputs { const void* input0; ...; long long s0; };
    // 16 bytes of row r of each matrix, from column c on
    void evaluate(const PrologueInputs& p, Index r, Index c, uint4 (&to)[kOperands]);

What is uniform within a piece is computed once for it, the rest in a loop over its elements.
"""

from __future__ import annotations

import functools
import re

import torch

from q2compile.runtime_kernels.cuda.quantize.prologue_expression import (
    OPERATIONS,
    PrologueExpression,
    uniform_steps,
)

FILE = "prologue_expression.cuh"
_OTHERS = {"load": 1.5, "round": 2.0, "cast": 1.5}  # instructions of other steps
# Loads of 16 bytes that a thread has in flight: four rows of four (KERNEL_LOG.md).
_LOADS_AHEAD = 16
_PREFETCHED = 5.0  # instructions per byte from which on prefetching pays
_TYPES = {"float": "float", "int": "long long", "bool": "bool"}
_ELEMENT = {
    torch.bfloat16: "bf16_of({}, {})",
    torch.float16: "f16_of({}, {})",
    torch.float32: "f32_of({}, {})",
    torch.bool: "(byte_of({}, {}) != 0)",
    torch.uint8: "(long long)byte_of({}, {})",
    torch.int8: "(long long)(signed char)byte_of({}, {})",
}


def layout(prologue: PrologueExpression) -> str:
    """The layout of struct PrologueInputs, in the notation of Python's struct module."""
    return "P" * len(prologue.inputs) + "q" * len(prologue.sizes)


@functools.lru_cache(maxsize=256)
def cuda_source(prologue: PrologueExpression) -> str:
    """The text of prologue_expression.cuh."""
    fields = [f"  const void* input{i};" for i in range(len(prologue.inputs))]
    fields += [f"  long long {name};" for name in prologue.sizes]
    uniform = uniform_steps(prologue.steps)
    once, each = [], []
    for i, step in enumerate(prologue.steps):
        if step[0] == "load" and not uniform[i]:
            once.append(f"  auto w{i} = {_load(prologue, step)};")
        line = f"{_TYPES[prologue.kinds[i]]} v{i} = {_value(prologue, i)};"
        if uniform[i]:
            once.append(f"  {line}")
        else:
            each.append(f"    {line}")
    sizes = [f"  const Index {name} = p.{name};" for name in prologue.sizes]
    at = "[[maybe_unused]] Index r, [[maybe_unused]] Index c"
    results = range(len(prologue.results))
    lines = [
        f"using Index = {'long long' if prologue.wide else 'int'};",
        f"constexpr int kRowsAhead = {rows_ahead(prologue)};",
        f"constexpr bool kPrefetched = {str(prefetches(prologue)).lower()};",
        *("struct PrologueInputs {", *fields, "};"),
        f"Q2_INLINE void evaluate(const PrologueInputs& p, {at}, uint4 (&to)[kOperands]) {{",
        *(*sizes, *once, "  float made[kOperands][kPerPiece];"),
        "#pragma unroll",
        "  for (int j = 0; j < kPerPiece; ++j) {",
        *(*each, *(f"    made[{i}][j] = v{prologue.results[i]};" for i in results), "  }"),
        *(*(f"  to[{i}] = piece_of(made[{i}]);" for i in results), "}"),
        f"Q2_INLINE void prefetch_lines(const PrologueInputs& p, {at}) {{",
        *(*sizes, *_prefetched(prologue, uniform), "}", ""),
    ]
    return "\n".join(lines)


def _prefetched(prologue: PrologueExpression, uniform: list[bool]) -> list[str]:
    """Statements that prefetch, from column c on, 64 columns of each input that is read by rows."""
    statements: dict[str, None] = {}
    for i, (name, *args) in enumerate(prologue.steps):
        if name != "load" or uniform[i] or args[3] >= 0 or not re.search(r"\br\b", args[1]):
            continue
        size = prologue.inputs[args[0]].itemsize
        first = f"(const u8*)p.input{args[0]} + (long long){args[1]} * {size}"
        for offset in range(0, 64 * size, 128):
            statements[f"  prefetch({first} + {offset});"] = None  # once
    return [*statements]


def prefetches(prologue: PrologueExpression) -> bool:
    """Whether the next tile is prefetched into L2. It helps where computing takes longer than
    reading, and costs time elsewhere (examples/benchmarks/KERNEL_LOG.md)."""
    return instructions(prologue) >= _PREFETCHED * bytes_read(prologue)


def instructions(prologue: PrologueExpression, by_inductor: bool = False) -> float:
    """About how many instructions an element of each matrix takes, with its loads and its rounding.
    by_inductor: in the kernel that Inductor makes of the expression."""
    uniform = uniform_steps(prologue.steps)
    total = 1.0 * len(prologue.results)  # the rounding and the store: 8 and 2 of 8 elements
    for i, (name, *_) in enumerate(prologue.steps):
        operation = OPERATIONS.get(name)
        cost = operation.instructions if operation else _OTHERS.get(name, 0.5)
        cost += operation.inductor if operation and by_inductor else 0
        # A uniform load computes its address, too.
        total += cost / prologue.piece * (3 if name == "load" else 1) if uniform[i] else cost
    return total


def _load(prologue: PrologueExpression, step: tuple) -> str:
    _, source, index, _, mask = step
    there = f", v{mask}" if mask >= 0 else ""
    size = prologue.inputs[source].itemsize
    return f"load_piece<{size}>(p.input{source}, {index}{there})"


def _value(prologue: PrologueExpression, i: int) -> str:
    name, *args = prologue.steps[i]
    if name == "load":
        source, index, how, mask = args
        element = _ELEMENT[prologue.inputs[source]]
        if how == "lanes":
            return element.format(f"w{i}", "j")
        there = f", v{mask}" if mask >= 0 else ""
        size = prologue.inputs[source].itemsize
        return element.format(f"load_one<{size}>(p.input{source}, {index}{there})", "0")
    if name == "index":
        return f"({args[0]})" + (" + j" if args[1] == "lanes" else "")
    if name == "constant":
        return _constant(*args)
    value = f"v{args[0]}"
    if name == "cast":
        kind = args[1]
        return f"({value} != 0)" if kind == "bool" else f"({_TYPES[kind]}){value}"
    if name == "round":
        return f"round_to_{args[1]}({value})"
    return OPERATIONS[name].cuda.format(*(f"v{arg}" for arg in args))


def _constant(text: str, kind: str) -> str:
    if kind != "float":
        return text
    if text in ("nan", "inf", "-inf"):
        bits = {"nan": "0x7FC00000u", "inf": "0x7F800000u", "-inf": "0xFF800000u"}[text]
        return f"__uint_as_float({bits})"
    return f"(float){text}"


def rows_ahead(prologue: PrologueExpression) -> int:
    """Rows whose loads are in flight at once."""
    words = sum(
        prologue.inputs[step[1]].itemsize / prologue.dtype.itemsize
        for step, one in zip(prologue.steps, uniform_steps(prologue.steps), strict=True)
        if step[0] == "load" and not one
    )
    ahead = 1
    while ahead < 4 and 2 * ahead * max(words, 1) <= _LOADS_AHEAD:
        ahead *= 2
    return ahead


@functools.lru_cache(maxsize=256)
def bytes_read(prologue: PrologueExpression) -> float:
    """Bytes read per element of the operand. An input counts with its share of the operand's
    elements, once for each different index. Caches hold vectors, and what is read repeatedly (for
    another head)."""
    sizes = [256] * len(prologue.sizes)
    height = prologue.height(sizes)
    own = dict(zip(prologue.sizes, sizes, strict=True))
    rows, cols = ([(n - 1) * i // 16 for i in range(17)] for n in (height, prologue.cols))
    places = [{**own, "r": r, "c": c} for r in rows for c in cols]
    extents = [0] * len(prologue.inputs)
    loads = [set[str]() for _ in prologue.inputs]
    for name, *args in prologue.steps:
        if name == "load":
            loads[args[0]].add(args[1])
            last = max(prologue.value_of(args[1], place) for place in places)
            extents[args[0]] = max(extents[args[0]], last + 1)
    shares = (
        min(extent / (height * prologue.cols), len(indices))
        for extent, indices in zip(extents, loads, strict=True)
    )
    return sum(share * x.itemsize for share, x in zip(shares, prologue.inputs, strict=True))
