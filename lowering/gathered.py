# SPDX-License-Identifier: Apache-2.0
"""The lowering of `q2::gather_rows`: Inductor kernels that gather codes and scales.

An emulated GEMM dequantizes all codes first and gathers rows of the result (gemm.py). If all
readers are emulated GEMMs, the codes are not gathered."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V

from q2compile.graph.gemms import is_emulated
from q2compile.lowering.inductor_kernels.blocks import reinterpreted
from q2compile.lowering.member import OpCall
from q2compile.lowering.state import lowering_state


def gather_rows(call: OpCall) -> tuple[Any, Any]:
    """See runtime_kernels/ops/gather_rows.py."""
    codes, scales, rows = call.bound
    lowering_state().ungathered[V.current_node] = codes, scales, rows
    readers = [reader for output in V.current_node.users for reader in output.users]
    if readers and all(is_emulated(reader) for reader in readers):
        return None, None
    if codes.get_dtype() == torch.float8_e4m3fn:  # which has no block scales
        return _bytes_gathered(codes, rows), scales
    return gathered(codes, rows), _bytes_gathered(scales, rows)


def _bytes_gathered(matrix: Any, rows: Any) -> Any:
    return reinterpreted(gathered(reinterpreted(matrix, torch.uint8), rows), matrix.get_dtype())


def gathered(matrix: Any, rows: Any) -> Any:
    """Rows of a matrix as an expression, to be fused with its reader."""
    return lowerings[torch.ops.aten.index.Tensor](matrix, [rows])
