# SPDX-License-Identifier: Apache-2.0
"""A machine checks a kernel once. The result, passed or failed, is stored on disk."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from q2compile.runtime_kernels import check_results, checks, registry, selfcheck, versions
from q2compile.runtime_kernels.cuda.jit.launch import LaunchError
from q2compile.runtime_kernels.registry import KernelWarning
from tests.support.checked_forms import COLUMNWISE, form
from tests.support.new_process import forget_checks
from tests.support.pretended_gpu import on_gpu

SCHEME = "nvfp4_ms_eden_pow2"
GPU = torch.device("cuda", 0)
REQUEST = selfcheck.request_of("cuda", GPU, form(COLUMNWISE, SCHEME))
OTHER = selfcheck.request_of("cuda", GPU, form(COLUMNWISE, "mxfp4_sr"))


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


def test_rejections_are_known_by_their_names(monkeypatch) -> None:
    """As soon as they are stored. They are part of the keys of Inductor's caches."""
    assert of_a_new_process(monkeypatch) == (None, True)
    assert check_results.rejections() == ()
    with pytest.warns(KernelWarning):
        of_a_new_process(monkeypatch, OTHER, "1 of 9 codes differ")
    (name,) = check_results.rejections()
    assert name == check_results._path(OTHER).stem
    forget_checks()
    assert check_results.rejections() == (name,)
    assert check_results.forget_rejections() and check_results.rejections() == ()


def test_of_the_same_gpu_versions_and_sources(monkeypatch, tmp_path) -> None:
    passed_now, passed_before = (None, True), (None, False)
    assert of_a_new_process(monkeypatch) == passed_now
    assert of_a_new_process(monkeypatch) == passed_before
    second_gpu = selfcheck.request_of("cuda", torch.device("cuda", 1), form(COLUMNWISE, SCHEME))
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
        forget_checks()
        with pytest.warns(KernelWarning, match="1 of 9 codes differ"):
            found, did = of_a_new_process(monkeypatch, answer="1 of 9 codes differ")
        assert did == ran and found is not None and found.startswith(said)
    assert found.removeprefix(said).startswith(" (20")
    with checks.answering(stored=False, in_child=False):  # as doctor asks
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
        with pytest.warns(KernelWarning, match=str(error)):
            assert str(error) in (checks.rejection(REQUEST) or "")
        assert len(ran) == times


