# SPDX-License-Identifier: Apache-2.0
"""The order of launches in a stream, with programmatic dependent launch.

By the PTX ISA manual 9.0, "griddepcontrol", and the CUDA programming guide, "Programmatic Dependent
Launch and Synchronization": a launch with the attribute may begin before the one ahead of it has
ended, and a thread sees what that one wrote only after its griddepcontrol.wait. Here launches run
one after the other. So an access that a GPU could do too early, in memory as it was before the
launch ahead, is found by what that launch reads and writes, and is a fault.

A launch waits for the one directly ahead of it. If that one said launch_dependents before its own
wait, the launch ahead of both may still run, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class OrderFault(AssertionError):
    """An access before griddepcontrol.wait that belongs behind it, or a thread that never waits."""


class OrderedLaunch:
    """A launch in a stream: the bytes that it reads and writes, and what may still run beside it.

    name: for messages.
    ahead: the launches that may still run until this one waits; none for a launch without the
        attribute, before which all others end.
    known: False for launches that are not ours: they may read and write anything.
    """

    def __init__(self, name: str, ahead: Sequence[OrderedLaunch] = (), known: bool = True) -> None:
        self.name, self.known = name, known
        self._ahead = tuple(ahead)
        self._reads: list[np.ndarray] = []
        self._writes: list[np.ndarray] = []
        self._begins_early = False  # the launch behind may begin before this one waits
        self.begin(0)

    def before_next(self) -> tuple[OrderedLaunch, ...]:
        """`ahead` of a launch with the attribute that comes next in the stream."""
        return (self, *(self._ahead if self._begins_early else ()))

    def begin(self, lanes: int) -> None:
        """The next thread blocks run."""
        self._waited = np.full(lanes, not self._ahead)

    def wait(self, lanes: np.ndarray) -> None:
        """griddepcontrol.wait"""
        self._waited[lanes] = True

    def launch_dependents(self, lanes: np.ndarray) -> None:
        """griddepcontrol.launch_dependents"""
        self._begins_early |= not self._waited[lanes].all()

    def note(self, lanes: np.ndarray, address: np.ndarray, size: int, *, writes: bool) -> None:
        """An access of `size` bytes by each lane.

        Raises:
            OrderFault: it comes too early.
        """
        (self._writes if writes else self._reads).append(_bytes(address, size))
        early = ~self._waited[lanes]
        if not early.any():
            return
        at = _bytes(address[early], size)
        for other in self._ahead:
            if (one := other._conflict(at, writes)) is not None:
                done = "written" if writes else "read"
                raise OrderFault(
                    f"{self.name}: byte {hex(one[0])} is {done} before griddepcontrol.wait, and "
                    f"{other.name}, which may still run, {one[1]} it"
                )

    def end(self) -> None:
        """These thread blocks have ended.

        Raises:
            OrderFault: a thread has not waited. What comes next in the stream would find this
                launch ended, and the one ahead of it perhaps not.
        """
        if not self._waited.all():
            raise OrderFault(
                f"{self.name}: {(~self._waited).sum()} threads end without griddepcontrol.wait, "
                f"and {self._ahead[0].name} may still run"
            )

    def _conflict(self, at: np.ndarray, writes: bool) -> tuple[int, str] | None:
        """A byte of these that this launch writes (or, if it is written, reads), and which."""
        if not self.known:
            return int(at[0]), "may read or write"
        for mine, word in ((self._writes, "writes"), (self._reads, "reads")):
            if mine and (writes or word == "writes"):
                mine[:] = [np.unique(np.concatenate(mine))]
                found = at[np.isin(at, mine[0])]
                if len(found):
                    return int(found[0]), word
        return None


# Any kernel that was enqueued before a call of ours: it may have written the call's tensors.
UNKNOWN = OrderedLaunch("a kernel ahead of the call", known=False)


def _bytes(address: np.ndarray, size: int) -> np.ndarray:
    return (address[:, None] + np.arange(size)).ravel()
