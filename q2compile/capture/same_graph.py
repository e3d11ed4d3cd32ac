# SPDX-License-Identifier: Apache-2.0
"""Which equal modules Dynamo runs with one graph.

When the compiled frame is not the whole model's, Dynamo takes parameters as inputs and runs every
module of the same class with the same code: those whose parameter of the same path looks the same
to its guards, and that an equal call of torch.compile compiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from q2compile.capture.module_tree import (
    children,
    module_at,
    named_modules,
    parameter_at,
    under,
)
from q2compile.torch_internals.dynamo import UNKNOWN, own_compile_call


def same_graph(
    parameter: nn.Parameter,
    by_id: Mapping[int, list[str]],
    root: nn.Module,
    label: str,
    prefix: str,
    models: Mapping[str, nn.Module],
) -> list[str]:
    """Names of the parameters that the graph for ``parameter`` will also be run with: those of the
    same path in modules equal to the compiled frame's own, which is at ``prefix`` in ``root``.

    by_id, label: of `module_names.Names`; models: those to look into, by label
    """
    own = module_at(root, prefix)
    if own is None:
        return []
    place = under(label, prefix)
    names = by_id.get(id(parameter), [])
    tails = [name[len(place) + 1 :] for name in names if name.startswith(f"{place}.")]
    call = _compile_call(root, prefix)
    return [
        under(under(label, name), tail)
        for label, model in models.items()
        for name, module in named_modules(model)
        if type(module) is type(own) and module is not own
        for tail in tails
        if _looks_like(parameter, module, tail) and _equal(call, _compile_call(model, name))
    ]


def _compile_call(root: nn.Module, path: str) -> Any:
    """The call of torch.compile that compiles the module at ``path``: its own, or else that of the
    nearest module around it. None if it is one outside of ``root``, or there is none.
    """
    found, module = own_compile_call(root), root
    for part in path.split(".") if path else ():
        module = children(module)[part]
        own = own_compile_call(module)
        found = found if own is None else own
    return found


def _equal(call: Any, other: Any) -> bool:
    """Whether what ``call`` compiled serves a module that ``other`` compiles. A call outside of the
    model (None) runs everything in it."""
    return call is None or call is UNKNOWN or other is UNKNOWN or bool(call == other)


def _looks_like(parameter: nn.Parameter, module: nn.Module, path: str) -> bool:
    """Whether Dynamo's guards on ``parameter`` hold for the one at ``path`` of ``module``.

    One that FSDP2 has sharded until its layer runs has the shape that it will have then, but not
    its dtype, which is that of a mixed precision policy: equal layers are taken to have equal ones.
    """
    other: torch.Tensor | None = parameter_at(module, path)
    if other is None:
        return False
    mesh = getattr(parameter, "device_mesh", None)
    sharded = isinstance(other, DTensor) and other.device_mesh != mesh
    seen = ("shape", "device", "requires_grad", *["dtype"] * (not sharded))
    return all(getattr(parameter, what) == getattr(other, what) for what in seen)
