# SPDX-License-Identifier: Apache-2.0
"""Self-checks run in a child process. Whatever a kernel does there, only this kernel is rejected,
the others are checked, training's results are right, and the next process runs no check."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch

from q2compile.runtime_kernels import check_child, check_results, checks, kernel_states, registry
from q2compile.runtime_kernels.choice import Choice, Kernel
from q2compile.runtime_kernels.kernel_states import DeviceLostError, Result, state_of
from q2compile.runtime_kernels.registry import KernelWarning
from tests.support import forked, forked_child
from tests.support.faulty_checks import request, runs
from tests.support.new_process import forget_checks
from tests.support.small_model import Mlp, quantized
from tests.support.warned import texts

pytestmark = pytest.mark.usefixtures("fresh_compiler")
# How a check ends -> the reason noted for the kernel.
ENDS = {
    "trap": "rejected: the process that ran its self-check was ended by SIGILL, twice",
    "illegal": "rejected: it failed: RuntimeError: CUDA error: an illegal instruction",
    "hang": "rejected: its self-check did not end within 1 s, twice",
    "wrong": "rejected: it failed its self-check on this GPU: 1 of 9 codes differ",
    "raises": "rejected: it failed: AssertionError: no scaled dot on sm_121",
}
RUNS = {"trap": 2, "hang": 2}  # those that end without an answer; the others run once


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The folder in which checks leave marks. Limits are short, and the machine is not busy."""
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(check_child, "SECONDS", 1.0)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    forked_child.serve(monkeypatch)
    checks.CHECKER.end_child()  # one that another file's tests left has another cache folder
    forget_checks()  # and the limits of before
    (tmp_path / "ran").mkdir()
    yield tmp_path / "ran"
    checks.CHECKER.end_child()


def new_process() -> None:
    forget_checks()


def refused(how, folder, **names):
    """The reason for which a kernel is rejected, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = checks.rejection(request(how, folder, **names))
    return found, texts(caught, KernelWarning)


@pytest.mark.parametrize("how", ENDS)
def test_whatever_a_kernel_does_it_alone_is_rejected_once(folder, how) -> None:
    """With one warning. A new child runs the checks that were queued after it. A check that ended
    without an answer runs again before its kernel is rejected."""
    for suffix in ("right", how, "right too"):
        checks.begin(request(suffix, folder, name=suffix))
    for good in ("right", "right too"):
        assert refused(good, folder, name=good) == (None, [])
    found, said = refused(how, folder, name=how)
    assert found.startswith(ENDS[how]) and state_of(found) == "rejected"
    (line,) = said
    assert line.startswith(f"q2compile: kernel {how!r} of q2::gemm on cpu is {ENDS[how]}")
    assert "`q2compile doctor --recheck` checks rejected kernels again." in line
    ran = runs(folder)
    assert ran == sorted(["right", *[how] * RUNS.get(how, 1), "right too"])
    new_process()
    again, said = refused(how, folder, name=how)
    assert again.startswith(ENDS[how]) and len(said) == 1 and runs(folder) == ran
    assert refused("right", folder, name="right") == (None, []) and runs(folder) == ran
    assert list((folder.parent / "cache").glob("*.checking")) == []


@pytest.mark.parametrize("busy, end", [(0.5, "within 1 s"), (4, None)])
def test_a_busy_machine_has_more_time(monkeypatch, folder, busy, end) -> None:
    """As many times as there are processes for a core, up to five. The check takes two seconds."""
    monkeypatch.setattr(os, "getloadavg", lambda: (busy * os.cpu_count(), 0.0, 0.0))
    found, _ = refused("slow", folder)
    assert found is None if end is None else end in found


def test_a_hang_ends_on_a_busy_machine_too(monkeypatch, folder) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1e6, 0.0, 0.0))
    found, _ = refused("hang", folder)
    assert found == "rejected: its self-check did not end within 5 s, twice"


def test_a_result_that_is_found_meanwhile_leaves_no_answer_unread(monkeypatch, folder, caplog):
    """Another process has stored the result of the check that the child begins. The next check
    does not take the child's answer for its own."""
    monkeypatch.setattr(os, "getloadavg", lambda: (4.0 * os.cpu_count(), 0.0, 0.0))
    slow = request("slow", folder)

    def found(record: logging.LogRecord) -> bool:
        if record.getMessage() == f"q2compile: checks {slow.label}":
            kernel_states.KNOWN.checks[slow.check] = Result(None)
        return True

    caplog.set_level("DEBUG", logger="q2compile")
    check_child.LOG.addFilter(found)
    try:
        checks.begin(slow)
        assert refused("right", folder, name="right") == (None, [])
    finally:
        check_child.LOG.removeFilter(found)
    assert runs(folder) == ["right", "slow"] and slow.check in kernel_states.KNOWN.checks
    assert not any("no other process can check" in line for line in caplog.messages)


