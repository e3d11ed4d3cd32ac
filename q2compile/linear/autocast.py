# SPDX-License-Identifier: Apache-2.0
"""Autocast as in torch's own linear, and a region without it; the device meta has no autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def cast(x: Tensor, *others: Any) -> tuple[Any, ...]:
    """``x`` and ``others`` in the dtype of autocast for the device of ``x``, if it is enabled."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return x, *others
    dtype = torch.get_autocast_dtype(device)
    return tuple(None if t is None else t.to(dtype) for t in (x, *others))


def without_autocast(device: str) -> AbstractContextManager[None]:
    if not torch.amp.is_autocast_available(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)
