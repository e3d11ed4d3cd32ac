# SPDX-License-Identifier: Apache-2.0
"""The option ``cache_weights``: codes of a weight are made once, and used until it changes.

Without it every forward quantizes every weight: in each micro-batch of an accumulated gradient, and
in each call of a model that does not train. With it the graph takes the codes as inputs. Its caller
makes them before the graph runs, so outside of any CUDA graph:

    before    y = q2.linear(x, w, b, ...)
    after     y = q2.linear(x, w, b, ..., [codes, scales, global_scale])

A dgrad that reuses fprop's codes takes them transposed from there, too. One that rotates w with the
signs of its dy quantizes fprop's codes anew: if micro-batches shared the signs and random bits of
w, they would have to share those of dy, and the errors of two stochastic roundings by the same bits
are correlated by one half.

Codes live as long as their weight's memory, at 4.5 bits per parameter and direction. Under CUDA
graphs they keep their addresses, so that they are not copied before a replay, and nothing is
recorded again after a step. They are recomputed after

    a change of the weight's version counter: every in-place change that autograd sees, by
        optimizers, copy_, load_state_dict, init, under no_grad and inference_mode, too;
    another storage, address or layout: ``p.data = other``, .to(), swap_tensors;
    a hand-over of the memory to another weight, whose version counter may have the same value:
        trainers that swap blocks hand one buffer from layer to layer;
    the step of an optimizer that holds the weight. torch's fused SGD, Adam, AdamW and Adagrad leave
        the version as it was, and so do optimizers of others that write through ``p.data``. A
        frozen weight that the optimizer skips keeps its codes;
    merging or unmerging adapters: PEFT and loralib write through ``p.data``, and note it in
        attributes of the module (`adapters`).

Steps are counted by a hook on each optimizer that holds such a weight (`optimizer_steps`); other
optimizers get none. Optimizers that hold copies of the weights, or that are no
torch.optim.Optimizer, are not found. So codes of a weight that a backward may have reached, and
that no known optimizer holds, are recomputed in every call.

Shared memory can change without any of these: the vector that `torch.nn.utils.vector_to_parameters`
cut the weights out of, the flat buffer of an optimizer, a NumPy array, another process. Codes of
such a weight are recomputed in every call.

Not detected: a write through an alias that is gone by the next call, outside of an optimizer's
step, such as ``p.data.copy_(average)``, a raw pointer, or the replay of a CUDA graph that holds a
step. Code that writes so must call `forget_weights` afterwards. FSDP writes so in every gather, so
it raises an error here.

The option is off by default, because common code writes so, and stale codes raise no error: target
networks are averaged by ``p.data.copy_``, and adversarial training adds to ``p.data`` between two
backward passes of one step, so that not even the micro-batches of a step are safe. Nothing cheap
tells: a checksum reads the weight, which is most of the cost of quantizing it on a GPU, and torch's
copy-on-write (_lazy_clone) does not see its foreach and fused CUDA kernels (2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import getitem
from threading import RLock
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakIdKeyDictionary

import q2compile.linear.dense  # noqa: F401  registers the ops
from q2compile.recipes.recipe import Operand
from q2compile.runtime_kernels.numerics.schemes import SCHEMES
from q2compile.torch_internals.fsdp import local_part
from q2compile.torch_internals.identity import identity_of
from q2compile.torch_internals.optimizer_steps import Holders, Steps
from q2compile.torch_internals.storage import has_other_holders


@dataclass(frozen=True)
class CodesLayout:
    """A form of a weight: codes by ``operand`` of the weight, or its transpose, in dtype. both:
    and these codes transposed, which a dgrad reuses."""

    operand: str
    dtype: torch.dtype
    transposed: bool
    both: bool = False

    def matrix(self, w: Tensor) -> Tensor:
        """The matrix to quantize, [..., K], of w [N, K], a stack of experts [E, N, K], or this
        rank's part of a DTensor. Transposed: of [K, N], or [E, K, N]."""
        w = local_part(w).detach()
        return (w.mT if self.transposed else w).flatten(0, -2)

    def graph(self) -> fx.GraphModule:
        """w -> its parts, for a compiler."""
        graph = fx.Graph()
        w = graph.placeholder("w")
        if self.transposed:
            w = graph.call_function(torch.ops.aten.t.default, (w,))
        args = (w, self.operand, self.dtype, self.both)
        parts = graph.call_function(torch.ops.q2.quantize_weight.default, args)
        count = 3 + SCHEMES[Operand.parse(self.operand).scheme].masked + 2 * self.both
        graph.output(tuple(graph.call_function(getitem, (parts, i)) for i in range(count)))
        return fx.GraphModule(nn.Module(), graph)


