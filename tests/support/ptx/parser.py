# SPDX-License-Identifier: Apache-2.0
"""PTX text to instructions: the subset of the grammar that NVRTC and Triton write for our kernels.

One statement per line, except for inline assembly: `{ .reg .b16 l, h; mov.b32 {l, h}, %r1; ... }`
is a scope of its own on one line.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import NamedTuple

_VARIABLE = re.compile(
    r"(?:\.extern )?\.(shared|const) \.align (\d+) \.(\w+) ([\w$]+)(?:\[(\d*)\])?(?: = (.*))?$"
)
_PARAMETER = re.compile(
    r"\.param (?:\.align (\d+) )?\.(\w+) (?:\.ptr .*)?\b([\w$]+)(?:\[(\d+)\])?$"
)
_REGISTERS = re.compile(r"\.reg \.(\w+)\s+(.*)$")
_RANGE = re.compile(r"(%\w+)<(\d+)>$")
_STATEMENT = re.compile(r"(?:@(!?)(%?\w+)\s+)?([\w.:]+)\s*(.*)$", re.S)
_LABEL = re.compile(r"([\w$]+):$")
_IGNORED = (
    ".version",
    ".target",
    ".address_size",
    ".global",
    ".visible",
    ".maxntid",
    ".minnctapersm",
)
_IGNORED += (".pragma", ".reqntid", ".explicitcluster", ".loc", ")")
_HINTS = re.compile(r"\.L[12]::\w+")  # to caches
_BYTES = {"b8": 1, "u8": 1, "b16": 2, "u16": 2, "b32": 4, "u32": 4, "f32": 4, "b64": 8, "u64": 8}


class Instruction(NamedTuple):
    """name: with its modifiers, like fma.rn.f32x2.  operands: texts, a vector as one in braces.
    predicate: the register that guards it.  negated: it runs where that is false."""

    name: str
    operands: tuple[str, ...]
    predicate: str | None = None
    negated: bool = False


class Variable(NamedTuple):
    """space: shared or const.  size: in bytes, 0 for the array whose size the launch gives."""

    name: str
    space: str
    align: int
    size: int
    content: bytes = b""


@dataclass
class Kernel:
    """One entry point.

    parameters: where each begins in what a launch gives, by name.
    registers: type (pred, b16, ...) of each, by name.
    labels: index of the instruction behind each.
    """

    target: str = ""
    parameters: dict[str, int] = field(default_factory=dict)
    end: int = 0  # of the parameters
    variables: list[Variable] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def parse(text: str) -> Kernel:
    """The only kernel of a PTX module.

    Raises:
        NotImplementedError: a directive that is not known; the message quotes its line.
    """
    kernel = Kernel()
    for line in text.splitlines():
        line = line.partition("//")[0].strip()
        if line.startswith((".file", ".section")):  # of a debugger, after the kernel
            break
        if line.startswith("{ "):  # inline assembly
            for statement in line[1:-1].split(";"):
                _read(kernel, statement.strip())
        elif line not in ("", "{", "}"):
            _read(kernel, line.rstrip(";").strip())
    return kernel


def _read(kernel: Kernel, line: str) -> None:
    if line.startswith(".target"):
        kernel.target = line.split()[1].rstrip(",")
    if not line or line.startswith(_IGNORED):
        return
    if label := _LABEL.match(line):
        kernel.labels[label[1]] = len(kernel.instructions)
    elif registers := _REGISTERS.match(line):
        for name in registers[2].split(","):
            many = _RANGE.match(name.strip())
            names = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name.strip()]
            kernel.registers.update(dict.fromkeys(names, registers[1]))
    elif variable := _VARIABLE.match(line):
        space, align, kind, name, count, content = variable.groups()
        size = _BYTES[kind] * (1 if count is None else int(count or 0))
        kernel.variables.append(
            Variable(name, space, int(align), size, _content(kind, size, content))
        )
    elif parameter := _PARAMETER.match(line.rstrip(",")):
        align, kind, name, count = parameter.groups()
        first = -(-kernel.end // int(align or _BYTES[kind])) * int(align or _BYTES[kind])
        kernel.parameters[name] = first
        kernel.end = first + _BYTES[kind] * int(count or 1)
    elif line.startswith("."):
        raise NotImplementedError(f"no such directive in this interpreter: {line}")
    else:
        statement = _STATEMENT.match(line)
        assert statement, line
        negated, predicate, name, operands = statement.groups()
        name = _HINTS.sub("", name)
        kernel.instructions.append(
            Instruction(name, tuple(_operands(operands)), predicate, negated == "!")
        )


def _content(kind: str, size: int, text: str | None) -> bytes:
    if text is None:
        return b""
    numbers = [int(n) for n in text.strip("{}").split(",")]
    mask = (1 << 8 * _BYTES[kind]) - 1
    letter = {1: "B", 2: "H", 4: "I", 8: "Q"}[_BYTES[kind]]
    made = b"".join(struct.pack("<" + letter, n & mask) for n in numbers)
    return made + bytes(size - len(made))


def _operands(text: str) -> list[str]:
    """Split at commas and at the bar of `%r1|%p1`, but not within braces."""
    operands, depth = [""], 0
    for letter in text:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter in ",|" and depth == 0:
            operands.append("")
        else:
            operands[-1] += letter
    return [o.strip() for o in operands if o.strip()]
