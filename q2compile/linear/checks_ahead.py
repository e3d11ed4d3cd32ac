"""The self-checks that a graph's kernels need on a new machine, begun before a pass asks for them.

A check compiles what it launches, half a second each, and the first step would wait for one after
the other. Known is which come, from the recipes, before AOTAutograd traces the graph: threads
compile meanwhile. One that is not foreseen is compiled when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from q2compile.recipes.recipe import Operand, Recipe, parse
from q2compile.runtime_kernels.cuda import selfcheck
from q2compile.runtime_kernels.cuda.jit.launch import multiplies_codes, unsupported
from q2compile.runtime_kernels.cuda.quantize import fused
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import not_served
from q2compile.runtime_kernels.numerics.schemes import SWIZZLED, WIDENED, get_scheme
from q2compile.runtime_kernels.ops.requantize_by_scales import rounds_by_scales


def begin_checks(texts: Iterable[tuple[str, str, str]], device: torch.device, fuses: bool) -> None:
    """Have threads compile for the checks of linear layers with these recipes (`Recipe.texts`).

    fuses: whether quantisers of gradients may compute their operand.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    if unsupported(index) is not None:
        return
    codes = multiplies_codes(index)
    recipes = [parse(*text) for text in dict.fromkeys(texts)]
    for op, scheme in dict.fromkeys(call for r in recipes for call in checked_calls(r, codes)):
        selfcheck.begin(op, index, scheme)
    for op, args in dict.fromkeys(call for r in recipes for call in fused_calls(r, codes)):
        for operands in (1, 2) if fuses else ():
            fused.begin(op, index, args, operands)


def checked_calls(recipe: Recipe, codes: bool) -> Iterator[tuple[str, str]]:
    """The quantisers of a recipe, as ops with schemes, and what is launched beside them. codes:
    whether GEMMs read codes, with swizzled scales; else bf16 numbers.
    """
    fprop = recipe.fprop
    for operand in (fprop.a, fprop.b) if fprop else ():
        spec = get_scheme(operand.scheme)
        scheme = _named(operand, codes, saved=not spec.stochastic)
        if spec.masked:
            yield "quantize_masked", scheme
            continue
        if not_served(scheme, operand.transform) is None:
            yield "quantize", scheme
        if spec.global_scale == "pow2":  # of Inductor's loops
            yield "split_scales", scheme
        if not codes:
            yield "dequantize", operand.scheme
        if fprop and operand is fprop.b and not codes and _named(operand, codes) != scheme:
            yield "quantize", _named(operand, codes)  # of a large weight
    for op, operand in _of_gradients(recipe):
        yield op, _named(operand, codes)
    for gemm in filter(None, (recipe.dgrad, recipe.wgrad)):
        if gemm.b.source == "requantize":
            yield "requantize", _named(gemm.b, codes)
            if gemm is recipe.dgrad and fprop and rounds_by_scales(fprop.b.scheme):
                # Of a weight: asked for as the joint graph names it, and then as passes do.
                yield "requantize_by_scales", _named(gemm.b, codes, saved=True)
                yield "requantize_by_scales", _named(gemm.b, codes)
        elif gemm.b.source == "reuse":
            yield "transpose", gemm.b.scheme
        else:
            yield "rht_quantize", _named(gemm.b, codes)
            if gemm.b.source == "forward":
                yield "rht_quantize", _named(gemm.b, codes, saved=True)


def fused_calls(recipe: Recipe, codes: bool) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Those that may compute a gradient in the place of reading it, with their arguments after x:
    an ellipsis is a tensor."""
    for op, operand in _of_gradients(recipe):
        how = _named(operand, codes), operand.transform
        if op == "rht_quantize_both":
            yield op, (..., ..., *how, 0)
        elif op == "rht_quantize":
            yield op, (..., *how, recipe.wgrad is not None and operand is recipe.wgrad.a, 0)


def _of_gradients(recipe: Recipe) -> Iterator[tuple[str, Operand]]:
    """What quantises dy: both directions at once where they are alike (`pair_directions`)."""
    dgrad = recipe.dgrad.a if recipe.dgrad else None
    wgrad = recipe.wgrad.a if recipe.wgrad else None
    if dgrad is not None and dgrad == wgrad and dgrad.transform != "none":
        yield "rht_quantize_both", dgrad
        return
    if dgrad is not None:
        yield "quantize" if dgrad.transform == "none" else "rht_quantize", dgrad
    if wgrad is not None:
        yield "rht_quantize", wgrad


def _named(operand: Operand, codes: bool, saved: bool = False) -> str:
    """The scheme as passes name it for what reads the operand (`swizzle_scales`,
    `widen_operands`). saved: for another graph as well, as codes."""
    if codes:
        return operand.scheme + (SWIZZLED if get_scheme(operand.scheme).block[0] == 1 else "")
    widened = operand.scheme + WIDENED
    return operand.scheme if saved or not_served(widened, operand.transform) else widened
