# SPDX-License-Identifier: Apache-2.0
"""Cases of the self-checks: small arguments, on the CPU, for each op with a CUDA kernel. A scheme
names a case; for a quantizer, a scheme and a variant (ops/table.py).
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from q2compile.runtime_kernels.numerics.groups import padded_rows
from q2compile.runtime_kernels.numerics.layout import pack_bits
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SWIZZLED, get_scheme
from q2compile.runtime_kernels.ops.table import (
    QUANTIZE,
    REQUANTIZE,
    QuantizerCall,
    QuantizerVariant,
)

_WIDTH = 264  # no multiple of 16 or 128, several tiles
_WHOLE = 768  # a contraction of whole tiles, several of them
_UNALIGNED = 261  # rows of which begin anywhere
ROWS = (130, 1)
_COLUMNS = 200  # of a product
_PADDED = 224  # columns of a product that is rotated back
_IN_GROUPS = 200  # rows: groups of 3, 137, 0 and 40 (copies in chunks, a whole chunk), 20 of none
_ENDS = (3, 140, 140, 180)
# Two results that are rounded once each differ by a relative 2^-8 in bf16. What remains is the
# order of the fp32 sums, and how many bits tensor cores keep on the way to them.
GEMM_ERROR = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-10}

# Ops for which only the format of a scheme counts.
BY_FORMAT = (
    *("dequantize", "gemm", "gemm_masked_unrotate", "grouped_gemm", "grouped_mm", "to_e4m3"),
)

# The form of a GEMM: dtypes of its result and its bias, and whether scales are swizzled; in a sweep
# also how many rows its result has.
Form = tuple[torch.dtype, torch.dtype | None, bool] | tuple[torch.dtype, None, bool, int]
# Counts of rows at which kernels take other paths: `q2compile doctor --sweep`.
SWEEP = (1, 15, 16, 17, 127, 128, 129, 1000, 2048, 3072, 4096, *range(64, 2048, 128))
FORMS: tuple[Form, ...] = tuple(
    (dtype, bias, swizzled)
    for dtype in GEMM_ERROR
    for bias in (None, dtype)
    for swizzled in (False, True)
)

# The form of a grouped GEMM: which of a layer's three it is, and the dtype of its result.
GroupedForm = tuple[str, torch.dtype]
GROUPED_FORMS: tuple[GroupedForm, ...] = tuple(
    product(("fprop", "dgrad", "wgrad"), (torch.bfloat16, torch.float32))
)

# The forms of each op that has any.
FORMS_OF: dict[str, tuple] = {
    "gemm": FORMS,
    "gemm_masked_unrotate": tuple(form for form in FORMS if form[1] is None),
    "grouped_gemm": GROUPED_FORMS,
}

RESULTS = {
    "dequantize": ("elements",),
    "masked_unrotate": ("elements",),
    "padded_ends": ("ends",),
    "signs": ("signs",),
    "split_scales": ("scales", "global scale"),
    "to_e4m3": ("elements", "scale"),
    "transpose": ("codes", "scales"),
}


class CheckKey(NamedTuple):
    """A variant of a quantizer as it is used, where that is not the usual way (`used`).

    vectors: rows of its operand begin on 16 bytes.
    """

    variant: QuantizerVariant
    transform: str
    dtype: torch.dtype = torch.bfloat16
    vectors: bool = True

    @property
    def op(self) -> str:
        return self.variant.op

    def __str__(self) -> str:
        unaligned = ", unaligned" * (not self.vectors)
        return f"{self.variant}, {self.transform}, {self.dtype}{unaligned}"


def used(
    variant: QuantizerVariant,
    transform: str,
    dtype: torch.dtype = torch.bfloat16,
    vectors: bool = True,
) -> QuantizerVariant | CheckKey:
    """The self-check of a call. A variant alone stands for its usual use: the usual transform,
    bf16, rows that begin on 16 bytes."""
    use = CheckKey(variant, transform, dtype, vectors)
    return variant if use == _usual(variant) else use


def _usual(of: QuantizerVariant | CheckKey) -> CheckKey:
    """A variant as it is usually used."""
    return CheckKey(of, _rotation(of)) if isinstance(of, QuantizerVariant) else of


def _matrix(rows: int, width: int = _WIDTH, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(rows)
    x = torch.randn((rows, width), generator=generator, dtype=torch.float32, device="cpu")
    return x.to(dtype)


def _quantized(scheme: str, rows: int, width: int = _WIDTH) -> tuple[torch.Tensor, ...]:
    amax = _amax(scheme, rows, width)
    return tuple(
        torch.ops.q2.quantize(
            _matrix(rows, width), scheme=scheme, rowwise=True, columnwise=False, amax=amax
        )
    )


def _amax(scheme: str, rows: int, width: int = _WIDTH) -> torch.Tensor | None:
    return torch.ops.q2.amax(_matrix(rows, width)) if get_scheme(scheme).takes_amax else None


def _seed(offset: int = 0) -> torch.Tensor:
    return torch.tensor(0x123456789ABCDEF + offset, device="cpu")


_FORWARD = "nvfp4_46_pow2"
OF_FORMAT = {"nvfp4": _FORWARD, "mxfp4": "mxfp4_rtn"}
# The global scale of the first is a power of two, which operands include; that of the second is
# not.
_OF_GEMM = {"nvfp4": (_FORWARD, "nvfp4_46"), "mxfp4": ("mxfp4_rtn", "mxfp4_rtn34")}


def _source(scheme: str, rows: int, width: int) -> tuple[str, tuple[torch.Tensor, ...]]:
    """A forward scheme of the same format, with swizzled scales if the scheme has them, and an
    operand in it."""
    spec = get_scheme(scheme)
    source = OF_FORMAT[spec.format] + (SWIZZLED if spec.swizzled else "")
    return source, _quantized(source, rows, width)


def _quantize(scheme: str, of: QuantizerVariant | CheckKey, rows: int) -> tuple:
    """Arguments of quantizing; with dbias so many rows that a thread adds up more than one tile."""
    variant, transform, dtype, vectors = _usual(of)
    rows = 8 * rows if variant.dbias else _IN_GROUPS if variant.grouped else rows
    x = _matrix(rows, _WIDTH if vectors else _UNALIGNED, dtype)
    takes_amax = get_scheme(scheme).takes_amax and not (variant.rotated or variant.columnwise)
    call = QuantizerCall.named(
        QUANTIZE,
        x=x,
        scheme=scheme,
        transform=transform,
        rotate_rows=not variant.rows_unrotated,
        rowwise=variant.rowwise,
        columnwise=variant.columnwise,
        amax=torch.ops.q2.amax(x) if takes_amax else None,
        rowwise_seed=_seed() if variant.rowwise and not variant.masked else None,
        columnwise_seed=_seed(variant.rowwise) if variant.columnwise else None,
        mask=variant.masked,
        dbias=torch.bfloat16 if variant.dbias else None,
    )
    return _with_groups(call, variant)


def _requantize(scheme: str, of: QuantizerVariant | CheckKey, rows: int) -> tuple:
    variant, transform, _, vectors = _usual(of)
    rows, width = _IN_GROUPS if variant.grouped else rows, _WIDTH if vectors else _UNALIGNED
    source, packed = _source(scheme, rows, width)
    call = QuantizerCall.named(
        REQUANTIZE,
        source=_matrix(rows, width) if variant.by_scales else packed[0],
        scales=packed[1],
        global_scale=packed[2],
        source_scheme=source,
        scheme=scheme,
        transform=transform,
        rows=width,
        columnwise_seed=_seed(),
        rng_offset=1,
        by_scales=variant.by_scales,
    )
    return _with_groups(call, variant)


def _rotation(variant: QuantizerVariant) -> str:
    if not variant.rotated:
        return "none"
    return "h32" if variant.masked else "rht16" if variant.rows_unrotated else "rht128"


def _with_groups(call: QuantizerCall, variant: QuantizerVariant) -> tuple:
    if variant.grouped:
        call = call.replace(**dict(zip(("offs", "padded_offs"), _groups(), strict=True)))
    return call.positional


def _masked_unrotate(scheme: str, rows: int) -> tuple:
    how = QuantizerCall.of(QUANTIZE, _quantize(scheme, MASKED, rows))
    codes, *_, mask = how()
    return _matrix(rows).repeat(1, 2)[:, : 2 * codes.shape[1]], mask, "h32"


def _gemm(
    scheme: str,
    rows: int,
    form: Form = FORMS[0],
    quantized: Callable[..., tuple] = _quantized,
    width: int = _WIDTH,
) -> tuple:
    dtype, bias_dtype, swizzled, *_ = form
    name = scheme.removesuffix(SWIZZLED) + (SWIZZLED if swizzled else "")
    bias = None if bias_dtype is None else 4 * _matrix(_COLUMNS)[:, 0].to(bias_dtype)
    operands = (*quantized(name, rows, width), *quantized(name, _COLUMNS, width))
    return (*operands, bias, name, name, dtype)


def _gemm_masked_unrotate(
    scheme: str,
    rows: int,
    form: Form = FORMS[0],
    quantized: Callable[..., tuple] = _quantized,
    width: int = _WIDTH,
) -> tuple:
    """Arguments whose mask keeps about half of the elements, so that a mask not applied shows."""
    dtype, _, swizzled, *_ = form
    name = scheme.removesuffix(SWIZZLED) + (SWIZZLED if swizzled else "")
    mask = pack_bits(_matrix(rows, _PADDED) > 0)
    operands = (*quantized(name, rows, width), *quantized(name, _PADDED, width))
    return (*operands, mask, name, name, "h32", dtype)


def _ends(groups: int) -> torch.Tensor:
    """The ends of groups of 0 to 198 rows."""
    sizes = 99 * torch.arange(groups, dtype=torch.int32, device="cpu").remainder(3)
    return sizes.cumsum(0, dtype=torch.int32)


def _groups() -> tuple[torch.Tensor, torch.Tensor]:
    offs = torch.tensor(_ENDS, dtype=torch.int32, device="cpu")
    return offs, torch.ops.q2.padded_ends(offs)


def _grouped_gemm(
    scheme: str, form: GroupedForm = GROUPED_FORMS[0], width: int = _WIDTH, of_dgrad: int = 128
) -> tuple:
    """Arguments; weights are [48, width] in fprop, [40, of_dgrad] in dgrad, [40, 48] in wgrad."""
    gemm, dtype = form
    offs, padded_offs = _groups()
    experts = len(_ENDS)
    contracted = padded_rows(_IN_GROUPS, experts)
    a, b = {
        "fprop": ((_IN_GROUPS, width), (48 * experts, width)),
        "dgrad": ((_IN_GROUPS, of_dgrad), (40, of_dgrad * experts)),
        "wgrad": ((40, contracted), (48, contracted)),
    }[gemm]
    ends = padded_offs if gemm == "wgrad" else offs
    return (*_quantized(scheme, *a), *_quantized(scheme, *b), ends, scheme, scheme, gemm, dtype)


def _grouped_mm(scheme: str) -> tuple:
    weights = _matrix(48 * len(_ENDS)).unflatten(0, (len(_ENDS), 48)).mT
    return (_matrix(_IN_GROUPS), weights, _groups()[0])


def op_of(of: str | QuantizerVariant | CheckKey) -> str:
    """The op of what is checked."""
    return of if isinstance(of, str) else of.op


def arguments_of(of: str | QuantizerVariant | CheckKey, scheme: str, rows: int = ROWS[0]) -> tuple:
    """The arguments of an op that has a CUDA kernel, or of a variant of a quantizer, on the CPU,
    for a scheme and rows of its operand."""
    if not isinstance(of, str):
        return (_requantize if of.op == REQUANTIZE else _quantize)(scheme, of, rows)
    return _ARGUMENTS[of](scheme, rows)


_ARGUMENTS: dict[str, Callable[..., tuple]] = {
    "masked_unrotate": _masked_unrotate,
    "dequantize": lambda s, t: (*_quantized(s, t), s, _WIDTH, torch.bfloat16),
    "padded_ends": lambda s, t: (_ends(t),),
    "signs": lambda s, t: (_seed(), "rht128"),
    "split_scales": lambda s, t: (_matrix(t).float().abs(), s),
    "to_e4m3": lambda s, t: (*_quantized(s, t), s),
    "transpose": lambda s, t: (*_quantized(s, t)[:2], s, _WIDTH, True),
    "gemm": _gemm,
    "gemm_masked_unrotate": _gemm_masked_unrotate,
    "grouped_gemm": lambda s, t: _grouped_gemm(s),
    "grouped_mm": lambda s, t: _grouped_mm(s),
}


def cases_of(of: str | QuantizerVariant | CheckKey, scheme: str) -> Iterator[tuple]:
    """The arguments of each case of a check by bits: the usual ones for few and more rows, then
    those for which an op has kernels of their own."""
    for rows in ROWS:
        yield arguments_of(of, scheme, rows)
    others = _OTHERS.get(of) if isinstance(of, str) else None
    yield from others(scheme) if others else ()


def _dequantize_cases(scheme: str) -> Iterator[tuple]:
    """Cases with other dtypes, and with all columns, so that no padding is cut."""
    packed = _quantized(scheme, ROWS[0])
    for dtype, width in product(_DTYPES, (_WIDTH, 2 * packed[0].shape[1])):
        if (dtype, width) != (torch.bfloat16, _WIDTH):
            yield *packed, scheme, width, dtype


def _masked_unrotate_cases(scheme: str) -> Iterator[tuple]:
    grad, *rest = _masked_unrotate(scheme, ROWS[0])
    for dtype in _DTYPES[1:]:
        yield grad.to(dtype), *rest


def _of_far_blocks(scheme: str) -> tuple:
    """An operand whose blocks lie up to 2^17 below the largest."""
    codes, scales, global_scale = _quantized(scheme, ROWS[0])
    bits = torch.arange(scales.numel(), dtype=torch.uint8, device="cpu").remainder(18) + 100
    return codes, bits.view(scales.shape).view(scales.dtype), global_scale, scheme


_SQUARE = "mxfp4_rceil_32x32"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_OTHERS: dict[str, Callable[[str], Iterator[tuple]]] = {
    "dequantize": _dequantize_cases,
    "masked_unrotate": _masked_unrotate_cases,
    "to_e4m3": lambda s: iter([_of_far_blocks(s), (*_quantized(_SQUARE, ROWS[0]), _SQUARE)]),
    "transpose": lambda s: iter([(*_quantized(s, ROWS[0])[:2], s, _WIDTH, False)]),
}


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
# The schemes that `q2compile doctor` checks for each: those of the recipes' operands.
CHECKED: dict[str | QuantizerVariant, tuple[str, ...]] = {
    ROWWISE: (
        *_with_swizzled("nvfp4_46_pow2", "nvfp4_46", "nvfp4_sr_pow2", "nvfp4_sr"),
        *_with_swizzled("mxfp4_rceil", "mxfp4_rceil_sr"),
        *("nvfp4_46_pow2" + DEQUANTIZED, "nvfp4_sr_pow2" + DEQUANTIZED),
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
    "padded_ends": ("nvfp4",),
    "signs": ("nvfp4",),
    "split_scales": _with_swizzled("nvfp4_46_pow2", "nvfp4_pow2"),
    "to_e4m3": (OF_FORMAT["mxfp4"],),
    "transpose": ("nvfp4_16x16_pow2", _SQUARE),
    "gemm": tuple(OF_FORMAT.values()),
    "gemm_masked_unrotate": tuple(OF_FORMAT.values()),
    "grouped_gemm": tuple(OF_FORMAT.values()),
    "grouped_mm": (_FORWARD,),
}


def checked_of(op: str) -> Iterator[tuple[str | QuantizerVariant, str]]:
    """The self-checks of an op's kernels: the op or its variants, and schemes."""
    for of, schemes in CHECKED.items():
        if op == op_of(of):
            for scheme in schemes:
                yield of, scheme


