"""Loading a cubin onto a device, and launching it on torch's current stream.

A kernel takes one struct by value. Its fields are written with Python's `struct` in native
alignment into a buffer made once, so that a launch costs one pack and one driver call;
-DQ2_PARAMS_BYTES and a static_assert in the source hold the two layouts together.
"""

import ctypes
import functools
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from q2compile.runtime_kernels.cuda import nvrtc
from q2compile.runtime_kernels.cuda.nvrtc import Variant

_LOCK = threading.Lock()  # the driver reads a parameter buffer with Python's global lock released


class LaunchError(RuntimeError):
    """The CUDA driver refused to load or to launch a kernel."""


@dataclass(frozen=True, eq=False)
class Launch:
    """A variant with what a launch of it needs.

    layout: format of the kernel's parameter struct, for Python's struct module.
    threads: of a thread block.  shared: bytes of dynamic shared memory.
    overlaps: may begin while the kernel ahead of it in the stream is still running
        (programmatic dependent launch); it then waits for that one by itself, in its code.
    """

    variant: Variant
    layout: str
    threads: int
    shared: int = 0
    overlaps: bool = False
    loaded: dict[int, "_Loaded"] = field(default_factory=dict, repr=False)  # by device index

    def __call__(self, device: torch.device, grid: tuple[int, int], *values) -> None:
        """Enqueues the kernel.

        Args:
            device: a CUDA device with an index.
            grid: thread blocks in x and y.
            values: the fields of the parameter struct, in order; addresses and numbers.

        Raises:
            LaunchError: the driver refuses, or the first use falls into a CUDA graph capture.
        """
        index = device.index
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self(device, grid, *values)
        loaded = self.loaded.get(index)
        if loaded is None:
            loaded = self.loaded[index] = _load(self, index)
        loaded.run(grid, torch._C._cuda_getCurrentRawStream(index), values)

    def warm_up(self, device: torch.device) -> None:
        """Compiles and loads the kernel on a device, if that is still to be done.

        Raises:
            LaunchError: as a launch does.
        """
        if device.index not in self.loaded:
            with torch.cuda.device(device.index):
                self.loaded[device.index] = _load(self, device.index)


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


class _Loaded:
    """A launch's kernel on one device."""

    def __init__(self, launch: Launch, function, context) -> None:
        from cuda.bindings import driver

        self._launch, self._function, self._context = launch, function, context
        self._driver, self._enqueue = driver, driver.cuLaunchKernelEx
        self._pack_into = struct.Struct("@" + launch.layout).pack_into
        self._buffer = ctypes.create_string_buffer(params_bytes(launch.layout))
        # The driver wants an array of addresses of parameters; there is one parameter.
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer))
        self._address = ctypes.addressof(self._parameters)
        self._config = config = driver.CUlaunchConfig()
        config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.blockDimX, config.sharedMemBytes = launch.threads, launch.shared
        if launch.overlaps:
            attribute = driver.CUlaunchAttribute()
            kind = driver.CUlaunchAttributeID
            attribute.id = kind.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            value = driver.CUlaunchAttributeValue()
            value.programmaticStreamSerializationAllowed = 1
            attribute.value = value
            config.attrs, config.numAttrs = [attribute], 1

    def run(self, grid: tuple[int, int], stream: int, values: tuple) -> None:
        with _LOCK:
            config = self._config
            config.gridDimX, config.gridDimY = grid
            config.hStream = stream
            self._pack_into(self._buffer, 0, *values)
            (status,) = self._enqueue(config, self._function, self._address, 0)
            if status == self._driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
                # A thread that has made no call to the CUDA runtime yet (autograd's may be such)
                # has no context.
                self._driver.cuCtxSetCurrent(self._context)
                (status,) = self._enqueue(config, self._function, self._address, 0)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise LaunchError(f"cannot launch {self._launch.variant}: {_message(status)}")


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
    if launch.shared > 48 * 1024:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(function, attribute, launch.shared), launch)
    return _Loaded(launch, function, context)


@functools.cache
def architecture(index: int) -> str:
    """The architecture that kernels are compiled for on this device. Call unsupported() first."""
    return nvrtc.ARCHITECTURES[torch.cuda.get_device_capability(index)]


@functools.cache
def unsupported(index: int) -> str | None:
    """None when kernels can be compiled for this CUDA device, otherwise the reason in words."""
    capability = torch.cuda.get_device_capability(index)
    if capability not in nvrtc.ARCHITECTURES:
        known = ", ".join(f"{major}.{minor}" for major, minor in nvrtc.ARCHITECTURES)
        got = f"{capability[0]}.{capability[1]}"
        return f"there are kernels for compute capability {known}, not for {got}"
    try:
        nvrtc.version()
    except ImportError as error:
        return str(error)
    return None


@functools.cache
def multiprocessors(index: int) -> int:
    """Multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def _checked(result: tuple, launch: Launch):
    status, *values = result
    if status != type(status).CUDA_SUCCESS:
        raise LaunchError(f"cannot load {launch.variant}: {_message(status)}")
    return values[0] if values else None


def _message(status) -> str:
    from cuda.bindings import driver

    _, text = driver.cuGetErrorString(status)
    return f"{status.name}, {text.decode() if text else 'unknown error'}"
