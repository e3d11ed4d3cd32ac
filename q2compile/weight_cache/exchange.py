# SPDX-License-Identifier: Apache-2.0
"""Ranks exchange facts about their sharded weights, at the start of each forward.

Ranks that gather different things hang, or read each other's bytes wrongly. So codes are gathered
from the forward after the one in which all ranks have read the same codes of a weight:

    forward 1    values are gathered; graphs are compiled, and take codes made of the whole weight
    forward 2    the maximum over the ranks of what each has read, and of minus that: if they are
                 equal, all ranks gather codes from now on, under a global scale of this forward

Different codes, or codes on one rank and values on another, are an error on all ranks, in the same
forward and outside of any collective. A rank that has not read a weight yet has no vote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from q2compile.errors import ConfigError
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
        self._device = weights[0].record.device
        self._agreed: list[RequestedCodes | None] = []  # of which there are batches
        self._batches: list[ShardBatch] = []
        self._graphs: Graphs = {}
        self._were_read = [False] * len(weights)  # by eager code of any of the ranks
        self._apart: Callable[[], Any] = nullcontext
        if self._device.type == "cuda":
            self._apart = partial(torch.cuda.StreamContext, torch.cuda.Stream(self._device))

    def begin(self) -> None:
        """Agree at the start of each forward, and quantize the shards of what is agreed on."""
        votes = []
        for weight in self.weights:
            n = weight.number
            votes += [n, -n if n != UNREAD else _LEAST, n == UNREAD, weight.has_readers]
        self._adopt(self._maxima(votes).view(-1, 4).tolist())
        found = [batch.agreement() for batch in self._batches if not batch.is_local]
        none = torch.empty(0, dtype=torch.int32, device=self._device)
        both = torch.cat([none, *found])
        if found:
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group)
        agreed = iter(both.split([*map(len, found)]))
        for batch in self._batches:
            batch.quantize(none if batch.is_local else next(agreed))

    def _maxima(self, votes: list[int]) -> torch.Tensor:
        """The maxima over all ranks. The host waits for them, in a stream of its own: for the last
        collective of the backward before, and not for the optimizer."""
        with self._apart():
            found = torch.tensor(votes, dtype=torch.int32).to(self._device)
            for group in (self._group, *self._others):
                dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
            return found.cpu()

    def _adopt(self, counts: list[list[int]]) -> None:
        differ = []
        for i, (weight, (most, least, _, readers)) in enumerate(
            zip(self.weights, counts, strict=True)
        ):
            if readers:  # gather the values, too, which eager code of any of the ranks may read
                self._were_read[i] = True
                weight.bring_values()
            # Dynamo has compiled a hook of one rank: that graph reads values.
            is_allowed = self._were_read[i] and -least == VALUES
            if most != UNREAD and most != -least and not is_allowed:
                differ.append(weight)
        if differ:
            raise ConfigError(_differ(differ))
        for weight, (most, least, unread, _) in zip(self.weights, counts, strict=True):
            if most != UNREAD and not unread:
                weight.adopt(-least)
        agreed = [weight.agreed for weight in self.weights]
        if agreed != self._agreed:
            self._agreed = agreed
            self._batch()

    def _batch(self) -> None:
        """Sort the weights whose codes are agreed on by what FSDP2 gathers at once."""
        by_group: dict[Any, list[ShardedWeight]] = {}
        for weight in self.weights:
            if weight.agreed is not None:
                key = id(weight.group), weight.agreed.is_local
                by_group.setdefault(key, []).append(weight)
        self._batches = [ShardBatch(weights, self._graphs) for weights in by_group.values()]


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
