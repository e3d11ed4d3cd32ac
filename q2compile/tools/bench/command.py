# SPDX-License-Identifier: Apache-2.0
"""`q2compile bench`: measures and checks the machine it is on, in some minutes.

    q2compile bench [--only GROUP,...] [--out FILE] [--limit SECONDS]
    q2compile bench --read FILE

Prints what it finds and writes the same as a report (report.py), to be sent back. Each group runs
in a process of its own with a time limit: a kernel that crashes or hangs takes this process with it
and not the report. A CPU runs its C++ kernels and references at small sizes, which shows that they
work and nothing about speed. --read prints a report of another machine, and what is wrong there.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from q2compile.errors import ConfigError, one_of
from q2compile.tools.arguments import BENCH_UNITS
from q2compile.tools.bench import machine
from q2compile.tools.bench.bench import Bench
from q2compile.tools.bench.measurements import GROUPS, measured
from q2compile.tools.bench.report import SCHEMA, Line, Log, doubts, faults, read, text

_MOST_CHARACTERS = 4000  # characters of a process's stderr that a report keeps
_BEFORE_THE_LIMIT = 5.0  # seconds in which a hang's traceback can be written
_GROUP = (sys.executable, "-m", "q2compile.tools.bench.command")
_ON_CPU = ": torch sees no GPU. C++ kernels and references run at small sizes; times say little"


def run(options: Namespace) -> int:
    """Returns the exit status: 0, or 1 where a fault was found."""
    if options.read is not None:
        return _read(options.read)
    groups = [one_of("group in --only", name, GROUPS) for name in options.only.split(",")]
    out: Path = options.out
    if not out.parent.is_dir():
        raise ConfigError(f"--out: {out.parent} is not a folder")
    if out.is_dir():  # checked before the minutes that measuring takes
        raise ConfigError(f"--out: {out} is a folder; allowed: a file's name in one")
    out.write_text("", encoding="utf-8")
    start = time.time()
    log = Log(out, start)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    about = machine.about(device)
    log.write("machine", schema=SCHEMA, **about, command=f"q2compile bench --only {options.only}")
    _print_machine(about, Bench.of(device))
    for group in groups:
        run_group(group, log, out, start, options.limit)
    print()
    log.write("done", seconds=round(time.time() - start, 1))
    wrong = _print_faults(read(out))
    print(f"{out} written, after {time.time() - start:.0f} s")
    return int(bool(wrong))


def _read(path: Path) -> int:
    try:
        lines = read(path)
    except ValueError as error:
        raise ConfigError(f"--read: {error}") from None
    group = ""
    print("\n".join(f"{name:9} {value}" for name, value in lines[0].items()))
    print(f"units     {BENCH_UNITS}")
    for line in lines:
        if line["kind"] == "row":
            print(*([f"\n{line['group']}"] * (line["group"] != group)), text(line), sep="\n")
            group = line["group"]
    print()
    return int(bool(_print_faults(lines)))


def _print_machine(about: dict[str, Any], bench: Bench) -> None:
    print(f"device    {about['device']['name']}{'' if bench.on_gpu else _ON_CPU}")
    print("versions  " + ", ".join(f"{name} {of}" for name, of in about["versions"].items()))
    print(f"units     {BENCH_UNITS}", flush=True)
    if bench.sheet is None and bench.on_gpu:
        print("predicted nothing, because q2compile/cost_model does not know this GPU", flush=True)


def _print_faults(lines: Sequence[Line]) -> list[str]:
    """Prints and returns what is wrong."""
    for doubt in doubts(lines):
        print(f"doubt     {doubt}")
    wrong = faults(lines)
    for fault in wrong:
        print(f"FAULT     {fault}")
    if not wrong:
        print("faults    none")
    return wrong


def run_group(
    group: str, log: Log, out: Path, start: float, limit: float, program: Sequence[str] = _GROUP
) -> None:
    """Runs a group in a process of its own, and notes how it ended."""
    began = time.time()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [*program, group, str(out.resolve()), str(start), str(limit)],
            stderr=errors,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
            how = "finished" if status == 0 else _ended_by(status)
        except subprocess.TimeoutExpired:
            _stop(process)
            how = f"was stopped after {limit:.0f} s"
        except BaseException:  # Ctrl-C goes to this process alone
            _stop(process)
            raise
        errors.seek(0)
        last_lines = errors.read().decode(errors="replace")
    parts = {"stderr": last_lines[-_MOST_CHARACTERS:]} if how != "finished" else {}
    log.write("ended", group=group, how=how, seconds=round(time.time() - began, 1), **parts)
    if how != "finished":
        print(f"  {group}: the process {how}\n{last_lines[-_MOST_CHARACTERS:]}", flush=True)


def _ended_by(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _stop(process: subprocess.Popen) -> None:
    """Stop a process and what it has started: Inductor compiles in processes of its own."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def measure_group(group: str, path: Path, start: float) -> None:
    """Appends the lines of a group to a report, and prints its rows."""
    log = Log(path, start)
    log.write("begun", group=group, name="the first use of the device")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    log.write("state", group=group, when="before", state=machine.state(device))
    print(f"\n{group}", flush=True)
    for row in measured(Bench.of(device, log, group)):
        line = row.as_line()
        log.write("row", **line)
        print(text(line), flush=True)
    log.write("state", group=group, when="after", state=machine.state(device))


if __name__ == "__main__":  # GROUP FILE START LIMIT
    group, path, start, limit = sys.argv[1:]
    faulthandler.enable()
    if float(limit) > 2 * _BEFORE_THE_LIMIT:
        faulthandler.dump_traceback_later(float(limit) - _BEFORE_THE_LIMIT)
    measure_group(group, Path(path), float(start))
