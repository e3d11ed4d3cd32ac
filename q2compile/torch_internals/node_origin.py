# SPDX-License-Identifier: Apache-2.0
"""Where a node of a graph comes from: the lines of the model's source, and Dynamo's node."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from torch import fx


class Frame(NamedTuple):
    """A line of source on the way to a node; ``line`` is its number, ``code`` its text."""

    file: str
    line: int
    function: str
    code: str


_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (.+)\n(?: *(.*))?', re.MULTILINE)


def stack_of(node: fx.Node) -> tuple[Frame, ...]:
    """The source lines that a node was traced from, outermost first; () where torch kept none."""
    text = node.meta.get("stack_trace") or node.stack_trace
    return _frames(text) if isinstance(text, str) else ()


@lru_cache(4096)
def _frames(text: str) -> tuple[Frame, ...]:
    found = _FRAME.findall(text)
    return tuple(Frame(file, int(line), name, code.strip()) for file, line, name, code in found)


def dynamo_name(node: fx.Node) -> str:
    """The node of Dynamo's graph that a node was made from, which Inductor's comments call its
    source node; "" where that is not known. A node of a backward has that of its forward.
    """
    origins = node.meta.get("from_node") or ()
    if origins:
        origin = origins[0]
        while getattr(origin, "from_node", None):
            origin = origin.from_node[0]
        return str(getattr(origin, "name", ""))
    stack = node.meta.get("source_fn_stack") or node.meta.get("fwd_source_fn_stack")
    return str(stack[-1][0]) if stack else ""