def test_in_a_capture_what_is_kept_needs_no_check(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(LaunchError, match="run the model once before capturing"):
        checks.rejection(REQUEST)
    check_results.store(REQUEST, check_results.Result(None))
    assert checks.rejection(REQUEST) is None


def test_where_nothing_can_be_written_each_process_checks(monkeypatch, tmp_path) -> None:
    """Neither the cache folder nor the temporary one."""

    def full(*paths):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert [of_a_new_process(monkeypatch) for _ in range(2)] == [(None, True)] * 2
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        LaunchError("cublasLtMatmul: ALLOC_FAILED (3)"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=lambda error: str(error)[:30],
)
def test_a_check_that_lacked_memory_is_no_verdict(gpu, monkeypatch, error):
    """It runs again at the next call, and the kernel serves then."""
    gpu((12, 0))
    results, stored = [error, None], []

    def disagreement(*what):
        if error := results.pop(0):
            raise error

    monkeypatch.setattr(selfcheck, "disagreement", disagreement)
    monkeypatch.setattr(check_results, "store", lambda _, result: stored.append(result.reason))
    args = on_gpu(COLUMNWISE, "nvfp4_ms_eden_pow2")
    with pytest.raises(type(error)):
        registry.choose("quantize", args)
    assert registry.choose("quantize", args).name == "cuda"
    assert stored == [None] and registry.left_out() == []


def test_only_wrong_numbers_are_held_against_a_kernel_for_good(monkeypatch, tmp_path) -> None:
    """Any other rejection may have come from the moment, and is forgotten after a day."""
    monkeypatch.setattr(selfcheck, "disagreement", lambda *what: 1 / 0)
    forget_checks()
    with pytest.warns(KernelWarning):
        assert "ZeroDivisionError" in checks.rejection(REQUEST)
    now = time.time()
    for hours, runs in ((0, False), (23, False), (25, True), (-1, True)):
        monkeypatch.setattr(time, "time", lambda hours=hours: now + 3600 * hours)
        assert (check_results.stored(REQUEST) is None) == runs
    monkeypatch.setattr(time, "time", lambda: now)
    with pytest.warns(KernelWarning):
        of_a_new_process(monkeypatch, OTHER, answer="1 of 9 codes differ")
    monkeypatch.setattr(time, "time", lambda: now + 1000 * 24 * 3600)
    assert check_results.stored(OTHER).differs


# ---- strikes and marks ---------------------------------------------------------------------------


def test_the_second_strike_within_a_day_rejects(monkeypatch) -> None:
    """Processes that were at the check together when they were killed give one strike."""
    now = time.time()
    assert check_results.strike(REQUEST, "it hung", now - 9) is None
    assert check_results.strike(REQUEST, "it hung", now - 8) is None  # the neighbor on another GPU
    assert check_results.stored(REQUEST) is None
    monkeypatch.setattr(time, "time", lambda: now + 25 * 3600)
    assert check_results.strike(REQUEST, "it hung", now + 24.9 * 3600) is None
    monkeypatch.setattr(time, "time", lambda: now + 26 * 3600)
    found = check_results.strike(REQUEST, "it hung", now + 25.5 * 3600)
    assert found.reason == "rejected: it hung, twice" and not found.differs
    assert check_results.stored(REQUEST).reason.startswith(found.reason)
    (line,) = check_results.forget_rejections()
    assert line.startswith("kernel 'cuda' of q2::quantize on cuda:0") and "it hung, twice" in line
    assert check_results.stored(REQUEST) is None


def test_strikes_count_in_this_process_where_nothing_can_be_written(monkeypatch) -> None:
    monkeypatch.setattr(check_results, "write", lambda *args, **parts: None)
    assert check_results.strike(REQUEST, "it hung", 1.0) is None
    assert check_results.strike(REQUEST, "it hung", 2.0, again=True).reason.endswith("twice")


@pytest.mark.parametrize("alive", [True, False])
def test_a_mark_is_that_of_a_process_that_runs(alive) -> None:
    """One that was killed and not yet reaped, as in containers without an init, does not."""
    reads, writes = os.pipe()
    process = os.fork()
    if process == 0:
        check_results.mark(REQUEST)
        os.write(writes, b"marked")
        signal.pause()
    try:
        assert os.read(reads, 6) == b"marked"
        if not alive:
            os.kill(process, signal.SIGKILL)
            os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
        began = check_results.take_unended(REQUEST)
        assert (began is None) == alive and (alive or began == pytest.approx(time.time(), abs=60))
        assert check_results.take_unended(REQUEST) is None  # once
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def test_without_locks_there_are_no_marks(monkeypatch, tmp_path) -> None:
    """As in some network file systems: a process that runs must not look like one that ended."""

    def unsupported(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(check_results.fcntl, "flock", unsupported)
    check_results.mark(REQUEST)
    assert list(tmp_path.iterdir()) == [] and check_results.take_unended(REQUEST) is None
    check_results.unmark(REQUEST)


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


@pytest.mark.parametrize(
    "answer, want",
    [((0, 13000), (13, 0)), ((0, 12030), (12, 3)), ((3, 0), None), (None, None)],
)
def test_the_driver_s_version_of_cuda(monkeypatch, tmp_path, answer, want) -> None:
    """It stands for the driver's own where there is no file of that, as in WSL."""

    def asked() -> tuple[int, int]:
        if answer is None:
            raise RuntimeError("Failed to dlopen libcuda.so.1")
        return answer

    driver = SimpleNamespace(cuDriverGetVersion=asked)
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    monkeypatch.setattr(versions, "DRIVER_FILE", tmp_path / "none")
    versions.driver_version.cache_clear()
    versions.driver_cuda.cache_clear()
    assert versions.driver_cuda() == want
    assert versions.driver_version() == ("{}.{}".format(*want) if want else "")
    versions.driver_version.cache_clear()
    versions.driver_cuda.cache_clear()
