# SPDX-License-Identifier: Apache-2.0
"""Which optimizers hold a parameter, and how often they have stepped.

torch offers a step hook for one optimizer and one for all optimizers of the process. Dynamo traces
the second kind into every compiled optimizer, whatever model it belongs to. Here hooks are put on
optimizers that hold a parameter in question, and are removed when nobody counts their steps.

torch keeps no list of its optimizers. They are looked up among the objects that Python's garbage
collector tracks, by type; no attribute of any other object is read. That takes 0.1 to 0.3 s for
half a million objects, so it is not done in every call. An optimizer refers to its parameters: as
long as the reference count of a parameter has not changed since the last look-up, and no optimizer
that held it is gone, no optimizer has come that holds it.
"""

from __future__ import annotations

import gc
import sys
import time
import weakref
from threading import RLock
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

# Time between two look-ups, as a multiple of what the last one took: for a weight whose optimizers
# were never looked up, and how many times as long for another, so that those take 1% of the time.
PAUSE, AGAIN = 10.0, 10.0


class _Flag:
    """The hook stores a constant and reads nothing, so that Dynamo compiles it into the step
    without a graph break, and without a guard that the next step would break."""

    def __init__(self) -> None:
        self.stepped = False

    def step(self, *_: Any) -> None:
        self.stepped = True


class Steps:
    """The steps of one optimizer, counted while anybody holds this object. Several steps between
    two reads of `count` may count as one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._flag, self._count = _Flag(), 0
        self._optimizer = weakref.ref(optimizer)
        handle = optimizer.register_step_post_hook(self._flag.step)
        weakref.finalize(self, handle.remove).atexit = False

    @property
    def count(self) -> int:
        if self._flag.stepped:
            self._flag.stepped = False
            self._count += 1
        return self._count

    @property
    def is_alive(self) -> bool:
        """Whether the optimizer is still there."""
        return self._optimizer() is not None

    def has_state_of(self, w: Tensor) -> bool:
        """Whether the optimizer has changed ``w`` before, as far as its state shows."""
        return w in getattr(self._optimizer(), "state", ())


class _Found:
    """The result of the last look-up: id of a parameter -> optimizers that hold it. number: of the
    look-up."""

    def __init__(self) -> None:
        self.number = 0
        self.holders: dict[int, list[weakref.ref[Optimizer]]] = {}
        self.ended, self.took = -float("inf"), 0.0


_found = _Found()
_steps: Any = WeakIdKeyDictionary()  # Optimizer -> weakref of its Steps
_lock = RLock()


def look_up_optimizers(at_once: bool = False, pauses: float = 1.0) -> bool:
    """Find all optimizers of the process; False if that was done a short while ago, fewer than so
    many ``pauses``, unless it is to be done ``at_once``."""
    with _lock:
        began = time.monotonic()
        if not at_once and began - _found.ended < pauses * PAUSE * _found.took:
            return False
        holders: dict[int, list[weakref.ref[Optimizer]]] = {}
        optimizers, sharded = _tracked_objects()
        for optimizer in optimizers:
            for w in _parameters(optimizer):
                holders.setdefault(id(w), []).append(weakref.ref(optimizer))
        for parameter in sharded:  # a forward sees the gathered one, an optimizer the shard
            gathered = getattr(parameter, "_unsharded_param", None)
            of_shard = holders.get(id(getattr(parameter, "sharded_param", None)))
            if gathered is not None and of_shard is not None:
                holders[id(gathered)] = of_shard
        _found.holders = holders
        _found.number += 1
        _found.ended = time.monotonic()
        _found.took = _found.ended - began
        return True


_FSDP_PARAMETERS = "torch.distributed.fsdp._fully_shard._fsdp_param"


def _tracked_objects() -> tuple[list[Optimizer], list[Any]]:
    """All optimizers, and FSDP2's records of the parameters that it shards."""
    kinds, todo = set(), [Optimizer]
    while todo:
        kind = todo.pop()
        kinds.add(id(kind))  # a metaclass may define __hash__ and __eq__
        todo += type.__subclasses__(kind)
    record = getattr(sys.modules.get(_FSDP_PARAMETERS), "FSDPParam", None)
    optimizers, sharded = [], []
    for x in gc.get_objects():
        if id(type(x)) in kinds:
            optimizers.append(x)
        elif record is not None and type(x) is record:
            sharded.append(x)
    return optimizers, sharded


def _parameters(optimizer: Optimizer) -> list[Any]:
    """The parameters in its own param_groups. A wrapper that shows those of another optimizer has
    none of its own; one whose __init__ was not run takes no hooks."""
    own = vars(optimizer)
    if "_optimizer_step_post_hooks" not in own:
        return []
    groups = own.get("param_groups", ())
    return [w for group in groups for w in group.get("params", ())]


class Holders:
    """The optimizers that hold one parameter. `note` is called first, and always from the same
    place: the reference count includes its callers."""

    def __init__(self) -> None:
        self._references, self._since, self._pauses = -1, 0, 1.0

    def note(self, w: Tensor) -> None:
        """Compare the reference count with that of the last call. All of C++ together holds one
        reference while anything in it besides w refers to w, such as the graph of a loss that is
        still alive."""
        references = sys.getrefcount(w) - (w._use_count() > 1)  # type: ignore[attr-defined]
        if references != self._references:
            self._references, self._since = references, _found.number

    def known(self, w: Tensor) -> tuple[Steps, ...]:
        """The optimizers that the last look-up found."""
        with _lock:
            refs = _found.holders.get(id(w), ())
            alive = [optimizer for ref in refs if (optimizer := ref()) is not None]
            return tuple(map(_steps_of, alive))

    def all(self, w: Tensor) -> tuple[Steps, ...] | None:
        """All that hold it, after another look-up if need be; None if they are not known."""
        with _lock:
            gone = any(ref() is None for ref in _found.holders.get(id(w), ()))  # one may replace it
            if gone or self._since >= _found.number:
                number = _found.number
                if not look_up_optimizers(pauses=self._pauses):
                    return None
                self._since, self._pauses = number, AGAIN
            return self.known(w)


def _steps_of(optimizer: Optimizer) -> Steps:
    steps: Steps | None = _steps[optimizer]() if optimizer in _steps else None
    if steps is None:
        steps = Steps(optimizer)
        _steps[optimizer] = weakref.ref(steps)
    return steps
