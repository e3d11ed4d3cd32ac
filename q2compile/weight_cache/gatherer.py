# SPDX-License-Identifier: Apache-2.0
"""The hooks of `gather_codes` on a model, and whether all ranks have them.

A rank learns what others did without a collective, from the store that their process groups were
made with: a rank that calls no gather_codes begins no collective for it. Each rank posts there,
under the number of its call of gather_codes,

    in gather_codes                     the names and shapes of its weights
    in the backend, without a call      "none"

and reads in its first compilation. That follows its first gather of values, for which it waited for
the ranks that hold other shards; for others of its mesh, as replicas, it waits then. So ranks that
did, and ranks that did not, both raise an error there.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from q2compile.capture.module_names import plain_name
from q2compile.capture.module_tree import named_modules, under
from q2compile.errors import ConfigError
from q2compile.torch_internals import fsdp
from q2compile.torch_internals.dynamo import is_compiled_by, skip_frames_of, skips_forward_of
from q2compile.weight_cache.eager_readers import EagerReaders
from q2compile.weight_cache.exchange import Votes
from q2compile.weight_cache.sharded_weight import ShardedWeight, add

_NONE = "none"
# Seconds to wait for ranks that have posted nothing yet, and for those that compiled without a call
# of gather_codes, which may follow; and of a rank without one for others that may have.
_FOR_OTHERS, _FOR_A_CALL, _WITHOUT_A_CALL = 600.0, 10.0, 10.0
_texts: list[str] = []  # of this rank's calls
_graphs_without_call: set[str] = set()  # types of sharded models that graphs were compiled for
_asked: set[int] = set()  # numbers of calls that this rank skipped and requested from others
_gatherers: Any = WeakIdKeyDictionary()  # the outermost sharded module -> its Gatherer
_covered: Any = WeakIdKeyDictionary()  # a sharded module in it -> the same


def gatherer_of(name: str, root: nn.Module) -> Gatherer:
    """The one of ``root``, the outermost module under fully_shard, called ``name`` in the model."""
    if root not in _gatherers:
        _gatherers[root] = Gatherer(name, root)
    gatherer: Gatherer = _gatherers[root]
    return gatherer


class Gatherer:
    """The weights of one outermost module under fully_shard: all of two or more dimensions.

    others  whether gradients are on in the forwards that graphs of another backend run in. Such a
        graph does not say what it reads, so values of all weights are gathered in these forwards.
    """

    def __init__(self, name: str, root: nn.Module) -> None:
        self.weights = _weights_of(name, root)
        self.others: set[bool] = set()
        self._readers = EagerReaders(root)
        by_groups: dict[Any, list[ShardedWeight]] = {}
        for weight in self.weights:
            if not weight.why:
                by_groups.setdefault(fsdp.process_groups(weight.record), []).append(weight)
        self._votes = [Votes(weights, *groups) for groups, weights in by_groups.items()]
        self._ranks = sorted({r for w in self.weights for r in fsdp.ranks_of(w.record)})
        self._forwards, self._agreed, self._key = 0, False, _key(len(_texts))
        described = [
            f"{w.name} {tuple(w.record.sharded_param.shape)} {w.why}" for w in self.weights
        ]
        self._text = f"{len(described)} weights, {zlib.crc32(repr(described).encode()):08x}"
        _texts.append(self._text)
        fsdp.post(self._key, self._text)
        self._register_hooks(root)
        _covered.update((m, self) for _, m in named_modules(root) if fsdp.is_sharded(m))

    def _register_hooks(self, root: nn.Module) -> None:
        self._eager: list[_ValuesIfEager] = []
        begin, end = torch.compiler.disable(self._begin), torch.compiler.disable(self._end)
        root.register_forward_pre_hook(begin, prepend=True)  # before FSDP2's, which gathers
        root.register_forward_hook(end, prepend=True, always_call=True)
        for weight in self.weights:
            weight.others = self.others
            if not weight.why:
                self._eager.append(_ValuesIfEager(weight))
        # Graphs compiled before this call take no codes, and Dynamo runs those of an equal model
        # for this one.
        stepped = any(fsdp.gathered_parameter(w.record) is not None for w in self.weights)
        if stepped or _graphs_without_call:
            torch.compiler.reset()
            _graphs_without_call.clear()

    def agree(self) -> None:
        """Raise ConfigError unless all ranks have called gather_codes on the same model."""
        if self._agreed:
            return
        texts = fsdp.read_posts(self._key, self._ranks, _FOR_OTHERS, {_NONE: _FOR_A_CALL})
        missing = [rank for rank, text in texts.items() if text in (None, _NONE)]
        if missing:
            raise ConfigError(
                f"gather_codes: rank {dist.get_rank()} called it, {_ranks(missing)} did not. "
                "Call it on all ranks, or on none"
            )
        other = [rank for rank, text in texts.items() if text != self._text]
        if other:
            raise ConfigError(
                f"gather_codes: rank {dist.get_rank()} called it on a model with {self._text}; "
                f"{_ranks(other)} on one with {texts[other[0]]}. The first number is a count, the "
                "second a hash of names and shapes. Call it on the same model on all ranks"
            )
        self._agreed = True

    def _begin(self, *_: Any) -> None:
        self._forwards += 1
        self._register_again()
        found = self._readers.find()
        for weight in self.weights:
            weight.begin_forward()
            is_kept = fsdp.is_kept(weight.group)
            weight.has_readers = self._readers.may_read(found, weight.home, is_kept)
        if self._forwards > 1:  # graphs are compiled in the first
            self.agree()
            for votes in self._votes:
                votes.begin()

    def _register_again(self) -> None:
        """Register at a forward's start and end, since its backward may run modules again."""
        for hook in self._eager:
            hook.register()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Runs before the user's hooks. output: None after an error, maybe of this rank alone."""
        self._register_again()
        for weight in self.weights:
            weight.end_forward()
        read = [weight for weight in self.weights if weight.was_read()]
        if output is None:
            return
        grads = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        hidden = [weight.leave(bool(grads)) for weight in self.weights]
        for t in grads if any(hidden) else ():
            t.register_hook(self._show)
        if read:
            raise RuntimeError(read[0].withheld)

    @torch.compiler.disable
    def _show(self, gradient: Tensor) -> None:
        """Show the gathered parameters when a backward begins, which may run modules again."""
        for weight in self.weights:
            weight.show()

    def read_by_another_backend(self) -> None:
        """Note a graph that another backend compiles; it will run for equal layers, too."""
        self.others.add(torch.is_grad_enabled())
        for weight in self.weights:
            weight.read_values()


