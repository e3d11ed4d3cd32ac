# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of the page: one dump, which they read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from q2compile.tools import cli
from tests.support.page_dumps import dump_of_net


@pytest.fixture(scope="session")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a dump with its page, report.html."""
    torch._dynamo.reset()
    folder = dump_of_net(tmp_path_factory.mktemp("graphs"))
    assert cli.main(["report", str(folder)]) == 0
    return folder
