# SPDX-License-Identifier: Apache-2.0
"""Shards of a matrix, each quantized for itself under the global scale of the whole matrix: when
that gives the codes of the whole. `weight_cache/shard_codes.py` has the argument."""

from collections.abc import Collection

import torch

from q2compile.runtime_kernels.numerics.schemes import Scheme
from q2compile.runtime_kernels.numerics.transforms import Transform

LARGEST_G = 2.0**117  # the rows that set g hold 1536 * g < 2^128
NAN_SCALE = 0x7F  # the bits of an e4m3 scale


def why_not(
    scheme: Scheme,
    transform: Transform,
    dtypes: Collection[torch.dtype],
    rows: int,
    columns: tuple[int, int] | None = None,
) -> str:
    """Why the codes of shards are not those of the whole matrix; "" if they are.

    dtypes   that the matrix is in, and that it is cast to
    rows     of a shard that follow each other in the matrix
    columns  of a shard and of the matrix, where it is cut along columns
    """
    height, unit = scheme.block[0], max(scheme.width, transform.size)
    if rows % height:
        return f"a rank has {rows} of its rows, and a block spans {height}"
    if columns and any(count % unit for count in columns):
        return f"a rank has {columns[0]} of its {columns[1]} columns, and a block spans {unit}"
    if scheme.global_scale != "none" and transform.size > 1:
        return f"its global scale is found after the rotation {transform.name}"
    if scheme.global_scale != "none" and torch.float16 in dtypes:
        return "it is fp16, in which a row that sets the global scale may overflow"
    return ""
