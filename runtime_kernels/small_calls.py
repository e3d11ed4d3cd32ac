# SPDX-License-Identifier: Apache-2.0
"""The form of a call, and small calls of that form, by which its kernel is checked.

A form is what kernels see of the arguments of an op: dtypes, schemes, the transform, flags, which
arguments are absent, and how rows are aligned. Sizes and values are not part of it. A call with
fake tensors, a node of Inductor and a call that runs have the same form. Whoever is asked for a
kernel checks it for the form of the real call (selfcheck.py).

`small_calls` makes calls of a form: on the CPU, of a few tiles with ragged ends.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from q2compile.runtime_kernels.numerics.groups import padded_rows
from q2compile.runtime_kernels.numerics.layout import pack_bits
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.table import (
    DEQUANTIZE,
    GEMM,
    GEMM_MASKED_UNROTATE,
    GROUPED_GEMM,
    GROUPED_MM,
    MASKED_UNROTATE,
    QUANTIZE,
    REQUANTIZE,
    SPECS,
    SPLIT_SCALES,
    TO_E4M3,
    TRANSPOSE,
    QuantizerCall,
)
from q2compile.runtime_kernels.registry import parameters

ROWS = (130, 1)
_WIDTH = 264  # no multiple of 16 or 128, several tiles
_WHOLE = 768  # a contraction of whole tiles, several of them
_UNALIGNED = 261  # rows of which begin anywhere
_COLUMNS = 200  # of a product
_ROTATED, _CHUNKS = 224, 384  # columns of a product, and of a matrix, that are rotated back
_IN_GROUPS = 200  # rows: groups of 3, 137, 0 and 40 (copies in chunks, a whole chunk), 20 of none
_ENDS = (3, 140, 140, 180)

# Ops that read codes: of their schemes only format, blocks, form, and the kind of the global scale
# count. These schemes draw no random numbers, and each stands for all that are like it.
_READ_CODES = (DEQUANTIZE, TO_E4M3, TRANSPOSE, GEMM, GEMM_MASKED_UNROTATE, GROUPED_GEMM)
_STAND_FOR: tuple[str, ...] = ("nvfp4_46_pow2", "nvfp4_46", "nvfp4_16x16_pow2", "nvfp4_16x16")
_STAND_FOR += ("mxfp4_rtn", "mxfp4_rtn34", "mxfp4_rceil_32x32")

PRODUCTS = (GEMM, GEMM_MASKED_UNROTATE, GROUPED_GEMM, GROUPED_MM)
_OUTPUTS = {
    DEQUANTIZE: ("elements",),
    MASKED_UNROTATE: ("elements",),
    "signs": ("signs",),
    SPLIT_SCALES: ("scales", "global scale"),
    TO_E4M3: ("elements", "scale"),
    TRANSPOSE: ("codes", "scales"),
    **dict.fromkeys(PRODUCTS, ("elements",)),
}


class Form(NamedTuple):
    """The arguments of a call as kernels see them.

    args: in the order of the op's schema. A dtype stands for a tensor. For the number of columns of
        q2::dequantize: whether these are all, None if that is not known.
    aligned: whether rows of its operand begin on 16 bytes.
    rows: of the result, where a product of just so many is meant.
    """

    op: str
    args: tuple[Any, ...]
    aligned: bool = True
    rows: int | None = None

    @property
    def named(self) -> dict[str, Any]:
        """The arguments by name."""
        return dict(zip((name for name, _ in parameters(self.op)), self.args, strict=True))

    @property
    def label(self) -> str:
        """The op; of a quantizer its variant."""
        return str(self.call.variant) if self.op in SPECS else self.op

    @property
    def call(self) -> QuantizerCall:
        return QuantizerCall.of(self.op, self.args)

    def __str__(self) -> str:
        named = self.named
        words = [self.label, *(arg for arg in self.args if isinstance(arg, str) and arg != "none")]
        for name in ("x", "grad", "dtype", "bias"):
            if isinstance(named.get(name), torch.dtype):
                words.append(f"{name} in {named[name]}".removeprefix("dtype "))
        words += ["one global scale"] * ("b_global" in named and named["b_global"] is None)
        words += ["unaligned"] * (not self.aligned)
        words += [f"{self.rows} rows"] * (self.rows is not None)
        return ", ".join(dict.fromkeys(words))


def form_of(op: str, args: Sequence[Any]) -> Form:
    """The form of a call. args: all arguments, in the order of the op's schema; tensors among them
    may be fake, or of Inductor."""
    seen = [
        arg if type(arg) in _PLAIN else arg.dtype if isinstance(arg, torch.Tensor) else ...
        for arg in args
    ]
    for i, name in _not_as_given(op):
        if name == "cols":
            is_whole = args[i] == 2 * args[0].shape[1]
            known = statically_known_true(is_whole), statically_known_true(torch.sym_not(is_whole))
            seen[i] = known[0] if any(known) else None
        elif name == "recorded":
            seen[i] = False
        elif name in ("rows", "rng_offset"):
            seen[i] = int(op == REQUANTIZE)
        else:
            seen[i] = stands_for(args[i])
    return Form(op, tuple(seen), op not in SPECS or _is_aligned(QuantizerCall.of(op, args)))


def _is_aligned(call: QuantizerCall) -> bool:
    """True if rows of its operand begin on 16 bytes. They count as unaligned only if that is known:
    a size may be a symbol."""
    x, known = call.x, statically_known_true
    if not isinstance(x, torch.Tensor) or x.dim() != 2:
        return True
    if call.spec.name == REQUANTIZE:
        return not (call.by_scales and known(x.shape[1] % 8 != 0))
    pitch = x.shape[1]  # of the copy that is made
    if known(x.stride(1) == 1):
        pitch = x.stride(0)
    elif known(x.stride(0) == 1) and not wants_rows(call):
        pitch = x.stride(1)
    return not known(pitch * x.element_size() % 16 != 0)


def wants_rows(call: QuantizerCall) -> bool:
    """True if a CUDA quantizer needs contiguous rows of x. Otherwise it reads a matrix with
    contiguous columns as its transpose, with rowwise and columnwise swapped."""
    has_squares = call.scheme.is_transposable and call.scheme.has_block_scales
    is_plain = not (call.grouped or call.masked or call.dbias is not None)
    return has_squares or not (is_plain and call.rotates_rows)


_PLAIN = {type(None), bool, int, float, str, torch.dtype}


@functools.cache
def _not_as_given(op: str) -> tuple[tuple[int, str], ...]:
    """Arguments that are not a part of the form as they are: their places and names."""
    names = ["cols", "rows", "rng_offset", "recorded", "source_scheme"]
    names += ["scheme", "a_scheme", "b_scheme"] * (op in _READ_CODES)
    return tuple((i, name) for i, (name, _) in enumerate(parameters(op)) if name in names)


@functools.cache
def places_of_schemes(op: str) -> tuple[int, ...]:
    """The arguments of an op that are schemes."""
    return tuple(i for i, (name, _) in enumerate(parameters(op)) if name.endswith("scheme"))


@functools.cache
def stands_for(name: str) -> str:
    """The scheme whose codes are checked for those of another one."""
    spec = get_scheme(name)
    like = (spec.format, spec.block, spec.has_pow2_scale)
    for other in map(get_scheme, _STAND_FOR):
        if (other.format, other.block, other.has_pow2_scale) == like:
            return other.name + spec.form
    return name


def outputs_of(form: Form) -> tuple[str, ...]:
    """Names of the results of a call."""
    return form.call.outputs if form.op in SPECS else _OUTPUTS[form.op]


class SmallCall(NamedTuple):
    """A call by which kernels are checked.

    words: a description of its result.
    in_training: it is launched as large products are in training, where a kernel has other tiles
        for those: the tile is chosen for a device with one multiprocessor, and the contraction is
        several whole tiles.
    """

    args: tuple
    words: str = ""
    in_training: bool = False


def small_calls(form: Form) -> Iterator[SmallCall]:
    """The calls whose results are compared."""
    if form.op in PRODUCTS:
        yield from _products(form)
        return
    named = form.named
    for rows in ROWS[: 1 if named.get("offs") else None]:
        yield SmallCall(arguments(form, rows))
    if form.op == DEQUANTIZE and named["cols"] is None:
        args = named | {"cols": False}
        yield SmallCall(arguments(form._replace(args=tuple(args.values()))))
    if form.op == TO_E4M3:
        yield SmallCall(_with_far_blocks(form))


def arguments(form: Form, rows: int = ROWS[0], width: int = _WIDTH) -> tuple:
    """The arguments of a small call, on the CPU. rows, width: of its first operand."""
    if form.op in SPECS:
        return _of_quantizer(form, rows)
    of = form.named
    if form.op == MASKED_UNROTATE:
        mask = pack_bits(_matrix(rows, _CHUNKS).roll(1, 1) > 0)
        return _matrix(rows, _CHUNKS, of["grad"]), mask, of["transform"]
    if form.op == "signs":
        return _seed(), of["transform"]
    if form.op == SPLIT_SCALES:
        return _matrix(rows).float().abs(), of["scheme"]
    if form.op == GROUPED_MM:
        weights = _matrix(48 * len(_ENDS)).unflatten(0, (len(_ENDS), 48)).mT
        return _matrix(_IN_GROUPS), weights, _groups()[0]
    if form.op in PRODUCTS:
        return _of_product(form, rows, width)
    groups = _groups() if of.get("offs") else (None, None)
    codes, scales, global_scale = _quantized(of["scheme"], _IN_GROUPS if of.get("offs") else rows)
    if form.op == TRANSPOSE:
        return codes, scales, of["scheme"], _WIDTH, of["swizzled"], *groups
    if form.op == TO_E4M3:
        return codes, scales, global_scale, of["scheme"]
    columns = _WIDTH if of["cols"] is False else 2 * codes.shape[1]
    factor = None if of["global_scale"] is None else global_scale
    return codes, scales, factor, of["scheme"], columns, of["dtype"]


def _of_quantizer(form: Form, rows: int) -> tuple:
    """Arguments of quantizing; with dbias so many rows that a thread adds up more than one tile."""
    call = form.call
    rows = _IN_GROUPS if call.grouped else 8 * rows if call.dbias else rows
    width = _WIDTH if form.aligned else _UNALIGNED
    made: dict[str, Any] = {}
    if form.op == QUANTIZE:
        x = _matrix(rows, width, call.x if isinstance(call.x, torch.dtype) else torch.bfloat16)
        made["x"] = x
        if call.args["amax"] is not None:
            made["amax"] = torch.ops.q2.amax(x)
    else:
        codes, scales, global_scale = _quantized(call.args["source_scheme"], rows, width)
        source = _matrix(rows, width) if call.by_scales else codes
        made |= dict(zip(call.spec.source, (source, scales, global_scale), strict=True), rows=width)
    if call.grouped:
        made |= zip(("offs", "padded_offs"), _groups(), strict=True)
    for number, operand in enumerate(call.operands):
        if operand.seed is not None:
            made[operand.seed_name] = _seed(number)
    return call.replace(**made).positional


def _of_product(form: Form, rows: int, width: int) -> tuple:
    """Arguments of a product. The mask keeps about half of the elements, so that a mask that is not
    applied shows. Weights of groups are [48, width] in fprop, [40, 128 or more] in dgrad; wgrad's
    are [40, 48]."""
    of = form.named
    schemes = of["a_scheme"], of["b_scheme"]
    columns = _ROTATED if form.op == GEMM_MASKED_UNROTATE else _COLUMNS
    shapes = (rows, width), (columns, width)
    made: dict[str, Any] = {}
    if form.op == GROUPED_GEMM:
        experts, offs = len(_ENDS), _groups()
        contracted, of_dgrad = padded_rows(_IN_GROUPS, experts), max(128, width // _WHOLE * _WHOLE)
        shapes = {
            "fprop": ((_IN_GROUPS, width), (48 * experts, width)),
            "dgrad": ((_IN_GROUPS, of_dgrad), (40, of_dgrad * experts)),
            "wgrad": ((40, contracted), (48, contracted)),
        }[of["gemm"]]
        made["offs"] = offs[of["gemm"] == "wgrad"]
    a: tuple
    b: tuple
    a, b = (_quantized(name, *shape) for name, shape in zip(schemes, shapes, strict=True))
    if of["b_global"] is None:
        a, b = (a[0], a[1], a[2] * b[2]), (b[0], b[1], None)
    if of.get("bias") is not None:
        made["bias"] = 4 * _matrix(columns)[:, 0].to(of["bias"])
    if "mask" in of:
        made["mask"] = pack_bits(_matrix(rows, columns) > 0)
    return *a, *b, *list((of | made).values())[6:]


def _products(form: Form) -> Iterator[SmallCall]:
    """A result in bf16 without a bias is also one by the tile of large products, since dtypes and
    bias change only the epilogue."""
    of = form.named
    dtype = of.get("dtype", torch.bfloat16)
    words = f"a result in {dtype}"
    words = f"{of['gemm']} in {dtype}" if form.op == GROUPED_GEMM else words
    words += f" with a bias in {of['bias']}" if of.get("bias") is not None else ""
    words += " from swizzled scales" * str(of.get("a_scheme")).endswith("x4")
    words += ", masked and rotated back" * (form.op == GEMM_MASKED_UNROTATE)
    if form.rows is not None:
        yield SmallCall(arguments(form, form.rows, _WHOLE), f"{words} of {form.rows} rows")
        return
    is_grouped = form.op in (GROUPED_GEMM, GROUPED_MM)
    for rows in ROWS[:1] if is_grouped else ROWS:
        yield SmallCall(arguments(form, rows), words + f" of {rows} rows" * (not is_grouped))
    if form.op != GROUPED_MM and dtype == torch.bfloat16 and of.get("bias") is None:
        by_tile = f"{words}, by the tile of large products"
        yield SmallCall(arguments(form, ROWS[0], _WHOLE), by_tile, True)


def _matrix(rows: int, width: int = _WIDTH, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(rows)
    x = torch.randn((rows, width), generator=generator, dtype=torch.float32, device="cpu")
    return x.to(dtype)


def _quantized(scheme: str, rows: int, width: int = _WIDTH) -> tuple[torch.Tensor, ...]:
    x, amax = _matrix(rows, width), None
    if get_scheme(scheme).takes_amax:
        amax = torch.ops.q2.amax(x)
    how = {"scheme": scheme, "rowwise": True, "columnwise": False, "amax": amax}
    return tuple(torch.ops.q2.quantize(x, **how))


def _seed(number: int = 0) -> torch.Tensor:
    return torch.tensor(0x123456789ABCDEF + number, device="cpu")


def _groups() -> tuple[torch.Tensor, torch.Tensor]:
    offs = torch.tensor(_ENDS, dtype=torch.int32, device="cpu")
    return offs, torch.ops.q2.padded_ends(offs)


def _with_far_blocks(form: Form) -> tuple:
    """An operand whose blocks lie up to 2^17 below the largest."""
    codes, scales, global_scale, scheme = arguments(form)
    bits = torch.arange(scales.numel(), dtype=torch.uint8, device="cpu").remainder(18) + 100
    return codes, bits.view(scales.shape).view(scales.dtype), global_scale, scheme
