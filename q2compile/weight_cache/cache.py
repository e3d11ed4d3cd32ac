"""The option ``cache_weights``: fprop's codes of a weight are made once, and used until it changes.

Without it every forward quantises every weight: in each micro-batch of an accumulated gradient, and
in each call of a model that does not train. With it the graph takes the codes as inputs, and what
calls it makes them, before the graph and so outside of any CUDA graph:

    before    y = q2.linear(x, w, b, ...)
    after     y = q2.linear_of_codes(x, w, [codes, scales, global_scale], b, ...)

Codes are kept as long as their weight's memory lives, 4.5 bits a parameter. They are made again
after

    a change of the weight's version counter: every in-place change that autograd sees, by
        optimizers, copy_, load_state_dict, init, under no_grad and inference_mode, too;
    another storage, address or layout: ``p.data = other``, .to(), swap_tensors;
    the step of any torch.optim.Optimizer, for all weights that need or have a gradient: torch's own
        fused optimizers, and others that write through ``p.data``, leave the version as it was, and
        some hold copies of the weights. A frozen weight stays quantised.

Memory that something besides the weight holds can change without any of these: the vector that
`torch.nn.utils.vector_to_parameters` cut the weights out of, the flat buffer of an optimizer, a
NumPy array, another process. Codes of such a weight are made in every call, and never kept.

What nothing shows is a write through an alias that is gone by the next call, outside of an
optimizer's step: ``p.data.copy_(average)``, a raw pointer, the replay of a CUDA graph that holds a
step. Who writes so calls `forget_weights` after it. FSDP does it in every gather, and is refused.
A checksum in every call would show it, but on a GPU the host would wait for its result, and
reading the weight is most of what quantising it costs there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import getitem
from threading import RLock
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

import q2compile.linear.dense  # noqa: F401  registers the ops
from q2compile.recipes.recipe import Operand
from q2compile.runtime_kernels.numerics.schemes import SCHEMES
from q2compile.torch_internals.storage import has_other_holders


@dataclass(frozen=True)
class Form:
    """What is made of a weight: codes by ``operand`` of the weight, or its transpose, in dtype."""

    operand: str
    dtype: torch.dtype
    transposed: bool

    def graph(self) -> fx.GraphModule:
        """w -> its parts, for a compiler."""
        graph = fx.Graph()
        w = graph.placeholder("w")
        if self.transposed:
            w = graph.call_function(torch.ops.aten.t.default, (w,))
        args = (w, self.operand, self.dtype)
        parts = graph.call_function(torch.ops.q2.quantize_weight.default, args)
        count = 3 + SCHEMES[Operand.parse(self.operand).scheme].masked
        graph.output(tuple(graph.call_function(getitem, (parts, i)) for i in range(count)))
        return fx.GraphModule(nn.Module(), graph)


@dataclass
class _Made:
    """What was made of the weight in one storage.

    state      what changes when the weight does
    trains     whether the weight needs or has a gradient: the step of any optimizer may change it
    forms      Form -> its parts
    """

    state: Any
    trains: bool
    forms: dict[Form, Sequence[Tensor]] = field(default_factory=dict)


# By storage, not by tensor: torch.utils.swap_tensors refuses a tensor that has weak references.
_made: Any = WeakIdKeyDictionary()  # storage -> _Made
# A model may be called in one thread while an optimizer steps in another, which walks over _made.
_lock = RLock()


def forget_weights() -> None:
    """Make all cached codes of weights again when they are next needed.

    For code that writes into a parameter in a way that autograd does not see, such as
    ``p.data.copy_(average)``. Needed with the option ``cache_weights`` alone.
    """
    with _lock:
        _made.clear()


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    with _lock:
        for storage in [s for s, made in _made.items() if made.trains]:
            del _made[storage]
    for group in optimizer.param_groups:
        for w in group["params"]:
            if _trains(w):
                _forget(w)


register_optimizer_step_post_hook(_after_step)


def _trains(w: Tensor) -> bool:
    return w.requires_grad or w.grad is not None


def _forget(w: Tensor) -> None:
    if _is_plain(w):
        with _lock:
            _made.pop(w.untyped_storage(), None)


def _is_plain(w: Tensor) -> bool:
    return type(w) in (Tensor, nn.Parameter) and torch._C._has_storage(w)


def _traceable(w: Tensor) -> bool:
    """Whether a change of ``w`` would be seen, and codes made now will be there later: not while a
    CUDA graph is captured, which must hold the quantisation itself."""
    if not _is_plain(w) or w.is_inference() or has_other_holders(w.untyped_storage()):
        return False
    return not (w.is_cuda and torch.cuda.is_current_stream_capturing())


def parts_of(w: Tensor, form: Form, make: Callable[[Tensor], Sequence[Tensor]]) -> Sequence[Tensor]:
    """``make(w.detach())``, or what it gave when ``w`` was last as it is now."""
    if not _traceable(w):
        _forget(w)
        return make(w.detach())
    storage = w.untyped_storage()
    state = (w.data_ptr(), w.shape, w.stride(), w.dtype, w._version)
    with _lock:
        made = _made.get(storage)
        if made is None or made.state != state:
            made = _made[storage] = _Made(state, False)
        made.trains = made.trains or _trains(w)
    if form not in made.forms:
        # Codes made in inference mode could not be saved for a backward later.
        with torch.inference_mode(False), torch.no_grad():
            made.forms[form] = make(w.detach())
    return made.forms[form]