@dataclass
class _Made:
    """Cached forms of the weight in one storage.

    weight   which weight that is (`identity_of`)
    state    changes when the weight does, except by its optimizers' steps
    steps    the steps of the known optimizers that hold the weight, when the codes were made
    trained  whether a backward pass can have followed a call
    forms    Form -> its parts
    current  the forms whose parts are of the weight as it is
    """

    weight: tuple[int, int]
    state: Any = None
    steps: tuple[tuple[Steps, int], ...] = ()
    trained: bool = False
    holders: Holders = field(default_factory=Holders)
    forms: dict[CodesLayout, Sequence[Tensor]] = field(default_factory=dict)
    current: set[CodesLayout] = field(default_factory=set)

    def changed(self, w: Tensor, state: Any) -> bool:
        """Whether ``w`` is, or may be, another than the codes were made of."""
        if state != self.state:
            return True
        needs = _trains(w)
        holders = self.holders.all(w) if needs else self.holders.known(w)
        if holders is None or self.steps != _counted(w, holders):
            return True
        return needs and self.trained and not holders

    def begin(self, w: Tensor, state: Any, in_place: bool) -> None:
        """Codes are made of ``w`` as it is now."""
        is_alike = self.state is not None and self.state[1:4] == state[1:4]
        self.state, self.steps = state, _counted(w, self.holders.known(w))
        self.current.clear()
        if not (in_place and is_alike):
            self.forms.clear()

    def put(self, form: CodesLayout, parts: Sequence[Tensor]) -> None:
        """Keep ``parts``, in the memory of earlier ones where there are any."""
        for old, new in zip(self.forms.setdefault(form, parts), parts, strict=True):
            if old is not new:
                old.copy_(new)
        self.current.add(form)


# By storage, not by tensor: torch.utils.swap_tensors refuses a tensor that has weak references.
_made: Any = WeakIdKeyDictionary()  # storage -> _Made
_lock = RLock()


def forget_weights() -> None:
    """Discard all cached codes of weights: they are recomputed when they are next needed.

    For code that writes into a parameter in a way that autograd does not see, such as
    ``p.data.copy_(average)``. Needed with the option ``cache_weights`` alone.
    """
    with _lock:
        _made.clear()


def _trains(w: Tensor) -> bool:
    return w.requires_grad or w.grad is not None


def _counted(w: Tensor, holders: Sequence[Steps]) -> tuple[tuple[Steps, int], ...]:
    """The steps that may change ``w``: optimizers skip a weight without a gradient."""
    trains = _trains(w)
    return tuple((s, s.count) for s in holders if trains or s.has_state_of(w))


def _forget(w: Tensor) -> None:
    if _is_plain(w):
        with _lock:
            _made.pop(w.untyped_storage(), None)


def _is_plain(w: Tensor) -> bool:
    return type(w) in (Tensor, nn.Parameter) and torch._C._has_storage(w)


def _can_keep(w: Tensor) -> bool:
    """True if ``w`` has a version and codes made now will be there later. During the capture of a
    CUDA graph they will not, because the graph must contain the quantization itself."""
    if not _is_plain(w) or w.is_inference():
        return False
    return not (w.is_cuda and torch.cuda.is_current_stream_capturing())


def parts_of(
    w: Tensor,
    form: CodesLayout,
    make: Callable[[Tensor], Sequence[Tensor]],
    adapters: Any = (),
    in_place: bool = False,
) -> Sequence[Tensor]:
    """``make(w.detach())``, or what it gave when ``w`` was last as it is now.

    adapters  which are merged into ``w`` (see `adapters.Merged`)
    in_place  new codes are written over those of the weight as it was. A backward that still needs
              those raises torch's error about a tensor that was modified in place, as it does in
              eager mode for the weight
    """
    is_shared = _can_keep(w) and has_other_holders(w.untyped_storage())
    if not _can_keep(w) or is_shared and not in_place:
        _forget(w)
        return make(w.detach())
    state = (w.data_ptr(), w.shape, w.stride(), w.dtype, w._version, adapters)
    with _lock:
        weight = identity_of(w)
        made = _made.get(w.untyped_storage())
        if made is None or made.weight != weight:
            made = _made[w.untyped_storage()] = _Made(weight)
        made.holders.note(w)
        if is_shared or made.changed(w, state):
            made.begin(w, state, in_place)
        made.trained |= w.grad is not None or w.requires_grad and torch.is_grad_enabled()
    if form not in made.current:
        # Codes made in inference mode could not be saved for a backward later.
        with torch.inference_mode(False), torch.no_grad():
            made.put(form, make(w.detach()))
    return made.forms[form]
