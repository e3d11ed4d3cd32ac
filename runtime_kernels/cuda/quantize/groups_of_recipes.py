# SPDX-License-Identifier: Apache-2.0
"""The grouped launches that `q2compile doctor` checks: those of linears under the published
recipes, forward and backward. Training checks all of its own before their first use
(grouped_check.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from q2compile.runtime_kernels.cuda.checked_cases import (
    BOTH,
    COLUMNS_ROTATED,
    COLUMNWISE,
    MASKED,
    OF_FORMAT,
    REQUANTIZED,
    ROWWISE,
    used,
)
from q2compile.runtime_kernels.cuda.quantize.grouped_check import Checked, Group
from q2compile.runtime_kernels.cuda.quantize.grouped_launch import ScaleProduct
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SWIZZLED, get_scheme
from q2compile.runtime_kernels.ops.table import DEQUANTIZE, SPLIT_SCALES, QuantizerVariant

# x and w.
_FORWARD = (
    *((ROWWISE, "nvfp4_46_pow2"), (ROWWISE, "nvfp4_search_pow2"), (ROWWISE, "nvfp4_pow2")),
    (MASKED, "mxfp4_quest"),
)
# The scheme and the transform of gradients, and what follows dy: x and w.
_BACKWARD = (
    ("nvfp4_ms_eden_pow2", "rht128", REQUANTIZED),
    ("nvfp4_sr_pow2", "rht128", REQUANTIZED),
    ("mxfp4_rtn34", "rht32", REQUANTIZED),
    ("mxfp4_sr", "rht64", COLUMNWISE),
)
_ROW, _COLUMN = (0, 2), (0, 5)  # the global scales of a first call with both operands


def groups_of_recipes(forms: Mapping[str, str]) -> Iterator[Group]:
    """Groups that the recipes launch. forms: of the operands that GEMMs read, by format; those with
    swizzled scales take one product of global scales."""
    codes = forms["nvfp4"] == SWIZZLED
    for variant, scheme in _FORWARD:
        calls = [(variant, scheme + SWIZZLED * codes)] * 2
        yield _group(calls, [ScaleProduct(_ROW, (1, 2))] if codes else [])
    for scheme in (OF_FORMAT[of] for of, form in forms.items() if form == DEQUANTIZED):
        yield Group(((DEQUANTIZE, scheme), (DEQUANTIZE, scheme)))
    for dbias in (False, True):
        for scheme, transform, variant in _BACKWARD:
            form = forms[get_scheme(scheme).format]
            dy = used(BOTH._replace(dbias=dbias), transform), scheme + form
            other = used(variant, transform), scheme + form
            products = [ScaleProduct(_ROW, (1, 2)), ScaleProduct(_COLUMN, (2, 2))] if codes else []
            yield _group([dy, other, other], products)
        dy = used(COLUMNWISE._replace(dbias=dbias), "h32"), "mxfp4_rceil" + forms["mxfp4"]
        yield _group([dy, dy], [])
    yield from _of_nvfp4(codes)


def _of_nvfp4(codes: bool) -> Iterator[Group]:
    """Groups of nvfp4: Inductor kernels make its 16x16 blocks of weights, but not their scales."""
    weight: Checked = (SPLIT_SCALES, "nvfp4_16x16_pow2")
    if not codes:
        yield Group(((COLUMNS_ROTATED, "nvfp4_pow2"), weight))
        return
    yield Group((weight,), (ScaleProduct((0, 1), 0),), 1)
    for dbias in (False, True):
        dy: QuantizerVariant = COLUMNS_ROTATED._replace(dbias=dbias)
        products = ScaleProduct(_ROW, 0), ScaleProduct(_COLUMN, 1)
        yield Group(((dy, "nvfp4_sr_pow2" + SWIZZLED),), products, 2)


def _group(calls: Sequence[Checked], products: Sequence[ScaleProduct]) -> Group:
    """A group of calls, without products for MXFP4, which has no global scales to multiply."""
    is_nvfp4 = get_scheme(calls[0][1]).format == "nvfp4"
    return Group(tuple(calls), tuple(products) if is_nvfp4 else ())
