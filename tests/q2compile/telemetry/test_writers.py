# SPDX-License-Identifier: Apache-2.0
"""TensorBoard's events, by a stand-in for its writer; and a folder that becomes unwritable."""

import json
import shutil
import sys
import types

import pytest
import torch

from q2compile.runtime_kernels.numerics.statistics import SUMS
from q2compile.telemetry.copies import HostCopy
from q2compile.telemetry.folder import Folder, Record, TelemetryWarning
from q2compile.telemetry.options import TelemetryOptions
from q2compile.telemetry.watch import Finding
from q2compile.telemetry.writers import Tensorboard
from tests.support.page_records import record


class Writer:
    def __init__(self, path):
        self.path, self.seen = path, []

    def add_scalar(self, tag, value, step):
        self.seen.append((tag, value, step))

    def add_text(self, tag, text, step):
        self.seen.append((tag, text, step))

    def flush(self):
        self.seen.append("flushed")


def test_scalars(monkeypatch, tmp_path):
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    board = Tensorboard.where_installed(tmp_path, ("amax", "changed"))
    row = {"step": 3, "module": "up", "gemm": "fprop", "operand": "x", "amax": 2.0}
    finding = Finding((3,), 3, "up", "fprop", "x")
    board.write([{**row, "changed": None}], finding)
    board.flush()
    text = "NaN or Inf first in x of fprop of up, at step 3"
    assert board._writer.seen == [("amax/up.fprop.x", 2.0, 3), ("nonfinite", text, 3), "flushed"]


def test_not_installed(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert Tensorboard.where_installed(tmp_path, ()) is None


def test_a_folder_that_is_gone_ends_no_training(tmp_path):
    folder = Folder(TelemetryOptions(to=str(tmp_path / "records"), tensorboard=False))
    shutil.rmtree(tmp_path / "records")
    rows = [("up", "fprop", "x", "nvfp4", 0)]
    folder.add(Record(0, rows, 1, [], HostCopy.of(torch.zeros(len(SUMS)))))
    with pytest.warns(TelemetryWarning, match="records: .*; unwritten records are lost"):
        folder.flush()


def test_the_summary_keeps_the_last_finite_records(tmp_path):
    """The last finite record of each operand. The worst operand has the largest error relative to
    its scheme's on Gaussian data: .0872 for 4/6, .0978 for MS-EDEN."""
    folder = Folder(TelemetryOptions(to=str(tmp_path), tensorboard=False))
    up = record(0, "up", 0.11, format="nvfp4_ms_eden")
    down = record(0, "down", 0.1, format="nvfp4_46")
    folder._write([up, down], None)
    folder._write(
        [
            record(2, "up", 0.12, format="nvfp4_ms_eden"),
            {**down, "step": 2, "relative_error": None},
        ],
        None,
    )
    folder._write([{**row, "step": 4, "relative_error": None} for row in (up, down)], None)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["step"], summary["operands"]) == (4, 0)
    assert [(r["module"], r["step"]) for r in summary["worst"]] == [("up", 2), ("down", 0)]
    assert folder.worst().startswith(
        "worst operand: x of fprop of up, relative error 0.120 at step 2, 1.23 times that of "
        "Gaussian data; q2compile report "
    )
    folder._write([{**down, "step": 6, "relative_error": 0.115}], None)
    assert folder.worst().startswith("worst operand: x of fprop of down, relative error 0.115")
