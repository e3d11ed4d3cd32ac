# SPDX-License-Identifier: Apache-2.0
"""The hooks of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

_KINDS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
_OF_ONE = tuple(f"_{kind}" for kind in _KINDS)
_OF_ALL = tuple(f"_global_{kind}" for kind in _KINDS)
# FSDP2's and tensor parallelism's; those of torch.nn.utils.spectral_norm read weights.
_NOT_OF_USERS = ("torch.distributed.", "q2compile.")


def hooks_of_users(module: nn.Module | None) -> Iterator[Callable[..., Any]]:
    """The hooks that were registered on ``module``, but for those of this project and of
    torch.distributed; of None, those that run for all modules."""
    held, names = (vars(nn.modules.module), _OF_ALL) if module is None else (vars(module), _OF_ONE)
    for name in names:
        for hook in held[name].values() if held.get(name) else ():
            home = str(getattr(_function_of(hook), "__module__", ""))
            if not home.startswith(_NOT_OF_USERS):
                yield hook


def name_of(hook: Callable[..., Any]) -> str:
    return getattr(_function_of(hook), "__qualname__", type(hook).__name__)


def _function_of(hook: Callable[..., Any]) -> Any:
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__func__", hook)
