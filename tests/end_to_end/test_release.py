# SPDX-License-Identifier: Apache-2.0
"""The published files: versions agree, and the sdist has every file that its documents link."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from q2compile import __version__
from tests.support import release
from tests.support.tracked import tracked

ROOT = Path(__file__).resolve().parents[2]


def test_versions_agree() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^version: {re.escape(__version__)}$", citation, re.MULTILINE)
    date = re.search(r"^date-released: (\S+)$", citation, re.MULTILINE)
    newest = re.search(r"^## (\d\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert date and newest and newest.groups() == (__version__, date[1])


def test_a_missing_python_fails_the_release(capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["--pythons", "2.99", "3.98"]) == 1
    assert "no Python 2.99, 3.98" in capsys.readouterr().out


def test_this_python_is_found() -> None:
    version = "{}.{}".format(*sys.version_info[:2])
    found = release.interpreter(version)
    assert found is not None and found.exists()


@pytest.mark.skipif(
    importlib.util.find_spec("build") is None or not (ROOT / ".git").exists(),
    reason="needs the package build, and a clone",
)
def test_the_sdist_has_every_file(tmp_path: Path) -> None:
    """All files that git tracks, so that `make demo` and `make test` run in it."""
    for path in tracked(ROOT):
        copy = tmp_path / "tree" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation"]
    command += ["--outdir", str(tmp_path), str(tmp_path / "tree")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (sdist,) = tmp_path.glob("q2compile-*.tar.gz")
    assert sdist.name == f"q2compile-{__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        names = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
        archive.extractall(tmp_path / "unpacked", filter="data")
    expected = {path.relative_to(ROOT).as_posix() for path in tracked(ROOT)}
    assert expected - names == set()
    made = {name for name in names - expected if not name.startswith("q2compile.egg-info/")}
    assert made == {"PKG-INFO", "setup.cfg"}
    (root,) = (tmp_path / "unpacked").iterdir()
    assert {p.relative_to(root).as_posix() for p in tracked(root)} - {"setup.cfg"} == expected
    assert release.links_broken_in(sdist) == []
