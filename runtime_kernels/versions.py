# SPDX-License-Identifier: Apache-2.0
"""Versions of all that compiles, contains or runs kernels, and hashes of sources. Every result that
is stored on disk names them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import sys
from pathlib import Path

import torch

from q2compile.runtime_kernels.kernel_states import LaunchError

_PACKAGES = ("triton", "nvidia-cuda-nvrtc")
_SOURCES = (".py", ".cu", ".cuh", ".cpp", ".h")
DRIVER_FILE = Path("/proc/driver/nvidia/version")  # of Linux


@functools.cache
def cublaslt() -> ctypes.CDLL:
    """The cuBLASLt that torch runs on, which has loaded it already.

    Raises:
        LaunchError: it is not there.
    """
    version = torch.version.cuda
    if version is None:
        raise LaunchError("this torch is built without CUDA, and so without cuBLASLt.")
    major = version.partition(".")[0]
    name = f"cublasLt64_{major}.dll" if sys.platform == "win32" else f"libcublasLt.so.{major}"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise LaunchError(
            f"{name}, cuBLASLt of CUDA {version}, cannot be loaded: {error}"
        ) from None
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return library


@functools.cache
def cublaslt_version() -> str:
    """The version of cuBLASLt, such as "130100"; "" where it is not there."""
    try:
        return str(cublaslt().cublasLtGetVersion())
    except LaunchError:
        return ""


@functools.cache
def driver_version() -> str:
    """The driver's version, such as "580.65.06"; if that is not known, the highest CUDA version
    that it runs, such as "13.0"; "" without one."""
    try:
        words = DRIVER_FILE.read_text(encoding="utf-8").splitlines()[0].split()
        return next(word for word in words if word[:1].isdigit() and "." in word)
    except (OSError, ValueError, IndexError, StopIteration):
        return "{}.{}".format(*found) if (found := driver_cuda()) else ""


@functools.cache
def driver_cuda() -> tuple[int, int] | None:
    """Returns the CUDA version that the driver supports, or None if there is no driver."""
    try:
        from cuda.bindings import driver

        status, version = driver.cuDriverGetVersion()
    except (ImportError, RuntimeError):  # cuda-bindings, or the driver, is not installed
        return None
    return None if int(status) else (version // 1000, version % 1000 // 10)


@functools.cache
def versions() -> tuple[str, ...]:
    """Versions of torch, CUDA, the driver, cuBLASLt, Triton and NVRTC."""
    found = [torch.__version__, str(torch.version.cuda), driver_version(), cublaslt_version()]
    return (*found, *(version_of(package) or "" for package in _PACKAGES))


def version_of(package: str) -> str | None:
    """The version of an installed package; None without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def hash_of(*folders: Path) -> str:
    """SHA-256 of the sources in the folders, in hexadecimal."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(each for each in folder.rglob("*") if each.suffix in _SOURCES):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
