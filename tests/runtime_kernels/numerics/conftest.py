# SPDX-License-Identifier: Apache-2.0
"""The references run in this folder: they define the bits, and tests/runtime_kernels/cpu compares
the C++ kernels, which would serve here, with them."""

from __future__ import annotations

import pytest

from q2compile.runtime_kernels.kernel_states import disable
from q2compile.runtime_kernels.registry import CPP


@pytest.fixture(autouse=True)
def by_reference() -> None:
    disable([CPP], "the tests of the references")
