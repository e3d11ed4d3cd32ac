# SPDX-License-Identifier: Apache-2.0
"""Kernels on a CPU (tests/support/emulation), for tests that use the fixture `on_cpu`. A test with
a parameter `architecture` or `room` has another GPU."""

from __future__ import annotations

import shutil

import pytest

from tests.support.emulation.on_cpu import launches_on_cpu


@pytest.fixture
def architecture() -> str:
    """Whose conversion instructions the kernels have."""
    return "sm_90a"


@pytest.fixture
def room() -> int:
    """Bytes of shared memory of a multiprocessor."""
    return 228 * 1024


@pytest.fixture
def on_cpu(architecture, room, monkeypatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    launches_on_cpu(monkeypatch, architecture, room)