class Case(NamedTuple):
    """A case of the self-check of a GEMM.

    words: a description of the result.
    in_training: it is launched as large products are in training, where a kernel has other tiles
        for those: the tile is chosen for a device with one multiprocessor, and the contraction is
        several whole tiles.
    """

    arguments: tuple
    words: str
    in_training: bool = False


_IN_TRAINING = "by the tile of large products"


def _words(form: Form, rows: int) -> str:
    dtype, bias, swizzled, *_ = form
    parts = [f"{rows} x {_COLUMNS} in {dtype}"]
    parts += [f"with a bias in {bias}"] * (bias is not None) + ["from swizzled scales"] * swizzled
    return " ".join(parts)


def _gemm_cases(scheme: str, forms: Sequence[Form] | None) -> Iterator[Case]:
    quantized = functools.cache(_quantized)
    sources = _OF_GEMM[get_scheme(scheme).format]
    for form, source in product(forms or FORMS_OF["gemm"], sources):
        width = _WHOLE if form[3:] else _WIDTH
        for rows in form[3:] or ROWS:
            arguments = _gemm(source, rows, form, quantized, width)
            yield Case(arguments, f"a result of {_words(form, rows)}")
    for form in filter(_is_of_training, forms or FORMS_OF["gemm"]):
        arguments = _gemm(sources[0], ROWS[0], form, quantized, _WHOLE)
        yield Case(arguments, f"a result of {_words(form, ROWS[0])}, {_IN_TRAINING}", True)


