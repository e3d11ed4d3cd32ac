# SPDX-License-Identifier: Apache-2.0
"""Types of the options ``recipe`` and ``policy``, for type checkers. `resolve` checks values."""

from __future__ import annotations

from typing import Literal, TypeAlias, TypedDict

RecipeName = Literal[
    "quartet2",
    "quartet2_search",
    "nvfp4",
    "quartet",
    "mxfp4",
    "mxfp4_2d",
    "tetrajet2",
    "fp8",
    "quartet2_fp8",
    "bf16",
]
"""The published recipes; ``q2compile recipes`` prints them."""


class OperandChange(TypedDict, total=False):
    """Changes of one operand of a GEMM, by names that ``q2compile recipes`` prints."""

    scheme: str
    transform: str
    source: Literal["fresh", "requantize", "reuse", "forward"]


class FpropChange(TypedDict, total=False):
    """Operands of y = x wᵀ."""

    x: OperandChange
    w: OperandChange


class DgradChange(TypedDict, total=False):
    """Operands of dx = dy w."""

    dy: OperandChange
    w: OperandChange


class WgradChange(TypedDict, total=False):
    """Operands of dw = dyᵀ x."""

    dy: OperandChange
    x: OperandChange


class RecipeChange(TypedDict, total=False):
    """A recipe of one's own: a published one, and what differs in its GEMMs. ``base`` is another
    word for ``recipe``. A GEMM is the name of the recipe to take it from ("bf16": not quantized),
    or what differs in its operands."""

    recipe: RecipeName
    base: RecipeName
    fprop: RecipeName | FpropChange
    dgrad: RecipeName | DgradChange
    wgrad: RecipeName | WgradChange


PolicyValue: TypeAlias = RecipeName | Literal["auto"] | RecipeChange
"""The value for a pattern of a policy; "auto": the fastest of the recipe, fp8 and bf16."""
