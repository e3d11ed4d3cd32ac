# SPDX-License-Identifier: Apache-2.0
"""The options that the graphs of each model were compiled with, for as long as the model lives.

torch keeps them only for a module that was compiled itself. A training step that was given to
torch.compile as a function leaves nothing in the model that it runs.
"""

from __future__ import annotations

from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from q2compile.capture.module_names import Names, plain_name
from q2compile.capture.module_tree import named_modules, unwrapped
from q2compile.config import Config

# model -> [(Config, place, part)], in the order that they came
_by_model: Any = WeakIdKeyDictionary()


def note(names: Names, config: Config) -> None:
    """A graph was compiled with ``config``: of the models in ``names``, and of the module whose
    frame Dynamo compiled."""
    part = None if names.prefix is None else plain_name(names.prefix)
    models = [(place, part, model) for place, model in names.models.items()]
    if names.root is not None and names.prefix:
        inner = [m for name, m in named_modules(names.root) if name == names.prefix]
        models += [(names.place, "", m) for m in inner]
    for place, part, model in models:
        known = _by_model.setdefault(unwrapped(model), [])
        if (config, place, part) not in known:
            known.append((config, place, part))


def options_of(model: Any) -> list[tuple[Config, str, str | None]]:
    """The options of all graphs of ``model`` in this process. Each with the place of the model, the
    text that the names of its sites began with, and with the name in it of the module whose frame
    was compiled, "" for the model itself; None if that is not known."""
    return list(_by_model.get(unwrapped(model), ()))
