# SPDX-License-Identifier: Apache-2.0
"""Memory whose reading is an error, in the op that reads or at the next check."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from q2compile.torch_internals.storage import WithheldMemory

READS: dict[str, Callable[[Tensor], Any]] = {
    "clone": lambda w: w.data.clone(),
    "linear": lambda w: nn.functional.linear(torch.ones(2, 32), w),
    "embedding": lambda w: nn.functional.embedding(torch.tensor([63]), w),
    "average": lambda w: torch.zeros(64, 32).lerp_(w.data, 0.1),
    "norm": lambda w: torch._foreach_norm([w.data]),
    "item": lambda w: w[63, 31].item(),
    "print": str,
    "deepcopy": copy.deepcopy,
    "numpy": lambda w: w.detach().numpy().sum(),
    "write": lambda w: w.data.zero_(),
}


@pytest.mark.parametrize("read", READS)
def test_a_read_is_an_error(read: str) -> None:
    w = nn.Parameter(torch.randn(64, 32))
    values, version = w.data, w._version
    withheld = WithheldMemory(w, "its values are elsewhere")
    w.data = withheld.tensor
    assert (w.shape, w.stride(), w._version) == (values.shape, values.stride(), version)
    w.t()  # neither are views read
    assert not withheld.was_read()
    with pytest.raises(RuntimeError, match="its values are elsewhere"):
        READS[read](w)
        if withheld.was_read():
            raise RuntimeError("its values are elsewhere")
    assert not withheld.was_read()  # one error for each read
    w.data = values
    assert torch.equal(w, values)


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
RAISES = hasattr(torch._C, "_set_storage_data_ptr_access_error_msg")


@pytest.mark.skipif(RAISES or not HUGE_PAGES.exists(), reason="no pages are looked at")
def test_no_huge_page_holds_it() -> None:
    """Where the system makes huge pages of all memory, a write beside it would be a read of it."""
    withheld = WithheldMemory(torch.zeros(64, 32), "")
    address = withheld.tensor.data_ptr()
    maps = re.split(r"^([0-9a-f]+)-([0-9a-f]+) ", Path("/proc/self/smaps").read_text(), flags=re.M)
    (of_memory,) = (
        text
        for first, end, text in zip(maps[1::3], maps[2::3], maps[3::3], strict=True)
        if int(first, 16) <= address < int(end, 16)
    )
    flags = next(line for line in of_memory.splitlines() if line.startswith("VmFlags:"))
    assert "nh" in flags.split()
