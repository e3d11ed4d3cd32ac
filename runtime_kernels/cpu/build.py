# SPDX-License-Identifier: Apache-2.0
"""csrc/kernels.cpp as a library of this machine: compiled once by a thread, kept in the cache
folder, loaded once per process.

The file is named by a hash of the sources, the options, torch's version, and the vectors that torch
found this processor to have: machines of several kinds may share a folder. The sources include no
header of torch's, so any C++17 compiler that Inductor accepts will do.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path

import torch

from q2compile.runtime_kernels.cache_folder import cache_dir, read_whole, write_whole
from q2compile.runtime_kernels.versions import hash_of
from q2compile.torch_internals.cpp_compiler import cpp_compiler

SOURCES = Path(__file__).parent / "csrc"
ENTRY = "kernels.cpp"
LOG = logging.getLogger("q2compile")
# No contraction of a * b + c: every operation rounds by itself, as in the reference.
_OPTIONS = ("-std=c++17", "-O2", "-ftree-vectorize", "-fPIC", "-shared", "-fopenmp", "-w")
_EXACT = ("-ffp-contract=off", "-fno-math-errno")
VECTORS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2"),
    "AVX2": ("-mavx2",),
}
_TIMEOUT = 300  # seconds; it takes three


class BuildError(RuntimeError):
    """There is no library; the message says why."""


@functools.cache
def why_missing() -> str | None:
    """None when the library can be had, otherwise the reason in words, which is logged once."""
    try:
        library()
    except BuildError as error:
        LOG.warning("no CPU kernels; the slower torch references run instead: %s", error)
        return str(error)
    return None


def reasons() -> list[str]:
    """Lines for reports: why the kernels are missing, if that was asked and they are."""
    if not why_missing.cache_info().currsize or why_missing() is None:
        return []
    return [f"no CPU kernels; the slower torch references run instead: {why_missing()}"]


def library() -> ctypes.CDLL:
    """The library, once it is loaded or compiled.

    Raises:
        BuildError: no compiler was found; it failed; what it made can't be loaded.
    """
    return begin(os.getpid()).result()


@functools.cache
def begin(process: int) -> Future[ctypes.CDLL]:
    """Have a thread load the library or compile it, which takes seconds. If that begins with a
    graph, it ends before Inductor has compiled the graph.

    process: this one's id. A fork has no thread of its parent, and begins anew.
    """
    made: Future[ctypes.CDLL] = Future()

    def run() -> None:
        try:
            made.set_result(_library())
        except BaseException as error:  # raised by library()
            made.set_exception(error)

    threading.Thread(target=run, name="q2compile-cpu-kernels").start()
    return made


def _library() -> ctypes.CDLL:
    if sys.byteorder != "little" or sys.platform == "win32":
        raise BuildError(f"they are not written for {platform.machine()} on {sys.platform}.")
    path = library_path()
    if read_whole(path) is not None:  # loading a shortened file would end the process (SIGBUS)
        with contextlib.suppress(OSError):  # a folder of which nothing may be run
            return ctypes.CDLL(str(path))
    compiler = _compiler()
    LOG.info("q2compile: compiling the kernels for this CPU; it can take a minute, once")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return compiled_library(compiler, path)
    except OSError:  # the folder can't be written: a compilation for each process
        try:
            with tempfile.TemporaryDirectory() as folder:
                return compiled_library(compiler, Path(folder) / path.name)
        except OSError as error:  # read-only as well, or no program in it may be run
            raise BuildError(f"no folder accepts a library that can be loaded: {error}.") from error


def _compiler() -> str:
    try:
        return cpp_compiler()
    except Exception as error:  # of several types, by torch's version
        text = " ".join(str(error).split())
        raise BuildError(
            f"Inductor finds no C++ compiler ({text}). Install g++, or name one in $CXX."
        ) from error


def library_path() -> Path:
    """Where the library is kept."""
    key = hashlib.sha256()
    for part in (*options(), torch.__version__, platform.machine(), hash_of(SOURCES)):
        key.update(f"{part}\0".encode())
    return cache_dir() / f"cpu-{key.hexdigest()[:24]}.so"


def options() -> tuple[str, ...]:
    """The compiler's options for this processor."""
    return *_OPTIONS, *_EXACT, *VECTORS.get(torch.backends.cpu.get_cpu_capability(), ())


def compiled_library(compiler: str, path: Path) -> ctypes.CDLL:
    """Compiles to a file beside ``path``, loads that, and stores it at ``path``."""
    handle, name = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        done = subprocess.run(
            [compiler, *options(), str(SOURCES / ENTRY), "-o", name],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            raise BuildError(f"{compiler} failed: {' '.join(lines[:3])[:500]}")
        loaded = ctypes.CDLL(name)
        write_whole(path, Path(name).read_bytes())
        return loaded
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} did not end within {_TIMEOUT} s.") from error
    finally:
        Path(name).unlink(missing_ok=True)
