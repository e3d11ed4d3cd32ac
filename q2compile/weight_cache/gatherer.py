"""The hooks of `gather_codes` on a model, and whether all ranks have them.

A rank learns what others did without a collective, from the store that their process groups were
made with: a rank that calls no gather_codes begins no collective for it. Each rank posts there

    in gather_codes                     the names and shapes of its weights
    in the backend, without a call      "none"

and reads in its first compilation, which follows its first gather of values, for which it waited
for the others. So ranks that did, and ranks that did not, both raise an error there.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from q2compile.capture.module_names import plain_name
from q2compile.capture.module_tree import named_modules, under
from q2compile.errors import ConfigError
from q2compile.torch_internals import fsdp
from q2compile.weight_cache.exchange import Votes
from q2compile.weight_cache.sharded_weight import ShardedWeight, add

_NONE = "none"
# Seconds to wait for ranks that have posted nothing yet, and for those that compiled without a call
# of gather_codes, which may follow.
_FOR_OTHERS, _FOR_A_CALL = 600.0, 10.0
_calls = itertools.count()
_gatherers: Any = WeakIdKeyDictionary()  # the outermost sharded module -> its Gatherer


def gatherer_of(name: str, root: nn.Module) -> Gatherer:
    """The one of ``root``, the outermost module under fully_shard, called ``name`` in the model."""
    if root not in _gatherers:
        _gatherers[root] = Gatherer(name, root)
    gatherer: Gatherer = _gatherers[root]
    return gatherer


class Gatherer:
    """The weights of one outermost module under fully_shard: all of two or more dimensions."""

    def __init__(self, name: str, root: nn.Module) -> None:
        self.weights = _weights_of(name, root)
        by_group: dict[Any, list[ShardedWeight]] = {}
        for weight in self.weights:
            if not weight.why:
                group = fsdp.process_group(weight.record)
                by_group.setdefault(group, []).append(weight)
        self._votes = [Votes(weights, group) for group, weights in by_group.items()]
        self._ranks = sorted({r for g in by_group for r in dist.get_process_group_ranks(g)})
        self._forwards, self._agreed, self._call = 0, False, next(_calls)
        described = [f"{w.name} {fsdp.shape_of(w.record)} {w.why}" for w in self.weights]
        self._text = f"{len(described)} weights, {zlib.crc32(repr(described).encode()):08x}"
        fsdp.count_posts("gather_codes", 1)
        fsdp.post(f"gather_codes/{self._call}", self._text)
        self._register_hooks(root)

    def _register_hooks(self, root: nn.Module) -> None:
        begin, end = torch.compiler.disable(self._begin), torch.compiler.disable(self._end)
        root.register_forward_pre_hook(begin, prepend=True)  # before FSDP2's, which gathers
        root.register_forward_hook(end, always_call=True)
        for weight in self.weights:
            if not weight.why:
                fsdp.owner_of(weight.record).register_forward_pre_hook(_values_if_eager(weight))
        if any(fsdp.gathered_parameter(w.record) is not None for w in self.weights):
            torch.compiler.reset()  # graphs of a step before this call take no codes

    def agree(self) -> None:
        """Raise ConfigError unless all ranks have called gather_codes on the same model."""
        if self._agreed:
            return
        key = f"gather_codes/{self._call}"
        texts = fsdp.read_posts(key, self._ranks, _FOR_OTHERS, {_NONE: _FOR_A_CALL})
        missing = [rank for rank, text in texts.items() if text in (None, _NONE)]
        if missing:
            raise ConfigError(
                f"gather_codes: rank {dist.get_rank()} has called it, and {_ranks(missing)} not. "
                "Call it on all ranks, or on none"
            )
        other = [rank for rank, text in texts.items() if text != self._text]
        if other:
            raise ConfigError(
                f"gather_codes: rank {dist.get_rank()} has called it on a model with {self._text}; "
                f"{_ranks(other)} on one with {texts[other[0]]}. The first number counts, the "
                "second sums up names and shapes. Call it on the same model on all ranks"
            )
        self._agreed = True

    def _begin(self, *_: Any) -> None:
        self._forwards += 1
        if self._forwards > 1:  # graphs are compiled in the first
            self.agree()
            for votes in self._votes:
                votes.begin()

    def _end(self, *_: Any) -> None:
        for weight in self.weights:
            weight.end_forward()


def check_all_called(root: nn.Module | None) -> None:
    """Before a graph of ``root`` is compiled: raise ConfigError if some ranks, this one or others,
    have not called gather_codes, and others have."""
    for gatherer in list(_gatherers.values()):
        gatherer.agree()
    if _gatherers or root is None or not dist.is_initialized():
        return
    if not any(fsdp.is_sharded(module) for _, module in named_modules(root)):
        return
    fsdp.post("gather_codes/0", _NONE)
    if fsdp.count_posts("gather_codes", 0):
        raise ConfigError(
            f"gather_codes: other ranks have called it, and rank {dist.get_rank()} not. Call it on "
            "all ranks, or on none"
        )


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
                weights.append(ShardedWeight(full, record, group))
                add(weights[-1])
    return weights


def _values_if_eager(weight: ShardedWeight) -> Callable[..., None]:
    """A hook of the module that holds the weight. In a compiled graph, which says itself what it
    reads, Dynamo leaves nothing of it."""

    def hook(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            weight.read_values()

    return hook


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
