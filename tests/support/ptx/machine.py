# SPDX-License-Identifier: Apache-2.0
"""Runs a kernel of PTX: one element of an array for each thread of some thread blocks.

Each thread has a program counter. In each step the threads at the lowest counter run one straight
piece of code. Threads that wait for others (a barrier, an exchange between lanes) stay until these
arrive. If no thread can continue, that is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tests.support.ptx import warps
from tests.support.ptx.instructions import TABLE, TYPES, U32, U64
from tests.support.ptx.memory import Constant, Global, Shared
from tests.support.ptx.parser import Instruction, Kernel

_SHARED_FIRST = 1024  # of shared addresses, so that 0 is none
_MOST_STEPS = 2_000_000
_NOTHING = ("prefetch.global.L2", "createpolicy.fractional.b64")  # of caches
_JUMPS = ("bra", "bra.uni", "ret", "exit")
_EXIT = 1 << 30
_INTEGER = re.compile(r"-?(\d+|0x[0-9a-fA-F]+)U?$")  # as ISA 4.5.1 has it

Mask = np.ndarray | None  # of the lanes that run; None for all
Run = Callable[[Mask], None]


class UnknownInstruction(NotImplementedError):
    """An instruction, or a form of one, that this interpreter does not have."""


class Piece(NamedTuple):
    """Straight code that ends in a jump, or is one instruction for which lanes wait on others.

    waits: from the lanes that are there and those that are alive to those that can go on.
    jump, target: of the lanes that jump; None where it goes on with the next piece.
    """

    runs: list[Run]
    waits: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    jump: Instruction | None = None


class Machine:
    """`blocks` thread blocks, each an (x, y) of the grid, of `threads` threads each."""

    def __init__(
        self,
        kernel: Kernel,
        threads: int,
        grid: tuple[int, int],
        blocks: list[tuple[int, int]],
        parameters: bytes,
        dynamic: int,
        memory: Global,
    ) -> None:
        self.kernel, self.threads, self.lanes = kernel, threads, threads * len(blocks)
        self._numbers = np.arange(self.lanes)
        thread = self._numbers % threads
        x, y = (np.repeat([b[i] for b in blocks], threads) for i in range(2))
        self._special = {"%tid.x": thread, "%ctaid.x": x, "%ctaid.y": y, "%ntid.x": threads}
        self._special |= {"%nctaid.x": grid[0], "%nctaid.y": grid[1], "%laneid": thread % 32}
        self._registers = self._new_registers()
        self._constants: dict[tuple[str, np.dtype], np.ndarray] = {}
        constants = self._place_variables(dynamic)
        unit = self._least_shared_access()
        self.shared = Shared(len(blocks), threads, self._shared_end, unit)
        self._order = memory.order
        self.spaces = {
            "global": memory,
            "param": Constant(parameters),
            "const": Constant(constants),
            "shared": self.shared,
        }
        self.copies = warps.AsyncCopies(self)
        self._pieces = self._cut()

    def run(self) -> None:
        """Until all threads have ended.

        Raises:
            MemoryFault: as memory.py has it.
            OrderFault: as order.py has it.
            AssertionError: threads wait for others that never come.
        """
        at, steps = np.zeros(self.lanes, np.int32), 0
        self._order.begin(self.lanes)
        with np.errstate(all="ignore"):
            while (alive := at != _EXIT).any():
                self._step(at, alive)
                steps += 1
                assert steps < _MOST_STEPS, "a loop without an end"
        self._order.end()

    def _step(self, at: np.ndarray, alive: np.ndarray) -> None:
        left = at[alive]
        while left.size:
            number = left.min()
            piece, here = self._pieces[number], at == number
            if piece.waits is not None:
                here = piece.waits(here, alive)
            if not here.any():
                left = left[left > number]
                continue
            mask = None if here.all() else here
            for run in piece.runs:
                run(mask)
            self._go_on(at, here, number, piece.jump)
            return
        waiting = {self._waiting[n] for n in np.unique(at[alive])}
        raise AssertionError(f"all threads wait for others, at {sorted(waiting)}")

    def _go_on(
        self, at: np.ndarray, here: np.ndarray, number: int, jump: Instruction | None
    ) -> None:
        at[here] = number + 1
        if jump is None:
            return
        if jump.predicate is not None:
            here = here & (self._registers[jump.predicate] != jump.negated)
        at[here] = self._targets[jump.operands[0]] if jump.operands else _EXIT

    # Registers, variables and operands ---------------------------------------------------------

    def _new_registers(self) -> dict[str, np.ndarray]:
        """Each with bits that mean nothing."""
        made: dict[str, np.ndarray] = {}
        for kind in set(self.kernel.registers.values()):
            names = [name for name, of in self.kernel.registers.items() if of == kind]
            rows = np.full((len(names), self.lanes), 0xA5, np.uint8).astype(_storage(kind))
            made.update(zip(names, rows, strict=True))
        return made

    def _place_variables(self, dynamic: int) -> bytes:
        """Gives the kernel's variables their addresses. Returns what constant memory holds."""
        self._symbols, constants, end = dict(self.kernel.parameters), b"", _SHARED_FIRST
        for variable in sorted(self.kernel.variables, key=lambda v: v.size == 0):
            if variable.space == "const":
                constants += bytes(-len(constants) % 16)
                self._symbols[variable.name] = len(constants)
                constants += variable.content or bytes(variable.size)
            else:
                end = -(-end // variable.align) * variable.align
                self._symbols[variable.name] = end
                end += variable.size or dynamic
        self._shared_end = end
        return constants

    def _least_shared_access(self) -> int:
        """Bytes of the kernel's smallest access to shared memory."""
        sizes = [16]  # of asynchronous copies, and of the rows of matrices
        for instruction in self.kernel.instructions:
            _, *parts = instruction.name.split(".")
            if parts[:1] == ["shared"]:
                count = int(parts[1][1:]) if parts[1] in ("v2", "v4") else 1
                sizes.append(count * TYPES[parts[-1]].itemsize)
        return min(sizes)

    def source(self, text: str, kind: str) -> Callable[[], np.ndarray]:
        """Reads an operand as a type: a register's lower bits, or a constant."""
        dtype = TYPES[kind]
        if text not in self._registers:
            constant = self._constant(text, dtype)
            return lambda: constant
        row = self._registers[text]
        if row.itemsize == dtype.itemsize:
            view = row.view(dtype)
            return lambda: view
        assert row.itemsize > dtype.itemsize, f"{text} is too narrow for .{kind}"
        narrow = np.dtype(f"u{dtype.itemsize}")
        return lambda: row.astype(narrow).view(dtype)

    def _constant(self, text: str, dtype: np.dtype) -> np.ndarray:
        key = text, dtype
        if key not in self._constants:
            if text in self._special:
                value = np.broadcast_to(self._special[text], self.lanes)
            elif text in self._symbols:
                value = np.full(self.lanes, self._symbols[text])
            elif text.startswith("0f"):
                value = np.full(self.lanes, int(text[2:], 16), U32)  # bits, for .b32
                value = value.view(np.float32) if dtype.kind == "f" else value
            elif _INTEGER.match(text):
                value = np.array([int(text.rstrip("U"), 0) & 2**64 - 1] * self.lanes, U64)
            else:
                raise UnknownInstruction(f"no such operand in this interpreter: {text}")
            self._constants[key] = value.astype(dtype)
        return self._constants[key]

    def target(self, text: str) -> Callable[[np.ndarray, Mask], None]:
        """Writes to a register; narrower values are extended by their sign, if they have one. To
        `_` nothing is written."""
        if text == "_":
            return lambda value, mask: None
        row = self._registers[text]

        def write(value: np.ndarray, mask: Mask) -> None:
            if value.itemsize == row.itemsize:
                value = value.view(row.dtype)
            else:
                assert value.itemsize < row.itemsize, f"{text} is too narrow"
                value = value.astype(row.dtype)
            if mask is None:
                row[:] = value
            else:
                np.copyto(row, value, where=mask)

        return write

    def address(self, text: str) -> Callable[[], np.ndarray]:
        """The address of [register], [variable+4], and so on."""
        base, _, offset = text.strip("[] ").partition("+")
        base, past = base.strip(), int(offset or 0)
        if base not in self._registers:
            return lambda: np.full(self.lanes, self._symbols[base] + past, np.int64)
        row = self._registers[base]
        return lambda: row.astype(np.int64) + past

    def active(self, mask: Mask) -> np.ndarray:
        """Numbers of the lanes."""
        return self._numbers if mask is None else np.flatnonzero(mask)

    # Decoding ----------------------------------------------------------------------------------

    def _cut(self) -> list[Piece]:
        """The kernel's code in pieces: cut at labels, behind jumps, and around instructions for
        which lanes wait."""
        code, starts = self.kernel.instructions, set(self.kernel.labels.values())
        pieces: list[Piece] = []
        of_instruction: dict[int, int] = {}  # first of a piece -> number of the piece
        self._waiting: dict[int, str] = {}
        runs: list[Run] = []
        for i, instruction in enumerate(code):
            if runs and (i in starts or instruction.name in warps.TOGETHER):
                pieces.append(Piece(runs))
                runs = []
            if not runs:
                of_instruction[i] = len(pieces)
            if instruction.name in _JUMPS:
                pieces.append(Piece(runs, jump=instruction))
                runs = []
            elif instruction.name in warps.TOGETHER:
                assert instruction.predicate is None, instruction
                waits, run = warps.TOGETHER[instruction.name](self, instruction.operands)
                self._waiting[len(pieces)] = instruction.name
                pieces.append(Piece([run], waits))
            elif instruction.name not in _NOTHING:
                runs.append(self._guarded(instruction, self._decoded(instruction)))
        of_instruction[len(code)] = len(pieces)
        self._targets = {name: of_instruction[first] for name, first in self.kernel.labels.items()}
        return pieces

    def _guarded(self, instruction: Instruction, run: Run) -> Run:
        if instruction.predicate is None:
            return run
        row, negated = self._registers[instruction.predicate], instruction.negated

        def guarded(mask: Mask) -> None:
            allowed = row != negated
            run(allowed if mask is None else allowed & mask)

        return guarded

    def _decoded(self, instruction: Instruction) -> Run:
        name, operands = instruction.name, instruction.operands
        parts = name.split(".")
        if name in TABLE:
            return self._elementwise(name, operands)
        if parts[0] == "mov" and parts[1] in TYPES:
            return self._move(parts[1], *operands)
        if parts[0] in ("ld", "st") and parts[1] not in self.spaces:
            # A generic address: in global memory, since no cvta makes one of shared memory.
            parts.insert(1, "global")
        if parts[0] in ("ld", "st") and parts[-1] in TYPES:
            vector = {("v2",): 2, ("v4",): 4, (): 1, ("nc",): 1, ("nc", "v2"): 2, ("nc", "v4"): 4}
            if tuple(parts[2:-1]) in vector:
                access = self._load if parts[0] == "ld" else self._store
                return access(parts[1], TYPES[parts[-1]], vector[tuple(parts[2:-1])], operands)
        if name in ("griddepcontrol.wait", "griddepcontrol.launch_dependents"):
            say = self._order.wait if parts[1] == "wait" else self._order.launch_dependents
            return lambda mask: say(self.active(mask))
        if name.startswith("cp.async"):
            return self.copies.decoded(name, operands)
        raise UnknownInstruction(f"no such instruction in this interpreter: {name}")

    def _elementwise(self, name: str, operands: tuple[str, ...]) -> Run:
        result, kinds, compute = TABLE[name]
        sources = [self.source(o, k) for o, k in zip(operands[1:], kinds, strict=True)]
        write, dtype = self.target(operands[0]), TYPES[result]

        def run(mask: Mask) -> None:
            value = compute(*[read() for read in sources])
            assert value.dtype == dtype, f"{name}: {value.dtype}"
            write(value, mask)

        return run

    def _move(self, kind: str, to: str, of: str) -> Run:
        """One register, or several that make up one."""
        if to.startswith("{"):
            return self._unpack(_members(to), self.source(of, kind))
        if of.startswith("{"):
            return self._pack(kind, to, _members(of))
        read, write = self.source(of, kind), self.target(to)
        return lambda mask: write(read(), mask)

    def _unpack(self, members: list[str], read: Callable[[], np.ndarray]) -> Run:
        writes = [self.target(m) for m in members]

        def run(mask: Mask) -> None:
            whole = read()
            parts = whole.view(np.dtype(f"u{whole.itemsize // len(writes)}"))
            for i, write in enumerate(writes):
                write(parts[i :: len(writes)], mask)

        return run

    def _pack(self, kind: str, to: str, members: list[str]) -> Run:
        write, dtype = self.target(to), TYPES[kind]
        part = f"b{8 * dtype.itemsize // len(members)}"
        reads = [self.source(m, part) for m in members]

        def run(mask: Mask) -> None:
            made = np.empty((self.lanes, len(reads)), TYPES[part])
            for i, read in enumerate(reads):
                made[:, i] = read()
            write(made.view(dtype)[:, 0], mask)

        return run

    def _load(self, space: str, dtype: np.dtype, count: int, operands: tuple[str, ...]) -> Run:
        memory, address = self.spaces[space], self.address(operands[1])
        writes = [self.target(o) for o in _members(operands[0])]
        assert len(writes) == count, operands

        def run(mask: Mask) -> None:
            lanes = self.active(mask)
            values = memory.load(lanes, address()[lanes], dtype, count)
            for i, write in enumerate(writes):
                whole = np.zeros(self.lanes, dtype)
                whole[lanes] = values[:, i]
                write(whole, mask)

        return run

    def _store(self, space: str, dtype: np.dtype, count: int, operands: tuple[str, ...]) -> Run:
        memory, address = self.spaces[space], self.address(operands[0])
        kind = f"b{8 * dtype.itemsize}"
        reads = [self.source(o, kind) for o in _members(operands[1])]
        assert len(reads) == count, operands

        def run(mask: Mask) -> None:
            lanes = self.active(mask)
            values = np.stack([read()[lanes] for read in reads], axis=1)
            memory.store(lanes, address()[lanes], values)

        return run


def _members(text: str) -> list[str]:
    return [o.strip() for o in text.strip("{}").split(",")]


def _storage(kind: str) -> np.dtype:
    return np.dtype(bool) if kind == "pred" else np.dtype(f"u{int(kind[1:]) // 8}")
