# SPDX-License-Identifier: Apache-2.0
"""Jagged nested tensors: batches of sequences, each of a length of its own."""

from __future__ import annotations

from typing import Any

import torch


def ragged_dimension(x: torch.Tensor) -> int | None:
    """Which dimension of a jagged nested tensor has another size for each of its sequences, when
    its values are those sequences one after the other; None for any other nested tensor.
    """
    if x.layout != torch.jagged or x.lengths() is not None:  # type: ignore[attr-defined]
        return None
    ragged: int = x._ragged_idx  # type: ignore[attr-defined]
    return ragged


def jagged_like(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The jagged nested tensor with sequences of the same lengths as those of ``x``. Lengths that
    ``x`` knows are known of it, too, so that no graph has to wait for them.
    """
    # The public function refuses to be traced.
    from torch.nested._internal.nested_tensor import nested_view_from_values_offsets

    any_x: Any = x
    made: torch.Tensor = nested_view_from_values_offsets(
        values,
        any_x.offsets(),
        any_x._ragged_idx,
        any_x._maybe_min_seqlen,
        any_x._maybe_max_seqlen,
    )
    return made
