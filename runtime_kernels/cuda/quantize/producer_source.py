# SPDX-License-Identifier: Apache-2.0
"""A Producer as CUDA: producer.cuh, included where rotate_quantize.cu computes its operand.

    struct Producer { const void* input0; ...; long long s0; };
    // 16 bytes of row r from column c on, of each matrix
    void produce(const Producer& p, Index r, Index c, uint4 (&to)[kOperands]);

What is the same for all of a piece is computed once a piece, the rest in a loop over its elements.
"""

from __future__ import annotations

import functools
import re

import torch

from q2compile.runtime_kernels.cuda.quantize.producer import (
    OPERATIONS,
    Producer,
    arguments_of,
)

FILE = "producer.cuh"
_OTHERS = {"load": 1.5, "round": 2.0, "cast": 1.5}  # instructions of steps that are no OPERATIONS
# Words of 16 bytes that a thread has on their way: four rows of four (KERNEL_LOG.md).
_LOADS_AHEAD = 16
_PREFETCHED = 5.0  # instructions a byte
_TYPES = {"float": "float", "int": "long long", "bool": "bool"}
_ELEMENT = {
    torch.bfloat16: "bf16_of({}, {})",
    torch.float16: "f16_of({}, {})",
    torch.float32: "f32_of({}, {})",
    torch.bool: "(byte_of({}, {}) != 0)",
    torch.uint8: "(long long)byte_of({}, {})",
    torch.int8: "(long long)(signed char)byte_of({}, {})",
}


def layout(producer: Producer) -> str:
    """Of the struct Producer, for Python's struct module."""
    return "P" * len(producer.inputs) + "q" * len(producer.sizes)


@functools.lru_cache(maxsize=256)
def cuda_source(producer: Producer) -> str:
    """The text of producer.cuh."""
    fields = [f"  const void* input{i};" for i in range(len(producer.inputs))]
    fields += [f"  long long {name};" for name in producer.sizes]
    uniform = _uniform(producer)
    once, each = [], []
    for i, step in enumerate(producer.steps):
        if step[0] == "load" and not uniform[i]:
            once.append(f"  auto w{i} = {_load(producer, step)};")
        line = f"{_TYPES[producer.kinds[i]]} v{i} = {_value(producer, i)};"
        if uniform[i]:
            once.append(f"  {line}")
        else:
            each.append(f"    {line}")
    sizes = [f"  const Index {name} = p.{name};" for name in producer.sizes]
    at = "[[maybe_unused]] Index r, [[maybe_unused]] Index c"
    results = range(len(producer.results))
    lines = [
        f"using Index = {'long long' if producer.wide else 'int'};",
        f"constexpr int kRowsAhead = {rows_ahead(producer)};",
        f"constexpr bool kPrefetched = {str(prefetches(producer)).lower()};",
        *("struct Producer {", *fields, "};"),
        f"Q2_INLINE void produce(const Producer& p, {at}, uint4 (&to)[kOperands]) {{",
        *(*sizes, *once, "  float made[kOperands][kPerPiece];"),
        "#pragma unroll",
        "  for (int j = 0; j < kPerPiece; ++j) {",
        *(*each, *(f"    made[{i}][j] = v{producer.results[i]};" for i in results), "  }"),
        *(*(f"  to[{i}] = piece_of(made[{i}]);" for i in results), "}"),
        f"Q2_INLINE void prefetch_lines(const Producer& p, {at}) {{",
        *(*sizes, *_lines(producer, uniform), "}", ""),
    ]
    return "\n".join(lines)


def _lines(producer: Producer, uniform: list[bool]) -> list[str]:
    """Of 64 columns from column c on, those that are read along rows."""
    lines: dict[str, None] = {}
    for i, (name, *args) in enumerate(producer.steps):
        if name != "load" or uniform[i] or args[3] >= 0 or not re.search(r"\br\b", args[1]):
            continue
        size = producer.inputs[args[0]].itemsize
        first = f"(const u8*)p.input{args[0]} + (long long){args[1]} * {size}"
        for past in range(0, 64 * size, 128):
            lines[f"  prefetch({first} + {past});"] = None  # once
    return [*lines]


