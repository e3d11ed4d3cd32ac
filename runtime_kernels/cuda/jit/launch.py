# SPDX-License-Identifier: Apache-2.0
"""Loading a cubin onto a device, and launching it on a stream.

A kernel takes one struct by value. All its fields except the addresses of tensors are written once
into a buffer, with Python's `struct` in native alignment. The arguments of the driver's function
are made once, too. So a launch costs writing the addresses, and one call through ctypes.
-DQ2_PARAMS_BYTES and a static_assert in the source check that both layouts are equal.
"""

import ctypes
import functools
import logging
import struct
import sys
import threading
import warnings
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from q2compile.runtime_kernels.cuda.jit import limits, nvrtc
from q2compile.runtime_kernels.cuda.jit.nvrtc import KernelVariant
from q2compile.runtime_kernels.kernel_states import ONE_MULTIPROCESSOR, LaunchError
from q2compile.runtime_kernels.versions import driver_cuda

LOG = logging.getLogger("q2compile")
_ADDRESS = struct.calcsize("@P")  # as long as an item of array("Q"), on its alignment
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
# CUDA_ERROR_INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_PTX, UNSUPPORTED_PTX_VERSION: this code does
# not run on this device by this driver, which a GB10's said of sm_120 code.
_NOT_LOADED = (200, 209, 218, 222)
_ALWAYS_ALLOWED = 40 * 1024  # of dynamic shared memory: 48 KiB, less what a kernel has besides
# The driver's CUDA version from which a kernel can be loaded while a CUDA graph is captured.
_LOADS_IN_CAPTURES = (12, 3)
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


@dataclass(frozen=True, eq=False)
class Launch:
    """A variant with what a launch of it needs.

    layout: format of the kernel's parameter struct, for Python's struct module.
    threads: of a thread block.  shared: bytes of dynamic shared memory.
    overlaps: may begin while the kernel ahead of it in the stream is still running
        (programmatic dependent launch, from compute capability 9.0 on); it then waits for that one
        by itself, in its code.
    """

    variant: KernelVariant
    layout: str
    threads: int
    shared: int = 0
    overlaps: bool = False
    loaded: dict[int, "_Loaded"] = field(default_factory=dict, repr=False)  # by device index
    proven: set[int] = field(default_factory=set, repr=False)  # devices it ran on without an error

    def bind(self, index: int, grid: tuple[int, int], values: Sequence, slots: dict) -> "Bound":
        """The kernel, loaded on CUDA device `index` if it is not yet, with all parameters that are
        the same in every launch.

        grid: thread blocks in x and y.
        values: the fields of the parameter struct, in order: constants, and keys of slots.
        slots: for such a key, the index of its value among the addresses of a launch.

        Raises:
            LaunchError: the driver reports an error, or is too old to load a kernel in a CUDA graph
                capture.
            torch.OutOfMemoryError: the driver has no memory for it.
        """
        if index not in self.loaded:
            with torch.cuda.device(index):
                self.loaded[index] = _load(self, index)
        return Bound(self, self.loaded[index], grid, values, slots)


def launch(
    file: str,
    layout: str,
    threads: int,
    shared: int = 0,
    *,
    overlaps: bool = False,
    defines: Mapping[str, int],
    headers: tuple[tuple[str, str], ...] = (),
) -> Launch:
    """A Launch of the kernel in `file`, which checks -DQ2_PARAMS_BYTES against its parameter
    struct."""
    sizes = ("Q2_PARAMS_BYTES", params_bytes(layout))
    variant = KernelVariant(file, (*defines.items(), sizes), headers)
    return Launch(variant, layout, threads, shared, overlaps)


# empty(size, stride, dtype) on the current CUDA device, without torch's dispatcher; Inductor's
# generated code allocates by it.
empty = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a union of 64 bytes that begins with the value we set."""

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


class _Loaded(NamedTuple):
    """A launch's kernel on one device."""

    function: int
    context: Any
    overlaps: bool


