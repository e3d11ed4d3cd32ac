# SPDX-License-Identifier: Apache-2.0
"""Runs the .cu files of runtime_kernels/cuda/csrc on a CPU.

g++ compiles them with cuda.h (threads as coroutines, run by threads.cpp) and with ptx.cuh of this
folder in place of theirs, which holds all their inline PTX. Only a GPU can show that its
instructions follow the PTX manual, that memory is ordered as the code assumes, and how fast a
kernel is.
"""

import ctypes
import functools
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from q2compile.runtime_kernels.cuda import calls
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.runtime_kernels.cuda.jit.launch import Launch, params_bytes
from tests.support.kept import kept

HERE = Path(__file__).parent
# Without _FORTIFY_SOURCE, whose longjmp refuses to change to another stack.
_COMPILER = (
    *("g++", "-std=c++17", "-Og", "-ffp-contract=off", "-w", "-fPIC"),
    *("-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=0"),
)
_MAIN = """
template <class Params>
void call(void (*kernel)(Params), const void* params) {{
  kernel(*(const Params*)params);
}}
void body(const void* params) {{
  call({entry}, params);
}}
extern "C" void run(const void* params, int grid_x, int grid_y) {{
  run_grid(body, params, grid_x, grid_y, {threads});
}}
"""


def emulate(launch: Launch, architecture: str, grid: tuple[int, int], *values) -> None:
    """Runs a launch on CPU memory, with the conversion instructions of an architecture."""
    parameters = ctypes.create_string_buffer(params_bytes(launch.layout))
    struct.pack_into("@" + launch.layout, parameters, 0, *values)
    converts = nvrtc.conversions(architecture)
    _kernel(launch.variant, launch.threads, converts).run(parameters, *grid)


def serve(
    monkeypatch: pytest.MonkeyPatch, architecture: str, run: Callable[..., None] = emulate
) -> None:
    """Calls of our kernels on tensors of the CPU are launched in the emulation.

    run: a replacement for `emulate`, with its arguments.
    """

    def bind(launch, index, grid, values, slots):
        def enqueue(stream, addresses):
            fields = (addresses[slots[v]] if v in slots else v for v in values)
            run(launch, architecture, grid, *fields)

        return enqueue

    def empty(size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype)

    monkeypatch.setattr(Launch, "bind", bind)
    monkeypatch.setattr(calls, "empty", empty)
    monkeypatch.setattr(calls, "raw_stream", lambda index: 0)
    monkeypatch.setattr(calls, "BOUND_CALLS", {})
    monkeypatch.setattr(calls, "wait", lambda index: False)
    monkeypatch.setattr(calls, "on_device", lambda index: nullcontext())


@functools.cache
def _threads() -> None:
    """Loads threads.cpp, whose functions all other libraries find."""

    def make(path: Path) -> None:
        subprocess.run([*_COMPILER, "-shared", "threads.cpp", "-o", path], cwd=HERE, check=True)

    path = kept(".so", (_compiler(), _sources(HERE, "cuda.h"), _sources(HERE, "*.cpp")), make)
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _folder() -> Path:
    """A folder of this process with cuda.h, precompiled."""
    folder = Path(os.environ["TESTS_COMPILED"]) / "emulation" / str(os.getpid())
    folder.mkdir(parents=True)
    shutil.copy(HERE / "cuda.h", folder)
    header = ("-x", "c++-header", "cuda.h", "-o", "cuda.h.gch")
    subprocess.run([*_COMPILER, *header], cwd=folder, check=True)
    return folder


@functools.cache
def _compiler() -> tuple[str, ...]:
    """The command, and the version of what it runs."""
    command = [_COMPILER[0], "--version"]
    made = subprocess.run(command, check=True, capture_output=True, text=True)
    return *_COMPILER, made.stdout


@functools.cache
def _sources(folder: Path, pattern: str) -> dict[str, str]:
    """Texts by name. They do not change while tests run."""
    return {path.name: path.read_text() for path in sorted(folder.glob(pattern))}


@functools.cache
def _kernel(variant: nvrtc.KernelVariant, threads: int, converts: tuple) -> ctypes.CDLL:
    source = (nvrtc.SOURCES / variant.file).read_text()
    # Dynamic shared memory is one array; a multiprocessor has no more than this.
    dynamic = "extern __shared__ __align__(16) u8 shared_tiles[];"
    source = source.replace(dynamic, "static __align__(16) u8 shared_tiles[228 * 1024];")
    main = _MAIN.format(entry=variant.entry, threads=threads)
    return library(source + main, (*variant.defines, *converts), variant.headers)


@functools.cache
def library(
    source: str,
    defines: tuple[tuple[str, int], ...],
    headers: tuple[tuple[str, str], ...] = (),
) -> ctypes.CDLL:
    """Compiles C++ that may include the .cuh files of runtime_kernels/cuda, for the CPU."""
    files = {**_sources(nvrtc.HEADERS, "*.cuh"), **_sources(HERE, "ptx.cuh"), **dict(headers)}

    def make(path: Path) -> None:
        folder = _folder() / path.stem
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
        (folder / "main.cpp").write_text(f'#include "../cuda.h"\n{source}')
        options = [f"-D{name}={value}" for name, value in defines]
        command = [*_COMPILER, "-shared", *options, "main.cpp", "-o", path]
        subprocess.run(command, cwd=folder, check=True)

    _threads()
    made_of = (_compiler(), _sources(HERE, "cuda.h"), files, source, defines)
    return ctypes.CDLL(str(kept(".so", made_of, make)))
