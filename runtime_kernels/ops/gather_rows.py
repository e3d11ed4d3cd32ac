# SPDX-License-Identifier: Apache-2.0
"""q2::gather_rows: rows of a quantized matrix, by index; an index may repeat.

    gather_rows(codes uint8 [M, Kp/2], scales [M, blocks], rows [R])
        -> codes uint8 [R, Kp/2], scales [R, blocks]

FP8 has e4m3 codes [M, Kp] and empty scales, which stay empty. rows: int32 or int64; -1 is the last
row, as in torch's indexing. The global scale stays the same.

One op instead of two of aten's: graphs show that both gathers belong to one matrix, and passes can
find the matrix and the index.
"""

import torch

from q2compile.runtime_kernels.ops.argument_checks import check_quantized
from q2compile.runtime_kernels.registry import define


def checked_gather_rows(codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> None:
    """Checks the arguments: codes and scales of one matrix, and a vector of integers."""
    check_quantized("gather_rows", codes, scales, None, dtype=_dtype(codes))
    right = rows.dtype in (torch.int32, torch.int64) and rows.dim() == 1
    assert right, f"q2::gather_rows takes integers [R], got {rows.dtype} in {rows.dim()} dimensions"


def _dtype(codes: torch.Tensor) -> torch.dtype:
    return codes.dtype if codes.dtype == torch.float8_e4m3fn else torch.uint8


def fake(codes, scales, rows):
    checked_gather_rows(codes, scales, rows)
    count = rows.shape[0]
    of_scales = 0 if _dtype(codes) == torch.float8_e4m3fn else count
    return codes.new_empty((count, codes.shape[1])), scales.new_empty((of_scales, scales.shape[1]))


@define("gather_rows(Tensor codes, Tensor scales, Tensor rows) -> (Tensor, Tensor)", fake=fake)
def gather_rows(
    codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference: see the top of this file."""
    checked_gather_rows(codes, scales, rows)
    rows = rows.long()
    if _dtype(codes) == torch.float8_e4m3fn:
        return codes.view(torch.uint8)[rows].view(codes.dtype), scales.clone()
    assert scales.shape[0] == codes.shape[0], "q2::gather_rows: blocks have one row"
    return codes[rows], scales.view(torch.uint8)[rows].view(scales.dtype)
