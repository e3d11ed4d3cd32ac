# SPDX-License-Identifier: Apache-2.0
"""Runs on a CPU the PTX that NVRTC makes of runtime_kernels/cuda/csrc for a GPU.

The emulation (tests/support/emulation) compiles the sources for a CPU, with plain C++ in the place
of their inline PTX. Here the compiled kernel itself runs, each instruction in numpy by the words of
the PTX ISA manual: the conversions of Blackwell, packed arithmetic, exchanges between lanes,
asynchronous copies. Memory is checked as well (memory.py), and the order of launches that may begin
early (order.py). Left to a GPU: whether ptxas and the hardware do what the manual says, the order
of memory accesses between thread blocks, and speed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import itertools
import re
import struct
from pathlib import Path

import pytest
import torch

from q2compile.runtime_kernels.cuda import calls
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.runtime_kernels.cuda.jit.launch import Launch, params_bytes
from tests.support import emulation
from tests.support.kept import kept
from tests.support.ptx.machine import Machine
from tests.support.ptx.memory import POISON, Global
from tests.support.ptx.order import UNKNOWN, OrderedLaunch
from tests.support.ptx.parser import Kernel, parse

_MOST_LANES = 1024  # at a time: registers of more leave the cache
_SMALL = """
.version 9.0
.target sm_100a
.visible .entry small(
	.param .align 8 .b8 small_param_0[8]
)
{
	.reg .pred %p<3>;
	.reg .b32 %r<9>;
	.reg .b64 %rd<5>;
	.shared .align 16 .b8 place[1024];
	ld.param.u64 %rd1, [small_param_0];
	mov.u32 %r1, %tid.x;
	mul.wide.u32 %rd2, %r1, 4;
	add.s64 %rd3, %rd1, %rd2;
	BODY
	ret;
}
"""


def serve(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    """Calls of our kernels on tensors of the CPU run as PTX of an architecture, like "sm_100a"."""
    windows: list[tuple[int, int]] = []
    last = UNKNOWN  # launch in the stream

    def address_of(x: torch.Tensor) -> int:
        """Notes which bytes a tensor has; those of an earlier call are forgotten. Between two calls
        there may be other kernels in the stream."""
        nonlocal last
        if last.known:
            windows.clear()
            last = UNKNOWN
        windows.append(extent(x))
        return x.data_ptr()

    def run(launch: Launch, architecture: str, grid: tuple[int, int], *values) -> None:
        nonlocal last
        last = interpret(launch, architecture, grid, values, windows, last)

    emulation.serve(monkeypatch, architecture, run)
    empty = calls.empty

    def poisoned(size, stride, dtype) -> torch.Tensor:
        made = empty(size, stride, dtype)
        if made.numel():
            ctypes.memset(made.data_ptr(), POISON, made.untyped_storage().nbytes())
        windows.append(extent(made))
        return made

    monkeypatch.setattr(calls, "address_of", address_of)
    monkeypatch.setattr(calls, "empty", poisoned)


def interpret(
    launch: Launch,
    architecture: str,
    grid: tuple[int, int],
    values,
    windows: list[tuple[int, int]],
    last: OrderedLaunch,
) -> OrderedLaunch:
    """Runs a launch, as run_kernel does, and returns its order for the next one.

    values: the fields of its parameter struct.
    last: the launch ahead of it in the stream.
    """
    overlaps = launch.overlaps and int(re.findall(r"\d+", architecture)[0]) >= 90
    order = OrderedLaunch(launch.variant.entry, last.before_next() if overlaps else ())
    parameters = ctypes.create_string_buffer(params_bytes(launch.layout))
    struct.pack_into("@" + launch.layout, parameters, 0, *values)
    kernel = compiled(launch.variant, architecture)
    run_kernel(kernel, launch.threads, grid, parameters.raw, launch.shared, windows, order)
    return order


def run_kernel(
    kernel: Kernel,
    threads: int,
    grid: tuple[int, int],
    parameters: bytes,
    shared: int,
    windows: list[tuple[int, int]],
    order: OrderedLaunch,
) -> None:
    """Runs all thread blocks of a launch.

    threads: of a thread block.
    parameters: what the kernel is given, in their layout.
    shared: bytes of dynamic shared memory.
    windows: first byte and the one after the last of each tensor that it may touch.
    order: of the launch; it notes what the launch reads and writes.

    Raises:
        UnknownInstruction: its PTX has an instruction that is not known here.
        MemoryFault: an access outside of the tensors, a misaligned one, or a race.
        OrderFault: an access before griddepcontrol.wait that must come after it, or no wait.
    """
    blocks = list(itertools.product(range(grid[0]), range(grid[1])))
    memory = Global(windows, order)
    at_once = max(1, _MOST_LANES // threads)
    for first in range(0, len(blocks), at_once):
        part = blocks[first : first + at_once]
        Machine(kernel, threads, grid, part, parameters, shared, memory).run()


@functools.cache
def compiled(variant: nvrtc.KernelVariant, architecture: str) -> Kernel:
    """The kernel of a variant."""
    return parse(text(variant, architecture))


def small_kernel(body: str) -> Kernel:
    """A kernel by hand, whose threads have their number in %r1 and, in %rd3, the address of their
    word of the array that the kernel is given."""
    return parse(_SMALL.replace("BODY", body))


def text(variant: nvrtc.KernelVariant, architecture: str) -> str:
    """The PTX on the way to an architecture's machine code: the same options and defines."""
    virtual = architecture.replace("sm_", "compute_")
    source = (nvrtc.SOURCES / variant.file).read_text()
    headers = {**nvrtc.common_headers(), **dict(variant.headers)}

    def make(path: Path) -> None:
        code, _ = nvrtc.compile_variant(variant, virtual)
        path.write_bytes(code.rstrip(b"\0"))

    options = nvrtc.compiler_options(variant, virtual)
    return kept(".ptx", (_compilers(), source, headers, options), make).read_text()


@functools.cache
def _compilers() -> list[str]:
    """NVRTC's version: of PyPI's packages, of which CUDA's releases have their own."""
    packages = importlib.metadata.distributions()
    found = (f"{each.name} {each.version}" for each in packages if "nvrtc" in each.name)
    return [str(nvrtc.version()), *sorted(found)]


def extent(x: torch.Tensor) -> tuple[int, int]:
    """First byte of a tensor, and the one after the last."""
    if x.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
