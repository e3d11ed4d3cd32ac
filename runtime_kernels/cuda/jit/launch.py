"""Loading a cubin onto a device, and launching it on torch's current stream.

A kernel takes one struct by value. Its fields are written with Python's `struct` in native
alignment into a buffer made once, and the driver is called through ctypes with arguments made once,
so that a launch costs a pack and a call; -DQ2_PARAMS_BYTES and a static_assert in the source hold
the two layouts together.
"""

import ctypes
import functools
import struct
import sys
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.runtime_kernels.cuda.jit.nvrtc import Variant

_LOCK = threading.Lock()  # the driver reads a parameter buffer with Python's global lock released
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_ALWAYS_ALLOWED = 40 * 1024  # of dynamic shared memory: 48 KiB, less what a kernel has besides
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class LaunchError(RuntimeError):
    """The CUDA driver refused to load or to launch a kernel."""


@dataclass(frozen=True, eq=False)
class Launch:
    """A variant with what a launch of it needs.

    layout: format of the kernel's parameter struct, for Python's struct module.
    threads: of a thread block.  shared: bytes of dynamic shared memory.
    overlaps: may begin while the kernel ahead of it in the stream is still running
        (programmatic dependent launch, from compute capability 9.0 on); it then waits for that one
        by itself, in its code.
    """

    variant: Variant
    layout: str
    threads: int
    shared: int = 0
    overlaps: bool = False
    loaded: dict[int, "_Loaded"] = field(default_factory=dict, repr=False)  # by device index

    def __call__(self, index: int, grid: tuple[int, int], *values) -> None:
        """Enqueues the kernel.

        Args:
            index: of the current CUDA device (on_device).
            grid: thread blocks in x and y.
            values: the fields of the parameter struct, in order; addresses and numbers.

        Raises:
            LaunchError: the driver refuses, or the first use falls into a CUDA graph capture.
            torch.OutOfMemoryError: the driver has no memory for it.
        """
        loaded = self.loaded.get(index)
        if loaded is None:
            loaded = self.loaded[index] = _load(self, index)
        loaded.run(grid, torch._C._cuda_getCurrentRawStream(index), values)

    def warm_up(self, index: int) -> None:
        """Compiles and loads the kernel on a device, if that is still to be done.

        Raises:
            LaunchError: as a launch does.
        """
        if index not in self.loaded:
            with torch.cuda.device(index):
                self.loaded[index] = _load(self, index)


def launch(
    file: str,
    layout: str,
    threads: int,
    shared: int = 0,
    *,
    overlaps: bool = False,
    defines: Mapping[str, int],
) -> Launch:
    """A Launch of the kernel in `file`, which checks -DQ2_PARAMS_BYTES against its parameter
    struct."""
    sizes = ("Q2_PARAMS_BYTES", params_bytes(layout))
    variant = Variant(file, (*defines.items(), sizes))
    return Launch(variant, layout, threads, shared, overlaps)


def on_device(function):
    """Decorator: runs function(index, ...) with CUDA device `index` as the current one, which costs
    nothing where it is that already."""

    @functools.wraps(function)
    def run(index, *args):
        if index == torch._C._cuda_getDevice():
            return function(index, *args)
        with torch.cuda.device(index):
            return function(index, *args)

    return run


# empty(size, stride, dtype) on the current CUDA device: what Inductor's generated code allocates
# with, past torch's dispatcher.
empty = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: a number, and a union of 64 bytes that begins with the one we set."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


