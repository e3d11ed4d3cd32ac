# SPDX-License-Identifier: Apache-2.0
"""Begins what a graph's kernels need on a new machine, before a pass or a call asks for it: on a
GPU self-checks, on a CPU the library of kernels.

A check compiles what it launches, half a second each, and the first step would wait for one after
the other. The recipes say which checks will come before AOTAutograd traces the graph, so threads
compile meanwhile, and a child process runs them. A check that was not foreseen begins when it is
asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping

import torch

from q2compile.recipes.recipe import Operand, Recipe, parse
from q2compile.runtime_kernels.cpu import build
from q2compile.runtime_kernels.cuda import selfcheck
from q2compile.runtime_kernels.cuda.checked_cases import (
    BOTH,
    COLUMNWISE,
    MASKED,
    OF_FORMAT,
    REQUANTIZED,
    ROWWISE,
    CheckKey,
    used,
)
from q2compile.runtime_kernels.cuda.gemm.operands import operand_forms
from q2compile.runtime_kernels.cuda.jit.launch import unsupported
from q2compile.runtime_kernels.cuda.known_bad import warn_of_known_bad
from q2compile.runtime_kernels.cuda.quantize import fused
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import not_served, rows_when_paired
from q2compile.runtime_kernels.kernel_states import why_disabled
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SWIZZLED, get_scheme
from q2compile.runtime_kernels.numerics.transforms import get_transform
from q2compile.runtime_kernels.ops.requantize import rounds_by_scales
from q2compile.runtime_kernels.ops.table import (
    DEQUANTIZE,
    GEMM,
    MASKED_UNROTATE,
    QUANTIZE,
    SPLIT_SCALES,
    TO_E4M3,
    TRANSPOSE,
    QuantizerCall,
    QuantizerVariant,
)
from q2compile.runtime_kernels.registry import CPP, CUBLASLT_FP4, CUDA_BF16, TRITON_FP4

Forms = Mapping[str, str]  # format -> the form of the operands that GEMMs read


def begin_library() -> None:
    """Have a thread compile the CPU kernels while Inductor compiles the graph, unless a user has
    disabled them."""
    if why_disabled(QUANTIZE, CPP) is None:
        build.begin(os.getpid())


def begin_checks(texts: Iterable[tuple[str, str, str]], device: torch.device, fuses: bool) -> None:
    """Have threads compile for the checks of linear layers with these recipes (`Recipe.texts`).

    fuses: whether quantizers of gradients may compute their operand.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    if unsupported(index) is not None:
        return
    warn_of_known_bad(index)
    forms = operand_forms(torch.cuda.get_device_capability(index))
    recipes = [parse(*text) for text in dict.fromkeys(texts)]
    for of, scheme in dict.fromkeys(call for r in recipes for call in checked_calls(r, forms)):
        selfcheck.begin(of, index, scheme)
    for name, scheme in dict.fromkeys(gemm for r in recipes for gemm in gemms(r, forms)):
        swizzled = name != CUDA_BF16
        selfcheck.begin_gemm(GEMM, name, index, scheme, (torch.bfloat16, None, swizzled))
    for call in [call for r in recipes for call in fused_calls(r, forms)] if fuses else ():
        for operands in (1, 2):
            fused.begin(index, call, operands)


def checked_calls(
    recipe: Recipe, forms: Forms
) -> Iterator[tuple[str | QuantizerVariant | CheckKey, str]]:
    """The quantizers of a recipe as they will be called, with schemes, and further ops that will
    run. The quantizers of fp8 are Inductor's kernels, which are checked as they are lowered."""
    for of, scheme in _calls(recipe, forms):
        if not get_scheme(scheme).is_tensorwise:
            yield of, scheme


def _calls(recipe: Recipe, forms: Forms) -> Iterator[tuple[str | QuantizerVariant | CheckKey, str]]:
    """The calls of a recipe in every scheme."""
    fprop, codes = recipe.fprop, forms["nvfp4"] == SWIZZLED
    for multiplied in filter(None, (fprop, recipe.dgrad, recipe.wgrad)):
        for operand in (multiplied.a, multiplied.b):
            if _form(operand, forms) == "":
                yield TO_E4M3, operand.scheme
    for operand in (fprop.a, fprop.b) if fprop else ():
        spec = get_scheme(operand.scheme)
        scheme = _named(operand, forms, saved=not spec.stochastic)
        if spec.masked:
            yield MASKED, scheme
            if not codes:
                yield MASKED_UNROTATE, operand.scheme  # else the GEMM's epilogue
            continue
        if not_served(scheme, operand.transform) is None:
            yield ROWWISE, scheme
        if spec.global_scale == "pow2":  # of Inductor's kernels
            yield SPLIT_SCALES, scheme
        if _form(operand, forms) == DEQUANTIZED:
            yield DEQUANTIZE, operand.scheme
        if fprop and operand is fprop.b and not codes and _named(operand, forms) != scheme:
            yield ROWWISE, _named(operand, forms)  # of a large weight
    for variant, operand in _of_gradients(recipe):
        yield used(variant, operand.transform), _named(operand, forms)
        if variant.rows_unrotated:  # `pair_directions` asks ahead of the passes that name schemes
            yield used(variant, operand.transform), operand.scheme
    for gemm in filter(None, (recipe.dgrad, recipe.wgrad)):
        rotated = get_transform(gemm.b.transform).size > 1
        saved = fprop and (fprop.a if gemm is recipe.wgrad else fprop.b)
        if saved and gemm.b.source == "requantize" and get_scheme(saved.scheme).is_tensorwise:
            columnwise = used(COLUMNWISE._replace(rotated=rotated), gemm.b.transform)
            yield columnwise, _named(gemm.b, forms)  # of dequantized codes
        elif gemm.b.source == "requantize":
            requantized = REQUANTIZED._replace(rotated=rotated)
            yield used(requantized, gemm.b.transform), _named(gemm.b, forms)
            if gemm is recipe.dgrad and fprop and rounds_by_scales(get_scheme(fprop.b.scheme)):
                # A weight: checked under the scheme of the joint graph, then under the scheme after
                # passes.
                by_scales = used(requantized._replace(by_scales=True), gemm.b.transform)
                yield by_scales, _named(gemm.b, forms, saved=True)
                yield by_scales, _named(gemm.b, forms)
        elif gemm.b.source == "reuse":
            yield TRANSPOSE, gemm.b.scheme
        else:
            columnwise = used(COLUMNWISE._replace(rotated=rotated), gemm.b.transform)
            both = None
            if gemm.b.source == "forward" and fprop:
                both = _both(fprop.a if gemm is recipe.wgrad else fprop.b, gemm.b)
            if both is not None:
                yield used(both, gemm.b.transform), _named(gemm.b, forms, saved=True)
            yield columnwise, _named(gemm.b, forms)
            if gemm.b.source == "forward" and (both is None or codes):
                yield columnwise, _named(gemm.b, forms, saved=True)


