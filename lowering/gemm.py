# SPDX-License-Identifier: Apache-2.0
"""The lowerings of `q2::gemm` and `q2::grouped_gemm`. Without fp4 tensor cores, a GEMM is
emulated by torch's own bf16 GEMM, or by its fp8 GEMM: MXFP4 on GPUs that have one. Inductor
allocates its result, chooses its kernel and fuses its readers, as for any other GEMM.

    A, B: the dequantized operands

    gemm(a.., b.., bias, ...)   ->   A @ Bᵀ (+ bias)                            power-of-two scales
                                     (fp32 A @ Bᵀ * alpha + bias) to dtype      otherwise
    grouped_gemm(a.., b.., ...) ->   grouped_mm(A, B, ends)                     power-of-two scales

A dequantized operand is written by its quantizer (scheme@bf16), or made from its codes: once for
all GEMMs that read it. A global scale that is a power of two is part of the dequantized operand,
exactly; another one is applied to the product.

In the second form the kernel returns fp32. Inductor fuses alpha and bias with the next operation,
which reads the value before it is rounded to dtype, as in any other fusion."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import fx
from torch._inductor.lowering import fallback_handler, lowerings
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv

from q2compile.graph.gemms import (
    OPERANDS,
    gather_of,
    is_emulated,
    ungathered,
)
from q2compile.lowering.gathered import gathered
from q2compile.lowering.launches import launch, launches_of
from q2compile.lowering.member import OpCall
from q2compile.lowering.state import lowering_state
from q2compile.runtime_kernels.cuda.gemm.operands import adds_bias
from q2compile.runtime_kernels.cuda.gemm.scaled_mm import UNIT
from q2compile.runtime_kernels.numerics.schemes import get_scheme

_aten = torch.ops.aten


def scaled(call: OpCall) -> Any:
    """q2.gemm by torch's own FP8 GEMM, whose result and kernel Inductor plans, of fp8 codes or of
    mxfp4 codes in e4m3; a call of the op where it has to pad (cuda/gemm/scaled_mm.py)."""
    a, _, _, b, _, _, bias, a_scheme, _, dtype = call.bound
    known = V.graph.sizevars
    sizes = a.get_size()[1] * get_scheme(a_scheme).packed, b.get_size()[0]
    if not all(known.statically_known_multiple_of(size, UNIT) for size in sizes) or any(
        known.statically_known_equals(size, 0) for size in (*a.get_size(), *b.get_size())
    ):
        return launch(call)
    inside = adds_bias(None if bias is None else bias.get_dtype(), dtype)
    (a, a_scale), (b, b_scale) = (_in_e4m3(V.current_node, call, *at) for at in OPERANDS)
    out = lowerings[_aten._scaled_mm.default](
        a,
        lowerings[_aten.permute.default](b, [1, 0]),
        a_scale,
        b_scale,
        bias if inside else None,
        None,
        dtype if inside else torch.float32,
        False,
    )
    if inside:
        return out
    out = lowerings[_aten.add.Tensor](out, bias)
    return lowerings[torch.ops.prims.convert_element_type.default](out, dtype)


def _in_e4m3(gemm: fx.Node, call: OpCall, first: int, at: int) -> tuple[Any, Any]:
    """The elements of an operand and the scale of all, made once for all GEMMs that read it. first,
    at: positions of its codes and its scheme."""
    codes, scales, global_scale = call.bound[first : first + 3]
    scheme, known = str(call.bound[at]), lowering_state().in_e4m3
    if get_scheme(scheme).is_tensorwise:
        return codes, global_scale
    node: Any = gemm.args[first]
    if node not in known:
        known[node] = launches_of(torch.ops.q2.to_e4m3.default, codes, scales, global_scale, scheme)
    return known[node]


def product(call: OpCall) -> Any:
    """q2.gemm (runtime_kernels/ops/gemm.py), emulated."""
    if not is_emulated(V.current_node):
        return launch(call)
    _, _, a_global, _, _, b_global, bias, a_scheme, b_scheme, dtype = call.bound
    a, b = _operands(V.current_node)
    b = lowerings[_aten.permute.default](b, [1, 0])
    # Global scales that are not part of a dequantized operand.
    scales = [
        global_scale
        for global_scale, scheme in ((a_global, a_scheme), (b_global, b_scheme))
        if not get_scheme(scheme).has_pow2_scale
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


def with_alpha(call: OpCall) -> Any:
    """q2.gemm by a kernel that multiplies codes; with alpha, the product of the global scales, if a
    quantizer's tail kernel computes it."""
    node = V.current_node
    alpha = lowering_state().products.get((node.args[2], node.args[5]))
    if alpha is None:
        return launch(call)
    a_codes, a_scales, _, b_codes, b_scales, _, *others = call.bound
    return launches_of(call.overload, a_codes, a_scales, alpha, b_codes, b_scales, None, *others)


def grouped_product(call: OpCall) -> Any:
    """q2.grouped_gemm (runtime_kernels/ops/grouped_gemm.py), emulated."""
    if not is_emulated(V.current_node):
        return launch(call)
    *_, offs, _, _, gemm, _ = call.bound
    a, b = _operands(V.current_node)
    multiply = fallback_handler(torch.ops.q2.grouped_mm.default, add_to_fallback_set=False)
    out = multiply(a, _as_grouped(b, gemm, offs.get_size()[0]), offs)
    if gemm != "wgrad":
        return out
    groups, rows, columns = out.get_size()
    return lowerings[_aten.view.default](out, [groups * rows, columns])


def _as_grouped(b: Any, gemm: str, groups: Any) -> Any:
    """The dequantized second operand in the shape of q2::grouped_mm: as_grouped of the op."""
    view, permute = lowerings[_aten.view.default], lowerings[_aten.permute.default]
    rows, columns = b.get_size()
    if gemm == "wgrad":
        return permute(b, [1, 0])
    if gemm == "fprop":
        return permute(view(b, [groups, FloorDiv(rows, groups), columns]), [0, 2, 1])
    return permute(view(b, [rows, groups, FloorDiv(columns, groups)]), [1, 2, 0])


def _operands(gemm: fx.Node) -> list[Any]:
    """Both operands of the emulated GEMM that is lowered, [rows, contraction]."""
    return [_operand(gemm, first, at) for first, at in OPERANDS]


def _operand(gemm: fx.Node, first: int, at: int) -> Any:
    """An operand, dequantized once for all GEMMs that read it, and its rows gathered once for all
    that read these. first, at: positions of its codes and its scheme."""
    state, lowered = lowering_state(), cast(Any, V.graph.env)
    node, scales_node, global_scale_node = ungathered(gemm, first)
    gather, rows = gather_of(gemm.args[first]), None
    if gather is None:
        codes, scales = lowered[node], lowered.get(scales_node)
    else:  # which may have been the last to read them
        codes, scales, rows = state.ungathered[gather]
    if node not in state.dequantized:
        scheme = str(gemm.args[at])
        spec, state.dequantized[node] = get_scheme(scheme), codes
        if not spec.dequantized:
            factor = lowered.get(global_scale_node) if spec.has_pow2_scale else None
            how = scheme, 2 * codes.get_size()[1], torch.bfloat16
            state.dequantized[node] = launches_of(
                torch.ops.q2.dequantize.default, codes, scales, factor, *how
            )
    if gather is None:
        return state.dequantized[node]
    if (node, gather) not in state.gathered:
        state.gathered[node, gather] = gathered(state.dequantized[node], rows)
    return state.gathered[node, gather]
