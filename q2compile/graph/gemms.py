# SPDX-License-Identifier: Apache-2.0
"""GEMMs of a graph: which are emulated, and which parts of their operands they read."""

from __future__ import annotations

from typing import Any

from torch import fx

from q2compile.graph.nodes import choice_of, is_q2, name_of, producer
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.table import GATHER_ROWS, GEMM, GROUPED_GEMM
from q2compile.runtime_kernels.registry import CUDA_BF16

# The operands of `GEMM_OPS`: where the three parts of each begin, and where its scheme is.
OPERANDS = ((0, 7), (3, 8))


def is_emulated(node: fx.Node) -> bool:
    """Whether a node is a GEMM that bf16 tensor cores emulate. Not a grouped one whose global
    scales are not part of the dequantized operands: that is a call of the op."""
    if not is_q2(node, GEMM, GROUPED_GEMM):
        return False
    schemes = [get_scheme(str(node.args[at])) for _, at in OPERANDS]
    if any(scheme.swizzled for scheme in schemes):
        return False
    if is_q2(node, GROUPED_GEMM) and not all(scheme.has_pow2_scale for scheme in schemes):
        return False
    return choice_of(name_of(node.target), node.args).name == CUDA_BF16


def is_read(output: fx.Node) -> bool:
    """Whether an output of a quantizer is read. An emulated GEMM of dequantized operands reads no
    block scales, and a global scale only if it is not part of the operand."""
    return any(not _is_left_unread(output, reader) for reader in output.users)


def _is_left_unread(output: fx.Node, reader: fx.Node) -> bool:
    if not is_emulated(reader):
        return False
    for first, at in OPERANDS:
        scheme = get_scheme(str(reader.args[at]))
        parts = reader.args[first : first + 3]
        unread = parts[1 : 3 if scheme.has_pow2_scale else 2] if scheme.dequantized else ()
        if output in parts and output not in unread:
            return False
    return output is not reader.args[6]


def ungathered(gemm: fx.Node, first: int) -> tuple[Any, Any, Any]:
    """The nodes of an operand's codes, scales and global scale; if q2::gather_rows gathered its
    rows, of the matrix before."""
    operand: Any = gemm.args[first : first + 3]
    gather = gather_of(operand[0])
    return (*gather.args[:2], operand[2]) if gather else operand


def gather_of(codes: Any) -> fx.Node | None:
    """The q2::gather_rows that made these codes."""
    maker = producer(codes)
    return maker if is_q2(maker, GATHER_ROWS) else None
