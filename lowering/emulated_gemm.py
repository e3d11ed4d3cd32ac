"""The lowerings of `q2::gemm` and `q2::grouped_gemm` where bf16 tensor cores multiply for fp4 ones:
torch's own product, which Inductor allocates, chooses a kernel for and fuses behind as for any
other.

    gemm(a.., b.., bias, ...)   ->   numbers of a @ numbers of bᵀ (+ bias)             scales fold
                                     (fp32 product * alpha + bias) to dtype            otherwise
    grouped_gemm(a.., b.., ...) ->   grouped_mm(numbers of a, numbers of b, ends)      scales fold

The numbers of an operand are what its quantiser wrote, where that writes them (scheme@bf16), or
dequantised from its codes, once however many GEMMs read them: by the launch that makes their scales
(launches.py), or both operands of a GEMM by one launch, with what the next ones want. Codes that
q2::transpose turned are dequantised as they lay before, and read by columns.

Of the second form, only the product is rounded to fp32 by a kernel; alpha and bias are Inductor's
to fuse with what comes next, which then reads them before they are rounded to dtype, as it does
with other operations that it fuses.
"""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any, NamedTuple, cast

import torch
from torch import fx
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv

from q2compile.lowering import launches
from q2compile.lowering.gathered import gathered
from q2compile.lowering.gemm_operands import (
    GEMM,
    GROUPED,
    OPERANDS,
    REACH,
    TRANSPOSE,
    emulated_after,
    gather_of,
    is_emulated,
    is_small,
    numbers,
    reads_unturned,
    turned,
    ungathered,
)
from q2compile.lowering.together import products
from q2compile.runtime_kernels.cuda.calls import MOST_SIDES
from q2compile.runtime_kernels.numerics.schemes import get_scheme

_aten = torch.ops.aten
_ABSENT = object()


@register_lowering(GEMM, type_promotion_kind=None)
def gemm(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, bias, a_scheme, b_scheme, dtype
) -> Any:
    """See runtime_kernels/ops/gemm.py."""
    args = (a_codes, a_scales, a_global, b_codes, b_scales, b_global, bias)
    if not is_emulated(V.current_node):
        product = products().get((V.current_node.args[2], V.current_node.args[5]))
        if product is not None:
            args = (a_codes, a_scales, product, b_codes, b_scales, None, bias)
        return launches.call(GEMM, *args, a_scheme, b_scheme, dtype)
    left, right = operands(V.current_node)
    a, b = left.gathered(), right.gathered()
    if not right.is_turned:
        b = lowerings[_aten.permute.default](b, [1, 0])
    # Of the operands whose global scale is not in their numbers.
    scales = [
        unit
        for unit, scheme in ((a_global, a_scheme), (b_global, b_scheme))
        if not get_scheme(scheme).folds
    ]
    if not scales and dtype == torch.bfloat16 and (bias is None or bias.get_dtype() == dtype):
        if bias is None:
            return lowerings[_aten.mm.default](a, b)
        return lowerings[_aten.addmm.default](bias, a, b)
    out = fallback_handler(_aten.mm.dtype, add_to_fallback_set=False)(a, b, torch.float32)
    multiply, add = lowerings[_aten.mul.Tensor], lowerings[_aten.add.Tensor]
    if scales:
        out = multiply(out, functools.reduce(multiply, scales))
    if bias is not None:
        out = add(out, bias)
    return lowerings[torch.ops.prims.convert_element_type.default](out, dtype)


@register_lowering(GROUPED, type_promotion_kind=None)
def grouped_gemm(
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, offs, a_scheme, b_scheme, gemm, dtype
) -> Any:
    """See runtime_kernels/ops/grouped_gemm.py."""
    args = (a_codes, a_scales, a_global, b_codes, b_scales, b_global, offs)
    if not is_emulated(V.current_node):
        return launches.call(GROUPED, *args, a_scheme, b_scheme, gemm, dtype)
    a, b = operands(V.current_node)
    multiply = fallback_handler(torch.ops.q2.grouped_mm.default, add_to_fallback_set=False)
    second = _as_grouped(b.gathered(), gemm, offs.get_size()[0], b.is_turned)
    out = multiply(a.gathered(), second, offs)
    if gemm != "wgrad":
        return out
    groups, rows, columns = out.get_size()
    return lowerings[_aten.view.default](out, [groups * rows, columns])


def _as_grouped(b: Any, gemm: str, groups: Any, is_turned: bool) -> Any:
    """The second operand's numbers as q2::grouped_mm takes them: as_grouped of the op."""
    view, permute = lowerings[_aten.view.default], lowerings[_aten.permute.default]
    rows, columns = b.get_size()
    if gemm == "wgrad":
        return permute(b, [1, 0])
    if gemm == "fprop":
        return permute(view(b, [groups, FloorDiv(rows, groups), columns]), [0, 2, 1])
    if is_turned:
        return view(b, [groups, FloorDiv(rows, groups), columns])
    return permute(view(b, [rows, groups, FloorDiv(columns, groups)]), [1, 2, 0])


