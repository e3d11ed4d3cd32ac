# SPDX-License-Identifier: Apache-2.0
"""Who holds the memory of a tensor, which tensors share it, and memory that may not be read."""

from __future__ import annotations

import torch
from torch import Tensor

# The bindings of torch builds without CUDA lack it.
_raise_where_read = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)


def has_other_holders(storage: torch.UntypedStorage) -> bool:
    """Whether something besides one tensor, and ``storage`` itself, holds this memory: another
    tensor, which may have a version counter of its own, a NumPy array, another process.
    """
    if storage.device.type == "cpu" and storage.is_shared():  # of CUDA memory that is always True
        return True
    return torch._C._storage_Use_Count(storage._cdata) > 2


def share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share storage. Works for fake tensors."""
    return bool(torch._C._is_alias_of(one, other))  # type: ignore[attr-defined]


def withheld_like(like: Tensor, message: str) -> Tensor:
    """A tensor of the shape, strides, dtype and device of ``like``, whose values are not there: an
    op that reads it raises RuntimeError(message). A torch built without CUDA can't raise it, and
    there the values are NaN."""
    with torch.inference_mode(False):
        if _raise_where_read is None:
            return torch.full_like(like, torch.nan)
        size = max(like.numel() * like.itemsize, 1)
        storage = torch._C._construct_storage_from_data_pointer(0, like.device, size)
        withheld = like.new_empty(0).set_(storage, 0, like.shape, like.stride())
        _raise_where_read(withheld.untyped_storage()._cdata, message)
        return withheld
