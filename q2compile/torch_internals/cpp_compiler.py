# SPDX-License-Identifier: Apache-2.0
"""The C++ compiler that Inductor uses: that of $CXX or of Inductor's setting, if it runs."""

from __future__ import annotations


def cpp_compiler() -> str:
    """The command of a compiler that runs.

    Raises:
        RuntimeError: there is none; the message says what was tried.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()
