# SPDX-License-Identifier: Apache-2.0
"""Ranks exchange facts about their sharded weights, in one collective per forward.

Ranks that gather different things hang, or read each other's bytes wrongly. So codes are gathered
from the forward after the one in which all ranks have read the same codes of a weight:

    forward 1    values are gathered; graphs are compiled, and take codes made of the whole weight
    forward 2    the maximum over the ranks of what each has read, and of minus that: equal, or not
    forward 3    all ranks see that they agree, and gather codes, under a global scale of forward 3

Different codes, or codes on one rank and values on another, are an error on all ranks, in the same
forward and outside of any collective. A rank that has not read a weight yet has no vote. The result
of one forward is looked at in the next, so that the host does not wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from q2compile.errors import ConfigError
from q2compile.weight_cache.eager_readers import ReaderExchange
from q2compile.weight_cache.shard_batch import Graphs, ShardBatch
from q2compile.weight_cache.sharded_weight import UNREAD, VALUES, RequestedCodes, ShardedWeight

_LEAST = -(2**31)


class Votes:
    """The weights whose shards are on the same ranks.

    group: these. others: process groups by which the other ranks that train these weights are
        reached, one dimension of the mesh each: replicas (HSDP), tensor and expert parallel ones.
        They have shards of their own, and global scales, but their policy has to be the same.
    """

    def __init__(self, weights: Sequence[ShardedWeight], group: Any, others: Sequence[Any]) -> None:
        self.weights, self._group, self._others = weights, group, others
        self._counted: Tensor | None = None  # of the last forward, on the host
        self._event: Any = None
        self._agreed: list[RequestedCodes | None] = []  # of which there are batches
        self._batches: list[ShardBatch] = []
        self._graphs: Graphs = {}
        self._readers = ReaderExchange(weights[0].record.device, (group, *others))
        self._were_read = [False] * len(weights)  # by eager code of any of the ranks

    def begin(self) -> None:
        """Agree at the start of each forward, and quantize the shards of what is agreed on."""
        self._adopt()
        self._exchange_readers()
        votes = []
        for weight in self.weights:
            n = weight.number
            votes += [n, -n if n != UNREAD else _LEAST, int(n == UNREAD)]
        device = self.weights[0].record.device
        own = torch.tensor(votes, dtype=torch.int32).to(device, non_blocking=True)
        found = [batch.agreement() for batch in self._batches if not batch.is_local]
        both = torch.cat([own, *found])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group)
        counted, *agreed = both.split([len(own), *map(len, found)])
        for group in self._others:
            dist.all_reduce(counted, dist.ReduceOp.MAX, group=group)
        self._look(counted)
        of_batch = iter(agreed)
        for batch in self._batches:
            batch.quantize(counted[:0] if batch.is_local else next(of_batch))

    def _by_weight(
        self, counts: list[list[int]]
    ) -> Iterator[tuple[ShardedWeight, bool, list[int]]]:
        return zip(self.weights, self._were_read, counts, strict=True)

    def _exchange_readers(self) -> None:
        """Gather the values, too, of weights that eager code of any of the ranks may read."""
        found = self._readers.any_of([weight.has_readers for weight in self.weights])
        for i, weight in enumerate(self.weights):
            if found[i]:
                self._were_read[i] = True
                weight.bring_values()

    def _batch(self) -> None:
        """Sort the weights whose codes are agreed on by what FSDP2 gathers at once."""
        by_group: dict[Any, list[ShardedWeight]] = {}
        for weight in self.weights:
            if weight.agreed is not None:
                key = id(weight.group), weight.agreed.is_local
                by_group.setdefault(key, []).append(weight)
        self._batches = [ShardBatch(weights, self._graphs) for weights in by_group.values()]

    def _look(self, counted: Tensor) -> None:
        if counted.device.type == "cpu":
            self._counted = counted.clone()
            return
        self._counted = torch.empty(counted.shape, dtype=counted.dtype, pin_memory=True)
        self._counted.copy_(counted, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def _adopt(self) -> None:
        if self._counted is None:
            return
        if self._event is not None:
            self._event.synchronize()
        counts = self._counted.view(-1, 3).tolist()
        differ = []
        for weight, was_read, (most, least, _) in self._by_weight(counts):
            # Dynamo has compiled a hook of one rank: that graph reads values.
            is_allowed = was_read and -least == VALUES
            if most != UNREAD and most != -least and not is_allowed:
                differ.append(weight)
        if differ:
            raise ConfigError(_differ(differ))
        for weight, _, (most, least, unread) in self._by_weight(counts):
            if most != UNREAD and not unread:
                weight.adopt(-least)
        agreed = [weight.agreed for weight in self.weights]
        if agreed != self._agreed:
            self._agreed = agreed
            self._batch()


def _differ(weights: Sequence[ShardedWeight]) -> str:
    first = weights[0]
    here = f"the codes {first.wanted.form.operand}" if first.wanted else "values"
    if first.wanted is None and not first.read:
        here = "nothing"
    more = f" and {len(weights) - 1} more" * (len(weights) > 1)
    return (
        f"gather_codes: the ranks disagree about {first.name!r}{more}: rank "
        f"{dist.get_rank()} reads {here}, another rank does not. Give all ranks the same options "
        "and policy"
    )
