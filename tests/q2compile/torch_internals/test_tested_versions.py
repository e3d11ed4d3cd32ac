# SPDX-License-Identifier: Apache-2.0
"""Which torch versions are supported, and the warning for others."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

from q2compile import explain
from q2compile.torch_internals import tested_versions
from q2compile.torch_internals.tested_versions import TESTED, UntestedTorchWarning
from tests.support.warned import texts

pytestmark = pytest.mark.usefixtures("fresh_compiler")

OPTIONS = {"inner": "eager"}
ROOT = Path(__file__).resolve().parents[3]


def warnings_of(monkeypatch, version):
    """The warnings of two compilations under this version of torch."""
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    tested_versions._warn_if_untested.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for width in (32, 64):
            report = explain(nn.Linear(width, 32), torch.randn(4, width), options=OPTIONS)
            assert [row.taken for row in report.rows] == [True]
    return texts(caught, UntestedTorchWarning)


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0", "2.16.0.dev20261122+cu130", "3.0.0a0"])
def test_an_untested_torch_is_named_once_and_runs(monkeypatch, version):
    """The warning names the tested versions, this version, and what to report."""
    (text,) = warnings_of(monkeypatch, version)
    oldest, newest = TESTED
    assert f"tested with torch {oldest} to {newest}, and this is {version}." in text
    assert "report" in text and "doctor" in text


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.3.post1", "2.15.0a0+git1234"])
def test_a_tested_torch_is_not_spoken_of(monkeypatch, version):
    assert warnings_of(monkeypatch, version) == []


def test_the_table_the_bound_the_warning_and_ci_name_the_same_versions():
    """TESTED, the bound in pyproject.toml, the table of runs and the versions that CI runs beside
    the pinned one agree."""
    table = (ROOT / "tests" / "VERSIONS.md").read_text()
    rows = re.findall(r"^\| (\d+\.\d+)\.\d+ \|", table, re.MULTILINE)
    by_age = sorted(rows, key=lambda version: [int(part) for part in version.split(".")])
    assert (by_age[0], by_age[-1]) == TESTED
    bounds = re.findall(r'"torch(.*)"', (ROOT / "pyproject.toml").read_text())
    assert f">={TESTED[0]}" in bounds
    ci = (ROOT / ".ci" / "run").read_text()
    run_by_ci = re.findall(r"^make test-internals TORCH=(.*)$", ci, re.MULTILINE)
    assert {v.rpartition(".")[0] for v in run_by_ci} == set(TESTED)
    assert re.findall(r"^begin_install (.*)$", ci, re.MULTILINE) == run_by_ci
