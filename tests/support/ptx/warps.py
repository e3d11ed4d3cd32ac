# SPDX-License-Identifier: Apache-2.0
"""Instructions for which lanes wait on others, and asynchronous copies.

By the PTX ISA manual 9.0, chapter "Instruction Set": Parallel Synchronization and Communication
Instructions (bar, redux.sync), Data Movement and Conversion Instructions (shfl.sync,
cp.async), Warp Level Matrix Multiply-Accumulate Instructions (ldmatrix).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.ptx.instructions import TYPES, U16, U32
from tests.support.ptx.memory import POISON

if TYPE_CHECKING:
    from tests.support.ptx.machine import Machine

Waits = Callable[[np.ndarray, np.ndarray], np.ndarray]
Exchange = Callable[["Machine", tuple[str, ...]], tuple[Waits, Any]]
TOGETHER: dict[str, Exchange] = {}


def _together(name: str) -> Callable[[Exchange], Exchange]:
    def define(make: Exchange) -> Exchange:
        TOGETHER[name] = make
        return make

    return define


def _by(size: int, here: np.ndarray, alive: np.ndarray) -> np.ndarray:
    """Lanes whose group of `size` lanes are all here, except lanes that have ended."""
    groups = (here | ~alive).reshape(-1, size).all(1)
    return here & np.repeat(groups, size)


def _whole_warps(machine: Machine, members: str) -> Waits:
    """members: the mask of the lanes that take part, which must be all."""
    mask = machine.source(members, "u32")

    def waits(here: np.ndarray, alive: np.ndarray) -> np.ndarray:
        assert (mask()[here] == 0xFFFFFFFF).all(), "lanes of a part of a warp"
        ready = _by(32, here, alive)
        whole = ready.reshape(-1, 32)
        assert (whole.all(1) | ~whole.any(1)).all(), "a lane of the mask has ended"
        return ready

    return waits


@_together("bar.sync")
def _barrier(machine: Machine, operands: tuple[str, ...]) -> tuple:
    assert operands == ("0",), operands

    def run(mask: np.ndarray | None) -> None:
        machine.shared.barriers[machine.active(mask)] += 1

    return lambda here, alive: _by(machine.threads, here, alive), run


@_together("bar.warp.sync")
def _warp_barrier(machine: Machine, operands: tuple[str, ...]) -> tuple:
    def run(mask: np.ndarray | None) -> None:
        machine.shared.warp_barriers[machine.active(mask)] += 1

    return _whole_warps(machine, operands[0]), run


def _shuffle(machine: Machine, operands: tuple[str, ...], index: Callable) -> tuple:
    """d|p, a, b, c: a of the lane that b says; p may be left out. c: five bits of the last lane of
    its segment, and from bit 8 on those of a lane's number that say the segment."""
    to, *found, value, by, clamp, members = operands
    read, write = machine.source(value, "b32"), machine.target(to)
    notes = [machine.target(name) for name in found]
    amount, how = machine.source(by, "u32"), machine.source(clamp, "u32")
    lane = np.arange(machine.lanes)

    def run(mask: np.ndarray | None) -> None:
        own, c = lane % 32, how().astype(np.int64)
        segment = c >> 8 & 31
        last = (own & segment) | (c & 31 & ~segment)
        of = index(own, amount().astype(np.int64) & 31, segment)
        inside = of <= last
        of = np.where(inside, of, own)
        write(read()[lane - own + of], mask)
        for note in notes:
            note(inside, mask)

    return _whole_warps(machine, members), run


@_together("shfl.sync.bfly.b32")
def _butterfly(machine: Machine, operands: tuple[str, ...]) -> tuple:
    return _shuffle(machine, operands, lambda own, by, segment: own ^ by)


@_together("shfl.sync.idx.b32")
def _from_index(machine: Machine, operands: tuple[str, ...]) -> tuple:
    first = lambda own, by, segment: (own & segment) | (by & ~segment)  # noqa: E731
    return _shuffle(machine, operands, first)