class _Loaded:
    """A launch's kernel on one device."""

    def __init__(self, launch: Launch, function: int, context, overlaps: bool) -> None:
        self._launch, self._context = launch, context
        self._enqueue = _driver().cuLaunchKernelEx
        self._pack_into = struct.Struct("@" + launch.layout).pack_into
        self._buffer = ctypes.create_string_buffer(params_bytes(launch.layout))
        self._config = _Config(
            grid=(1, 1, 1), block=(launch.threads, 1, 1), shared=launch.shared, count=0
        )
        self._grid = self._config.grid
        if overlaps:
            self._attribute = _Attribute(id=_PROGRAMMATIC_SERIALIZATION)
            self._attribute.value[0] = 1
            self._config.attributes = ctypes.pointer(self._attribute)
            self._config.count = 1
        # The driver wants an array of addresses of parameters; there is one parameter.
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer))
        self._arguments = ctypes.byref(self._config), ctypes.c_void_p(function), parameters, None

    def run(self, grid: tuple[int, int], stream: int, values: tuple) -> None:
        with _LOCK:
            self._grid[0], self._grid[1] = grid
            self._config.stream = stream
            self._pack_into(self._buffer, 0, *values)
            status = self._enqueue(*self._arguments)
            if status == _INVALID_CONTEXT:
                # A thread that has made no call to the CUDA runtime yet (autograd's may be such)
                # has no context.
                from cuda.bindings import driver

                driver.cuCtxSetCurrent(self._context)
                status = self._enqueue(*self._arguments)
        if status:
            raise _error(f"cannot launch {self._launch.variant}", status)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def params_bytes(layout: str) -> int:
    """Size of a C struct with these fields: padded to the alignment of its pointers."""
    return (struct.calcsize("@" + layout) + 7) // 8 * 8


def _load(launch: Launch, index: int) -> _Loaded:
    from cuda.bindings import driver

    if torch.cuda.is_current_stream_capturing():
        raise LaunchError(
            f"{launch.variant} is used for the first time inside a CUDA graph capture, where "
            "nothing can be loaded: run the model once before capturing it."
        )
    torch.cuda.synchronize(index)  # gives this thread its context
    context = _checked(driver.cuCtxGetCurrent(), launch)
    code = nvrtc.cubin(launch.variant, architecture(index))
    module = _checked(driver.cuModuleLoadData(code), launch)
    function = _checked(driver.cuModuleGetFunction(module, launch.variant.entry.encode()), launch)
    if launch.shared > _ALWAYS_ALLOWED:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(function, attribute, launch.shared), launch)
    overlaps = launch.overlaps and torch.cuda.get_device_capability(index) >= (9, 0)
    return _Loaded(launch, int(function), context, overlaps)


@functools.cache
def architecture(index: int) -> str:
    """The architecture that kernels are compiled for on this device. Call unsupported() first."""
    found = nvrtc.architecture(torch.cuda.get_device_capability(index))
    assert found is not None
    return found


@functools.cache
def unsupported(index: int) -> str | None:
    """None when kernels can be compiled for this CUDA device, otherwise the reason in words."""
    reason = _unsupported(torch.cuda.get_device_capability(index))
    if reason is not None:
        warnings.warn(
            f"q2compile: none of its CUDA kernels runs on cuda:{index}: {reason}\n"
            "Inductor's loops and the torch references run in their place, slower.",
            RuntimeWarning,
            stacklevel=2,
        )
    return reason


def _unsupported(capability: tuple[int, int]) -> str | None:
    if nvrtc.architecture(capability) is None:
        got = f"{capability[0]}.{capability[1]}"
        return f"there are kernels for compute capability 8.0 and higher, not for {got}"
    try:
        nvrtc.version()
    except Exception as error:  # whatever is wrong with the installation, the references run
        return str(error)
    return None


@functools.cache
def multiprocessors(index: int) -> int:
    """Multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def _checked(result: tuple, launch: Launch):
    status, *values = result
    if status != type(status).CUDA_SUCCESS:
        raise _error(f"cannot load {launch.variant}", int(status))
    return values[0] if values else None


def _error(what: str, status: int) -> RuntimeError:
    from cuda.bindings import driver

    error = driver.CUresult(status)
    _, text = driver.cuGetErrorString(error)
    kind = torch.OutOfMemoryError if status == _OUT_OF_MEMORY else LaunchError
    return kind(f"{what}: {error.name}, {text.decode() if text else 'unknown error'}")
