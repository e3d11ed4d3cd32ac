# SPDX-License-Identifier: Apache-2.0
"""A queue of runs over several devices: one process for each device, taking the next run.

A process trains all seeds of one run, so that it compiles once, and ends. It is this program's own
command for that run with one device to see, so a run is the same with one device and with many.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

STOPPED = 75  # exit status of a process that left runs unfinished, with checkpoints
GRACE = 20  # seconds after the deadline before a process is ended that has not left by itself


@dataclass
class Worker:
    job: int
    device: str
    process: subprocess.Popen[bytes]


def visible_to(device: str) -> dict[str, str]:
    """The environment of a process that sees one device, cuda:2, as its only one."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return dict(os.environ)
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    physical = listed.split(",")[int(number)] if listed else number
    return {**os.environ, "CUDA_VISIBLE_DEVICES": physical}


def run_all(
    commands: Sequence[Sequence[str]],
    devices: Sequence[str],
    deadline: float,
    between: Callable[[], None],
) -> dict[int, int]:
    """Run every command, in order, on the next free device; exit statuses by index.

    A command gets ``--device``, ``--bar`` and ``--until``, the deadline, of `time.time`; after it
    nothing is started. between: called about twice a second.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))  # through the finally below
    waiting, free = list(range(len(commands))), list(devices)
    working: list[Worker] = []
    statuses: dict[int, int] = {}
    try:
        while working or (waiting and time.time() < deadline):
            while waiting and free and time.time() < deadline:
                job, device = waiting.pop(0), free.pop(0)
                command = [*commands[job], "--device", device.partition(":")[0]]
                command += ["--bar", str(devices.index(device))]
                command += ["--until", str(deadline)]
                process = subprocess.Popen(command, env=visible_to(device))
                working.append(Worker(job, device, process))
            time.sleep(0.5)
            if late := time.time() > deadline + GRACE:
                end(working)
            for worker in [w for w in working if w.process.poll() is not None]:
                working.remove(worker)
                free.append(worker.device)
                status = worker.process.returncode
                statuses[worker.job] = STOPPED if late and status < 0 else status
            between()
    finally:
        end(working)
    return {**dict.fromkeys(waiting, STOPPED), **statuses}


def end(working: Sequence[Worker]) -> None:
    """End the processes; each keeps its last checkpoint."""
    for worker in working:
        worker.process.terminate()
    for worker in working:
        worker.process.wait()


def this_program() -> list[str]:
    return [sys.executable, sys.argv[0]]
