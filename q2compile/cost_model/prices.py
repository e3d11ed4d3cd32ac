# SPDX-License-Identifier: Apache-2.0
"""The cost of a linear layer under a recipe and in BF16, by data sheet: bytes, FLOPs, time.

    shape [T, N, K]: y[T, N] = x[T, K] wᵀ; for E experts w is [E, N, K] and T counts all rows

What a recipe costs is the sum over the nodes of a layer's graphs after the passes (layer.py). A
GEMM or a quantizer is a `Step` (step.py). Sizes may be sympy expressions; FLOPs and bytes then are,
too. A step's time on the GPU is the longest of three: FLOPs at the rate of the tensor cores, bytes
at the bandwidth, instructions at the issue rate. Steps run one after another, and each launch has a
fixed overhead. Its time on the host is that of its calls. Nothing was measured on a Blackwell. On
an H200 everything was (`devices`), and tests compare the predictions with that.

Lowering decides what no graph shows:

    fusion     an Inductor kernel for x is part of what computes x, which costs no read, unless
               something else quantizes x as well; x of q, k and v is quantized once, and each pays
               its share
    a scale    computed after the codes: raw scales are written, then read and rounded. An exact one
               for the tensor takes a read of its own before them
    emulated   without fp4 tensor cores GEMMs are in BF16, or those of MXFP4 in FP8; codes that they
               read are dequantized, or made e4m3
    fp8        a GEMM has the rate of fp8 tensor cores on every GPU, a grouped one a rate of its own
               on a Hopper; on other GPUs a grouped one multiplies dequantized operands in BF16
    experts    a grouped GEMM in FP4 is taken to be as fast as one of a single weight. What pads an
               expert's tokens to whole chunks and tiles, half a chunk each, is not counted
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from q2compile.cost_model.devices import TRANSPOSE_REACH
from q2compile.cost_model.layer import (
    HOPPER,
    RESULT,
    Layer,
    TracedGraph,
    gemm_of,
    multiplies,
    traced,
)
from q2compile.cost_model.quantizers import (
    BF16,
    HIGH,
    ROWS_UNROTATED,
    Quantizer,
    packed_bits,
    written_bits,
)
from q2compile.cost_model.step import CALL, DISPATCHED, FUSED, TORCH, Step
from q2compile.graph.node_meta import ALPHA_FROM, LAUNCH_GROUP
from q2compile.graph.nodes import GEMM_OPS, is_q2, named_arguments
from q2compile.graph.quantizers import quantizer_of
from q2compile.lowering.inductor_kernels.fusion_gain import GENERATED_INSTRUCTIONS
from q2compile.recipes.recipe import GEMMS, Recipe
from q2compile.runtime_kernels.numerics.schemes import SWIZZLED, Scheme, get_scheme
from q2compile.runtime_kernels.ops.table import (
    DEQUANTIZE,
    GEMM_MASKED_UNROTATE,
    MASKED_UNROTATE,
    REQUANTIZE,
    TRANSPOSE,
    QuantizerCall,
)

# Launches of quantizers by Inductor; a test counts them in generated code.
_SPLIT_SCALES_LAUNCHES = 2  # q2::split_scales: the largest, then the scales
_INDUCTOR_SQUARE_LAUNCHES = 2  # the largest of each block, then codes
_ALPHA = 1  # the product of two global scales, if no quantizer's last launch computes it
_E4M3 = 8  # bits of an element
_AMAX_LAUNCHES = 2  # of Inductor's reduction over a whole tensor


def bf16_steps(layer: Layer, gemms: Iterable[str]) -> list[Step]:
    """The GEMMs of a plain linear, and the gradient of its bias."""
    gemms = list(gemms)
    dbias = [_sum_of_dy(layer)] if layer.bias and "wgrad" in gemms else []
    return [_plain_gemm(layer, name) for name in gemms] + dbias


def recipe_steps(recipe: Recipe, layer: Layer, gemms: Iterable[str]) -> list[Step]:
    """The kernels of a quantized linear, for those of its GEMMs that are wanted."""
    traits = layer.grouped, layer.bias, layer.w_quantized == 0, layer.capability
    forward, *backward = traced(recipe, tuple(gemms), *traits)
    steps = _steps_of(forward, layer, layer.w_quantized)
    return steps + [step for graph in backward for step in _steps_of(graph, layer)]


def _steps_of(made: TracedGraph, layer: Layer, w_quantized: int = 1) -> list[Step]:
    """w_quantized: how often a quantizer of w runs."""
    steps: list[Step] = []
    groups: dict[Any, list[Step]] = {}  # the steps that share a last launch
    for node in made.graph.nodes:
        call = quantizer_of(node)
        if call is None:
            steps += _others(node, made, layer)
            continue
        role, group = made.roles[node], groups.setdefault(node.meta.get(LAUNCH_GROUP, node), [])
        for _ in range(w_quantized if role == "w" else 1):
            steps.append(_behind(group, _quantizer(call, role, layer, node in made.fused)))
            if LAUNCH_GROUP in node.meta:
                group.append(steps[-1])
    return steps


def _behind(group: list[Step], step: Step) -> Step:
    """A quantizer that shares its last launch with those ahead of it, and the launch before, if
    that is the same kernel. (Not for large operands: next to their time a launch is none.)"""
    if not group:
        return step
    batched = step.quantizer and step.quantizer.batched
    ahead = [each.quantizer.batched for each in group if each.quantizer is not None]
    return replace(step, launches=step.launches - 1 - (batched is not None and batched in ahead))


def _others(node: fx.Node, made: TracedGraph, layer: Layer) -> list[Step]:
    """The steps of a node that is no quantizer. Casts, views and seeds cost nothing."""
    if multiplies(node):
        return _product(node, gemm_of(node, made.roles), layer)
    role = made.roles.get(node, "")
    if is_q2(node, TRANSPOSE):
        given = named_arguments(node)
        scheme, swizzled = str(given["scheme"]), bool(given["swizzled"])
        return [transposing(f"transpose {role}", scheme, layer.elements(role), swizzled)]
    if is_q2(node, DEQUANTIZE):
        bits = (packed_bits(str(node.args[3])) + HIGH) * layer.elements(role)
        return [Step(f"dequantize {role}", bits, by=TORCH, shared_by=layer.users(role))]
    if is_q2(node, MASKED_UNROTATE):
        return [Step("mask and rotate back", (2 * HIGH + 1) * layer.elements(role))]
    return [_sum_of_dy(layer)] if node.target is torch.ops.aten.sum.dim_IntList else []


# ---- GEMMs ---------------------------------------------------------------------------------------


def _plain_gemm(layer: Layer, name: str) -> Step:
    bits = HIGH * sum(layer.elements(role) for role in (*GEMMS[name], RESULT[name]))
    return Step(name, bits, layer.flops, by=TORCH)


def _sum_of_dy(layer: Layer) -> Step:
    return Step("sum dy", HIGH * layer.elements("dy"), by=TORCH, launches=2)


def _product(node: fx.Node, name: str, layer: Layer) -> list[Step]:
    """The GEMM, and launches ahead of it."""
    if not is_q2(node, *GEMM_OPS):
        return [_plain_gemm(layer, name)]
    schemes = {r: get_scheme(str(s)) for r, s in zip(GEMMS[name], node.args[7:9], strict=True)}
    result = layer.elements(RESULT[name])
    written = (HIGH + is_q2(node, GEMM_MASKED_UNROTATE)) * result  # that one reads a mask
    bits = written + sum(packed_bits(s.name) * layer.elements(r) for r, s in schemes.items())
    first = next(iter(schemes.values()))
    if first.is_tensorwise and (not layer.grouped or layer.capability == HOPPER):
        kind = "grouped fp8" if layer.grouped else "fp8"
        return [Step(name, bits, layer.flops, kind, by=TORCH)]
    if layer.emulated and first.format == "mxfp4" and not layer.grouped:
        bits = written + _E4M3 * sum(map(layer.elements, schemes))
        return [*_in_e4m3(layer, schemes), Step(name, bits, layer.flops, "fp8", by=TORCH)]
    if layer.emulated or first.is_tensorwise:
        is_plain = layer.grouped or all(scheme.has_pow2_scale for scheme in schemes.values())
        is_masked = any(is_q2(user, MASKED_UNROTATE) for user in node.users)
        product = _plain_gemm(layer, name) if is_plain else _fp32_gemm(layer, name, not is_masked)
        return [*_dequantized(layer, schemes), product]
    ahead, expanded = 0, Fraction(0)
    if not layer.grouped:
        ahead = _ALPHA if first.format == "nvfp4" and ALPHA_FROM not in node.meta else 0
        for role, scheme in schemes.items():
            if not scheme.swizzled:  # read, and written for each row of a square block
                read = packed_bits(scheme.name) - 4
                expanded += layer.elements(role) * (read + Fraction(8, scheme.width))
                ahead += 1
    return [
        Step(
            name, bits, layer.flops, "fp4", bits_before=expanded, launches=1 + ahead, by=DISPATCHED
        )
    ]


def _fp32_gemm(layer: Layer, name: str, fuses: bool) -> Step:
    """A plain GEMM of operands without their global scales. It writes fp32, which its reader scales
    and rounds. fuses: the reader is Inductor's next kernel, not one more."""
    plain, bits = _plain_gemm(layer, name), HIGH * layer.elements(RESULT[name])
    more = bits * (1 if fuses else 3)  # read as fp32; else also written, and read as bf16
    return replace(plain, bits=plain.bits + bits, bits_before=more, launches=2 - fuses)


