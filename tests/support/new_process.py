# SPDX-License-Identifier: Apache-2.0
"""State of q2compile that lasts as long as a process: as it is in a new one."""

from q2compile.report.dump_folder import DumpFolder
from q2compile.runtime_kernels import checks
from q2compile.runtime_kernels.kernel_states import KNOWN
from q2compile.runtime_kernels.registry import CPP
from q2compile.telemetry import clock


def forget_dump_folders() -> None:
    """The next graph starts its folder anew."""
    DumpFolder.forget_all()


def forget_checks() -> None:
    """Nothing is known about any kernel but what is on disk, and the user was warned of nothing.
    CPU kernels, whose checks no process stores, stay checked."""
    known = {check: found for check, found in KNOWN.checks.items() if check[1] == CPP}
    checks.forget()
    KNOWN.checks.update(known)


def restart_clock() -> None:
    """Telemetry counts steps from 0, by the steps of optimizers."""
    clock.restart()
