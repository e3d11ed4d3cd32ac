# SPDX-License-Identifier: Apache-2.0
"""The shards that FSDP2 gathers in one collective, quantized by two compiled graphs.

Two calls for each layer, and not several for each weight: each call costs the host more than its
kernels cost a GPU. Equal layers share the graphs. One layer's shards in the dtype of the gather are
alive at a time; between the calls none is, so the second makes them again.

A graph is compiled by each rank for itself, when the others may already wait for this rank in a
collective. Where that fails, or the graph's first call, the rank runs the same ops without a
compiler. They have the same bits, so no rank has to know of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from q2compile.runtime_kernels.numerics import shards as of_shards
from q2compile.torch_internals import fsdp
from q2compile.torch_internals.dynamo import compiling_apart
from q2compile.weight_cache.sharded_weight import RequestedCodes, ShardedWeight

Graphs = dict[Any, dict[Any, Callable[..., Any]]]  # forms and layouts -> function, inputs -> graph


class ShardBatch:
    """Weights of one group of FSDP2 whose codes all ranks take. All have a global scale, or none.

    is_local  whether they have none, so that there is no `agreement`
    graphs    compiled before, by the weights' forms and layouts
    """

    def __init__(self, weights: Sequence[ShardedWeight], graphs: Graphs) -> None:
        self.weights = weights
        agreed = [weight.agreed for weight in weights]
        self._wanted = [wanted for wanted in agreed if wanted is not None]
        described = tuple((wanted.form, wanted.layout) for wanted in self._wanted)
        self._graphs = graphs.setdefault(described, {})
        self.is_local = all(wanted.is_local for wanted in self._wanted)

    def agreement(self) -> Tensor:
        """The values that the ranks are to agree on: of `shards.agreement`."""
        shards = self._shards()
        found: Tensor = self._run(agreement, shards)[0]
        return found

    def quantize(self, agreed: Tensor) -> None:
        """Make the codes under what the ranks agreed on; it is empty without a global scale."""
        shards = self._shards()
        made = iter(self._run(codes, [agreed, *shards]))
        for weight, wanted in zip(self.weights, self._wanted, strict=True):
            global_scale, *sent = [
                next(made) for _ in range(1 + of_shards.sent_parts(wanted.scheme))
            ]
            weight.send(sent, global_scale)

    def _shards(self) -> list[Tensor]:
        """The shards in the dtype that is quantized. They are cast here, as FSDP2 and autocast
        cast: Inductor would fuse the casts with the quantizers, and leave out the rounding."""
        cast = []
        for weight, wanted in zip(self.weights, self._wanted, strict=True):
            gathered = fsdp.shard_of(weight.record).to(fsdp.dtype_of(weight.record))
            cast.append(gathered.to(wanted.form.dtype))
        return cast

    @torch.no_grad()
    def _run(self, function: Callable[..., Any], inputs: list[Tensor]) -> Sequence[Tensor]:
        """``function`` of `_wanted` and the inputs, compiled if it can be compiled and called."""
        key = (function, *((t.shape, t.dtype, t.device) for t in inputs))
        if key not in self._graphs:
            of_inputs = partial(function, self._wanted)
            try:
                compiled = self._compiled(of_inputs, inputs)
                made: Sequence[Tensor] = compiled(*inputs)
                self._graphs[key] = compiled
                return made
            except Exception as error:
                self._graphs[key] = of_inputs
                _warn(self.weights[0].name, error)
        made = self._graphs[key](*inputs)
        return made

    def _compiled(self, function: Callable[..., Any], inputs: list[Tensor]) -> Callable[..., Any]:
        with compiling_apart(*inputs) as like:
            traced = make_fx(function, tracing_mode="fake")(*like)
            return self._wanted[0].compile(traced, like)


def _warn(name: str, error: Exception) -> None:
    warnings.warn(
        f"q2compile: gather_codes: the graph that quantizes the shards of {name!r} and others of "
        f"its layer failed to compile or in its first call ({type(error).__name__}: {error}). On "
        "this rank it runs in eager mode: slower, but with the same bits",
        RuntimeWarning,
        stacklevel=2,
    )


def agreement(wanted: Sequence[RequestedCodes], *shards: Tensor) -> tuple[Tensor]:
    """The result of `shards.agreement`, for a compiler."""
    found: list[tuple[Tensor, Tensor | None]] = []
    for w, shard in zip(wanted, shards, strict=True):
        rows = w.form.matrix(shard).contiguous()
        if w.scheme.takes_amax:
            found.append((torch.ops.q2.amax(rows), None))
        else:
            found.append(of_shards.found_in(w.quantized(rows)))
    return (of_shards.agreement(found),)


def codes(wanted: Sequence[RequestedCodes], agreed: Tensor, *shards: Tensor) -> tuple[Tensor, ...]:
    """The global scale of each weight, and what `shards.of_shard` returns for it."""
    scales = of_shards.global_scale(agreed)
    made: list[Tensor] = []
    for i, (w, shard) in enumerate(zip(wanted, shards, strict=True)):
        rows = w.form.matrix(shard).contiguous()
        if not w.is_local:
            rows = of_shards.filled(rows, w.scheme, agreed[i], scales[i])
        parts = w.quantized(rows)
        made.append(scales[i].clone() if w.scheme.global_scale == "pow2" else parts[2])
        made += of_shards.of_shard(parts, w.layout.rows, w.scheme)
    return tuple(made)
