"""Runs the .cu files of runtime_kernels/cuda on a CPU.

g++ compiles them with cuda.h (threads as coroutines) and with ptx.cuh of this folder in place of
theirs, which holds all their inline PTX. What is left to a GPU is that the instructions do what PTX
says, memory is ordered as the code assumes, and speed.
"""

import ctypes
import functools
import struct
import subprocess
import tempfile
from pathlib import Path

from q2compile.runtime_kernels.cuda import nvrtc
from q2compile.runtime_kernels.cuda.launch import Launch, params_bytes

HERE = Path(__file__).parent
_MAIN = """
extern "C" void run(const void* params, int grid_x, int grid_y) {{
  gridDim = {{(unsigned)grid_x, (unsigned)grid_y, 1}};
  for (unsigned y = 0; y < gridDim.y; ++y)
    for (unsigned x = 0; x < gridDim.x; ++x) {{
      blockIdx = {{x, y, 0}};
      kernel_body = [&] {{ {entry}(*(const Params*)params); }};
      run_block({threads});
    }}
}}
"""


def emulate(launch: Launch, hw_fp4: bool, grid: tuple[int, int], *values) -> None:
    """Runs a launch on CPU memory, with Blackwell's fp4 conversions or without."""
    parameters = ctypes.create_string_buffer(params_bytes(launch.layout))
    struct.pack_into("@" + launch.layout, parameters, 0, *values)
    _library(launch.variant, launch.threads, hw_fp4).run(parameters, *grid)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="q2-emulation-")


@functools.cache
def _library(variant: nvrtc.Variant, threads: int, hw_fp4: bool) -> ctypes.CDLL:
    number = _library.cache_info().misses
    folder = Path(_folder().name) / str(number)
    folder.mkdir()
    for source in (*nvrtc.SOURCES.glob("*.cuh"), *HERE.glob("*.h"), HERE / "ptx.cuh"):
        (folder / source.name).write_bytes(source.read_bytes())
    source = (nvrtc.SOURCES / variant.file).read_text()
    # Dynamic shared memory is one array; a multiprocessor has no more than this.
    dynamic = "extern __shared__ __align__(128) u8 shared_tiles[];"
    source = source.replace(dynamic, "static __align__(128) u8 shared_tiles[228 * 1024];")
    main = _MAIN.format(entry=variant.entry, threads=threads)
    (folder / "main.cpp").write_text(f'#include "cuda.h"\n{source}\n{main}')
    defines = [
        f"-D{name}={value}" for name, value in (*variant.defines, ("Q2_HW_FP4", int(hw_fp4)))
    ]
    command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", *defines]
    subprocess.run([*command, "main.cpp", "-o", "kernel.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))