def _dequantized(layer: Layer, schemes: dict[str, Scheme]) -> list[Step]:
    """Dequantizes codes for an emulated GEMM."""
    return [
        Step(
            f"dequantize {role}",
            (HIGH + packed_bits(scheme.name)) * layer.elements(role),
            shared_by=layer.users(role),
        )
        for role, scheme in schemes.items()
        if not scheme.dequantized
    ]


def _in_e4m3(layer: Layer, schemes: dict[str, Scheme]) -> list[Step]:
    """Makes codes e4m3 for an FP8 GEMM, after a launch that reads their scales."""
    return [
        Step(
            f"e4m3 {role}",
            (_E4M3 + packed_bits(scheme.name)) * layer.elements(role),
            bits_before=(packed_bits(scheme.name) - 4) * layer.elements(role),
            launches=2,
            shared_by=layer.users(role),
        )
        for role, scheme in schemes.items()
    ]


# ---- quantizers ----------------------------------------------------------------------------------


def _quantizer(call: QuantizerCall, role: str, layer: Layer, is_fused: bool) -> Step:
    """An amax that it takes is priced with it, as the launch that finds an exact global scale."""
    elements, users, source = layer.elements(role), layer.users(role), call.source_scheme
    scheme = call.scheme.name.removesuffix(SWIZZLED)
    directions = " rowwise and columnwise" * (len(call.operands) > 1)
    what = f"{call.spec.name} {role}{directions}"
    if call.scheme.is_tensorwise:  # the largest, by Inductor if it is given; then the codes
        bits = (HIGH + len(call.operands) * packed_bits(scheme)) * elements
        # The largest of x is part of what computes x.
        before = 0 if role == "x" and layer.x_fuses else HIGH * elements
        launches = 1 + (1 if call.args["amax"] is None else _AMAX_LAUNCHES)
        by = TORCH if is_fused else CALL
        return Step(what, bits, bits_before=before, launches=launches, by=by, shared_by=users)
    if call.scheme.block[0] != 1 and call.scheme.format == "mxfp4":
        return Step(what, (HIGH + packed_bits(scheme)) * elements)
    if call.scheme.block[0] != 1:  # Inductor kernels read the operand twice; q2::split_scales
        bits = (HIGH + written_bits(scheme)) * elements
        launches = _INDUCTOR_SQUARE_LAUNCHES
        launches += _SPLIT_SCALES_LAUNCHES * (call.scheme.global_scale == "pow2")
        return Step(what, bits, bits_before=HIGH * elements, launches=launches)
    if role == "x" and layer.x_fuses and is_fused:
        launches = 0 if call.scheme.takes_amax else _SPLIT_SCALES_LAUNCHES
        bits = written_bits(scheme) * elements
        fused = GENERATED_INSTRUCTIONS[scheme.removesuffix("_pow2")]
        how = {"elements": elements, "launches": launches, "shared_by": users}
        return Step(what, bits, by=FUSED, fused=fused, **how)
    kind = "col" if not call.rowwise else "row" if not call.columnwise else "both"
    if kind == "both" and not call.rotates_rows:
        kind = ROWS_UNROTATED
    made = Quantizer(
        REQUANTIZE if source else kind,
        scheme,
        call.transform.name,
        source.name.removesuffix(SWIZZLED) if source else BF16,
        dbias=call.dbias is not None,
    )
    return quantizing(what, made, elements, users)


def quantizing(what: str, quantizer: Quantizer, elements: Any, users: int = 1) -> Step:
    """A call of a CUDA quantizer of so many elements, for each of so many users."""
    return Step(
        what,
        quantizer.bits * elements,
        quantizer=quantizer,
        elements=elements,
        bits_before=quantizer.amax_bits * elements,
        launches=quantizer.launches,
        shared_by=users,
    )


def transposing(what: str, scheme: str, elements: Any, swizzled: bool = True) -> Step:
    """q2::transpose of so many elements. Swizzled scales of square blocks are one for each row."""
    written = 4 + Fraction(8, get_scheme(scheme).width) if swizzled else packed_bits(scheme)
    return Step(what, (packed_bits(scheme) + written) * elements, reach=TRANSPOSE_REACH)
