# SPDX-License-Identifier: Apache-2.0
"""Where the matrix of a matmul is in its parameter.

A matmul multiplies w [N, K], or w [E, N, K] for experts: a view of its parameter, or the parameter
itself. Quantization blocks are along K. Here the parameter is seen as one matrix [R, K], and w is a
range of its rows:

    parameter [N, K]                      the matrix itself
    parameter [K, N], stored transposed   its transpose (Hugging Face's Conv1D)
    parameter [E, N, K] or [E, K, N]      one expert's rows after the other's
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor, Shard
from torch.fx.node import map_arg

from q2compile.capture.matmul import Matmul
from q2compile.graph.views import example, viewed
from q2compile.torch_internals.dynamo import attribute_read, dtensor_method
from q2compile.torch_internals.private_names import FakeTensorMode
from q2compile.torch_internals.storage import share_storage


@dataclass(frozen=True)
class Place:
    """Rows [start, stop) of the parameter's matrix [R, K].

    transposed  the parameter's last dimension are the rows of the matrix, not its columns
    cuts        tensor parallelism: (dimension of w, ranks) of each cut. Each rank quantizes its own
                part, as `torch.chunk` cuts them.
    """

    k: int
    start: int
    stop: int
    transposed: bool = False
    cuts: tuple[tuple[int, int], ...] = ()


def matrix_of(parameter: Tensor, k: int, transposed: bool) -> Tensor:
    """The parameter as a matrix [R, K]; a copy where it is stored transposed."""
    if transposed:
        return parameter.reshape(-1, k, parameter.shape[-1]).mT.reshape(-1, k)
    return parameter.reshape(-1, k)


def stacked(rows: Tensor, parameter: torch.Size, transposed: bool) -> Tensor:
    """Per-row values [R, ...] with the parameter's leading dimensions: [N, ...], or [E, N, ...] for
    experts."""
    leading = (*parameter[:-2], parameter[-1]) if transposed else parameter[:-1]
    return rows.reshape(*leading, *rows.shape[1:])


def place_of(found: Matmul) -> Place | str:
    """Where the w of a matmul is, or why that is not known."""
    _, w, _ = found.operands()
    cuts: tuple[tuple[int, int], ...] = ()
    if isinstance(w, DTensor):
        placed = zip(w.placements, w.device_mesh.shape, strict=True)
        cuts = tuple((p.dim, ranks) for p, ranks in placed if isinstance(p, Shard))
    shown = _replayed(found)
    if isinstance(shown, str):
        return shown
    root, seen = shown
    sizes, strides = list(map(int, seen.shape)), list(map(int, seen.stride()))
    offset, last = int(seen.storage_offset()), int(root.shape[-1])
    if len(sizes) == 3 and sizes[0] == 1:  # one expert of a loop
        sizes, strides = sizes[1:], strides[1:]
    *experts, n, k = sizes
    rows = math.prod(experts) * n
    if strides == [*(n * k for _ in experts), k, 1] and offset % k == 0:
        return Place(k, offset // k, offset // k + rows, cuts=cuts)
    before, column = divmod(offset, k * last)  # whole matrices [K, last] before w, and columns
    fits = n == last if experts else column + n <= last
    if strides == [*(k * last for _ in experts), 1, last] and fits:
        start = before * last + column
        return Place(k, start, start + rows, transposed=True, cuts=cuts)
    return f"a part of the parameter that is not whole rows: sizes {sizes}, strides {strides}"


def _replayed(found: Matmul) -> tuple[Tensor, Tensor] | str:
    """The parameter, laid out as a contiguous tensor, and w as a view of it; or why w is none."""
    chain: list[fx.Node] = []
    node = found.w
    while node.op not in ("placeholder", "get_attr"):
        chain.append(node)
        node = viewed(node)
    with FakeTensorMode(), torch.no_grad():
        root = seen = torch.empty(example(node).shape)
        for step in reversed(chain):
            if dtensor_method(step):
                return "the weight is a rank's part of a DTensor, taken by the model itself"
            seen = _same_storage(seen, _applied(step, seen))
        for method, args in found.w_views:
            seen = _same_storage(seen, getattr(seen, method)(*args))
    if not share_storage(root, seen):
        return "the weight is a copy in another shape than the parameter's"
    return root, seen


def _applied(step: fx.Node, source: Tensor) -> Tensor:
    """The value of a view or a cast, of ``source`` in its first argument's place."""
    first = viewed(step)
    args, kwargs = map_arg(
        (step.args, dict(step.kwargs)), lambda node: source if node is first else example(node)
    )
    if attribute := attribute_read(step):
        return getattr(source, attribute)
    if step.op == "call_method":
        return getattr(source, str(step.target))(*args[1:], **kwargs)
    return step.target(*args, **kwargs)  # type: ignore[operator]


def _same_storage(source: Any, result: Any) -> Any:
    """``result``; ``source`` where a cast or a copy has the same elements in the same order. Either
    may be the list of views that split() returns."""
    if not (isinstance(source, Tensor) and isinstance(result, Tensor)):
        return result
    copied = result.shape == source.shape and not share_storage(source, result)
    return source if copied else result
