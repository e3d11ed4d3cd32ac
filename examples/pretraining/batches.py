# SPDX-License-Identifier: Apache-2.0
"""Which tokens a step sees, and how they get to the device before it asks.

Shapes: B sequences of S tokens in a batch.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

PREFETCHED = 8  # batches


class Batches(Protocol):
    """int64 [B, S] for each index. A tensor [count, B, S] is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Tensor: ...


class Windows:
    """Batches of windows that lie side by side in a token file; every token once in an epoch.

    An epoch's windows come in a random order, and begin at a random place so that epochs cut the
    text differently. What a batch holds is a function of seed and index alone: the position in the
    data is the number of the step.

    tokens: uint16 [tokens], may be a memory map. count: batches in all, over as many epochs as it
    takes.
    seed: None keeps the windows in their order, for validation.
    """

    def __init__(
        self, tokens: np.ndarray, count: int, batch: int, seq: int, seed: int | None
    ) -> None:
        # One window is spent on the place where an epoch begins.
        self.per_epoch = len(tokens) // seq - (seed is not None)
        if self.per_epoch < batch:
            raise ValueError(
                f"{len(tokens):,} tokens, less than a batch of {batch} x {seq}: give more text"
            )
        self.tokens, self.count, self.batch, self.seq, self.seed = tokens, count, batch, seq, seed
        self._starts = lru_cache(maxsize=2)(self._starts_of_epoch)

    @property
    def epochs(self) -> float:
        return self.count * self.batch / self.per_epoch

    def _starts_of_epoch(self, epoch: int) -> np.ndarray:
        """int64 [windows of an epoch]."""
        starts = np.arange(self.per_epoch) * self.seq
        if self.seed is None:
            return starts
        generator = np.random.default_rng([self.seed, epoch])
        return generator.permutation(starts) + generator.integers(self.seq)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.count:
            raise IndexError(index)  # ends a for loop
        rows = np.empty((self.batch, self.seq), dtype=np.int64)
        for row in range(self.batch):
            epoch, place = divmod(index * self.batch + row, self.per_epoch)
            start = self._starts(epoch)[place]
            rows[row] = self.tokens[start : start + self.seq]
        return torch.from_numpy(rows)


class Backwards:
    """The same batches with the sequences of each in reverse order.

    A step's loss and gradients are means over the batch, so nothing but the order of their sums
    differs, and with a recipe that rounds along T or at random, what is rounded with what.
    """

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Tensor:
        return self.batches[index].flip(0)


class First:
    """The first batches of others."""

    def __init__(self, batches: Batches, count: int) -> None:
        self.batches, self.count = batches, min(count, len(batches))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.batches[index]


@contextmanager
def prefetched(batches: Batches, first: int, device: str) -> Iterator[Iterator[Tensor]]:
    """The batches from index ``first`` on, on the device, read and copied ahead by a thread."""
    ready: queue.Queue[Tensor | BaseException | None] = queue.Queue(PREFETCHED)
    stopped = threading.Event()
    pinned = device != "cpu"

    def put(item: Tensor | BaseException | None) -> None:
        while not stopped.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def read() -> None:
        try:
            for index in range(first, len(batches)):
                batch = batches[index]
                put(batch.pin_memory() if pinned else batch)
                if stopped.is_set():
                    return
            put(None)
        except BaseException as error:  # raised where the batch is asked for
            put(error)

    def arrive() -> Iterator[Tensor]:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item.to(device, non_blocking=True)

    thread = threading.Thread(target=read, name="batches", daemon=True)
    thread.start()
    try:
        yield arrive()
    finally:
        stopped.set()
        thread.join()
