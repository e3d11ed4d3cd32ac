# SPDX-License-Identifier: Apache-2.0
"""The records of a folder, as its page has them."""

import json

import pytest

from q2compile.telemetry.read import MOST_STEPS, read_folder
from q2compile.tools.page.document import of_records
from tests.support.page_records import NONFINITE, record, written


def test_data(tmp_path):
    written(tmp_path, {"event": "start"}, record(0), record(2, error=0.2), NONFINITE)
    written(tmp_path, record(2, error=0.123456), rank=1)
    data = read_folder(tmp_path)
    assert data["steps"] == [0, 2] and data["ranks"] == [0, 1]
    one, other = data["operands"]
    assert one["curves"]["relative_error"] == [0.1, 0.2]
    assert other["curves"]["relative_error"] == [None, 0.1235]
    assert one["curves"]["zero"] == [0.0, 0.0] and one["curves"]["changed"] == [None, None]
    assert data["nonfinite"] == [{"rank": 0, **NONFINITE}]
    assert of_records(data) == "1 module, steps 0 to 2, on 2 ranks."


def test_a_resumed_run_and_a_line_that_was_cut_off(tmp_path):
    written(tmp_path, record(0), record(2), {"event": "start"}, record(2, error=0.3))
    with (tmp_path / "rank0.jsonl").open("a") as file:
        file.write('{"step": 4, "mod')
    (row,) = read_folder(tmp_path)["operands"]
    assert row["curves"]["relative_error"] == [0.1, 0.3]


def test_of_many_steps_some_are_shown(tmp_path):
    written(tmp_path, *(record(step) for step in range(1000)))
    steps = read_folder(tmp_path)["steps"]
    assert len(steps) == MOST_STEPS and steps[0] == 0 and steps[-1] == 999


def test_a_later_run_replaces_what_an_earlier_one_recorded_of_its_steps(tmp_path):
    """A training that begins again replaces all records; a resumed one keeps those before it."""
    start, later = {"event": "start"}, {**NONFINITE, "step": 4}
    earlier = [start, record(0), NONFINITE, later, record(4), record(4, "down")]
    written(tmp_path, *earlier, start, record(4, error=0.3), record(6, error=0.4))
    data = read_folder(tmp_path)
    (row,) = data["operands"]
    assert data["steps"] == [0, 4, 6] and row["curves"]["relative_error"] == [0.1, 0.3, 0.4]
    assert data["nonfinite"] == [{"rank": 0, **NONFINITE}]
    written(tmp_path, *earlier, start, record(0, error=0.3))
    data = read_folder(tmp_path)
    assert data["steps"] == [0] and data["nonfinite"] == []
    assert [o["curves"]["relative_error"] for o in data["operands"]] == [[0.3]]


BAD = [b"{", b"3", b'{"step": 1}', b'{"step": "a", "module": "up"}', b"\xff\xfe"]
BAD += [b'{"event": "nonfinite", "step": 1}', json.dumps(record(0, format=3)).encode()]


@pytest.mark.parametrize("line", BAD)
def test_other_files_are_refused(line, tmp_path):
    (tmp_path / "rank0.jsonl").write_bytes(line + f"\n{json.dumps(record(1))}\n".encode())
    with pytest.raises(ValueError, match="rank0.jsonl, line 1: not as q2compile writes it"):
        read_folder(tmp_path)


def test_after_an_inf_the_last_finite_record_stays(tmp_path):
    """With its step, although later records have no error."""
    written(tmp_path, record(0), record(2, error=0.2), *(record(s, error=None) for s in (4, 6)))
    data = read_folder(tmp_path)
    (row,) = data["operands"]
    assert row["last"] == {"step": 2, "relative_error": 0.2} and data["last"] == 6
    assert row["gaussian"] == pytest.approx(0.0957, abs=1e-3)  # of nvfp4, by q2compile tables
    written(tmp_path, record(0, error=None))
    assert read_folder(tmp_path)["operands"][0]["last"] is None
