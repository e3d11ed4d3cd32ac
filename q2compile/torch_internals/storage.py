# SPDX-License-Identifier: Apache-2.0
"""Who holds the memory of a tensor, which tensors share it, and memory that may not be read."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

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


class WithheldMemory:
    """Memory for a tensor whose values are not there: reading it is an error.

    A torch built with CUDA raises ``message`` in the op that reads, on every device. One without
    can't. There the memory is zeros, which the system hands out when they are first read, and
    `was_read` says afterwards whether it has done so.

    tensor  of the shape, strides, dtype and device of ``like``, in this memory
    """

    def __init__(self, like: Tensor, message: str) -> None:
        self._pages = 0
        size = max(like.numel() * like.itemsize, 1)
        with torch.inference_mode(False):
            if _raise_where_read is not None:
                storage = torch._C._construct_storage_from_data_pointer(0, like.device, size)
                self.tensor = like.new_empty(0).set_(storage, 0, like.shape, like.stride())
                _raise_where_read(self.tensor.untyped_storage()._cdata, message)
                return
            self._mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a system without huge pages
                # A huge page would be of the memory beside it, too, and handed out for that.
                self._mapped.madvise(mmap.MADV_NOHUGEPAGE)
            flat = torch.frombuffer(self._mapped, dtype=like.dtype)
            self.tensor = flat.as_strided(like.shape, like.stride())
        # A system that calls all pages resident, as gVisor does, can't tell which are read.
        pages = -(-size // mmap.PAGESIZE)
        self._pages = 0 if self._is_resident(pages) else pages

    def was_read(self) -> bool:
        """Return whether an op has read the memory since the last call without raising an error."""
        if not self._pages or not self._is_resident(self._pages):
            return False
        self._mapped.madvise(mmap.MADV_DONTNEED)  # as new
        return True

    def _is_resident(self, pages: int) -> bool:
        found = (ctypes.c_ubyte * pages)()
        address = ctypes.c_void_p(self.tensor.data_ptr())
        ctypes.CDLL(None).mincore(address, ctypes.c_size_t(pages * mmap.PAGESIZE), found)
        return any(page & 1 for page in found)
