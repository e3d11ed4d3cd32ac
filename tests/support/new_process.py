# SPDX-License-Identifier: Apache-2.0
"""State of q2compile that lasts as long as a process: as it is in a new one."""

from q2compile.report.dump_folder import DumpFolder
from q2compile.telemetry import clock


def forget_dump_folders() -> None:
    """The next graph starts its folder anew."""
    DumpFolder._open.clear()


def restart_clock() -> None:
    """Telemetry counts steps from 0, by the steps of optimizers."""
    clock._clock.__init__()  # type: ignore[misc]
