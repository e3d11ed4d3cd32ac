# SPDX-License-Identifier: Apache-2.0
"""Calls of q2's quantizing ops by the arguments that tests vary, in a fixed order.

both(x, *seeds, "nvfp4_sr", "rht128")()              what the op returns
launched(both(x, *seeds, "nvfp4_sr", "rht128"))      what its CUDA kernel makes, in the emulation
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from q2compile.graph.quantizers import quantizers as of_graph
from q2compile.runtime_kernels.cuda.quantize import quantizers
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.table import QUANTIZE, REQUANTIZE, QuantizerCall

Seed = Tensor | None
SEEDS = torch.tensor(-1234567890123456789), torch.tensor(42)


def amax_of(x: Tensor, scheme: str) -> Tensor | None:
    """x's amax, if the scheme takes one."""
    return torch.ops.q2.amax(x) if get_scheme(scheme).takes_amax else None


def plain(x: Any, amax: Seed, seed: Seed, scheme: str, rng_offset: int = 0) -> QuantizerCall:
    """Rowwise, without a rotation."""
    return one(x, seed, scheme, "none", False, rng_offset, amax=amax)


def with_amax(x: Tensor, seed: Seed, scheme: str, rng_offset: int = 0) -> QuantizerCall:
    """The same with x's amax, if the scheme takes one."""
    return plain(x, amax_of(x, scheme), seed, scheme, rng_offset)


def one(
    x: Any,
    seed: Seed,
    scheme: str,
    transform: str,
    columnwise: bool,
    rng_offset: int = 0,
    **more: Any,
) -> QuantizerCall:
    """Rowwise or columnwise."""
    seeds = {"columnwise_seed" if columnwise else "rowwise_seed": seed}
    how = {"scheme": scheme, "transform": transform, "rng_offset": rng_offset, **more}
    directions = {"rowwise": not columnwise, "columnwise": columnwise}
    return QuantizerCall.named(QUANTIZE, x=x, **directions, **seeds, **how)


def both(
    x: Any,
    rowwise_seed: Seed,
    columnwise_seed: Seed,
    scheme: str,
    transform: str,
    rng_offset: int = 0,
    **more: Any,
) -> QuantizerCall:
    """Rowwise and columnwise."""
    call = one(x, rowwise_seed, scheme, transform, False, rng_offset, **more)
    return call.replace(columnwise=True, columnwise_seed=columnwise_seed)


def masked(x: Any, scheme: str, transform: str) -> QuantizerCall:
    """With QuEST's trust mask."""
    return one(x, None, scheme, transform, False, mask=True)


def grouped(x: Any, offs: Tensor, padded_offs: Tensor, seed: Seed, *how: Any) -> QuantizerCall:
    """Columnwise, by groups of rows."""
    scheme, transform, rng_offset = how
    groups = {"offs": offs, "padded_offs": padded_offs}
    return one(x, seed, scheme, transform, True, rng_offset, **groups)


def grouped_both(x: Any, offs: Tensor, padded_offs: Tensor, *how: Any) -> QuantizerCall:
    """Rowwise, and columnwise by groups of rows. how: as of `both`."""
    return both(x, *how, offs=offs, padded_offs=padded_offs)


def again(
    codes: Any,
    scales: Tensor,
    global_scale: Tensor,
    seed: Seed,
    source_scheme: str,
    scheme: str,
    transform: str,
    rows: int,
    rng_offset: int = 0,
    **more: Any,
) -> QuantizerCall:
    """From codes."""
    source = {"source": codes, "scales": scales, "global_scale": global_scale}
    how = {"scheme": scheme, "transform": transform, "rng_offset": rng_offset}
    how |= {"source_scheme": source_scheme, "rows": rows, "columnwise_seed": seed}
    return QuantizerCall.named(REQUANTIZE, **source, **how, **more)


def grouped_again(
    codes: Any, scales: Tensor, global_scale: Tensor, offs: Tensor, padded_offs: Tensor, *how: Any
) -> QuantizerCall:
    """From codes, by groups of rows. how: as of `again`."""
    return again(codes, scales, global_scale, *how, offs=offs, padded_offs=padded_offs)


def by_scales(x: Any, scales: Tensor, global_scale: Tensor, *how: Any) -> QuantizerCall:
    """From a matrix and the scales of its codes. how: as of `again`, without rows."""
    seed, source_scheme, scheme, transform, rng_offset = how
    names = seed, source_scheme, scheme, transform
    return again(x, scales, global_scale, *names, x.shape[-1], rng_offset, by_scales=True)


def launched(call: QuantizerCall) -> Any:
    """The results of the op's CUDA kernel for a call."""
    kernel = {QUANTIZE: quantizers.quantize, REQUANTIZE: quantizers.requantize}
    return kernel[call.spec.name](*call.positional)


def nodes(graph: torch.fx.Graph, **wanted: Any) -> list[torch.fx.Node]:
    """The quantizers of a graph whose calls have these properties."""
    return [
        node
        for node, call in of_graph(graph)
        if all(getattr(call, name) == value for name, value in wanted.items())
    ]


def labels(graph: torch.fx.Graph) -> Counter[str]:
    """How often a graph has which kind of quantizer."""
    return Counter(call.label for _, call in of_graph(graph))


def quantized_both(
    x: Tensor,
    rowwise_seed: Tensor,
    columnwise_seed: Tensor,
    scheme: str,
    transform: str,
    rng_offset: int = 0,
    **more: Any,
) -> list[Tensor]:
    """The results of `both` as torch.compile traces it: the op alone."""
    return torch.ops.q2.quantize(
        x,
        scheme=scheme,
        transform=transform,
        rowwise=True,
        columnwise=True,
        rowwise_seed=rowwise_seed,
        columnwise_seed=columnwise_seed,
        rng_offset=rng_offset,
        **more,
    )
