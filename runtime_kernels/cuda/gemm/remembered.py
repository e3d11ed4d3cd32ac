# SPDX-License-Identifier: Apache-2.0
"""Which kernel of q2::gemm, and which of cuBLASLt's algorithms, was the fastest on a device, as
`q2compile bench` measured it there.

The choices are stored in gemm-HASH.json beside the cubins (cache_folder.py). The hash and the file
name what they hold for: name and compute capability of the device, and the versions of torch,
Triton, cuBLASLt, the driver and q2compile. A product takes the fastest kernel of the nearest
measured shape, if no size differs by more than a factor of four. Elsewhere the usual order holds
(gemm/__init__.py).

Only kernels on fp4 tensor cores are chosen from. They read the same operands, so a graph that was
compiled with one is right with the other. They add the same products in fp32 in another order, so
results differ by their one rounding, a relative 2^-8 in bf16 (selfcheck.py enforces it). Reports
name the kernel and why it was chosen. Q2COMPILE_GEMM_CHOICES=off restores the usual order.
"""

import functools
import hashlib
import json
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from q2compile.runtime_kernels.cache_folder import cache_dir
from q2compile.runtime_kernels.cuda.gemm.triton_fp4 import triton_version
from q2compile.runtime_kernels.cuda.versions import cublaslt_version, driver_version
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.registry import (
    CUBLASLT_FP4,
    TRITON_FP4,
    KernelWarning,
    device_of,
    prefer,
)
from q2compile.version import __version__

SCHEMA = 3
VARIABLE = "Q2COMPILE_GEMM_CHOICES"
CANDIDATES = (CUBLASLT_FP4, TRITON_FP4)
_FIRST = (10, 0)  # compute capability with fp4 tensor cores: before it there is nothing to choose
_FARTHEST = 4  # times a size that was measured


class Choice(NamedTuple):
    """The fastest kernel for products a [M, K] by b [N, K] of a format.

    algorithm: of cuBLASLt's (cublaslt.Algorithm) the fastest; None for another kernel
    """

    format: str
    shape: tuple[int, int, int]  # M, N, K
    fastest: str
    algorithm: tuple[int, ...] | None = None


class Remembered(NamedTuple):
    """The measured choices for a device, and their date."""

    choices: tuple[Choice, ...]
    date: str


def holds_for(index: int) -> dict[str, Any]:
    """The properties that the choices of CUDA device `index` depend on."""
    found = triton_version()
    return {
        "schema": SCHEMA,
        "device": torch.cuda.get_device_name(index),
        "capability": list(torch.cuda.get_device_capability(index)),
        "torch": torch.__version__,
        "triton": None if found is None else "{}.{}".format(*found),
        "cublaslt": cublaslt_version(),
        "driver": driver_version(),
        "q2compile": __version__,
    }


def path_for(held: dict[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()
    return cache_dir() / f"gemm-{key[:24]}.json"


def remember(index: int, choices: Sequence[Choice], date: str) -> Path:
    """Stores the choices for a device in place of earlier ones. Returns the file."""
    held = holds_for(index)
    path = path_for(held)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**held, "date": date, "choices": [c._asdict() for c in choices]}, indent=1)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(path)
    forget()
    return path


def forget() -> None:
    """The choices that this process has read."""
    _remembered.cache_clear()
    _nearest.cache_clear()


@functools.cache
def _remembered(index: int) -> Remembered | None:
    if not _wanted() or torch.cuda.get_device_capability(index) < _FIRST:
        return None
    held = holds_for(index)
    path = path_for(held)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _ignored(path, str(error))
        return None
    try:
        found = json.loads(text)
        if {name: found[name] for name in held} != held:
            raise ValueError("it is of another device or another version")
        choices = tuple(_choice(**choice) for choice in found["choices"])
        return Remembered(choices, str(found["date"]))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        _ignored(path, f"{type(error).__name__}: {error}")
        return None


def _choice(format: str, shape: list[int], fastest: str, algorithm: list[int] | None) -> Choice:
    m, n, k = shape
    if format not in ("nvfp4", "mxfp4") or fastest not in CANDIDATES:
        raise ValueError(f"{format!r} by {fastest!r}")
    if not all(type(size) is int and size > 0 for size in shape):
        raise ValueError(f"shape {shape}")
    if algorithm is not None and not all(type(value) is int for value in algorithm):
        raise ValueError(f"algorithm {algorithm}")
    return Choice(format, (m, n, k), fastest, None if algorithm is None else tuple(algorithm))


def _wanted() -> bool:
    value = os.environ.get(VARIABLE) or "on"
    if value not in ("on", "off"):
        raise ValueError(f"{VARIABLE}: got {value!r}; allowed: on, off")
    return value == "on"


def _ignored(path: Path, why: str) -> None:
    warnings.warn(
        f"q2compile: {path.name}, the GEMM kernels chosen by `q2compile bench`, is ignored: "
        f"{' '.join(why.split())[:300]}\nRun `q2compile bench` again, or delete it from the folder "
        "that `q2compile doctor` names.",
        KernelWarning,
        stacklevel=2,
    )


def chosen(args: Sequence[Any]) -> str | None:
    """The kernel that was the fastest for a product like this one; None where nothing is known, or
    a size is symbolic."""
    device = device_of(args)
    if device.type != "cuda":
        return None
    a, b, scheme = args[0], args[3], get_scheme(args[7])
    sizes = a.shape[0], b.shape[0], a.shape[1]
    if scheme.dequantized or not all(type(size) is int and size > 0 for size in sizes):
        return None
    m, n, half = sizes
    nearest = _nearest(device.index, scheme.format, m, n, 2 * half)
    return nearest and nearest.fastest


def remembered_algorithm(index: int, m: int, n: int, k: int) -> tuple[int, ...] | None:
    """cuBLASLt's fastest algorithm at the nearest shape; None where nothing is known."""
    nearest = _nearest(index, "nvfp4", m, n, k)
    return nearest and nearest.algorithm


@functools.lru_cache(4096)
def _nearest(index: int, format: str, *shape: int) -> Choice | None:
    found = _remembered(index)
    if found is None:
        return None

    def distances(choice: Choice) -> list[float]:
        return [abs(math.log2(a / b)) for a, b in zip(shape, choice.shape, strict=True)]

    near = [
        choice
        for choice in found.choices
        if choice.format == format and max(distances(choice)) <= math.log2(_FARTHEST)
    ]
    return min(near, key=lambda choice: sum(distances(choice)), default=None)


def described() -> list[str]:
    """For reports: what is chosen by measurement in this process, in words."""
    texts = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found = _remembered(index)
        if found is not None and found.choices:
            texts.append(
                f"q2::gemm on cuda:{index} is run by the kernel that `q2compile bench` found the "
                f"fastest at {len(found.choices)} shapes on {found.date}; another kernel sums in "
                f"another order, within a rounding of the result. {VARIABLE}=off ignores them"
            )
    return texts


prefer("gemm", chosen, described)
