# SPDX-License-Identifier: Apache-2.0
"""`expect`: an error instead of a training in high precision that nobody noticed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from q2compile.capture.module_tree import named_modules, named_parameters, unwrapped
from q2compile.errors import ConfigError, NotTakenError, shown
from q2compile.report.row import Row

_MOST = 5  # reasons in a message

# Structures of models with a matmul compiled in 4 bits: Dynamo runs the same graphs for an equal
# model. No references to parameters, since torch.utils.swap_tensors refuses those that have weak
# references.
taken_models: set[tuple[Any, ...]] = set()
_expected: Any = WeakIdKeyDictionary()  # model -> _Expected


def expect(model: nn.Module) -> None:
    """Make sure that ``model`` trains in 4 bits: if no matmul of it was compiled in 4 bits by the
    time its first gradient is complete, the backward raises. No optimizer has stepped then.

    For trainers that compile the model themselves, or are given a compiled one: a wrong flag, a
    call that goes around the compiled module, or a policy that matches everything leaves a training
    that runs as usual, in high precision. Call it before the first step, on the model whose
    parameters are trained; under ``fully_shard`` afterwards, which makes new parameters; for a
    compiled function before its first call. One matmul in 4 bits is enough; the option ``strict``
    asks for all that the policy wants.

        q2compile.expect(model)
        trainer.train()

    The hooks that wait for the gradients are removed when a matmul of the model is compiled in 4
    bits. A second call for the same model changes nothing.

    Raises:
        ConfigError, a ValueError: ``model`` is no module, or none of its parameters is trained.
        NotTakenError, a RuntimeError: in the first backward. It says whether a graph came at all,
            and why its matmuls were left.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"expect: got {shown(type(model).__name__)}; allowed: a torch.nn.Module")
    model = unwrapped(model)
    trained = [p for _, p in named_parameters(model) if p.requires_grad and p.is_leaf]
    if not trained:
        raise ConfigError(
            f"expect: no parameter of {type(model).__name__} requires a gradient; call it on the "
            "model that is trained, before the first step"
        )
    if model not in _expected and not _is_taken(model):
        _expected[model] = _Expected(model, trained)


def compiled(rows: Sequence[Row], held: Sequence[nn.Parameter], root: nn.Module | None) -> None:
    """A graph of ``root`` that holds these parameters was compiled."""
    taken = any(row.taken and row.has_parameter for row in rows)
    if taken and root is not None:
        taken_models.add(_likeness(root))
    for model, expected in list(_expected.items()):
        holds = any(p is q for _, p in named_parameters(model) for q in held)
        if (taken and holds) or _is_taken(model):
            expected.forget()
            del _expected[model]
        elif holds:
            expected.left.update((f"{row.module}: {row.why}", None) for row in rows if row.why)


class _Expected:
    """A model of which nothing has been compiled in 4 bits yet."""

    def __init__(self, model: nn.Module, trained: Sequence[Tensor]) -> None:
        self.left: dict[str, None] = {}
        self._model = weakref.ref(model)
        self._hooks = [p.register_post_accumulate_grad_hook(self._raise) for p in trained]

    def forget(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _raise(self, _: Tensor) -> None:
        """A gradient is complete: whatever was to be compiled has been."""
        model = self._model()
        if model is None or _is_taken(model):
            return
        if self.left:
            more = f" and {len(self.left) - _MOST} more" if len(self.left) > _MOST else ""
            why = f"no matmul of its graphs was taken: {'; '.join([*self.left][:_MOST])}{more}"
        else:
            why = (
                "no graph of it came to the backend. Either it was not compiled with "
                "backend='quartet2' (model.compile(backend='quartet2'), or the trainer's own "
                "setting for the backend), or the trainer calls something that was not compiled"
            )
        raise NotTakenError(
            f"expect: nothing of {type(model).__name__} runs in 4 bits: {why}. "
            "q2compile.explain(model, ...) lists every matmul"
        )


def _is_taken(model: nn.Module) -> bool:
    kinds = {kind for kind, _ in taken_models}
    parts = (part for _, part in named_modules(model) if _kind(part) in kinds)
    return any(_likeness(part) in taken_models for part in parts)


def _kind(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def _likeness(model: nn.Module) -> tuple[Any, ...]:
    """Equal for models that one compiled graph can serve. FSDP2's parameters have global shapes
    where they are sharded and where they are gathered."""
    return _kind(model), tuple((name, tuple(p.shape)) for name, p in named_parameters(model))
