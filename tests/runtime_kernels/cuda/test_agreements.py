# SPDX-License-Identifier: Apache-2.0
"""A machine checks a kernel once: that it agrees is kept on disk, that it does not is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from q2compile.runtime_kernels import registry
from q2compile.runtime_kernels.cuda import agreements, selfcheck
from q2compile.runtime_kernels.cuda.checked_cases import COLUMNWISE
from q2compile.runtime_kernels.cuda.jit.launch import LaunchError
from q2compile.runtime_kernels.registry import KernelWarning
from tests.support.pretended_gpu import on_gpu

CHECK = ("quantize", "cuda", torch.device("cuda", 0), "nvfp4_ms_eden_pow2", COLUMNWISE)


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(agreements, "_named", lambda device: ("a GPU", 10, 0))


def verdict_of_a_new_process(check=CHECK, sources=(), answer=None) -> tuple[str | None, bool]:
    """And whether it ran the check."""
    ran = []
    verdicts: dict[tuple, str | None] = {}
    verdict = selfcheck.judge(verdicts, check, lambda: ran.append(check) or answer, sources)
    assert verdicts == {check: verdict}
    return verdict, bool(ran)


def test_of_the_same_gpu_versions_and_sources(monkeypatch, tmp_path) -> None:
    agreed_now, agreed_before = (None, True), (None, False)
    assert verdict_of_a_new_process() == agreed_now
    assert verdict_of_a_new_process() == agreed_before
    second_gpu = (*CHECK[:2], torch.device("cuda", 1), *CHECK[3:])
    assert verdict_of_a_new_process(second_gpu) == agreed_before
    for other in ((CHECK[0], "triton", *CHECK[2:]), (*CHECK[:3], "mxfp4_rtn", None)):
        assert verdict_of_a_new_process(other) == agreed_now
    (tmp_path / "own").mkdir()
    source = tmp_path / "own" / "rules.py"
    for text in ("A = 1", "A = 2"):
        source.write_text(text)
        agreements._hash.cache_clear()  # as in a new process
        assert verdict_of_a_new_process(sources=(source.parent,)) == agreed_now
        assert verdict_of_a_new_process(sources=(source.parent,)) == agreed_before
    monkeypatch.setattr(agreements, "_versions", lambda: ("99.0",))
    assert verdict_of_a_new_process() == agreed_now
    monkeypatch.setattr(agreements, "_named", lambda device: ("another GPU", 10, 0))
    assert verdict_of_a_new_process() == agreed_now


def test_a_disagreement_is_found_again() -> None:
    for _ in range(2):
        registry._SAID.clear()
        with pytest.warns(KernelWarning, match="1 of 9 codes differ"):
            verdict, ran = verdict_of_a_new_process(answer="1 of 9 codes differ")
        assert ran and verdict == "it failed its self-check on this GPU: 1 of 9 codes differ"


def test_in_a_capture_what_is_kept_needs_no_check(monkeypatch) -> None:
    monkeypatch.setattr(selfcheck, "_VERDICTS", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(LaunchError, match="run the model once before capturing"):
        selfcheck._refusal(CHECK)
    agreements.keep(CHECK)
    assert selfcheck._refusal(CHECK) is None


def test_a_folder_that_cannot_be_written(monkeypatch) -> None:
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", "/dev/null/nowhere")
    assert [verdict_of_a_new_process() for _ in range(2)] == [(None, True)] * 2


@pytest.mark.parametrize("file", ["ptx.cuh", "rotate_quantize.cu", "quantizers.py"])
def test_a_kernel_that_changed_is_checked_again(monkeypatch, file) -> None:
    assert verdict_of_a_new_process() == (None, True)
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b" " * (path.name == file))
    agreements._hash.cache_clear()
    assert verdict_of_a_new_process() == (None, True)
    monkeypatch.undo()
    agreements._hash.cache_clear()


def test_a_self_check_without_memory_is_done_again(gpu, monkeypatch):
    gpu((12, 0))
    verdicts = [torch.OutOfMemoryError("CUDA out of memory"), None]

    def disagreement(*what):
        if error := verdicts.pop(0):
            raise error

    monkeypatch.setattr(selfcheck, "disagreement", disagreement)
    args = on_gpu(COLUMNWISE, "nvfp4_ms_eden_pow2")
    with pytest.raises(torch.OutOfMemoryError):
        registry.serving("quantize", args)
    assert registry.serving("quantize", args).name == "cuda"
