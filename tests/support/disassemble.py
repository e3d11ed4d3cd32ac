# SPDX-License-Identifier: Apache-2.0
"""Reads the machine code of a cubin: which instructions, how many, in which loops.

For tests and benchmarks; needs nvdisasm (pip install nvidia-cuda-nvdisasm), no GPU.
"""

import importlib.metadata
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass

_LABEL = re.compile(r"(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


@dataclass(frozen=True)
class Code:
    """names: instructions in order, with their modifiers, like F2FP.SATFINITE.E2M1.F32.PACK_AB;
    loops: first and last index of each, outer and inner;
    descriptors: uniform registers that memory accesses take their descriptors from."""

    names: tuple[str, ...]
    loops: tuple[tuple[int, int], ...]
    descriptors: frozenset[int]

    def count(self, prefix: str) -> int:
        """How many instructions have a name that begins with this."""
        return sum(name.startswith(prefix) for name in self.names)

    def hot_loop(self) -> Counter:
        """Instructions of the longest loop, without the loops inside it (edges of a matrix)."""
        first, last = max(self.loops, key=lambda loop: loop[1] - loop[0])
        inside = set(range(first, last + 1))
        for start, end in self.loops:
            if first < start and end < last:
                inside -= set(range(start, end + 1))
        return Counter(self.names[i].partition(".")[0] for i in inside)


def disassemble(cubin: bytes) -> Code:
    """The code of a cubin with one kernel.

    Raises:
        FileNotFoundError: nvdisasm is not installed.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [_nvdisasm(), file.name], check=True, capture_output=True, text=True
        ).stdout
    names: list[str] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(names)
        elif instruction := _INSTRUCTION.match(line):
            if instruction[1].startswith("BRA") and (target := _TARGET.search(instruction[2])):
                branches.append((len(names), target[1]))
            names.append(instruction[1])
    # A NOP behind the last instruction is padding, and the branch before it goes to itself.
    loops = [(labels[to], at) for at, to in branches if labels.get(to, at) < at]
    descriptors = frozenset(int(r) for r in re.findall(r"desc\[UR(\d+)\]", text))
    return Code(tuple(names), tuple(loops), descriptors)


def _nvdisasm() -> str:
    if found := shutil.which("nvdisasm"):
        return found
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "nvdisasm":
            return str(file.locate())
    raise FileNotFoundError("nvdisasm: pip install nvidia-cuda-nvdisasm")
