# SPDX-License-Identifier: Apache-2.0
"""The memories that a thread block sees, with one address a lane.

Every access is checked for alignment and bounds, in global memory also for the order of launches
(order.py). Shared memory also records the last access to each
byte: two threads that access it, one of them writing, need a barrier in between.
"""

from __future__ import annotations

import ctypes

import numpy as np

from tests.support.ptx.order import OrderedLaunch

_FIRST = 4096
_ALL = (ctypes.c_char * 2**47).from_address(_FIRST)  # this process's memory; nothing is read here
POISON = 0xA5  # what memory holds before it is written


class MemoryFault(AssertionError):
    """An address outside of all tensors, a misaligned one, or a race."""


def _check_alignment(address: np.ndarray, size: int) -> None:
    if (address % size).any():
        raise MemoryFault(f"{size} bytes at {hex(address[address % size != 0][0])}: misaligned")


class Global:
    """The tensors of a launch.

    windows: first byte and the one after the last of each.
    order: of its accesses and those of other launches.
    """

    def __init__(self, windows: list[tuple[int, int]], order: OrderedLaunch) -> None:
        self.order = order
        windows = sorted(w for w in windows if w[1] > w[0])
        self._first = np.array([w[0] for w in windows] or [0], np.int64)
        # Tensors may overlap: the end of all up to each.
        self._end = np.maximum.accumulate(np.array([w[1] for w in windows] or [0], np.int64))

    def _cells(self, address: np.ndarray, dtype: np.dtype, count: int) -> tuple:
        size = dtype.itemsize * count
        _check_alignment(address, size)
        window = np.searchsorted(self._first, address, side="right") - 1
        bad = (window < 0) | (address + size > self._end[window])
        if bad.any():
            where = int(address[bad][0])
            raise MemoryFault(f"{size} bytes at {hex(where)}: in no tensor of the launch")
        flat = np.frombuffer(_ALL, dtype, 2**47 // dtype.itemsize)
        at = (address - _FIRST) // dtype.itemsize
        return flat, at[:, None] + np.arange(count)

    def load(self, lanes, address: np.ndarray, dtype: np.dtype, count: int) -> np.ndarray:
        flat, at = self._cells(address, dtype, count)
        self.order.note(lanes, address, dtype.itemsize * count, writes=False)
        return flat[at]

    def store(self, lanes, address: np.ndarray, values: np.ndarray) -> None:
        flat, at = self._cells(address, values.dtype, values.shape[1])
        self.order.note(lanes, address, values.itemsize * values.shape[1], writes=True)
        flat[at] = values


class Constant:
    """The parameters of a launch, or constants: bytes that all lanes share."""

    def __init__(self, content: bytes) -> None:
        self._content = np.frombuffer(content + bytes(-len(content) % 16), np.uint8)

    def load(self, lanes, address: np.ndarray, dtype: np.dtype, count: int) -> np.ndarray:
        _check_alignment(address, dtype.itemsize * count)
        if (address < 0).any() or (address + dtype.itemsize * count > len(self._content)).any():
            raise MemoryFault("a parameter or a constant is read beyond its end")
        cells = self._content.view(dtype)
        return cells[(address // dtype.itemsize)[:, None] + np.arange(count)]


class Shared:
    """Shared memory of several thread blocks of `threads` each, `size` bytes a block.

    unit: accesses are of whole units, so that what is recorded of a unit's bytes is the same.
    """

    def __init__(self, blocks: int, threads: int, size: int, unit: int) -> None:
        self._size, self._threads, self._unit = -(-size // 16) * 16, threads, unit
        total = blocks * self._size
        self._bytes = np.full(total, POISON, np.uint8)
        self.barriers = np.zeros(blocks * threads, np.int32)  # that each lane has passed
        self.warp_barriers = np.zeros(blocks * threads, np.int32)
        # The last writer and reader of each unit: lane, and its barrier counts at that time. Reader
        # -2 stands for several lanes of a warp, -3 for several warps.
        units = total // unit
        self._writer = np.full((3, units), -1, np.int32)
        self._reader = np.full((3, units), -1, np.int32)
        self._reading_warp = np.full(units, -1, np.int32)

    def _place(self, lanes: np.ndarray, address: np.ndarray, size: int) -> np.ndarray:
        _check_alignment(address, size)
        if (address < 0).any() or (address + size > self._size).any():
            raise MemoryFault(f"shared memory of {self._size} bytes: an access beyond its end")
        return address + lanes // self._threads * self._size

    def load(self, lanes, address: np.ndarray, dtype: np.dtype, count: int) -> np.ndarray:
        place = self._place(lanes, address, dtype.itemsize * count)
        self._note_read(*self._touched(lanes, place, dtype.itemsize * count))
        cells = self._bytes.view(dtype)
        return cells[(place // dtype.itemsize)[:, None] + np.arange(count)]

    def store(self, lanes, address: np.ndarray, values: np.ndarray) -> None:
        size = values.dtype.itemsize
        place = self._place(lanes, address, size * values.shape[1])
        self._note_write(*self._touched(lanes, place, size * values.shape[1]))
        self._bytes.view(values.dtype)[(place // size)[:, None] + np.arange(values.shape[1])] = (
            values
        )

    def _touched(self, lanes: np.ndarray, place: np.ndarray, size: int) -> tuple:
        """Lanes and places of the units of an access."""
        count = size // self._unit
        return np.repeat(lanes, count), (place[:, None] // self._unit + np.arange(count)).ravel()

    def _unordered(self, noted: np.ndarray, lane: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Whether no barrier separates an earlier access, by another lane, from this one."""
        who, barriers, warp_barriers = noted[:, at]
        same_interval = (who >= 0) & (who != lane) & (barriers == self.barriers[lane])
        same_warp = (who // 32 == lane // 32) & (warp_barriers < self.warp_barriers[lane])
        return same_interval & ~same_warp

    def _note_read(self, lane: np.ndarray, at: np.ndarray) -> None:
        racing = self._unordered(self._writer, lane, at)
        if racing.any():
            raise MemoryFault(self._race("is read by", lane, at, racing, self._writer[0, at]))
        who, barriers, warp_barriers = self._reader[:, at]
        warp, other_warp = lane // 32, self._reading_warp[at] != lane // 32
        ordered = ~other_warp & (who != -3) & (warp_barriers < self.warp_barriers[lane])
        again = (barriers == self.barriers[lane]) & (who != -1) & (who != lane) & ~ordered
        reader = np.where(again, np.where(other_warp | (who == -3), -3, -2), lane)
        self._reader[0, at], self._reading_warp[at] = reader, warp
        self._reader[1, at], self._reader[2, at] = self.barriers[lane], self.warp_barriers[lane]
        # If several lanes read a byte at once, the last of them is recorded.
        lost = (self._reader[0, at] != reader) & (self._reader[0, at] != -3)
        self._reader[0, at[lost]] = -2
        self._reader[0, at[lost & (self._reading_warp[at] != warp)]] = -3

    def _note_write(self, lane: np.ndarray, at: np.ndarray) -> None:
        racing = self._unordered(self._writer, lane, at) | self._unordered(self._reader, lane, at)
        who, barriers, warp_barriers = self._reader[:, at]
        now = barriers == self.barriers[lane]
        ordered = (self._reading_warp[at] == lane // 32) & (
            warp_barriers < self.warp_barriers[lane]
        )
        racing |= now & ((who == -3) | ((who == -2) & ~ordered))
        if racing.any():
            who = np.where(self._unordered(self._writer, lane, at), self._writer[0, at], who)
            raise MemoryFault(self._race("is written by", lane, at, racing, who))
        self._writer[0, at] = lane
        self._writer[1, at], self._writer[2, at] = self.barriers[lane], self.warp_barriers[lane]

    def _race(self, what: str, lane, at, racing, other) -> str:
        first = np.flatnonzero(racing)[0]
        byte = int(at[first] * self._unit % self._size)
        thread = int(lane[first] % self._threads)
        by = int(other[first])
        whom = f"thread {by % self._threads}" if by >= 0 else "several threads"
        return f"race: byte {byte} of shared memory {what} thread {thread}, no barrier after {whom}"
