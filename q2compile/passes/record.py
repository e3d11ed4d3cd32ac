"""What a pass did, for dumps and reports."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PassRecord:
    """What one pass did to one graph."""

    graph: str
    name: str
    matches: int
    seconds: float
    ops: dict[str, int] = field(default_factory=dict)  # op -> change of its count
    note: str = ""
