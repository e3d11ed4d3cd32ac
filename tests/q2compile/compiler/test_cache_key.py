# SPDX-License-Identifier: Apache-2.0
"""Which files are part of Inductor's cache keys."""

import pytest

from q2compile.runtime_kernels.versions import hash_of


@pytest.mark.parametrize("name", ["pass.py", "kernel.cu", "kernel.cuh", "kernel.cpp", "kernel.h"])
def test_an_edited_source_changes_the_key(name, tmp_path) -> None:
    file = tmp_path / "inner" / name
    file.parent.mkdir()
    file.write_text("one")
    before = hash_of(tmp_path)
    assert hash_of(tmp_path) == before
    file.write_text("two")
    assert hash_of(tmp_path) != before


def test_other_files_do_not(tmp_path) -> None:
    (tmp_path / "pass.py").write_text("one")
    before = hash_of(tmp_path)
    (tmp_path / "notes.txt").write_text("two")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "pass.cpython-311.pyc").write_text("three")
    assert hash_of(tmp_path) == before
