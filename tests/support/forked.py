# SPDX-License-Identifier: Apache-2.0
"""Runs Python code in processes of its own. They are forks of one process that has imported torch
and its compiler, which takes five seconds of CPU time, and nothing of q2compile.

    python -m tests.support.forked FOLDER

runs the scripts of FOLDER/scripts.json, one after the other.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    returncode: int
    stdout: str
    stderr: str


def run(folder: Path, scripts: Sequence[tuple[str, ...]]) -> list[Ended]:
    """How each script ends: its code and its arguments. ``folder`` takes the outputs."""
    (folder / "scripts.json").write_text(json.dumps(scripts))
    command = [sys.executable, "-m", "tests.support.forked", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    codes = json.loads((folder / "codes.json").read_text())
    texts = [[(folder / f"{i}.{o}").read_text() for o in "12"] for i in range(len(codes))]
    return [Ended(code, *text) for code, text in zip(codes, texts, strict=True)]


def main() -> None:
    folder = Path(sys.argv[1])
    import torch._inductor.compile_fx  # noqa: F401

    assert not any(name.startswith("q2compile") for name in sys.modules)
    gc.freeze()
    codes = []
    for i, (code, *arguments) in enumerate(json.loads((folder / "scripts.json").read_text())):
        if (child := os.fork()) == 0:
            for output in (1, 2):
                flags = os.O_WRONLY | os.O_CREAT
                os.dup2(os.open(folder / f"{i}.{output}", flags, 0o600), output)
            sys.argv = ["-c", *arguments]
            exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})
            sys.exit()  # which runs what atexit has
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
