# SPDX-License-Identifier: Apache-2.0
"""State of q2compile that lasts as long as a process: as it is in a new one."""

from q2compile.report.dump_folder import DumpFolder
from q2compile.runtime_kernels import registry
from q2compile.runtime_kernels.cuda import check_results, checks
from q2compile.runtime_kernels.cuda.gemm import first_launch, triton_fp4
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.telemetry import clock


def forget_dump_folders() -> None:
    """The next graph starts its folder anew."""
    DumpFolder.forget_all()


def forget_checks() -> None:
    """Results of self-checks, and of first large GEMMs, are read from disk again, and the sources
    of the kernels."""
    check_results.forget_sources()
    checks.forget_checks()
    first_launch.forget_first_launches()


def forget_failures() -> None:
    """No kernel has failed, in a compiler or later, and nothing was warned of."""
    registry.forget_failures()
    nvrtc.forget_failures()
    triton_fp4.forget_failures()


def restart_clock() -> None:
    """Telemetry counts steps from 0, by the steps of optimizers."""
    clock.restart()
