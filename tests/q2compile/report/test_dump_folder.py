# SPDX-License-Identifier: Apache-2.0
"""The folder of a dump: only files of an earlier dump are replaced."""

import json
import os
import signal
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from q2compile import explain
from q2compile.report.dump_folder import DumpFolder
from q2compile.report.row import Row
from tests.support.new_process import forget_dump_folders

pytestmark = pytest.mark.usefixtures("fresh_compiler")

EAGER = {"inner": "eager"}


def dumped(folder):
    torch._dynamo.reset()
    return explain(nn.Linear(32, 32), torch.randn(4, 32), options={**EAGER, "dump": str(folder)})


def modules(folder):
    return [row["module"] for row in json.loads((folder / "report.json").read_text())]


@pytest.mark.parametrize("name", ["report.txt", "report.json", "report.html"])
def test_a_users_report_is_not_replaced(tmp_path, name):
    (tmp_path / name).write_text("mine")
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"dump: .* holds {name}.*name another folder"):
            dumped(tmp_path)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(name, "mine")]


def test_a_users_graph_is_not_replaced(tmp_path):
    """The next run does not remove it either, even if the first one did not reach its number."""
    for number in (1, 7):
        (tmp_path / f"graph_{number}").mkdir()
        (tmp_path / f"graph_{number}" / "mine.txt").write_text("mine")
    dumped(tmp_path)
    with pytest.raises(ValueError, match="graph_1 holds files that q2compile did not write"):
        dumped(tmp_path)
    forget_dump_folders()
    dumped(tmp_path)
    assert (tmp_path / "graph_0" / "0_dynamo.txt").exists()
    assert [p.read_text() for p in tmp_path.glob("graph_*/mine.txt")] == ["mine", "mine"]


def test_a_report_is_replaced_at_one_stroke(tmp_path, monkeypatch):
    """Who reads it at any moment, or after the process was killed, finds a whole one."""
    dumped(tmp_path)
    before = (tmp_path / "report.json").read_text()

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        dumped(tmp_path)
    assert (tmp_path / "report.json").read_text() == before


class Child:
    """A forked process that dumps a report of ``name``, and then lives on until it is let go."""

    def __init__(self, folder, name):
        self.said, say = os.pipe()
        wait, self.let_go = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    dump = DumpFolder.get(str(folder))
                dump.report.compiled_rows.append(Row(name, (1,)))
                dump.write_report()
                os.write(say, f"{dump.path}\n{[str(w.message) for w in caught]}".encode())
                os.close(self.let_go)
                os.read(wait, 1)
            finally:
                os._exit(0)  # without pytest's goodbye
        os.close(wait)
        folder, self.warned = os.read(self.said, 4096).decode().split("\n")
        self.folder = Path(folder)

    def end(self):
        os.close(self.let_go)
        os.waitpid(self.pid, 0)


def test_processes_that_dump_into_one_folder_keep_apart(tmp_path):
    """A later run deletes their folders when these processes have ended."""
    first, second = Child(tmp_path, "a"), Child(tmp_path, "b")
    aside = tmp_path / f"process{second.pid}"
    assert (first.folder, first.warned) == (tmp_path, "[]")
    assert second.folder == aside
    assert f"another process dumps into {tmp_path}; this one goes to {aside}" in second.warned
    assert (modules(tmp_path), modules(aside)) == (["a"], ["b"])
    os.kill(first.pid, signal.SIGKILL)  # no goodbye: the lock goes with the process
    os.waitpid(first.pid, 0)
    third = Child(tmp_path, "c")
    assert third.folder == tmp_path and aside.exists()  # the second still writes there
    third.end()
    second.end()
    Child(tmp_path, "d").end()
    assert modules(tmp_path) == ["d"] and not aside.exists()


def test_a_forked_process_has_a_folder_of_its_own(tmp_path):
    """For example a DataLoader's worker: it inherits the state of the folder, but gets its own
    folder."""
    dumped(tmp_path)
    child = Child(tmp_path, "a")
    child.end()
    assert modules(tmp_path) == ["weight"] and modules(child.folder) == ["a"]
    assert child.folder == tmp_path / f"process{child.pid}"


def test_ranks_keep_apart_before_torch_distributed_knows_them(tmp_path, monkeypatch):
    """torchrun sets the environment of each rank."""
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert DumpFolder.get(str(tmp_path)).path == tmp_path / f"rank{rank}"
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert DumpFolder.get(str(tmp_path)).path == tmp_path
