# SPDX-License-Identifier: Apache-2.0
"""The hooks of `gather_codes` on a model."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
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

_graphs_without_call: set[str] = set()  # types of sharded models that graphs were compiled for
_gatherers: Any = WeakIdKeyDictionary()  # the outermost sharded module -> its Gatherer


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
        self._forwards = 0
        self._check_ranks(by_groups)
        self._register_hooks(root)

    def _check_ranks(self, by_groups: Mapping[Any, Sequence[ShardedWeight]]) -> None:
        """Raise ConfigError, on all ranks, if they have called gather_codes on different models."""
        described = [
            f"{w.name} {tuple(w.record.sharded_param.shape)} {w.why}" for w in self.weights
        ]
        number = zlib.crc32(repr(described).encode())
        for (own, others), weights in by_groups.items():
            found = torch.tensor([number, -number]).to(weights[0].record.device)
            for group in (own, *others):
                dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
            if found.sum().item():
                raise ConfigError(
                    f"gather_codes: rank {dist.get_rank()} called it on a model with "
                    f"{len(self.weights)} weights, another rank on one with other names or "
                    "shapes. Call it on the same model on all ranks"
                )

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

    def _begin(self, *_: Any) -> None:
        self._forwards += 1
        self._register_again()
        found = self._readers.find()
        for weight in self.weights:
            weight.begin_forward()
            is_kept = fsdp.is_kept(weight.group)
            weight.has_readers = self._readers.may_read(found, weight.home, is_kept)
        if self._forwards > 1:  # graphs are compiled in the first
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


def note_graph_without_codes(root: nn.Module) -> None:
    """A graph was compiled, maybe of a sharded model for which nobody has called gather_codes."""
    if any(fsdp.is_sharded(module) for _, module in named_modules(root)):
        _graphs_without_call.add(type(root).__name__)


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
