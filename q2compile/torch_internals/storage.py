# SPDX-License-Identifier: Apache-2.0
"""Who holds the memory of a tensor, and which tensors share it."""

from __future__ import annotations

import torch


def has_other_holders(storage: torch.UntypedStorage) -> bool:
    """Whether something besides one tensor, and ``storage`` itself, holds this memory: another
    tensor, which may have a version counter of its own, a NumPy array, another process.
    """
    if storage.device.type == "cpu" and storage.is_shared():  # of CUDA memory that is always True
        return True
    return torch._C._storage_Use_Count(storage._cdata) > 2


def share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are views of one memory; fake tensors have some, too."""
    return bool(torch._C._is_alias_of(one, other))  # type: ignore[attr-defined]
