# SPDX-License-Identifier: Apache-2.0
"""Queries of the FX graph that Inductor lowers: which GEMMs are emulated, and which parts of their
operands they read."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from q2compile.graph.nodes import name_of
from q2compile.graph.served import kernel_of
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.registry import CUDA_BF16, SCALED_MM

GEMM = torch.ops.q2.gemm.default
GROUPED = torch.ops.q2.grouped_gemm.default
GATHER = torch.ops.q2.gather_rows.default
OPERANDS = (
    (0, 7),
    (3, 8),
)  # of both GEMM ops: position of an operand's three parts, and of its scheme


def is_emulated(node: fx.Node) -> bool:
    """Whether a node is a GEMM that bf16 tensor cores emulate. Not a grouped one whose global
    scales are not part of the dequantized operands: that is a call of the op."""
    if node.target not in (GEMM, GROUPED):
        return False
    schemes = [get_scheme(str(node.args[at])) for _, at in OPERANDS]
    if any(scheme.swizzled for scheme in schemes):
        return False
    if node.target is GROUPED and not all(scheme.has_pow2_scale for scheme in schemes):
        return False
    return kernel_of(name_of(node.target), node.args).name == CUDA_BF16


def multiplies_fp8(node: fx.Node) -> bool:
    """True if torch's FP8 GEMM serves a q2.gemm."""
    return kernel_of(name_of(node.target), node.args).name == SCALED_MM


def is_read(output: fx.Node) -> bool:
    """Whether an output of a quantizer is read. An emulated GEMM of dequantized operands reads no
    block scales, and a global scale only if it is not part of the operand."""
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
    """The nodes of an operand's codes, scales and global scale; if q2::gather_rows gathered its
    rows, of the matrix before."""
    codes, scales, global_scale = (gemm.args[i] for i in range(first, first + 3))
    gather = gather_of(codes)
    return (
        (codes, scales, global_scale)
        if gather is None
        else (gather.args[0], gather.args[1], global_scale)
    )


def gather_of(codes: Any) -> fx.Node | None:
    """The q2::gather_rows that made these codes."""
    maker = codes.args[0] if codes.args else None
    return maker if isinstance(maker, fx.Node) and maker.target is GATHER else None


def reads_ungathered(node: fx.Node) -> bool:
    """Whether a reader of gathered codes or scales reads the matrix and the index instead: an
    emulated GEMM."""
    return is_emulated(node)