class Bound:
    """A launch whose parameters are complete except for the addresses of tensors."""

    def __init__(
        self,
        launch: Launch,
        loaded: _Loaded,
        grid: tuple[int, int],
        values: Sequence,
        slots: dict,
    ) -> None:
        self._launch, self._context = launch, loaded.context
        # The driver reads the buffer with Python's global lock released.
        self._lock = threading.Lock()
        self._enqueue = libcuda().cuLaunchKernelEx
        self._words = array("Q", bytes(params_bytes(launch.layout)))  # the parameter struct
        fixed = (0 if value in slots else value for value in values)
        struct.pack_into("@" + launch.layout, self._words, 0, *fixed)
        self._addresses = [
            (struct.calcsize("@" + launch.layout[: i + 1]) // _ADDRESS - 1, slots[value])
            for i, value in enumerate(values)
            if value in slots
        ]
        self._stream = 0  # equals config.stream, which takes longer to read
        self._config = _Config(
            grid=(*grid, 1), block=(launch.threads, 1, 1), shared=launch.shared, count=0
        )
        if loaded.overlaps:
            self._attribute = _Attribute(id=_PROGRAMMATIC_SERIALIZATION)
            self._attribute.value[0] = 1
            self._config.attributes = ctypes.pointer(self._attribute)
            self._config.count = 1
        # The driver wants an array of addresses of parameters; there is one parameter.
        parameters = (ctypes.c_void_p * 1)(self._words.buffer_info()[0])
        function = ctypes.c_void_p(loaded.function)
        self._arguments = ctypes.byref(self._config), function, parameters, None

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        """Enqueues the kernel.

        Raises:
            LaunchError, torch.OutOfMemoryError: the driver reports an error.
        """
        with self._lock:
            if stream != self._stream:
                self._config.stream = self._stream = stream
            words = self._words
            for word, slot in self._addresses:
                words[word] = addresses[slot]
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
def libcuda() -> ctypes.CDLL:
    """The CUDA driver."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def params_bytes(layout: str) -> int:
    """Size of a C struct with these fields: padded to the alignment of its pointers."""
    return (struct.calcsize("@" + layout) + 7) // 8 * 8


def _load(launch: Launch, index: int) -> _Loaded:
    from cuda.bindings import driver

    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(index)  # gives this thread its context
    elif (driver_cuda() or (0, 0)) < _LOADS_IN_CAPTURES:
        raise LaunchError(
            f"{launch.variant} is used for the first time inside a CUDA graph capture, where a "
            "driver of before CUDA 12.3 loads nothing: run the model once with these sizes before "
            "capturing it."
        )
    context = _checked(driver.cuCtxGetCurrent(), launch)
    code = nvrtc.cubin(launch.variant, architecture(index))
    with _relaxed_captures():
        module = _checked(driver.cuModuleLoadData(code), launch)
        entry = launch.variant.entry.encode()
        function = _checked(driver.cuModuleGetFunction(module, entry), launch)
        if launch.shared > _ALWAYS_ALLOWED:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(function, attribute, launch.shared), launch)
    overlaps = launch.overlaps and torch.cuda.get_device_capability(index) >= (9, 0)
    return _Loaded(int(function), context, overlaps)


@contextmanager
def _relaxed_captures() -> Iterator[None]:
    """This thread may do what no capture records, such as loading a kernel, while it or another
    thread captures a CUDA graph."""
    from cuda.bindings import driver

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)


_PROBE = launch("zero_rows.cu", "PPqqi", 256, defines={}).variant  # the smallest kernel


@functools.cache
def target(index: int) -> limits.Target:
    """The target that kernels are compiled for on this device: the first whose code the driver
    loads.

    Raises:
        ImportError: NVRTC is not installed.
    """
    refused = ""
    capability = torch.cuda.get_device_capability(index)
    for found in limits.targets(capability, nvrtc.version(), driver_cuda()):
        said = None if found.name is None else _load_error(index, found.name)
        if said is None:
            return found if found.why is None or not refused else found._replace(why=refused)
        refused = f"the driver loads no code for {found.name} ({said})"
        LOG.warning("q2compile: cuda:%d: %s; the next target is tried", index, refused)
    return limits.Target(None, refused)


def _load_error(index: int, name: str) -> str | None:
    """The driver's error, if it refuses to load code for a target. None also where that can't be
    found out: whatever else is wrong is said when a kernel is loaded."""
    try:
        if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
            return None
        from cuda.bindings import driver

        with torch.cuda.device(index):
            torch.cuda.synchronize(index)  # gives this thread its context
            status, module = driver.cuModuleLoadData(nvrtc.cubin(_PROBE, name))
            if not int(status):
                driver.cuModuleUnload(module)
    except Exception:
        return None
    return f"error {int(status)}" if int(status) in _NOT_LOADED else None


def architecture(index: int) -> str:
    """The name of that target. Call unsupported() first."""
    found = target(index).name
    assert found is not None
    return found


def begin_compiling(launches: Iterable[Launch], index: int) -> list[Future]:
    """Threads that compile these launches for a device."""
    variants = dict.fromkeys(launch.variant for launch in launches)
    return [nvrtc.begin(variant, architecture(index)) for variant in variants]


@functools.cache
def unsupported(index: int) -> str | None:
    """None when kernels can be compiled for this CUDA device, otherwise the reason in words."""
    try:
        found = target(index)
        reason = found.why if found.name is None else None
    except Exception as error:  # whatever is wrong with the installation, the references run
        reason = str(error)
    if reason is not None:
        warnings.warn(
            f"q2compile: none of its CUDA kernels runs on cuda:{index}: {reason}\n"
            "Inductor's kernels and the slower torch references run instead.",
            RuntimeWarning,
            stacklevel=2,
        )
    return reason


def wait(index: int) -> bool:
    """Waits for all that was enqueued on the current stream of CUDA device `index`, unless a CUDA
    graph is being captured; whether it did.

    Raises:
        RuntimeError: the device has failed.
    """
    if torch.cuda.is_current_stream_capturing():
        return False
    torch.cuda.current_stream(index).synchronize()
    return True


def multiprocessors(index: int) -> int:
    """Multiprocessors of a CUDA device, or those that grids are planned for."""
    return 1 if ONE_MULTIPROCESSOR.get() else all_multiprocessors(index)


@functools.cache
def all_multiprocessors(index: int) -> int:
    """The number of multiprocessors of a CUDA device."""
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
