# SPDX-License-Identifier: Apache-2.0
"""The tile of quantizing Inductor kernels, by a rule instead of a search.

A persistent reduction of 16 gets four configurations from Inductor, which it compiles and times at
the first call. On an H200 the best for every producer tried was 128 blocks for 2 warps: 32 elements
per thread, in loads of 16 bytes, so that values that depend on the position alone are computed once
for four blocks. 64 blocks for 2 warps took 4% longer, 128 for 8 warps 29% (8192x4096, 4/6, torch
2.11).

For gathered rows (tokens of experts) Inductor may make rows a second dimension beside the blocks of
a row. The tile is then all blocks of a row, up to 128, times as many rows as make 128 blocks in
all. That was not timed."""

from __future__ import annotations

from typing import Any

from torch._inductor import config
from torch._inductor.codegen.triton import FixedTritonConfig, TritonKernel
from torch._inductor.virtualized import V

from q2compile.torch_internals.patches import replaces

_TILE = {"XBLOCK": 128, "num_warps": 2}
_WIDTH = 16  # of a block


@replaces("choices")
class Choices:
    """The choices of Inductor, or of a user's handler, with the tile of our kernels fixed."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def triton_kernel_kwargs(
        self, kernel_cls: type, features: Any, groups: Any, kernel_kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        kwargs = self._original.triton_kernel_kwargs(kernel_cls, features, groups, kernel_kwargs)
        searching = config.max_autotune or config.max_autotune_pointwise
        if kernel_cls is not TritonKernel or searching or not _quantizes(features):
            return kwargs
        tile = FixedTritonConfig({**_TILE, **_shared_out(_TILE["XBLOCK"], groups[0])})
        return {**kwargs, "fixed_config": tile, "override_persistent_reduction": True}


def _shared_out(blocks: int, sizes: dict[str, Any]) -> dict[str, int]:
    """Distributes so many blocks over the dimensions of a kernel, x first, in powers of two.

    sizes: of its dimensions: x, and y and z if it has them."""
    outer = [name for name in ("y", "z") if name in sizes]
    tile = {"XBLOCK": blocks}
    for name, next_one in zip(("x", *outer), outer, strict=False):
        size = V.graph.sizevars.optimization_hint(sizes[name], fallback=blocks)
        here, left = f"{name.upper()}BLOCK", tile[f"{name.upper()}BLOCK"]
        tile[here] = min(left, 1 << (max(1, size) - 1).bit_length())
        tile[f"{next_one.upper()}BLOCK"] = left // tile[here]
    return tile


def _quantizes(features: Any) -> bool:
    """Whether a kernel reduces over blocks and one of its nodes comes from a quantizing op."""
    if features.reduction_numel != _WIDTH:
        return False
    origins = (o for node in features.scheduler_nodes() for o in node.node.get_origins())
    return any(str(origin.target).startswith("q2.") for origin in origins)