@register_lowering(TRANSPOSE, type_promotion_kind=None)
def transpose(codes, scales, scheme: str, rows: Any, swizzled: bool = False) -> Any:
    """See runtime_kernels/ops/transpose.py. Nothing, for GEMMs that read what was not turned."""
    readers = [gemm for output in V.current_node.users for gemm in output.users]
    if readers and all(reads_unturned(reader) for reader in readers):
        numbers()[V.current_node] = codes, scales, rows
        return None, None
    return launches.call(TRANSPOSE, codes, scales, scheme, rows, swizzled)


class Numbers(NamedTuple):
    """An operand of a GEMM as bf16.

    box        [rows, contraction], or turned
    is_turned  whether it is
    rows       an index of those of its rows that the GEMM multiplies; None if it is all as they are
    known_by   the key of what is gathered in `numbers`
    """

    box: Any
    is_turned: bool
    rows: Any
    known_by: Any

    def gathered(self) -> Any:
        """What the GEMM multiplies, made once however many read it."""
        if self.rows is None:
            return self.box
        if self.known_by not in numbers():
            numbers()[self.known_by] = gathered(self.box, self.rows)
        return numbers()[self.known_by]


class _Source(NamedTuple):
    """What an operand's numbers are made of: by what they are known, the arguments of
    q2::dequantize, and whether that makes it turned."""

    key: Any
    args: tuple
    is_turned: bool


def operands(gemm: fx.Node) -> list[Numbers]:
    """Both operands of an emulated GEMM, which is lowered: each made once, and not gathered."""
    known = numbers()
    sources = [_source(gemm, first, at) for first, at in OPERANDS]
    missing = {s.key: s.args for s in sources if s is not None and s.key not in known}
    op = torch.ops.q2.dequantize.default
    if len({_variant(args) for args in missing.values()}) == 1:
        missing |= _soon(missing)
        made = launches.call_in_one(op, [*missing.values()])
    else:
        made = [launches.call(op, *args) for args in missing.values()]
    known.update(zip(missing, made, strict=True))
    found = []
    for (first, _), source in zip(OPERANDS, sources, strict=True):
        assert source is not None, "what a GEMM reads has been lowered"
        gather = gather_of(gemm.args[first])
        *_, rows = (None,) if gather is None else known[gather]
        found.append(Numbers(known[source.key], source.is_turned, rows, (source.key, gather)))
    return found


def _soon(missing: dict[Any, tuple]) -> dict[Any, tuple]:
    """What the next GEMMs will want of codes that are there already, the weights of k and v or of a
    gated MLP's other half, as far as it is small and one launch has room."""
    found: dict[Any, tuple] = {}
    variant = _variant(next(iter(missing.values())))
    for gemm in itertools.islice(emulated_after(V.current_node), REACH):
        for first, at in OPERANDS:
            source = _source(gemm, first, at)
            if source is None:
                continue
            key, args, is_turned = source
            there = key in numbers() or key in missing or is_turned
            room = len(missing) + len(found) < MOST_SIDES
            if not there and room and _variant(args) == variant and is_small(args[0]):
                found[key] = args
    return found


def _there(node: Any) -> Any:
    """What a node has been lowered to, or would be as a part of what has."""
    env = V.graph.env
    if not isinstance(node, fx.Node):
        return node
    if node not in env and node.target is operator.getitem:
        of, number = cast(Any, node.args)
        return env[of][number] if of in env else _ABSENT
    return env.get(node, _ABSENT)


def _source(gemm: fx.Node, first: int, at: int) -> _Source | None:
    """Of an operand, by the places of its codes and its scheme; None where it is not there yet."""
    node, *others = ungathered(gemm, first)
    codes, scales, unit = map(_there, (node, *others))
    gather = gather_of(gemm.args[first])
    if gather in numbers():  # which may have been the last to read them
        codes, scales, _ = numbers()[gather]
    if any(part is _ABSENT for part in (codes, scales, unit)):
        return None
    scheme = str(gemm.args[at])
    spec = get_scheme(scheme)
    if spec.widened:
        numbers()[node, None] = codes
        return _Source((node, None), (), False)
    maker = turned(node) if reads_unturned(gemm) else None
    if maker is None:
        cols = 2 * codes.get_size()[1]
    else:
        node = maker.args[0]
        codes, scales, cols = numbers()[maker]
    args = codes, scales, unit if spec.folds else None, scheme, cols, torch.bfloat16
    return _Source((node, cols), args, maker is not None)


def _variant(args: tuple) -> tuple[str, bool]:
    """What calls of q2::dequantize must have in common that are one launch."""
    codes, _, _, scheme, cols, _ = args
    spec = get_scheme(scheme)
    whole = V.graph.sizevars.statically_known_equals(cols, 2 * codes.get_size()[1])
    return spec.format, whole and spec.block[0] == 1
