# SPDX-License-Identifier: Apache-2.0
"""Memory whose reading is an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from q2compile.torch_internals.storage import withheld_like

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
    w.data = withheld_like(w.detach(), "its values are elsewhere")
    assert (w.shape, w.stride(), w._version) == (values.shape, values.stride(), version)
    w.t()  # views do not read
    if RAISES:
        with pytest.raises(RuntimeError, match="its values are elsewhere"):
            READS[read](w)
    else:
        assert w.isnan().all()
    w.data = values
    assert torch.equal(w, values)


RAISES = hasattr(torch._C, "_set_storage_data_ptr_access_error_msg")