@pytest.mark.parametrize("how", ["trap", "wrong"])  # the child ends, and goes on
def test_training_goes_on_with_the_right_numbers(candidate, folder, how) -> None:
    model, x = Mlp(), torch.randn(32, 64)

    def step():
        torch.manual_seed(1)
        compiled = quantized(model)
        y = compiled(x)
        y.square().sum().backward()
        results = [y.detach(), *(p.grad.clone() for p in model.parameters())]
        model.zero_grad()
        torch._dynamo.reset()
        return results

    want = step()
    unsupported = lambda *args: checks.rejection(request(how, folder))  # noqa: E731
    calls = candidate("gemm", ZeroDivisionError(), unsupported=unsupported)
    for _ in range(2):
        with pytest.warns(KernelWarning) as caught:
            assert all(map(torch.equal, step(), want))
        assert len(texts(caught, KernelWarning)) == 1
        new_process()
    assert runs(folder) == [how] * RUNS.get(how, 1) and calls == []


@pytest.mark.parametrize("how", ["trap", "illegal", "hang"])
def test_the_kernel_inside_of_a_check_is_the_one(folder, how) -> None:
    """A GEMM's check runs dequantize. If that one fails, the GEMM is checked again."""
    assert checks.rejection(request(f"inside {how}", folder)) is None
    inner = request(how, folder, "inner", "dequantize")
    assert check_results.stored(inner).reason.startswith(ENDS[how])
    times = RUNS.get(how, 1)
    assert runs(folder) == sorted([how] * times + [f"inside {how}"] * (times + 1))


def test_a_child_that_ended_between_two_checks_is_replaced(folder, caplog) -> None:
    """A child ends like this if its device was lost. Checks do not move into this process then."""
    with caplog.at_level("INFO", logger="q2compile"):
        assert checks.rejection(request("illegal", folder)).startswith(ENDS["illegal"])
        if checks.CHECKER._child is not None:
            checks.CHECKER._child._process.wait(60)
        assert checks.rejection(request("right", folder)) is None
        checks.CHECKER._child._process.kill()
        checks.CHECKER._child._process.wait(60)
        assert checks.rejection(request("wrong", folder)).startswith(ENDS["wrong"])
    said = [record.getMessage() for record in caplog.records]
    assert sum("in a process of its own" in line for line in said) == 3
    assert not any("no other process can check" in line for line in said)
    assert runs(folder) == ["illegal", "right", "wrong"]


DIES_AT_A_CHECK = """
from pathlib import Path
from q2compile.runtime_kernels import checks
from tests.support.faulty_checks import request
with checks.answering(in_child={child}):
    checks.rejection(request({how!r}, Path({folder!r})))
"""


def test_a_process_that_died_at_a_check_leaves_a_strike(folder, caplog) -> None:
    """The next process runs the check in a child, where the kernel fails again. While a process is
    still checking, there is no strike."""
    asked = request("right", folder)
    check_results.mark(asked)  # of this process, which is alive
    assert checks.rejection(asked) is None and runs(folder) == ["right"]
    check_results.unmark(asked)
    done = forked.run(DIES_AT_A_CHECK.format(child=False, how="trap", folder=str(folder)))
    assert done.returncode == -signal.SIGILL, done.stderr
    for _ in range(2):
        new_process()
        found, said = refused("trap", folder)
        assert found.startswith(ENDS["trap"]) and len(said) == 1
    assert runs(folder) == ["right", "trap", "trap"]
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert line == (
        "q2compile: the check of kernel 'broken' of q2::gemm on cpu (trap) ended without an answer "
        "(its self-check did not end in an earlier process) and is run again"
    )


