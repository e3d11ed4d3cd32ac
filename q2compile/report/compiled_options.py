# SPDX-License-Identifier: Apache-2.0
"""The options that the graphs of each model were compiled with, for as long as the model lives.

torch keeps them only for a module that was compiled itself. A training step that was given to
torch.compile as a function leaves nothing in the model that it runs.
"""

from __future__ import annotations

from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from q2compile.capture.module_names import Names
from q2compile.capture.module_tree import named_modules, unwrapped
from q2compile.config import Config

# model -> [(Config, place)], in the order that they came
_by_model: Any = WeakIdKeyDictionary()


def note(names: Names, config: Config) -> None:
    """A graph was compiled with ``config``: of the models in ``names``, and of the module whose
    frame Dynamo compiled."""
    models = list(names.models.items())
    if names.root is not None and names.prefix:
        models += [(names.place, m) for n, m in named_modules(names.root) if n == names.prefix]
    for place, model in models:
        known = _by_model.setdefault(unwrapped(model), [])
        if (config, place) not in known:
            known.append((config, place))


def options_of(model: Any) -> list[tuple[Config, str]]:
    """The options of all graphs of ``model`` in this process, each with the place of the model: the
    text that the names of its sites began with."""
    return list(_by_model.get(unwrapped(model), ()))
