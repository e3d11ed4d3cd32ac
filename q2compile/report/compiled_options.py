# SPDX-License-Identifier: Apache-2.0
"""The options that the graphs of each model were compiled with, for as long as the model lives.

torch keeps them only for a module that was compiled itself. A training step that was given to
torch.compile as a function leaves nothing in the model that it runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from q2compile.capture.module_tree import unwrapped
from q2compile.config import Config

_by_model: Any = WeakIdKeyDictionary()  # model -> its Configs, in the order that they came


def note(models: Iterable[nn.Module], config: Config) -> None:
    """A graph of ``models`` was compiled with ``config``."""
    for model in models:
        known = _by_model.setdefault(unwrapped(model), [])
        if config not in known:
            known.append(config)


def options_of(model: nn.Module) -> list[Config]:
    """All options that graphs of ``model`` were compiled with in this process."""
    return list(_by_model.get(unwrapped(model), ()))
