# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: the gpu marker, and property tests that repeat exactly."""

from __future__ import annotations

import atexit
import dataclasses
import gc
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import partial

# Before torch is imported, for this process and those that tests start. Inductor's code for a CPU
# without vectors compiles in half the time; fixture `vectors` brings them back. A pool of compiling
# processes would import torch once more beside each process that compiles something. A collection
# after each frame takes 4% of the time.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("CXX", os.path.join(os.path.dirname(__file__), "support/compiler/g++"))
# Triton finds what it compiled in earlier runs, by the hash of all that it was made of.
os.environ.setdefault("TRITON_CACHE_DIR", os.path.abspath(f"{__file__}/../../build/triton"))
if "PYTEST_XDIST_WORKER" not in os.environ:
    # All processes of a run share the folder of compiled code, which is empty at the start.
    os.environ["TESTS_COMPILED"] = tempfile.mkdtemp(prefix="q2compile-tests-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(os.environ["TESTS_COMPILED"], "inductor")
    atexit.register(shutil.rmtree, os.environ["TESTS_COMPILED"], ignore_errors=True)

import pytest
import torch
import torch._inductor.config as inductor_config
from hypothesis import settings
from torch._dynamo.utils import counters
from torch._guards import TracingContext
from torch._inductor.cpu_vec_isa import valid_vec_isa_list
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from q2compile.runtime_kernels import checks, kernel_states
from q2compile.runtime_kernels.choice import KERNELS, Kernel
from q2compile.runtime_kernels.kernel_states import KNOWN
from tests.support.browser import Browser, missing
from tests.support.forked import compile_faster
from tests.support.new_process import forget_checks, forget_dump_folders

# The same examples in every run, and no deadline: CI machines are slow and shared.
settings.register_profile("q2compile", derandomize=True, deadline=None)
settings.load_profile("q2compile")

compile_faster()

# pytest hangs a handler on every logger that does not propagate, and torch takes one on this logger
# for TORCH_TRACE: it would write down every graph of every test.
logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(autouse=True, scope="module")
def _collections_see_one_module() -> None:
    """The garbage collector visits only what the running module created. Millions of objects
    outlive their module (imports, torch's caches); a collection that visits them takes seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_numbers_in_every_run() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_mode_outlives_its_test() -> Iterator[None]:
    """A mode that an error left active, in a compiler for example, would make torch.load create
    fake tensors."""
    yield
    assert _get_current_dispatch_mode_stack() == []
    assert TracingContext.try_get() is None


@pytest.fixture(autouse=True)
def _no_kernel_left_out_outlives_its_test() -> None:
    """A disabled kernel would not run in the next test, whose reports would mention it."""
    kernel_states.enable_all()
    forget_checks()


@pytest.fixture
def fresh_compiler() -> None:
    """Nothing is compiled or counted yet, and no dump folder is in use, as in a new process."""
    torch._dynamo.reset()
    counters.clear()
    forget_dump_folders()


@pytest.fixture
def vectors() -> Iterator[None]:
    """Inductor's code for a CPU has vectors, as a user's has. It remembers which there are."""
    valid_vec_isa_list.cache_clear()
    with inductor_config.patch({"cpp.vec_isa_ok": None}):
        yield
    valid_vec_isa_list.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[tuple[int, int]], None]]:
    """Call it with a compute capability: the process then behaves as if it had such a GPU."""
    from tests.support.pretended_gpu import forget, pretend

    with checks.answering(stored=False, in_child=False):
        yield partial(pretend, monkeypatch)
    forget()


@pytest.fixture
def checked_here() -> Iterator[None]:
    """Self-checks run in this process, where a test can replace them, and not in a child."""
    with checks.answering(in_child=False):
        yield


@pytest.fixture
def candidate() -> Iterator[Callable[..., list]]:
    """Puts a kernel before the others of an op, one that raises an error; returns the list of its
    calls."""
    added = []

    def put(op, error, name="broken", **parts):
        calls = []

        def function(*args):
            calls.append(args)
            raise error

        kernel = Kernel(op, name, "cpu", function)
        added.append(dataclasses.replace(kernel, **parts))
        KERNELS[op].insert(0, added[-1])
        KNOWN.choices.clear()
        return calls

    yield put
    for kernel in added:
        KERNELS[kernel.op].remove(kernel)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, as it does in a user's program: pytest-xdist ignores it in
    its workers."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Chromium, for the tests of a module; they are skipped where there is none."""
    if reason := missing():
        pytest.skip(reason)
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked gpu where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, torch.cuda.is_available() is False")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
