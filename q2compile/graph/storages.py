# SPDX-License-Identifier: Apache-2.0
"""The memory behind the values of a graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

SMALL = 64 * 2**20  # bytes that no GPU is short of
# A fiftieth of the peak is where memory and time change hands one for one: in four layers of width
# 2048 quantizing the weights a second time took 2% of the time and gave back 2% of the peak
# (examples/benchmarks/README.md).
WORTH_TIME = 0.02
Storage = int  # the address of a fake storage, which its views share


def storages(node: fx.Node) -> dict[Storage, int]:
    """The storages of what ``node`` makes or passes on, and their bytes."""
    found = {}
    for value in tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor) and not value.is_sparse:
            memory = value.untyped_storage()
            found[memory._cdata] = hint_of(memory.nbytes(), 0)
    return found


def bytes_of(nodes: Iterable[fx.Node]) -> int:
    """Bytes of what nodes make or pass on. What they share counts once."""
    return sum({s: size for node in nodes for s, size in storages(node).items()}.values())


def hint_of(size: Any, unknown: Any = None) -> Any:
    """A size as a number, a symbol by the shapes that were traced; ``unknown`` where data decide.
    No guard is added."""
    hint = size if isinstance(size, int) else size.node.hint
    return unknown if hint is None else int(hint)
