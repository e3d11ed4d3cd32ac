# SPDX-License-Identifier: Apache-2.0
"""State of q2compile that lasts as long as a process: as it is in a new one."""

import pytest

from q2compile.report.dump_folder import DumpFolder
from q2compile.runtime_kernels import registry
from q2compile.runtime_kernels.cuda import checks
from q2compile.runtime_kernels.cuda.gemm import first_launch
from q2compile.telemetry import clock


def forget_dump_folders() -> None:
    """The next graph starts its folder anew."""
    DumpFolder._open.clear()


def forget_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of self-checks, and of first large GEMMs, are read from disk again."""
    monkeypatch.setattr(checks, "_RESULTS", {})
    monkeypatch.setattr(first_launch, "_RESULTS", {})


def forget_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel has failed, and nothing was warned of."""
    monkeypatch.setattr(registry, "_FAILURES", {})
    monkeypatch.setattr(registry, "_WARNED", {})


def restart_clock() -> None:
    """Telemetry counts steps from 0, by the steps of optimizers."""
    clock._clock.__init__()  # type: ignore[misc]
