# SPDX-License-Identifier: Apache-2.0
"""Copies from a device to the host, without waiting."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor in host memory that is under way.

    of     starts it, on the current stream
    ready  whether it is there
    value  the copy; waits for it if it is not
    """

    def __init__(self, value: Tensor, event: torch.Event | None) -> None:
        self._value, self._event = value, event

    @classmethod
    def of(cls, source: Tensor) -> HostCopy:
        source = source.detach()
        if source.device.type == "cpu":
            return cls(source.clone(), None)
        value = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        value.copy_(source, non_blocking=True)
        event = torch.Event(source.device)
        event.record()
        return cls(value, event)

    @property
    def ready(self) -> bool:
        return self._event is None or self._event.query()

    @property
    def value(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._value