IN_ANOTHER_NAMESPACE = """
import ctypes, os, sys, time
from pathlib import Path
from q2compile.runtime_kernels import check_results
from tests.support.faulty_checks import request
folder = Path({folder!r})
if ctypes.CDLL(None, use_errno=True).unshare(0x20000000):  # CLONE_NEWPID
    sys.exit(77)
if container := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(container, 0)[1]))
assert os.getpid() == 1
assert check_results.take_unended(request("of the host", folder)) is None
check_results.mark(request("of the container", folder))
(folder.parent / "marked").touch()
while not (folder.parent / "release").exists():
    time.sleep(0.01)
"""


def test_containers_that_share_a_folder_see_no_dead_process_in_each_other(folder) -> None:
    """Process ids of one mean nothing in the other."""
    check_results.mark(request("of the host", folder))
    container = forked.start(IN_ANOTHER_NAMESPACE.format(folder=str(folder)))
    asked, ended = request("of the container", folder), None
    try:
        while not (folder.parent / "marked").exists() and ended is None:
            time.sleep(0.02)
            ended = None if os.path.exists(f"/proc/{container.pid}/fd/0") else container.wait()
        if ended is not None and ended.returncode == 77:
            pytest.skip("no namespace of process ids can be made here")
        assert ended is None, ended.stderr
        assert check_results.take_unended(asked) is None
        assert check_results.stored(asked) is None
    finally:
        (folder.parent / "release").touch()
    done = container.wait()
    assert done.returncode == 0, done.stderr
    check_results.unmark(request("of the host", folder))


def test_a_job_that_was_killed_during_a_check_rejects_no_kernel(folder, candidate, caplog) -> None:
    """scancel, docker rm and the OOM killer end all processes of a job. The next job trains with
    the kernel, and its numbers are the kernel's."""
    program = DIES_AT_A_CHECK.format(child=True, how="long", folder=str(folder))
    job = forked.start(program)
    cache = folder.parent / "cache"
    while not runs(folder):
        time.sleep(0.02)
    (mark,) = cache.glob("*.checking")
    child = int(mark.name.split(".")[-2].partition("-")[0])
    os.kill(job.pid, signal.SIGKILL)
    os.killpg(child, signal.SIGKILL)  # the child has a process group of its own
    assert job.wait().returncode == -signal.SIGKILL
    asked = request("long", folder)
    assert check_results.stored(asked) is None and runs(folder) == ["long"]
    (folder.parent / "release").touch()
    kernel = registry.kernels("gemm")[-1].function
    calls = []

    def function(*args):
        calls.append(args)
        return kernel(*args)

    unsupported = lambda *args: checks.rejection(asked)  # noqa: E731
    candidate("gemm", None, "good", function=function, unsupported=unsupported)
    model, x = Mlp(), torch.randn(32, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KernelWarning)
        quantized(model)(x).square().sum().backward()
    assert calls and runs(folder) == ["long", "long"]
    assert check_results.stored(asked).reason is None
    assert [r.levelname for r in caplog.records].count("WARNING") == 1


