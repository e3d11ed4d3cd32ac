# SPDX-License-Identifier: Apache-2.0
"""4/6 in a tie keeps the scale for 6, and a search of scales the first: the reference, the kernel
for CPUs, and the CUDA kernel, which is emulated."""

from __future__ import annotations

import shutil

import pytest
import torch

from q2compile.runtime_kernels.registry import CPP, REFERENCE, select
from tests.support import quantizer_calls as calls
from tests.support.emulation.on_cpu import launches_on_cpu

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
# Exact as 6 * 2 and 3 * 2, and as 4 * 3 and 2 * 3.
X = torch.tensor([[12.0, 6.0] + [0.0] * 14], dtype=torch.bfloat16)


@pytest.mark.parametrize("scheme", ["nvfp4_46_pow2", "nvfp4_search_pow2"])
@pytest.mark.parametrize("kernel", [REFERENCE, CPP, "cuda"])
def test_the_first_scale_is_kept(scheme: str, kernel: str, monkeypatch) -> None:
    call = calls.plain(X, None, None, scheme)
    if kernel == "cuda":
        launches_on_cpu(monkeypatch, "sm_100a")
        codes, *_ = calls.launched(call)
    else:
        codes, *_ = select("quantize", call.positional, kernel)(*call.positional)
    assert codes[0, 0] == 0x57  # 6 and 3, not 4 and 2
