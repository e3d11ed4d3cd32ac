# SPDX-License-Identifier: Apache-2.0
"""This process among those of a training run: torch.distributed's answer while it is initialized,
else torchrun's environment, which is there before and after."""

from __future__ import annotations

import os

import torch.distributed as dist


def process_rank() -> int:
    return dist.get_rank() if _initialized() else int(os.environ.get("RANK") or 0)


def world_size() -> int:
    return dist.get_world_size() if _initialized() else int(os.environ.get("WORLD_SIZE") or 1)


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()