def test_where_no_child_can_run_it_runs_here(monkeypatch, folder) -> None:
    """The child has no memory, sees another device, or can't be started."""
    memory = request("memory", folder)
    with pytest.raises(torch.OutOfMemoryError):
        checks.rejection(memory)
    assert runs(folder) == ["memory", "memory"] and check_results.stored(memory) is None
    with monkeypatch.context() as patch:
        patch.setattr(check_results, "named", lambda device: ("a GPU", 10, 0))
        assert checks.rejection(request("right", folder)) is None
    assert runs(folder)[2:] == ["right"]
    checks.CHECKER.end_child()
    new_process()
    python = folder.parent / "python"
    python.write_text("#!/bin/sh\necho no torch >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(check_child, "subprocess", subprocess)
    found, said = refused("wrong", folder)
    assert found.startswith(ENDS["wrong"]) and len(said) == 1
    assert "no torch" in checks.CHECKER._unable


def test_a_check_whose_thread_cannot_start_runs_here(monkeypatch, folder, caplog) -> None:
    """As under a limit of processes. The next time it may start."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched, caplog.at_level("INFO", logger="q2compile"):
        patched.setattr(threading.Thread, "start", start)
        checks.begin(request("right", folder))
        assert checks.rejection(request("right", folder)) is None
        assert "so this one does: can't start new thread" in caplog.text
        assert checks.CHECKER._child is None and runs(folder) == ["right"]
    assert checks.rejection(request("right", folder, name="right")) is None
    assert checks.CHECKER._child is not None and runs(folder) == ["right", "right"]


@pytest.mark.usefixtures("checked_here")
def test_a_device_that_fails_here_ends_in_one_error_that_names_the_kernel(folder) -> None:
    """The next process does not run that kernel."""
    own = checks.device_error
    try:
        with pytest.raises(DeviceLostError, match="Q2COMPILE_DISABLE_KERNELS=gemm.broken") as said:
            checks.rejection(request("illegal", folder))
    finally:
        checks.device_error = own
    assert "cpu failed after kernel 'broken' of q2::gemm was launched" in str(said.value)
    new_process()
    found, _ = refused("illegal", folder)
    assert found.startswith(ENDS["illegal"]) and runs(folder) == ["illegal"]


def test_an_orphan_keeps_its_result(folder) -> None:
    """Ctrl-C ends training at once. The child finishes its check, stores the result, and exits."""
    asked = request("wrong", folder)
    child = check_child._Child()
    child.ask(asked)
    child.asked.close()
    assert child._process.wait(60) == 0
    assert check_results.stored(asked).reason.startswith(ENDS["wrong"])


def test_a_child_that_ends_of_itself_leaves_no_zombie(monkeypatch) -> None:
    """An idle child ends, and nobody asks for its status before the next check, if there is one."""
    monkeypatch.setattr(check_child, "subprocess", subprocess)
    monkeypatch.setattr(check_child, "PROGRAM", "# {path!r}")
    child, end = check_child._Child(), time.monotonic() + 60
    while os.path.exists(f"/proc/{child.pid}"):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert child.end() == "ended with status 0"


def test_each_check_is_in_the_log_before_it_runs(folder, caplog) -> None:
    with caplog.at_level("DEBUG", logger="q2compile"):
        checks.rejection(request("wrong", folder))
    lines = [record.getMessage() for record in caplog.records]
    assert "q2compile: checks kernel 'broken' of q2::gemm on cpu (wrong)" in lines
    assert sum("in a process of its own" in line for line in lines) == 1


def test_a_disabled_kernel_is_not_checked(folder) -> None:
    kernel_states.disable(["gemm.broken"], "option disable_kernels")
    assert refused("trap", folder) == ("disabled by option disable_kernels", [])
    with checks.awaited_together() as rejected:
        assert checks.rejection(request("trap", folder)) == "disabled by option disable_kernels"
    assert rejected == {} and runs(folder) == []


def test_results_say_what_they_are_of(folder) -> None:
    checks.rejection(request("wrong", folder))
    (path,) = (folder.parent / "cache").glob("*.checked")
    found = json.loads(path.read_text())
    assert found["what"] == "kernel 'broken' of q2::gemm on cpu (wrong)"
    assert found["reason"] == "it failed its self-check on this GPU: " + (
        "1 of 9 codes differ from the reference"
    )
    assert found["versions"][0] == torch.__version__


# ---- errors of the device while training ---------------------------------------------------------


def test_in_training_a_device_error_is_one_error(monkeypatch) -> None:
    """Innocent kernels are not blamed one after the other."""
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")

    def synchronize(device=None):
        raise lost

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(registry, "device_of", lambda args: torch.device("cuda", 0))
    args = (torch.ones(2, 2),)

    def fails(*args):
        raise lost

    kernel = Kernel("mark", "cuda", "cuda", fails)
    with pytest.raises(DeviceLostError) as said:
        registry.run_chosen(Choice(kernel, {}), args)
    words = str(said.value)
    assert words.startswith("cuda:0 failed after kernel 'cuda' of q2::mark was launched")
    assert "illegal memory access" in words and "DISABLE_KERNELS=mark.cuda" in words
    assert registry.left_out() == []
