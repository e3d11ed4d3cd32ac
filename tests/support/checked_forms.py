# SPDX-License-Identifier: Apache-2.0
"""The forms of calls by which tests try each kernel: those of the recipes' operands, and others."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SWIZZLED, get_scheme
from q2compile.runtime_kernels.ops.table import QUANTIZE, REQUANTIZE, SPECS, QuantizerVariant
from q2compile.runtime_kernels.registry import bound, parameters
from q2compile.runtime_kernels.small_calls import Form, arguments, form_of

BF16 = torch.bfloat16
TYPES = BF16, torch.float16, torch.float32
OF_FORMAT = {"nvfp4": "nvfp4_46_pow2", "mxfp4": "mxfp4_rtn"}
SQUARE = "mxfp4_rceil_32x32"
# Schemes with Inductor kernels.
INDUCTOR_CHECKED = "nvfp4_46_pow2", "nvfp4_46", "nvfp4_16x16_pow2", "nvfp4_16x16"


def _with_swizzled(*schemes: str) -> tuple[str, ...]:
    return schemes + tuple(scheme + SWIZZLED for scheme in schemes)


_ROTATED = _with_swizzled(
    *("nvfp4_ms_eden_pow2", "nvfp4_sr_pow2", "nvfp4_sr", "nvfp4_pow2", "nvfp4"),
    *("mxfp4_sr", "mxfp4_rtn34", "mxfp4_rceil"),
)
_GROUPED = (
    *("nvfp4_ms_eden_pow2", "nvfp4_sr_pow2", "nvfp4_sr", "nvfp4_pow2"),
    *("mxfp4_sr", "mxfp4_rtn34", "mxfp4_rceil"),
    *("nvfp4_ms_eden_pow2@bf16", "nvfp4_sr_pow2@bf16"),
)
_WITH_DBIAS = _with_swizzled(
    *("nvfp4_ms_eden_pow2", "nvfp4_sr_pow2", "nvfp4_pow2"),
    *("mxfp4_sr", "mxfp4_rtn34", "mxfp4_rceil"),
)
_UNROTATED = _with_swizzled("nvfp4_pow2", "nvfp4_sr_pow2", "nvfp4_sr")
_DEQUANTIZED = ("nvfp4_ms_eden_pow2" + DEQUANTIZED, "nvfp4_sr_pow2" + DEQUANTIZED)
ROWWISE = QuantizerVariant(QUANTIZE, rowwise=True, columnwise=False, rotated=False)
MASKED = ROWWISE._replace(rotated=True, masked=True)
_ROWWISE_ROTATED = ROWWISE._replace(rotated=True)
COLUMNWISE = _ROWWISE_ROTATED._replace(rowwise=False, columnwise=True)
BOTH = COLUMNWISE._replace(rowwise=True)
COLUMNS_ROTATED = BOTH._replace(rows_unrotated=True)
REQUANTIZED = COLUMNWISE._replace(op=REQUANTIZE)
# Schemes for each op or variant.
CHECKED: dict[str | QuantizerVariant, tuple[str, ...]] = {
    ROWWISE: (
        *_with_swizzled("nvfp4_46_pow2", "nvfp4_46", "nvfp4_sr_pow2", "nvfp4_sr"),
        *_with_swizzled("mxfp4_rceil", "mxfp4_rceil_sr"),
        *("nvfp4_46_pow2" + DEQUANTIZED, "nvfp4_sr_pow2" + DEQUANTIZED),
        *("fp8", SQUARE),
    ),
    _ROWWISE_ROTATED: _ROTATED + _DEQUANTIZED,
    COLUMNWISE: _ROTATED + _DEQUANTIZED,
    BOTH: _ROTATED + _DEQUANTIZED,
    COLUMNWISE._replace(dbias=True): _WITH_DBIAS + _DEQUANTIZED,
    BOTH._replace(dbias=True): _WITH_DBIAS + _DEQUANTIZED,
    COLUMNS_ROTATED: _UNROTATED + ("nvfp4_sr_pow2" + DEQUANTIZED,),
    COLUMNS_ROTATED._replace(dbias=True): (
        *_with_swizzled("nvfp4_sr_pow2"),
        "nvfp4_sr_pow2" + DEQUANTIZED,
    ),
    COLUMNWISE._replace(grouped=True): _GROUPED,
    BOTH._replace(grouped=True): _GROUPED,
    COLUMNS_ROTATED._replace(grouped=True): (
        *("nvfp4_pow2", "nvfp4_sr_pow2"),
        "nvfp4_sr_pow2" + DEQUANTIZED,
    ),
    MASKED: _with_swizzled("mxfp4_quest"),
    REQUANTIZED: (
        _with_swizzled("nvfp4_ms_eden_pow2", "nvfp4_sr_pow2", "nvfp4_sr", "mxfp4_rtn34")
        + _DEQUANTIZED
    ),
    REQUANTIZED._replace(by_scales=True): (
        _with_swizzled("nvfp4_ms_eden_pow2", "nvfp4_sr_pow2") + _DEQUANTIZED
    ),
    REQUANTIZED._replace(grouped=True): (
        ("nvfp4_ms_eden_pow2", "nvfp4_sr_pow2", "mxfp4_rtn34") + _DEQUANTIZED
    ),
    "masked_unrotate": ("mxfp4_quest",),
    "dequantize": tuple(OF_FORMAT.values()),
    "signs": ("nvfp4",),
    "split_scales": _with_swizzled("nvfp4_46_pow2", "nvfp4_pow2"),
    "to_e4m3": (OF_FORMAT["mxfp4"],),
    "transpose": ("nvfp4_16x16_pow2", SQUARE),
    "gemm": tuple(OF_FORMAT.values()),
    "gemm_masked_unrotate": tuple(OF_FORMAT.values()),
    "grouped_gemm": tuple(OF_FORMAT.values()),
    "grouped_mm": ("nvfp4_46_pow2",),
}


def op_of(of: str | QuantizerVariant) -> str:
    return of if isinstance(of, str) else of.op


def checked_of(*ops: str) -> list[tuple[str | QuantizerVariant, str]]:
    """The table's rows of these ops, or all."""
    pairs = ((of, scheme) for of, schemes in CHECKED.items() for scheme in schemes)
    return [(of, scheme) for of, scheme in pairs if not ops or op_of(of) in ops]


