# SPDX-License-Identifier: Apache-2.0
"""One group of `q2compile bench`, in a process of its own: a kernel that crashes or hangs takes
this process with it and not the report.

    python -m q2compile.tools.bench.child GROUP FILE START LIMIT
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from q2compile.tools.bench import machine
from q2compile.tools.bench.bench import Bench
from q2compile.tools.bench.measurements import measured
from q2compile.tools.bench.report import Log, text

_BEFORE_THE_LIMIT = 5.0  # seconds in which a hang's traceback can be written


def main(argv: Sequence[str] | None = None) -> int:
    """Appends the lines of a group to a report, and prints its rows. The exit status is 0."""
    group, path, start, _ = sys.argv[1:] if argv is None else argv
    log = Log(Path(path), float(start))
    log.write("begun", group=group, name="the first use of the device")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    bench = Bench.of(device, log, group)
    log.write("state", group=group, when="before", state=machine.state(device))
    print(f"\n{group}", flush=True)
    for row in measured(bench):
        line = row.as_line()
        log.write("row", **line)
        print(text(line), flush=True)
    log.write("state", group=group, when="after", state=machine.state(device))
    return 0


def _traced(limit: float) -> None:
    """Makes a crash, and what still runs shortly before the limit, leave a traceback on stderr."""
    faulthandler.enable()
    if limit > 2 * _BEFORE_THE_LIMIT:
        faulthandler.dump_traceback_later(limit - _BEFORE_THE_LIMIT)


if __name__ == "__main__":
    _traced(float(sys.argv[4]))
    raise SystemExit(main())
