# SPDX-License-Identifier: Apache-2.0
"""Which versions of torch were tested, and the warning about any other."""

from __future__ import annotations

import warnings
from functools import cache

import torch

# The oldest and the newest minor version that the tests were run with: tests/VERSIONS.md.
TESTED = ("2.11", "2.15")


class UntestedTorchWarning(UserWarning):
    """This torch is older or newer than those that q2compile was tested with."""


def warn_if_untested() -> None:
    """Say once per process that this torch was not tested, and what to report."""
    _warn_if_untested(torch.__version__)


@cache
def _warn_if_untested(version: str) -> None:
    oldest, newest, this = (
        tuple(int(part) for part in text.split(".")[:2]) for text in (*TESTED, version)
    )
    if oldest <= this <= newest:
        return
    warnings.warn(
        f"q2compile was tested with torch {TESTED[0]} to {TESTED[1]}, and this is {version}. It "
        f"runs nevertheless. Please report what differs from {TESTED[1]}: a matmul that "
        "q2compile.explain(...) does not list or does not take, an error (which names a file that "
        "reproduces it), or another loss. Add the output of `q2compile doctor`.",
        UntestedTorchWarning,
        stacklevel=3,
    )
