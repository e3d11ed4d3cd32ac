# SPDX-License-Identifier: Apache-2.0
"""Records of passes, for dumps and reports."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PassRecord:
    """The effect of one pass on one graph.

    details: sentences, which lowerings may still add to (see `fuse_rotations_pass`).
    """

    graph: str
    name: str
    matches: int
    seconds: float
    ops: dict[str, int] = field(default_factory=dict)  # op -> change of its count
    note: str = ""
    details: list[str] = field(default_factory=list)
