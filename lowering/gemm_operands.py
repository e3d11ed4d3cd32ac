"""What the GEMMs of bf16 tensor cores need of their operands, asked of the FX graph that Inductor
lowers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V
from torch.fx.node import map_arg

from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.registry import CUDA_BF16, serving

GEMM, TRANSPOSE = torch.ops.q2.gemm.default, torch.ops.q2.transpose.default
GROUPED = torch.ops.q2.grouped_gemm.default
GATHER = torch.ops.q2.gather_rows.default
OPERANDS = ((0, 7), (3, 8))  # of both GEMMs: where three arguments begin, and their scheme
REACH = 2  # GEMMs: numbers that are made early wait for no more than those
_SMALL = 16 * 2**20  # bytes of codes, four times as many of their numbers
_NUMBERS: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
_BY_LOOPS: WeakKeyDictionary[Any, dict[fx.Node, Callable[[], Any]]] = WeakKeyDictionary()


def numbers() -> dict[Any, Any]:
    """Of the graph that is lowered: numbers by the node of their codes and how many columns; what
    is not turned, or not gathered, by the node that would have."""
    return _NUMBERS.setdefault(V.graph, {})


def by_loops() -> dict[fx.Node, Callable[[], Any]]:
    """Of the graph that is lowered: by quantisers that are loops, what has the same loops write the
    numbers of their codes, too. They are right but for blocks that the launch which makes the
    scales makes again (align_scales.cu)."""
    return _BY_LOOPS.setdefault(V.graph, {})


def is_emulated(node: fx.Node) -> bool:
    """Whether a node is a GEMM by bf16 tensor cores, of operands that were made for them. A grouped
    one is an op of its own where global scales are not in the numbers: it multiplies in place."""
    if node.target not in (GEMM, GROUPED):
        return False
    schemes = [get_scheme(str(node.args[at])) for _, at in OPERANDS]
    if any(scheme.swizzled for scheme in schemes):
        return False
    if node.target is GROUPED and not all(scheme.folds for scheme in schemes):
        return False
    args = map_arg(node.args, lambda n: n.meta["val"])
    op = "gemm" if node.target is GEMM else "grouped_gemm"
    return serving(op, args).name == CUDA_BF16


def emulated_after(node: fx.Node) -> Iterator[fx.Node]:
    """GEMMs behind a node, as long as they are emulated."""
    for later in itertools.takewhile(lambda n: n.op != "output", _after(node)):
        if later.target in (GEMM, GROUPED):
            if not is_emulated(later):
                return
            yield later


def _after(node: fx.Node) -> Iterator[fx.Node]:
    while True:
        node = node.next
        yield node


def is_small(codes: Any) -> bool:
    """Whether numbers of these codes may be made before the GEMM that comes next wants them."""
    known = V.graph.sizevars.statically_known_leq
    return known(sympy_product(codes.get_size()), _SMALL)


def is_read(output: fx.Node) -> bool:
    """Whether an output of a quantiser is needed: a GEMM of bf16 numbers asks for nothing else but
    their global scale, where that is not in them."""
    return any(not _is_left_unread(output, reader) for reader in output.users)


def _is_left_unread(output: fx.Node, reader: fx.Node) -> bool:
    if not is_emulated(reader):
        return False
    for first, at in OPERANDS:
        spec = get_scheme(str(reader.args[at]))
        unread = reader.args[first + 1 : first + (3 if spec.folds else 2)] if spec.widened else ()
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


def turned(codes: Any) -> fx.Node | None:
    """The q2::transpose that made these codes, or these scales."""
    maker = codes.args[0] if codes.args else None
    return maker if isinstance(maker, fx.Node) and maker.target is TRANSPOSE else None


def reads_unturned(node: fx.Node) -> bool:
    """Whether a GEMM's second operand, turned, can be dequantised where it was: its contraction
    needs no padding."""
    if not is_emulated(node):
        return False
    maker = turned(node.args[3])
    if maker is None or turned(node.args[0]) is not None:
        return False
    codes: Any = maker.args[0]
    side = get_scheme(str(maker.args[2])).width
    return V.graph.sizevars.statically_known_equals(codes.meta["val"].shape[0] % side, 0)
