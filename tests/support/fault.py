# SPDX-License-Identifier: Apache-2.0
"""A fault to plant (planted_faults.py)."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """name: what is wrong then, in words. tests: what is handed to pytest."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, text: str) -> str:
        """The text of the file with the fault."""
        assert text.count(self.old) == 1, f"{self.file} has {text.count(self.old)} times {self.old}"
        return text.replace(self.old, self.new)


def fault(name: str, file: str, old: str, new: str, *tests: str) -> Fault:
    return Fault(name, file, old, new, tuple(f"tests/{test}" for test in tests))