def prefetches(producer: Producer) -> bool:
    """Whether L2 is told a tile ahead what will be read: that helps where computing takes longer
    than reading, and where it does not it is in the way (examples/benchmarks/KERNEL_LOG.md)."""
    return instructions(producer) >= _PREFETCHED * bytes_read(producer)


def instructions(producer: Producer, by_inductor: bool = False) -> float:
    """About how many instructions an element takes, or two of one place, its loads and its rounding
    among them. by_inductor: in the kernel that Inductor makes of it."""
    uniform = _uniform(producer)
    total = 1.0 * len(producer.results)  # the rounding and the store: 8 and 2 of 8 elements
    for i, (name, *_) in enumerate(producer.steps):
        operation = OPERATIONS.get(name)
        cost = operation.instructions if operation else _OTHERS.get(name, 0.5)
        cost += operation.inductor if operation and by_inductor else 0
        # A uniform load has an address, too.
        total += cost / producer.piece * (3 if name == "load" else 1) if uniform[i] else cost
    return total


def _uniform(producer: Producer) -> list[bool]:
    """Which steps are the same for all of a piece."""
    uniform: list[bool] = []
    for name, *args in producer.steps:
        if name == "load":
            uniform.append(args[2] == "one")
        elif name == "index":
            uniform.append(args[1] != "lanes")
        elif name == "constant":
            uniform.append(True)
        else:
            uniform.append(all(uniform[arg] for arg in arguments_of((name, *args))))
    return uniform


def _load(producer: Producer, step: tuple) -> str:
    _, number, index, _, mask = step
    there = f", v{mask}" if mask >= 0 else ""
    size = producer.inputs[number].itemsize
    return f"load_piece<{size}>(p.input{number}, {index}{there})"


def _value(producer: Producer, i: int) -> str:
    name, *args = producer.steps[i]
    if name == "load":
        number, index, how, mask = args
        element = _ELEMENT[producer.inputs[number]]
        if how == "lanes":
            return element.format(f"w{i}", "j")
        there = f", v{mask}" if mask >= 0 else ""
        size = producer.inputs[number].itemsize
        return element.format(f"load_one<{size}>(p.input{number}, {index}{there})", "0")
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


def rows_ahead(producer: Producer) -> int:
    """Rows whose loads are on their way together."""
    words = sum(
        producer.inputs[step[1]].itemsize / producer.dtype.itemsize
        for step, one in zip(producer.steps, _uniform(producer), strict=True)
        if step[0] == "load" and not one
    )
    ahead = 1
    while ahead < 4 and 2 * ahead * max(words, 1) <= _LOADS_AHEAD:
        ahead *= 2
    return ahead


@functools.lru_cache(maxsize=256)
def bytes_read(producer: Producer) -> float:
    """An element: each input as often as it has numbers for the operand's, and as it is loaded;
    what is read of it again (for another head, or from a shifted place), and vectors, a cache
    holds."""
    sizes = [256] * len(producer.sizes)
    height = producer.height(sizes)
    own = dict(zip(producer.sizes, sizes, strict=True))
    rows, cols = ([(n - 1) * i // 16 for i in range(17)] for n in (height, producer.cols))
    places = [{**own, "r": r, "c": c} for r in rows for c in cols]
    extents = [0] * len(producer.inputs)
    loads = [set[str]() for _ in producer.inputs]
    for name, *args in producer.steps:
        if name == "load":
            loads[args[0]].add(args[1])
            last = max(producer.number(args[1], place) for place in places)
            extents[args[0]] = max(extents[args[0]], last + 1)
    shares = (
        min(extent / (height * producer.cols), len(indices))
        for extent, indices in zip(extents, loads, strict=True)
    )
    return sum(share * x.itemsize for share, x in zip(shares, producer.inputs, strict=True))