def _is_of_training(form: Form) -> bool:
    """Whether a form is checked at large tiles: dtypes and bias change only the epilogue."""
    return len(form) == 3 and form[:2] == (torch.bfloat16, None)


def _unrotated_cases(scheme: str, forms: Sequence[Form] | None) -> Iterator[Case]:
    quantized = functools.cache(_quantized)
    sources, forms = _OF_GEMM[get_scheme(scheme).format], forms or FORMS_OF["gemm_masked_unrotate"]

    def words(form: Form, rows: int) -> str:
        return f"a result of {rows} x {_PADDED} in {form[0]}, masked and rotated back"

    for form, source, rows in product(forms, sources, ROWS):
        yield Case(_gemm_masked_unrotate(source, rows, form, quantized), words(form, rows))
    for form in filter(_is_of_training, forms):
        arguments = _gemm_masked_unrotate(sources[0], ROWS[0], form, quantized, _WHOLE)
        yield Case(arguments, f"{words(form, ROWS[0])}, {_IN_TRAINING}", True)


def _grouped_cases(scheme: str, forms: Sequence[GroupedForm] | None) -> Iterator[Case]:
    sources = _OF_GEMM[get_scheme(scheme).format]
    for form, source in product(forms or GROUPED_FORMS, sources):
        yield Case(_grouped_gemm(source, form), f"{form[0]} in {form[1]}")
    for form in forms or GROUPED_FORMS:
        if form[1] == torch.bfloat16:
            arguments = _grouped_gemm(sources[0], form, _WHOLE, _WHOLE)
            yield Case(arguments, f"{form[0]} in {form[1]}, {_IN_TRAINING}", True)


# The cases of each kind of GEMM.
CASES: dict[str, Callable[[str, Any], Iterator[Case]]] = {
    "gemm": _gemm_cases,
    "gemm_masked_unrotate": _unrotated_cases,
    "grouped_gemm": _grouped_cases,
}