@torch.compiler.assume_constant_result
def _is_read_by_graph() -> bool:
    """Called by Dynamo while it traces a forward: have the values there if the graph reads them."""
    for gatherer in list(_gatherers.values()):
        if fsdp.wants_values():
            for weight in gatherer.weights:
                weight.gather_values()
        elif not is_compiled_by("q2compile"):
            gatherer.read_by_another_backend()
    return True


def check_all_called(root: nn.Module | None) -> None:
    """Raise ConfigError, before a graph of ``root`` is compiled, if some ranks, this one or others,
    have not called gather_codes and others have."""
    found = named_modules(root) if root is not None and dist.is_initialized() else ()
    sharded = [module for _, module in found if fsdp.is_sharded(module)]
    known = [_covered[module] for module in sharded if module in _covered]
    for gatherer in known if sharded else list(_gatherers.values()):
        gatherer.agree()
    if known or not sharded:
        return
    _graphs_without_call.add(type(root).__name__)
    records = [r for m in sharded for group in fsdp.groups_of(m) for r in group.fsdp_params]
    ranks = {rank for record in records for rank in fsdp.ranks_of(record)}
    reached = {rank for record in records for rank in fsdp.ranks_of_shards(record)}
    number = len(_texts)
    fsdp.post(_key(number), _NONE)
    wait = ranks > reached and number not in _asked
    _asked.add(number)
    texts = fsdp.read_posts(_key(number), sorted(ranks), _WITHOUT_A_CALL if wait else 0.0, {})
    called = [rank for rank, text in texts.items() if text not in (None, _NONE)]
    if called:
        raise ConfigError(
            f"gather_codes: {_ranks(called)} called it, rank {dist.get_rank()} did not. Call it on "
            "all ranks, or on none"
        )


def _key(number: int) -> str:
    return f"gather_codes/{number}"


def _weights_of(name: str, root: nn.Module) -> list[ShardedWeight]:
    weights = []
    for path, module in named_modules(root):
        for group in fsdp.groups_of(module):
            names = {id(p): n for n, p in module.named_parameters()}
            for record in group.fsdp_params:
                if len(fsdp.shape_of(record)) < 2:
                    continue
                inner = names.get(id(record.sharded_param), fsdp.names_of(record)[0])
                full = plain_name(under(under(name, path), inner))
                weights.append(ShardedWeight(full, module, record, group))
                add(weights[-1])
    return weights


class _ValuesIfEager:
    """A hook of the module that holds the weight, for a forward without a graph of ours. Our graph
    says itself what it reads; Dynamo leaves nothing of the hook there, nor where it compiles the
    hook and the forward one after the other. It leaves nothing in graphs of other backends either,
    but `_is_read_by_graph` runs while they are compiled.

    Where Dynamo skips a torch.nn module it would compile one that has hooks, and the module would
    be quantized. So there the hook runs, and is gone while the module runs.
    """

    def __init__(self, weight: ShardedWeight) -> None:
        self._owner = fsdp.owner_of(weight.record)
        self._skipped = skips_forward_of(self._owner)
        self._read_values: Any = torch.compiler.disable(weight.read_values)
        self._handle: RemovableHandle | None = None
        self.register()

    def register(self) -> None:
        """Register the hook, or register it again if it was removed."""
        if self._handle is not None:
            return
        hook = self._traced
        if self._skipped:
            hook = self._once
            skip_frames_of(hook)
        self._handle = self._owner.register_forward_pre_hook(hook)

    def _traced(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            _is_read_by_graph()
        else:
            self._read_values()

    def _once(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            _is_read_by_graph()
        else:
            if self._handle is not None:
                self._handle.remove()
                self._handle = None
            self._read_values()


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
