# SPDX-License-Identifier: Apache-2.0
"""A model's linear layers by the torch references, in fp32, without compiling: the numerics alone.

Nothing is captured, rewritten or compiled, no pass runs and no kernel: each `nn.Linear` calls the
op q2::linear on fp32 tensors, and every op in it is computed by its torch reference, with sums in
fp32. A compiled run differs by bf16 around the linears, by Inductor, the passes and the kernels,
and by its random bits, which are drawn in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import q2compile.linear.dense  # noqa: F401  registers q2::linear
from q2compile.config import Config, resolved_policy
from q2compile.runtime_kernels.registry import REFERENCE, bound, select


class References(TorchDispatchMode):
    """Within it, every op of q2compile is computed by its torch reference, on any device."""

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if op.namespace == "q2":
            name = op._schema.name.partition("::")[2]
            given = bound(name, args, kwargs or {})
            return select(name, given, REFERENCE)(*given)
        return op(*args, **(kwargs or {}))


@contextmanager
def exact_sums() -> Iterator[None]:
    """fp32 products in fp32, also where TF32 was allowed."""
    allowed = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(allowed)


def by_references(model: nn.Module, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The model as it is called, its linears by the recipe and policy of the options.

    Forward and backward must both be run within `References` and `exact_sums`.
    """
    policy = resolved_policy(Config.from_options(dict(options)))
    for seed_index, (name, module) in enumerate(model.named_modules()):
        if isinstance(module, nn.Linear):
            recipe, _ = policy.resolve(name)
            module.__dict__.pop("forward", None)  # of the options before
            if recipe.quantizes:
                module.__dict__["forward"] = partial(_linear, module, recipe.texts(), seed_index)
    return model


def _linear(module: nn.Linear, texts: tuple[str, str, str], seed_index: int, x: Tensor) -> Tensor:
    return torch.ops.q2.linear(x, module.weight, module.bias, *texts, seed_index)