def _reduction(kind: str, reduce: Callable) -> Exchange:
    def make(machine: Machine, operands: tuple[str, ...]) -> tuple:
        to, value, members = operands
        read, write = machine.source(value, kind), machine.target(to)

        def run(mask: np.ndarray | None) -> None:
            whole = reduce(read().reshape(-1, 32), axis=1).astype(TYPES[kind])
            write(np.repeat(whole, 32), mask)

        return _whole_warps(machine, members), run

    return make


TOGETHER["redux.sync.max.u32"] = _reduction("u32", np.max)
TOGETHER["redux.sync.max.s32"] = _reduction("s32", np.max)
TOGETHER["redux.sync.add.s32"] = _reduction("s32", np.sum)


def _vector(text: str) -> list[str]:
    return [o.strip() for o in text.strip("{}").split(",")]


@_together("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16")
def _load_matrices(machine: Machine, operands: tuple[str, ...]) -> tuple:
    """Rows of eight 16-bit elements lie where the lanes say, row r of matrix i where lane 8 i + r
    does. Lane l gets of each matrix, transposed, elements 2 (l % 4) and the next of row l / 4."""
    writes = [machine.target(o) for o in _vector(operands[0])]
    address = machine.address(operands[1])

    def run(mask: np.ndarray | None) -> None:
        lanes = machine.active(mask)
        rows = machine.shared.load(lanes, address()[lanes], np.dtype(U16), 8)
        matrices = rows.reshape(-1, 4, 8, 8)  # warp, matrix, row, column
        lane = np.arange(32)
        for i, write in enumerate(writes):
            two = [matrices[:, i, 2 * (lane % 4) + k, lane // 4].astype(U32) for k in range(2)]
            whole = np.zeros(machine.lanes, U32)
            whole[lanes] = (two[0] | two[1] << U32(16)).ravel()
            write(whole, mask)

    return _whole_warps(machine, "-1"), run


class AsyncCopies:
    """cp.async: what is copied arrives when a lane waits for it, and not before. Until then the
    target holds POISON."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._pending: list[list] = []  # lanes, targets, sources, which of them are committed

    def decoded(self, name: str, operands: tuple[str, ...]) -> Callable:
        if name == "cp.async.cg.shared.global" and operands[2:] == ("16",):
            to, of = (self._machine.address(o) for o in operands[:2])
            return lambda mask: self._begin(self._machine.active(mask), to(), of())
        if name == "cp.async.commit_group":
            return lambda mask: self._commit(self._machine.active(mask))
        if name == "cp.async.wait_group" and operands == ("0",):
            return lambda mask: self._arrive(self._machine.active(mask))
        raise NotImplementedError(f"no such copy in this interpreter: {name} {operands}")

    def _begin(self, lanes: np.ndarray, to: np.ndarray, of: np.ndarray) -> None:
        # Later, when they arrive, it would be too late to see that they were read too early.
        self._machine.spaces["global"].order.note(lanes, of[lanes], 16, writes=False)
        poison = np.full((len(lanes), 16), POISON, np.uint8).view(U32)
        self._machine.shared.store(lanes, to[lanes], poison)
        self._pending.append([lanes, to[lanes], of[lanes], np.zeros(len(lanes), bool)])

    def _commit(self, lanes: np.ndarray) -> None:
        for pending in self._pending:
            pending[3] |= np.isin(pending[0], lanes)

    def _arrive(self, lanes: np.ndarray) -> None:
        left = []
        for whose, to, of, committed in self._pending:
            now = committed & np.isin(whose, lanes)
            if now.any():
                memory, shared = self._machine.spaces["global"], self._machine.shared
                words = memory.load(whose[now], of[now], np.dtype(U32), 4)
                shared.store(whose[now], to[now], words)
            if not now.all():
                left.append([part[~now] for part in (whose, to, of, committed)])
        self._pending = left
