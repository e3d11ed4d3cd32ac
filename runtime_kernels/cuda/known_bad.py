# SPDX-License-Identifier: Apache-2.0
"""Versions of libraries that are known to be wrong, with what to install. Self-checks find most of
what they do wrong; this says why, and names what a small check may not meet. `q2compile doctor`
lists the rows that hold for a machine, and the first graph on a GPU warns of them.

Not in the table: Triton's tl.dot_scaled with K = 96 was silently wrong on 10.0
(https://github.com/facebookexperimental/triton/pull/1688); the tiles here have K = 128 and 256.
"""

from __future__ import annotations

import functools
import re
import warnings
from typing import NamedTuple

import torch

from q2compile.runtime_kernels.versions import cublaslt_version, version_of

CUBLAS, TRITON = "cuBLAS", "Triton"


class KnownBad(NamedTuple):
    """Versions of a library from `first` on and before `fixed`.

    on: compute capabilities, or majors of them; every one with fp4 tensor cores if it is empty.
    """

    library: str
    first: tuple[int, ...]
    fixed: tuple[int, ...]
    on: tuple[tuple[int, ...], ...]
    symptom: str
    source: str
    install: str


TABLE = (
    KnownBad(
        *(CUBLAS, (13, 4, 0), (13, 4, 1), ()),
        "cublasLtMatmul may ignore the tensor-wide scale of an NVFP4 product",
        "https://docs.nvidia.com/cuda/archive/13.2.1/cuda-toolkit-release-notes/",
        "pip install 'nvidia-cublas>=13.4.1'",
    ),
    KnownBad(
        *(CUBLAS, (13, 5), (13, 6), ((12,),)),
        "matmuls fail with memory errors",
        "https://github.com/conda-forge/pytorch-cpu-feedstock/issues/521",
        "pip install 'nvidia-cublas>=13.6'",
    ),
    KnownBad(
        *(TRITON, (3, 4), (3, 5), ((12,),)),
        "tl.dot_scaled multiplies in bf16 instead of on fp4 tensor cores",
        "https://github.com/triton-lang/triton/issues/7550",
        "a torch with Triton 3.6 or later",
    ),
    KnownBad(
        *(TRITON, (3, 8), (3, 9), ()),
        "tl.dot_scaled reads an E8M0 scale of 2^-127, or one that is subnormal in bf16, as zero, "
        "and other fixes are missing",
        "https://github.com/triton-lang/triton/issues/11735 and 11733",
        "a torch with another version of Triton, such as 3.7 (3.9 on 12.1)",
    ),
)


def known_bad(capability: tuple[int, int]) -> list[str]:
    """A sentence for each row that holds for a GPU of this compute capability here."""
    versions = {CUBLAS: cublas(), TRITON: triton()}
    lines = []
    for row in TABLE:
        version = versions[row.library]
        concerns = any(capability[: len(of)] == of for of in row.on) if row.on else True
        if capability >= (10, 0) and concerns and row.first <= version < row.fixed:
            dotted = ".".join(map(str, version))
            lines.append(
                f"{row.library} {dotted}: {row.symptom} ({row.source}). To install: {row.install}"
            )
    return lines


@functools.cache
def warn_of_known_bad(index: int) -> None:
    """Warns once of the versions that are known to be bad on a CUDA device."""
    for text in known_bad(torch.cuda.get_device_capability(index)):
        warnings.warn(f"q2compile: {text}", RuntimeWarning, stacklevel=2)


def cublas() -> tuple[int, ...]:
    """The version of cuBLAS; empty if it is not there."""
    found = cublaslt_version()  # like "130401"
    return tuple(int(part) for part in (found[:-4], found[-4:-2], found[-2:])) if found else ()


def triton() -> tuple[int, ...]:
    """The version of Triton; empty if it is not there."""
    return tuple(map(int, re.findall(r"\d+", version_of("triton") or "")[:3]))
