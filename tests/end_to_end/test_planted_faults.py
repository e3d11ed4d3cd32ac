# SPDX-License-Identifier: Apache-2.0
"""The faults of tests/support/planted_faults.py can be planted. A run by hand shows which ones no
test catches."""

from __future__ import annotations

from pathlib import Path

from tests.support.planted_faults import FAULTS, Fault, lives

ROOT = Path(__file__).resolve().parents[2]
# Folders and single files of q2compile/, whose tests are in the folders of those names.
WITHOUT = {"__init__.py", "backend.py", "errors.py"}


def test_it_can_be_planted() -> None:
    for fault in FAULTS:
        text = (ROOT / fault.file).read_text()
        assert fault.planted(text) != text
        if fault.file.endswith(".py"):
            compile(fault.planted(text), fault.file, "exec")
        assert fault.tests and all((ROOT / test).exists() for test in fault.tests)


def test_every_room_has_one() -> None:
    rooms = {"/".join(Path(fault.file).parts[:2]) for fault in FAULTS}
    front = {f"q2compile/{p.name}" for p in (ROOT / "q2compile").iterdir() if p.name[0] not in "_."}
    assert front - rooms == {f"q2compile/{name}" for name in WITHOUT if name != "__init__.py"} | {
        "q2compile/py.typed"
    }
    assert {"runtime_kernels/numerics", "runtime_kernels/ops", "runtime_kernels/cuda"} <= rooms
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40


def test_a_fault_that_no_test_sees_lives(tmp_path: Path) -> None:
    """A fault that a test sees does not live. The file is restored after both."""
    package = tmp_path / "installed" / "q2compile"
    package.mkdir(parents=True)
    (package / "__init__.py").symlink_to(tmp_path / "one.py")
    (tmp_path / "one.py").write_text("ONE = 1\nTWO = 2\n")
    test = "from q2compile import ONE\ndef test(): assert ONE == 1\n"
    (tmp_path / "test_one.py").write_text(test)
    found = {
        old: lives(Fault(old, "one.py", old, f"{old}1", ("test_one.py",)), tmp_path)
        for old in ("ONE = 1", "TWO = 2")
    }
    assert found == {"ONE = 1": False, "TWO = 2": True}
    assert (tmp_path / "one.py").read_text() == "ONE = 1\nTWO = 2\n"