def gemms(recipe: Recipe, forms: Forms) -> Iterator[tuple[str, str]]:
    """The kernels of its GEMMs, with a scheme of the format that they multiply; torch's FP8 GEMM
    needs no check."""
    for gemm in filter(None, (recipe.fprop, recipe.dgrad, recipe.wgrad)):
        format_, form = get_scheme(gemm.a.scheme).format, _form(gemm.a, forms)
        if form:
            by_codes = TRITON_FP4 if format_ == "mxfp4" else CUBLASLT_FP4
            yield CUDA_BF16 if form == DEQUANTIZED else by_codes, OF_FORMAT[format_]


def inductor_kernels_of(recipe: Recipe, forms: Forms) -> Iterator[str]:
    """The schemes of which Inductor may make kernels in its forward."""
    for operand in (recipe.fprop.a, recipe.fprop.b) if recipe.fprop else ():
        if not get_transform(operand.transform).size > 1:
            yield _named(operand, forms, saved=not get_scheme(operand.scheme).stochastic)


def inductor_kernels_ahead(
    texts: Iterable[tuple[str, str, str]], device: torch.device
) -> list[str]:
    """Schemes of Inductor kernels for linear layers with these recipes, on a GPU."""
    index = torch.cuda.current_device() if device.index is None else device.index
    known = torch.cuda.get_device_capability(index) if unsupported(index) is None else (0, 0)
    forms = operand_forms(known)
    recipes = [parse(*text) for text in dict.fromkeys(texts)]
    return list(dict.fromkeys(scheme for r in recipes for scheme in inductor_kernels_of(r, forms)))


def fused_calls(recipe: Recipe, forms: Forms) -> Iterator[QuantizerCall]:
    """Quantizers that may compute a gradient instead of reading it. An ellipsis is a seed."""
    for variant, operand in _of_gradients(recipe):
        if variant == ROWWISE or get_scheme(operand.scheme).is_tensorwise:
            continue
        seeds = ["rowwise_seed"] * variant.rowwise + ["columnwise_seed"] * variant.columnwise
        yield QuantizerCall.named(
            QUANTIZE,
            x=None,
            scheme=_named(operand, forms),
            transform=operand.transform,
            rotate_rows=not variant.rows_unrotated,
            rowwise=variant.rowwise,
            columnwise=variant.columnwise,
            **dict.fromkeys(seeds, ...),
        )


def _both(row: Operand | None, column: Operand | None) -> QuantizerVariant | None:
    """The variant of the one call that makes two operands of a matrix (`pair_directions`)."""
    if row is None or column is None:
        return None
    rotated = rows_when_paired(row.scheme, row.transform, column.scheme, column.transform)
    return None if rotated is None else BOTH._replace(rows_unrotated=not rotated)


def _of_gradients(recipe: Recipe) -> Iterator[tuple[QuantizerVariant, Operand]]:
    """The quantizers of dy: one for rowwise and columnwise where that can be
    (`pair_directions`)."""
    dgrad = recipe.dgrad.a if recipe.dgrad else None
    wgrad = recipe.wgrad.a if recipe.wgrad else None
    both = _both(dgrad, wgrad)
    if both is not None and wgrad is not None:
        yield both, wgrad
        return
    if dgrad is not None:
        rotated = get_transform(dgrad.transform).size > 1
        yield ROWWISE._replace(rotated=rotated), dgrad
    if wgrad is not None:
        rotated = get_transform(wgrad.transform).size > 1
        yield COLUMNWISE._replace(rotated=rotated), wgrad


def _form(operand: Operand, forms: Forms) -> str | None:
    """The form in which GEMMs read an operand; None in fp8, which has one form only."""
    return forms.get(get_scheme(operand.scheme).format)


def _named(operand: Operand, forms: Forms, saved: bool = False) -> str:
    """The scheme as passes name it for what reads the operand (`swizzle_scales`,
    `dequantize_operands`). saved: another graph reads it too, as codes."""
    scheme, form = get_scheme(operand.scheme), _form(operand, forms)
    if not form:
        return scheme.name
    if form == SWIZZLED:
        return scheme.with_form(SWIZZLED if scheme.block[0] == 1 else "").name
    dequantized = scheme.with_form(DEQUANTIZED).name
    return scheme.name if saved or not_served(dequantized, operand.transform) else dequantized
