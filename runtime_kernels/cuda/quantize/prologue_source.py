# SPDX-License-Identifier: Apache-2.0
"""A prologue expression in CUDA: prologue_expression.cuh, included where rotate_quantize.cu
computes its operand.

    struct PrologueInputs { const void* input0; ...; };
    // 16 bytes of row r of each matrix, from column c on
    void evaluate(const PrologueInputs& p, Index r, Index c, uint4 (&to)[kOperands]);

What is uniform within a piece is computed once for it, the rest in a loop over its elements.
"""

from __future__ import annotations

import functools

import torch

from q2compile.runtime_kernels.cuda.quantize.prologue_expression import (
    OPERATIONS,
    PrologueExpression,
    Step,
    index_value,
    kind_of,
    uniform_steps,
)

FILE = "prologue_expression.cuh"
_OTHERS = {"load": 1.5, "round": 2.0, "cast": 1.5}  # instructions of other steps
# Loads of 16 bytes that a thread has in flight: four rows of four (KERNEL_LOG.md).
_LOADS_AHEAD = 16
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
    return "P" * len(prologue.inputs)


@functools.lru_cache(maxsize=256)
def cuda_source(prologue: PrologueExpression) -> str:
    """The text of prologue_expression.cuh."""
    once, each, kinds = list[str](), list[str](), list[str]()
    for i, uniform in enumerate(uniform_steps(prologue.steps)):
        step = prologue.steps[i]
        kinds.append(kind_of(step, kinds, prologue.inputs))
        if step[0] == "load" and not uniform:
            once.append(f"  auto w{i} = {_load(prologue, step)};")
        line = f"{_TYPES[kinds[i]]} v{i} = {_value(prologue, i)};"
        (once if uniform else each).append(f"  {line}" if uniform else f"    {line}")
    each += [f"    made[{i}][j] = v{step};" for i, step in enumerate(prologue.results)]
    lines = [
        f"using Index = {'long long' if prologue.wide else 'int'};",
        f"constexpr int kRowsAhead = {rows_ahead(prologue)};",
        "struct PrologueInputs {",
        *(f"  const void* input{i};" for i in range(len(prologue.inputs))),
        "};",
        "Q2_INLINE void evaluate(const PrologueInputs& p, [[maybe_unused]] Index r, "
        "[[maybe_unused]] Index c, uint4 (&to)[kOperands]) {",
        *(*once, "  float made[kOperands][kPerPiece];"),
        "#pragma unroll",
        "  for (int j = 0; j < kPerPiece; ++j) {",
        *(*each, "  }"),
        *(f"  to[{i}] = piece_of(made[{i}]);" for i in range(len(prologue.results))),
        *("}", ""),
    ]
    return "\n".join(lines)


def instructions(prologue: PrologueExpression, by_inductor: bool = False) -> float:
    """About how many instructions an element of each matrix takes, with its loads and its rounding.
    by_inductor: in the kernel that Inductor makes of the expression."""
    total = 1.0 * len(prologue.results)  # the rounding and the store: 8 and 2 of 8 elements
    for (name, *_), uniform in zip(prologue.steps, uniform_steps(prologue.steps), strict=True):
        operation = OPERATIONS.get(name)
        cost = operation.instructions if operation else _OTHERS.get(name, 0.5)
        cost += operation.inductor if operation and by_inductor else 0
        # A uniform load computes its address, too.
        total += cost / prologue.piece * (3 if name == "load" else 1) if uniform else cost
    return total


def _load(prologue: PrologueExpression, step: Step) -> str:
    _, source, index, how, mask = step
    there = f", v{mask}" if mask >= 0 else ""
    what = f"load_{'piece' if how == 'lanes' else 'one'}<{prologue.inputs[source].itemsize}>"
    return f"{what}(p.input{source}, {index}{there})"


def _value(prologue: PrologueExpression, i: int) -> str:
    name, *args = prologue.steps[i]
    if name == "load":
        words = (f"w{i}", "j") if args[2] == "lanes" else (_load(prologue, prologue.steps[i]), "0")
        return _ELEMENT[prologue.inputs[args[0]]].format(*words)
    if name == "index":
        return f"({args[0]})" + (" + j" if args[1] == "lanes" else "")
    if name == "constant":
        text, kind = args
        bits = {"nan": "0x7FC00000u", "inf": "0x7F800000u", "-inf": "0xFF800000u"}.get(text)
        return f"__uint_as_float({bits})" if bits else f"(float){text}" if kind == "float" else text
    value = f"v{args[0]}"
    if name == "cast":
        kind = args[1]
        return f"({value} != 0)" if kind == "bool" else f"({_TYPES[kind]}){value}"
    if name == "round":
        return f"round_to_{args[1]}({value})"
    return OPERATIONS[name].cuda.format(*(f"v{arg}" for arg in args))


def rows_ahead(prologue: PrologueExpression) -> int:
    """Rows whose loads are in flight at once."""
    sizes = (
        prologue.inputs[s[1]].itemsize for s in prologue.steps if "lanes" in s and s[0] == "load"
    )
    words = max(sum(sizes) / prologue.dtype.itemsize, 1)
    return next((n for n in (4, 2) if n * words <= _LOADS_AHEAD), 1)


@functools.lru_cache(maxsize=256)
def bytes_read(prologue: PrologueExpression) -> float:
    """Bytes read per element of the operand. An input counts with its share of the operand's
    elements, once for each different index. Caches hold vectors, and what is read repeatedly (for
    another head)."""
    rows, cols = ([(n - 1) * i // 16 for i in range(17)] for n in (prologue.rows, prologue.cols))
    shares = 0.0
    for source, dtype in enumerate(prologue.inputs):
        loads = {step[2] for step in prologue.steps if step[:2] == ("load", source)}
        extent = 1 + max(index_value(text, r, c) for text in loads for r in rows for c in cols)
        shares += min(extent / (prologue.rows * prologue.cols), len(loads)) * dtype.itemsize
    return shares
