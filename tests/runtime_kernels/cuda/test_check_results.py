# SPDX-License-Identifier: Apache-2.0
"""A machine checks a kernel once. The result, passed or failed, is stored on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from q2compile.runtime_kernels import registry
from q2compile.runtime_kernels.cuda import check_results, checks, selfcheck, versions
from q2compile.runtime_kernels.cuda.checked_cases import COLUMNWISE
from q2compile.runtime_kernels.cuda.jit.launch import LaunchError
from q2compile.runtime_kernels.registry import KernelWarning
from tests.support.new_process import forget_checks, forget_failures
from tests.support.pretended_gpu import on_gpu

SCHEME = "nvfp4_ms_eden_pow2"
REQUEST = selfcheck.request_of("quantize", "cuda", 0, SCHEME, COLUMNWISE)


@pytest.fixture(autouse=True)
def on_a_gpu(checked_here, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(check_results, "named", lambda device: ("a GPU", 10, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def of_a_new_process(monkeypatch, request=REQUEST, answer=None) -> tuple[str | None, bool]:
    """The state of a kernel in a new process, and whether the check ran."""
    ran = []
    monkeypatch.setattr(selfcheck, "disagreement", lambda *what: ran.append(what) or answer)
    forget_checks()
    return checks.rejection(request), bool(ran)


def test_of_the_same_gpu_versions_and_sources(monkeypatch, tmp_path) -> None:
    passed_now, passed_before = (None, True), (None, False)
    assert of_a_new_process(monkeypatch) == passed_now
    assert of_a_new_process(monkeypatch) == passed_before
    second_gpu = selfcheck.request_of("quantize", "cuda", 1, SCHEME, COLUMNWISE)
    assert of_a_new_process(monkeypatch, second_gpu) == passed_before
    for other in (("quantize", "triton", *REQUEST.check[2:]), (*REQUEST.check[:3], "mxfp4", None)):
        assert of_a_new_process(monkeypatch, REQUEST._replace(check=other)) == passed_now
    (tmp_path / "own").mkdir()
    source = tmp_path / "own" / "rules.py"
    with_source = REQUEST._replace(sources=(str(source.parent),))
    for text in ("A = 1", "A = 2"):
        source.write_text(text)
        assert of_a_new_process(monkeypatch, with_source) == passed_now
        assert of_a_new_process(monkeypatch, with_source) == passed_before
    monkeypatch.setattr(check_results, "named", lambda device: ("another GPU", 10, 0))
    assert of_a_new_process(monkeypatch) == passed_now


@pytest.mark.parametrize("which", ["torch", "driver", "cuBLASLt", "Triton"])
def test_another_version_is_checked_again(monkeypatch, which) -> None:
    monkeypatch.setattr(versions, "driver_version", lambda: "580.65.06")
    monkeypatch.setattr(versions, "cublaslt_version", lambda: "130100")
    try:
        for times in range(2):
            versions.versions.cache_clear()  # as in a new process
            assert of_a_new_process(monkeypatch) == (None, True)
            assert of_a_new_process(monkeypatch) == (None, False)
            if times == 0 and which == "torch":
                monkeypatch.setattr(torch, "__version__", "99.0")
            if times == 0 and which == "driver":
                monkeypatch.setattr(versions, "driver_version", lambda: "590.1")
            if times == 0 and which == "cuBLASLt":
                monkeypatch.setattr(versions, "cublaslt_version", lambda: "130200")
            if times == 0 and which == "Triton":
                monkeypatch.setattr(versions.importlib.metadata, "version", lambda name: "9.9")
    finally:
        monkeypatch.undo()
        versions.versions.cache_clear()


def test_a_rejection_is_kept_with_its_date(monkeypatch) -> None:
    said = "rejected: it failed its self-check on this GPU: 1 of 9 codes differ"
    for ran in (True, False):
        forget_failures()
        with pytest.warns(KernelWarning, match="1 of 9 codes differ"):
            found, did = of_a_new_process(monkeypatch, answer="1 of 9 codes differ")
        assert did == ran and found is not None and found.startswith(said)
    assert found.removeprefix(said).startswith(" (20")
    with checks.answering(checks.Mode(stored=False, in_child=False)):  # as doctor asks
        assert of_a_new_process(monkeypatch) == (None, True)
    assert of_a_new_process(monkeypatch) == (None, False)


@pytest.mark.parametrize("error", [OSError("disk full"), ImportError("no ptxas")])
def test_what_depends_on_the_moment_is_found_again(monkeypatch, error) -> None:
    ran = []

    def disagreement(*what):
        ran.append(what)
        raise error

    for times in (1, 2):
        monkeypatch.setattr(selfcheck, "disagreement", disagreement)
        forget_checks()
        forget_failures()
        with pytest.warns(KernelWarning, match=str(error)):
            assert str(error) in (checks.rejection(REQUEST) or "")
        assert len(ran) == times


def test_in_a_capture_what_is_kept_needs_no_check(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(LaunchError, match="run the model once before capturing"):
        checks.rejection(REQUEST)
    check_results.store(REQUEST, check_results.Result(None))
    assert checks.rejection(REQUEST) is None


def test_a_folder_that_cannot_be_written(monkeypatch) -> None:
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", "/dev/null/nowhere")
    assert [of_a_new_process(monkeypatch) for _ in range(2)] == [(None, True)] * 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"reason": null}', '{"reason": 1, "x": 2}'])
def test_a_damaged_file_is_no_result(monkeypatch, tmp_path, content) -> None:
    assert of_a_new_process(monkeypatch) == (None, True)
    (path,) = tmp_path.glob("*.checked")
    path.write_text(content)
    assert of_a_new_process(monkeypatch) == (None, True)
    assert of_a_new_process(monkeypatch) == (None, False)


@pytest.mark.parametrize("file", ["ptx.cuh", "rotate_quantize.cu", "quantizers.py"])
def test_a_kernel_that_changed_is_checked_again(monkeypatch, file) -> None:
    assert of_a_new_process(monkeypatch) == (None, True)
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b" " * (path.name == file))
    assert of_a_new_process(monkeypatch) == (None, True)
    monkeypatch.undo()


def test_a_self_check_without_memory_is_done_again(gpu, monkeypatch):
    gpu((12, 0))
    results = [torch.OutOfMemoryError("CUDA out of memory"), None]

    def disagreement(*what):
        if error := results.pop(0):
            raise error

    monkeypatch.setattr(selfcheck, "disagreement", disagreement)
    args = on_gpu(COLUMNWISE, "nvfp4_ms_eden_pow2")
    with pytest.raises(torch.OutOfMemoryError):
        registry.serving("quantize", args)
    assert registry.serving("quantize", args).name == "cuda"


@pytest.mark.parametrize(
    "text, want",
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul", "580.65.06"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  590.1.2  Rel", "590.1.2"),
    ],
)
def test_the_driver_s_version(monkeypatch, tmp_path, text, want) -> None:
    (tmp_path / "version").write_text(text + "\nGCC version: 12.3\n")
    monkeypatch.setattr(versions, "DRIVER_FILE", tmp_path / "version")
    versions.driver_version.cache_clear()
    assert versions.driver_version() == want
    versions.driver_version.cache_clear()
