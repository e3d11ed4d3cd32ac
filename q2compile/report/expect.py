# SPDX-License-Identifier: Apache-2.0
"""`expect`: an error instead of a training in high precision that nobody noticed."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from q2compile.capture.module_names import Names
from q2compile.capture.module_tree import named_modules, named_parameters, unwrapped
from q2compile.errors import ConfigError, NotTakenError, shown
from q2compile.report import announce
from q2compile.report.row import Row
from q2compile.torch_internals.aot_autograd import compiles_ahead_of_time
from q2compile.torch_internals.fsdp1 import UNSUPPORTED, is_flattened
from q2compile.torch_internals.ranks import process_rank

_MOST = 5  # reasons in a message

_expected: Any = WeakIdKeyDictionary()  # model -> _Expected
_saved: Any = WeakIdKeyDictionary()  # models with a matmul in code that was compiled to be saved


def expect(model: nn.Module) -> None:
    """Make sure that ``model`` trains in 4 bits: the first backward raises if none of its matmuls
    has run in 4 bits when its first gradient is complete. No optimizer has stepped by then.

    Use it if a trainer compiles the model. After a wrong flag, a call that bypasses the compiled
    module, or a policy that matches everything, training would run as usual, but in high precision.
    Call it before the first step, on the model whose parameters are trained, and after
    ``fully_shard``, which creates new parameters. One matmul in 4 bits is enough, whereas the
    option ``strict`` requires every matmul that the policy wants. Other models that are compiled in
    this process do not count.

        q2compile.expect(model)
        trainer.train()

    The hooks that wait for the gradients are removed when a matmul of the model has run in 4 bits.
    A second call for the same model changes nothing.

    Raises:
        ConfigError, a ValueError: ``model`` is no module, or none of its parameters is trained.
        NotTakenError, a RuntimeError: in the first backward. It says whether a graph came at all,
            and why its matmuls were left. For a model under FSDP1 (FullyShardedDataParallel) it
            comes at once. If FSDP1 wraps the model later, it comes with the first graph, and if
            there is no graph, a line at exit says so.
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
    if any(map(is_flattened, trained)):
        raise _error(model, UNSUPPORTED)
    is_saved = any(part in _saved for _, part in named_modules(model))
    if model not in _expected and not is_saved:
        _expected[model] = _Expected(model, trained)


def compiled(
    run: Callable[..., Any], rows: Sequence[Row], names: Names, *, was_taken: bool
) -> Callable[..., Any]:
    """``run``, the compiled code of a graph, wrapped so that it notes for which models it runs.

    Raises NotTakenError for a model that FSDP1 has wrapped since it was expected.
    """
    if not was_taken:
        for model, expected in list(_expected.items()):
            held = [p for _, p in named_parameters(model) if any(p is q for q in names.held)]
            if any(map(is_flattened, held)):
                raise _error(model, UNSUPPORTED)
            if held:
                expected.left.update((f"{row.module}: {row.why}", None) for row in rows if row.why)
        return run
    if compiles_ahead_of_time():
        if names.root is not None:
            _saved[names.root] = True
        return run
    places = tuple(names.places[id(p)] for p in names.taken if id(p) in names.places)

    def call(*args: Any) -> Any:
        if _expected and torch.is_grad_enabled():
            _ran([args[place] for place in places])
        return run(*args)

    return call


def _ran(weights: Sequence[Tensor]) -> None:
    """Called when compiled code that multiplies these weights in 4 bits runs with gradients. Dynamo
    may have compiled it for another model."""
    weight_ids = {id(w) for w in weights}
    for model, expected in list(_expected.items()):
        if any(id(p) in weight_ids for _, p in named_parameters(model)):
            expected.forget()
            del _expected[model]


class _Expected:
    """A model of which nothing has run in 4 bits yet."""

    def __init__(self, model: nn.Module, trained: Sequence[Tensor]) -> None:
        self.left: dict[str, None] = {}
        self._model = weakref.ref(model)
        self._hooks = [p.register_post_accumulate_grad_hook(self._raise) for p in trained]

    def forget(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _raise(self, _: Tensor) -> None:
        """Called when a gradient is complete: whatever was to be compiled has been."""
        model = self._model()
        if model is None:
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
        raise _error(model, why)


def _say_what_waits_under_fsdp1() -> None:
    """FSDP1 gives the gradients to a parameter of its own, on which there is no hook. If no graph
    has come either, the models that still wait at exit show it."""
    for model in list(_expected) if process_rank() == 0 else ():
        if any(is_flattened(p) for _, p in named_parameters(model)):
            announce.LOG.warning("q2compile: %s", _error(model, UNSUPPORTED))


atexit.register(_say_what_waits_under_fsdp1)


def _error(model: nn.Module, why: str) -> NotTakenError:
    return NotTakenError(
        f"expect: nothing of {type(model).__name__} runs in 4 bits: {why}. "
        "q2compile.explain(model, ...) lists every matmul"
    )