def form(of: str | QuantizerVariant, scheme: str, **more: Any) -> Form:
    """The form of a call. more: its arguments that are not the usual ones, and `aligned`."""
    op, aligned = op_of(of), more.pop("aligned", True)
    given = _of_variant(of, scheme) if isinstance(of, QuantizerVariant) else _others(op, scheme)
    plain = Form(op, bound(op, (), {**given, **more}), aligned)
    found = form_of(op, arguments(plain))
    named = found.named | {name: more.get(name) for name in found.named if name == "cols"}
    return found._replace(args=tuple(named.values()), aligned=aligned)


def _of_variant(variant: QuantizerVariant, scheme: str) -> dict[str, Any]:
    transform = "none"
    if variant.rotated:
        transform = "h32" if variant.masked else "rht16" if variant.rows_unrotated else "rht128"
    given: dict[str, Any] = {"scheme": scheme, "transform": transform, "columnwise_seed": ...}
    given |= dict.fromkeys(("offs", "padded_offs"), ... if variant.grouped else None)
    if variant.op == REQUANTIZE:
        spec = get_scheme(scheme)
        source = OF_FORMAT[spec.format] + SWIZZLED * spec.swizzled
        sources = dict.fromkeys(SPECS[REQUANTIZE].source, ...)
        return {**given, **sources, "source_scheme": source, "by_scales": variant.by_scales}
    takes_amax = get_scheme(scheme).takes_amax and not (variant.rotated or variant.columnwise)
    return {
        **given,
        "x": ...,
        "rotate_rows": not variant.rows_unrotated,
        "rowwise": variant.rowwise,
        "columnwise": variant.columnwise,
        "amax": ... if takes_amax else None,
        "rowwise_seed": ... if variant.rowwise and not variant.masked else None,
        "columnwise_seed": ... if variant.columnwise else None,
        "mask": variant.masked,
        "dbias": BF16 if variant.dbias else None,
    }


def _others(op: str, scheme: str) -> dict[str, Any]:
    usual = {"scheme": scheme, "a_scheme": scheme, "b_scheme": scheme, "dtype": BF16, "bias": None}
    usual |= {"gemm": "fprop", "swizzled": True, "filled": False}
    usual |= {"transform": "rht128" if op == "signs" else "h32", "grad": BF16}
    if op == "transpose":
        usual |= {"offs": None, "padded_offs": None}
    return {name: usual.get(name, ...) for name, _ in parameters(op)}


def arguments_of(of: str | QuantizerVariant, scheme: str, **more: Any) -> tuple:
    """Small arguments on the CPU."""
    return arguments(form(of, scheme, **more))


# The dtypes of a GEMM's result and its bias, and whether scales are swizzled; each of a layer's
# three GEMMs of groups.
def products(op: str, scheme: str) -> list[Form]:
    """Every form of a product, for both kinds of global scales."""
    kinds = {"nvfp4": ("nvfp4_46_pow2", "nvfp4_46"), "mxfp4": ("mxfp4_rtn", "mxfp4_rtn34")}
    schemes = kinds[get_scheme(scheme).format]
    if op == "grouped_gemm":
        several = product(schemes, ("fprop", "dgrad", "wgrad"), (BF16, torch.float32))
        return [form(op, name, gemm=gemm, dtype=dtype) for name, gemm, dtype in several]
    found = []
    for name, dtype, biased, end in product(schemes, TYPES, (False, True), ("", SWIZZLED)):
        if op == "gemm":
            found.append(form(op, name + end, dtype=dtype, bias=dtype if biased else None))
        elif not biased:
            found.append(form(op, name + end, dtype=dtype))
    return found
