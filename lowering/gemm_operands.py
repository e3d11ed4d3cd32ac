# SPDX-License-Identifier: Apache-2.0
"""What the GEMMs of bf16 tensor cores need of their operands, asked of the FX graph that Inductor
lowers."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.registry import CUDA_BF16, serving

GEMM = torch.ops.q2.gemm.default
GROUPED = torch.ops.q2.grouped_gemm.default
GATHER = torch.ops.q2.gather_rows.default
OPERANDS = ((0, 7), (3, 8))  # of both GEMMs: where three arguments begin, and their scheme


def is_emulated(node: fx.Node) -> bool:
    """Whether a node is a GEMM by bf16 tensor cores, of operands that were made for them. A grouped
    one is an op of its own where global scales are not in the numbers: it multiplies in place."""
    if node.target not in (GEMM, GROUPED):
        return False
    schemes = [get_scheme(str(node.args[at])) for _, at in OPERANDS]
    if any(scheme.swizzled for scheme in schemes):
        return False
    if node.target is GROUPED and not all(scheme.has_pow2_scale for scheme in schemes):
        return False
    args = map_arg(node.args, lambda n: n.meta["val"])
    op = "gemm" if node.target is GEMM else "grouped_gemm"
    return serving(op, args).name == CUDA_BF16


def is_read(output: fx.Node) -> bool:
    """Whether an output of a quantizer is needed: a GEMM of bf16 numbers asks for nothing else but
    their global scale, where that is not in them."""
    return any(not _is_left_unread(output, reader) for reader in output.users)


def _is_left_unread(output: fx.Node, reader: fx.Node) -> bool:
    if not is_emulated(reader):
        return False
    for first, at in OPERANDS:
        spec = get_scheme(str(reader.args[at]))
        unread = (
            reader.args[first + 1 : first + (3 if spec.has_pow2_scale else 2)]
            if spec.dequantized
            else ()
        )
        if output in reader.args[first : first + 3] and output not in unread:
            return False
    return output is not reader.args[6]


def ungathered(gemm: fx.Node, first: int) -> tuple[Any, Any, Any]:
    """The nodes of an operand's codes, scales and global scale, or of the matrix whose rows
    q2::gather_rows gathers."""
    codes, scales, unit = (gemm.args[i] for i in range(first, first + 3))
    gather = gather_of(codes)
    return (codes, scales, unit) if gather is None else (gather.args[0], gather.args[1], unit)


def gather_of(codes: Any) -> fx.Node | None:
    """The q2::gather_rows that made these codes."""
    maker = codes.args[0] if codes.args else None
    return maker if isinstance(maker, fx.Node) and maker.target is GATHER else None


def reads_ungathered(node: fx.Node) -> bool:
    """Whether a reader of gathered codes, or of their scales, has use for the matrix and the index
    alone: a GEMM of bf16 numbers."""
    return is_emulated(node)
