# SPDX-License-Identifier: Apache-2.0
"""Which adapters are merged into a weight.

PEFT (``merge_adapter``, ``unmerge_adapter``) and loralib (``train``, ``eval``) add an adapter's
product to its weight through ``weight.data``, which leaves the version counter as it was. Both note
it in an attribute of the module that holds the weight, or that wraps it: ``merged_adapters``, a
list of names, and ``merged``, a bool. Modules of others that write so may do the same.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

from q2compile.capture.module_tree import named_modules, named_parameters

_ATTRIBUTES = ("merged_adapters", "merged")


class Merged:
    """The adapters merged into the parameters of one model: id -> the modules that note them."""

    def __init__(self, noting: dict[int, list[weakref.ref[nn.Module]]]) -> None:
        self._noting = noting

    @classmethod
    def of_model(cls, root: nn.Module | None) -> Merged | None:
        """The adapters of a model; None if it has no such module, or is not known."""
        noting: dict[int, list[weakref.ref[nn.Module]]] = {}
        for _, module in () if root is None else named_modules(root):
            if any(name in vars(module) for name in _ATTRIBUTES):
                for _, w in named_parameters(module):
                    noting.setdefault(id(w), []).append(weakref.ref(module))
        return cls(noting) if noting else None

    def of(self, w: Tensor) -> tuple[Any, ...]:
        """A value that changes when an adapter is merged into ``w``, or unmerged."""
        modules = [ref() for ref in self._noting.get(id(w), ())]
        return tuple(
            tuple(value) if isinstance(value, list) else value
            for module in modules
            if module is not None
            for name in _ATTRIBUTES
            if isinstance(value := vars(module).get(name), list | bool)
        )
