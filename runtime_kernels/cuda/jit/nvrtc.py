# SPDX-License-Identifier: Apache-2.0
"""Compiles a .cu file to a cubin by NVRTC, with a cache on disk.

The sources include no CUDA header, so that NVRTC alone compiles them: no toolkit, no host compiler,
no GPU. A variant is one entry point with its defines; the entry point has the name of the file.

The cache holds one file per cubin, named by the hash of everything that went into it: sources,
defines, architecture, options, and the version of NVRTC. A file that was shortened or changed since
is replaced (cache_folder.py). The folder is $Q2COMPILE_CACHE_DIR, or q2compile under
$XDG_CACHE_HOME or ~/.cache; deleting it costs a second at the next start.
"""

import functools
import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from q2compile.runtime_kernels.cache_folder import cache_dir, read_whole, write_whole
from q2compile.runtime_kernels.kernel_states import KNOWN

SOURCES = Path(__file__).parents[1] / "csrc"
HEADERS = SOURCES / "include"

# No contraction of a * b + c: every operation rounds by itself, as in the reference.
_OPTIONS = ("--std=c++17", "--fmad=false", "--device-as-default-execution-space")


class CompileError(RuntimeError):
    """NVRTC could not compile a source; the message has its log."""


@dataclass(frozen=True)
class KernelVariant:
    """One kernel: a source file beside this module, compiled with these defines, and with these
    headers (name, text) beside those that every kernel has."""

    file: str
    defines: tuple[tuple[str, int], ...]
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def entry(self) -> str:
        """Name of the kernel: that of its file."""
        return Path(self.file).stem

    def __str__(self) -> str:
        return f"{self.file} " + " ".join(f"{name}={value}" for name, value in self.defines)


def cubin(variant: KernelVariant, architecture: str) -> bytes:
    """The variant's machine code, from the cache or compiled now; PTX for a virtual architecture.

    Args:
        architecture: as limits.targets() gives it, like "sm_90a".

    Raises:
        ImportError: cuda.bindings or NVRTC is not installed.
        CompileError: the source does not compile.
    """
    path = _cache_path(variant, architecture)
    begun = _begun.pop(path.name, None)
    if begun is not None:
        return begun.result()
    return _made(variant, architecture, path)


def begin(variant: KernelVariant, architecture: str) -> Future:
    """Starts a thread that compiles what cubin() will be asked for. The future ends when it is done
    or has failed. NVRTC holds no lock of Python's."""
    path = _cache_path(variant, architecture)
    begun = _begun.get(path.name)
    if begun is None:
        begun = _begun[path.name] = _threads().submit(_made, variant, architecture, path)
    return begun


_begun: dict[str, Future] = {}  # name of a cubin -> the thread that compiles it


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=8, thread_name_prefix="q2-nvrtc")


def _made(variant: KernelVariant, architecture: str, path: Path) -> bytes:
    if path.name in KNOWN.sources:
        raise CompileError(KNOWN.sources[path.name])
    code = read_whole(path)
    if code is None:
        try:
            code, _ = compile_variant(variant, architecture)
        except CompileError as error:
            KNOWN.sources[path.name] = str(error)
            raise
        with suppress(OSError):  # each process compiles for itself then
            write_whole(path, code)
    return code


def compile_variant(
    variant: KernelVariant, architecture: str, extra: tuple[str, ...] = ()
) -> tuple[bytes, str]:
    """Compiles, past the cache: (cubin, log). `extra` are further options of NVRTC's."""
    from cuda.bindings import nvrtc

    headers = {**common_headers(), **dict(variant.headers)}
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            _source(variant.file).encode(),
            str(SOURCES / variant.file).encode(),
            len(headers),
            [text.encode() for text in headers.values()],
            [name.encode() for name in headers],
        )
    )
    options = [o.encode() for o in (*compiler_options(variant, architecture), *extra)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    output = _output(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    log = output.rstrip(b"\0").decode()
    try:
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{variant} does not compile for {architecture}:\n{log}")
        if architecture.startswith("compute_"):
            return _output(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program), log
        return _output(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@functools.cache
def version() -> tuple[int, int]:
    """NVRTC's version, major and minor.

    Raises:
        ImportError: cuda.bindings or NVRTC is not installed.
    """
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # RuntimeError: the bindings find no libnvrtc
        raise ImportError(
            "the CUDA kernels of q2compile need cuda-bindings and NVRTC, which CUDA builds of "
            f"torch >= 2.11 bring along: pip install cuda-bindings nvidia-cuda-nvrtc ({error})"
        ) from error
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    return major, minor


def conversions(architecture: str) -> tuple[tuple[str, int], ...]:
    """The defines that say which conversion instructions an architecture has; without them the
    sources compute the same values by arithmetic (formats.cuh)."""
    capability = int(architecture.partition("_")[2].rstrip("af"))
    fp4 = capability >= 100 and architecture.endswith(("a", "f"))
    return ("Q2_HW_FP8", int(capability >= 89)), ("Q2_HW_FP4", int(fp4))


def compiler_options(variant: KernelVariant, architecture: str) -> tuple[str, ...]:
    """NVRTC's options for a variant: architecture, language and defines."""
    defines = (*variant.defines, *conversions(architecture))
    return (
        f"--gpu-architecture={architecture}",
        *_OPTIONS,
        *(f"-D{name}={value}" for name, value in defines),
    )


def _cache_path(variant: KernelVariant, architecture: str) -> Path:
    key = hashlib.sha256()
    for part in (
        _source(variant.file),
        *common_headers().values(),
        *variant.headers,
        *compiler_options(variant, architecture),
        version(),
    ):
        key.update(f"{part}\0".encode())
    return cache_dir() / f"{variant.entry}-{architecture}-{key.hexdigest()[:24]}.cubin"


@functools.cache
def _source(file: str) -> str:
    return (SOURCES / file).read_text()


@functools.cache
def common_headers() -> dict[str, str]:
    """The text of the headers that every kernel has, by name."""
    return {path.name: path.read_text() for path in sorted(HEADERS.glob("*.cuh"))}


def _output(size_of: Any, get: Any, program: Any) -> bytes:
    # Not b" " * size, which NVIDIA's samples take: of an empty log that is b" " itself, one object
    # in the whole process, and NVRTC writes the log's NUL into it.
    buffer = bytearray(_checked(size_of(program)))
    _checked(get(program, buffer))
    return bytes(buffer)


def _checked(result: tuple) -> Any:
    """The value of an NVRTC call that fails only by a mistake in this file."""
    status, *values = result
    assert int(status) == 0, f"NVRTC: {status}"
    return values[0] if values else None
