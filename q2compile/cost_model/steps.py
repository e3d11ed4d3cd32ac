# SPDX-License-Identifier: Apache-2.0
"""The cost of a linear layer under a recipe and in BF16, by data sheet: bytes, FLOPs, time.

    shape [T, N, K]: y[T, N] = x[T, K] wᵀ; for E experts w is [E, N, K] and T counts all rows

Sizes may be sympy expressions; then FLOPs and bytes are, as well. Each GEMM and each quantizer is a
`Step` (step.py). Its time on the GPU is the longest of three: FLOPs at the rate of the tensor
cores, bytes at the bandwidth, instructions at the issue rate. Steps run one after another, and each
launch has a fixed overhead. Its time on the host is that of its calls. Nothing was measured on a
Blackwell. On an H200 everything was (`devices`), and tests compare the predictions with that.

The steps are those of the ops after the passes (`q2compile.passes`, `q2compile.lowering`):

    forward    a quantizer of nvfp4 by blocks of a row writes x's codes from inside x's producer,
               which costs no read, unless something reads x as well; x of q, k and v is quantized
               once, and each pays its share
    backward   the gradient is read once for dgrad and wgrad if both take it rotated alike, or wgrad
               alone rotated; so is an x that the forward rotates for wgrad. x and w are read as
               the codes that fprop saved, x once for all that share it
    a scale    computed after the codes: raw scales are written, then read and rounded
    fp8        the amax of x is part of what computes it, that of w and dy a read of its own; dy is
               read once for dgrad and wgrad; x and w are transposed as codes; a GEMM has the rate
               of fp8 tensor cores on every GPU
    emulated   without fp4 tensor cores GEMMs are in BF16, on dequantized operands: quantizers of
               the backward write them, saved codes and those of the forward are dequantized
    experts    a grouped GEMM in FP4 is taken to be as fast as one of a single weight. What pads an
               expert's tokens to whole chunks and tiles, half a chunk each, is not counted
    a bias     is added inside of the GEMM, as BF16's is; its gradient is a sum in both
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from q2compile.cost_model.devices import TRANSPOSE_REACH
from q2compile.cost_model.quantizers import (
    HIGH,
    ROWS_UNROTATED,
    Quantizer,
    packed_bits,
    written_bits,
)
from q2compile.cost_model.step import DISPATCHED, FUSED, TORCH, Step
from q2compile.recipes.recipe import GEMMS, Gemm, Operand, Recipe
from q2compile.runtime_kernels.cuda.jit.launch import Launch
from q2compile.runtime_kernels.cuda.quantize import plan
from q2compile.runtime_kernels.cuda.quantize.grouping import Tail, can_share, groups_of
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import rows_when_paired
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SWIZZLED, get_scheme
from q2compile.runtime_kernels.numerics.transforms import get_transform

# Launches of quantizers by Inductor; a test counts them in generated code.
_SPLIT_SCALES_LAUNCHES = 2  # q2::split_scales: the largest, then the scales
_INDUCTOR_SQUARE_LAUNCHES = 2  # the largest of each block, then codes
_ALPHA = 1  # the product of two global scales, if no quantizer's last launch computes it
_AMAX_LAUNCHES = 2  # of Inductor's reduction over a whole tensor
_DY_PAIR = "quantize dy rowwise and columnwise"


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer, how many matmuls share its x, and how often fprop's codes of w are computed
    in a forward and backward.

    grouped: its GEMMs are grouped ones.  x_fuses: something computes x, that its quantizer may be
    part of.  emulated: the GPU has no fp4 tensor cores, so GEMMs multiply dequantized operands."""

    t: Any
    n: Any
    k: Any
    experts: int = 1
    x_users: int = 1
    w_quantized: int = 1
    grouped: bool = False
    bias: bool = False
    x_fuses: bool = True
    emulated: bool = False

    def elements(self, role: str) -> Any:
        """Elements of x, w, dy, or y."""
        n, k, t = self.n, self.k, self.t
        return {"x": t * k, "w": self.experts * n * k, "dy": t * n, "y": t * n}[role]

    def users(self, role: str) -> int:
        return self.x_users if role == "x" else 1

    @property
    def flops(self) -> Any:
        return 2 * self.t * self.n * self.k


# For dy and x, if one call makes both operands: its kind, and the columnwise operand.
_Pairs = dict[str, tuple[str, Operand]]
# The result of each GEMM.
_RESULT = {"fprop": "y", "dgrad": "x", "wgrad": "w"}


def bf16_steps(layer: Layer, gemms: Iterable[str]) -> list[Step]:
    """The GEMMs of a plain linear, and the gradient of its bias."""
    gemms = list(gemms)
    return [_plain_gemm(layer, name) for name in gemms] + _dbias(layer, gemms)


def _plain_gemm(layer: Layer, name: str) -> Step:
    roles = (*GEMMS[name], _RESULT[name])
    bits = HIGH * sum(layer.elements(role) for role in roles)
    return Step(name, "gemm", bits, layer.flops, by=TORCH)


def _fp32_gemm(layer: Layer, name: str, *, fuses: bool) -> Step:
    """A plain GEMM of operands without their global scales. It writes fp32, which its reader scales
    and rounds. fuses: the reader is Inductor's next kernel, not one more."""
    plain, result = _plain_gemm(layer, name), layer.elements(_RESULT[name])
    more = HIGH * result * (1 if fuses else 3)  # read as fp32; else also written, and read as bf16
    bits = plain.bits + HIGH * result
    return replace(plain, bits=bits, bits_before=more, launches=1 if fuses else 2)


def _dbias(layer: Layer, gemms: list[str]) -> list[Step]:
    if not layer.bias or "wgrad" not in gemms:
        return []
    return [Step("wgrad", "sum dy", HIGH * layer.elements("dy"), by=TORCH, launches=2)]


def _dbias_by_quantizer(recipe: Recipe, layer: Layer, gemms: list[str]) -> bool:
    """Whether wgrad's quantizer of dy computes dbias (`passes.sum_columns`)."""
    if recipe.wgrad is None or not _dbias(layer, gemms) or layer.grouped:
        return False
    operand = recipe.wgrad.a
    spec, rotation = get_scheme(operand.scheme), get_transform(operand.transform)
    draws = spec.stochastic or rotation.seeded
    return draws and plan.tail_launch_of_scheme(spec, rotation) is not None


def _is_columnwise_dy(step: Step) -> bool:
    """Whether a quantizer makes dy's columnwise operand, with or without the rowwise one."""
    return step.what in (_DY_PAIR, "quantize dy") and (
        step.quantizer is not None and step.quantizer.kind != "row"
    )


def _with_dbias(step: Step) -> Step:
    assert step.quantizer is not None
    quantizer = replace(step.quantizer, dbias=True)
    return replace(step, quantizer=quantizer, bits=quantizer.bits * step.elements)


def recipe_steps(recipe: Recipe, layer: Layer, gemms: Iterable[str]) -> list[Step]:
    """The kernels of a quantized linear, for those of its GEMMs that are wanted."""
    gemms = list(gemms)
    dbias_fused = _dbias_by_quantizer(recipe, layer, gemms)
    steps = [] if dbias_fused else _dbias(layer, gemms)
    pairs = _pairs(recipe, gemms)
    before: list[Step] = []
    for name in gemms:
        gemm: Gemm | None = getattr(recipe, name)
        if gemm is None:
            steps.append(_plain_gemm(layer, name))
            continue
        made = _operands(recipe, layer, name, pairs)
        if dbias_fused:
            made = [_with_dbias(step) if _is_columnwise_dy(step) else step for step in made]
        made = _moved_to_group(made, before)
        before = made
        steps += made
        pair = [step for step in steps if name == "wgrad" and step.what == _DY_PAIR]
        aligned = any(step.tail is not None for step in (*made, *pair))
        masked = bool(recipe.fprop and get_scheme(recipe.fprop.a.scheme).masked)
        steps += _product(layer, name, gemm, masked=masked, aligned=aligned)
        if name != "fprop" and masked:
            steps = _rotated_back(steps, layer, gemm, name)
    return steps


def _rotated_back(steps: list[Step], layer: Layer, gemm: Gemm, name: str) -> list[Step]:
    """The mask and inverse rotation behind a GEMM of codes that fprop rotated: in the epilogue of
    Triton's GEMM, where it is used (`passes.unrotate_in_gemm`), else a kernel."""
    result = layer.elements(_RESULT[name])
    if layer.emulated or layer.grouped or get_scheme(gemm.a.scheme).format == "nvfp4":
        return [*steps, Step(name, "mask and rotate back", (2 * HIGH + 1) * result)]
    *others, product = steps
    return [*others, replace(product, bits=product.bits + result)]


def _operands(recipe: Recipe, layer: Layer, name: str, pairs: _Pairs) -> list[Step]:
    """The quantizers of a GEMM's operands. A pair belongs to the first GEMM that reads it."""
    gemm: Gemm = getattr(recipe, name)
    ahead: list[Step] = []
    beside: list[Step] = []
    for role, operand in zip(GEMMS[name], (gemm.a, gemm.b), strict=True):
        if role in pairs:
            first = "fprop" if role == "x" else "dgrad"
            beside += [_rowwise_and_columnwise(layer, name, role, *pairs[role])] * (name == first)
            continue
        times = layer.w_quantized if (name, role) == ("fprop", "w") else 1
        made = times * _quantizer(recipe, layer, name, role, operand)
        if operand.source == "forward":
            ahead += [replace(step, tail=None) for step in made]
        else:
            beside += made
    return ahead + _grouped(beside)


def _tail(step: Step) -> Tail:
    return Tail(step.tail, step.quantizer.directions if step.quantizer else 1)


def _grouped(steps: list[Step]) -> list[Step]:
    """Adjacent quantizers share launches where they can."""
    groups = groups_of(steps, _tail)
    return [_behind(group[:i], step) for _, group in groups for i, step in enumerate(group)]


def _behind(group: list[Step], step: Step) -> Step:
    """A quantizer that shares its last launch with those before it, and the launch before that, if
    it is the same kernel. (Large operands do not: a launch is negligible beside their time.)"""
    if not group:
        return step
    batched = step.quantizer and step.quantizer.batched
    ahead = [each.quantizer.batched for each in group if each.quantizer is not None]
    return replace(step, launches=step.launches - 1 - (batched is not None and batched in ahead))


def _moved_to_group(made: list[Step], before: list[Step]) -> list[Step]:
    """A quantizer that is alone before its GEMM shares launches with those before the previous
    GEMM, where it can and has their scheme (`passes.gather_quantizers`)."""
    lone, group = ([step for step in steps if step.tail is not None] for steps in (made, before))
    schemes = {s.quantizer.scheme for s in (*group, *lone) if s.quantizer}
    if len(lone) != 1 or not group or len(schemes) > 1:
        return made
    if not can_share([_tail(step) for step in (*group, *lone)]):
        return made
    return [_behind(group, step) if step in lone else step for step in made]


def _product(layer: Layer, name: str, gemm: Gemm, *, masked: bool, aligned: bool) -> list[Step]:
    """The GEMM, and launches before it. masked: a kernel of ours reads its result. aligned: the
    last launch of a quantizer before it computes alpha."""
    operands = dict(zip(GEMMS[name], (gemm.a, gemm.b), strict=True))
    if get_scheme(gemm.a.scheme).is_tensorwise:
        bits = sum(packed_bits(o.scheme) * layer.elements(role) for role, o in operands.items())
        bits += HIGH * layer.elements(_RESULT[name])
        return [Step(name, "gemm", bits, layer.flops, "fp8", by=TORCH)]
    if layer.emulated:
        has_pow2_scale = layer.grouped or all(
            get_scheme(o.scheme).has_pow2_scale for o in operands.values()
        )
        product = (
            _plain_gemm(layer, name)
            if has_pow2_scale
            else _fp32_gemm(layer, name, fuses=not masked)
        )
        return [*_dequantized(layer, name, operands), product]
    nvfp4 = get_scheme(gemm.a.scheme).format == "nvfp4"
    ahead = _ALPHA if nvfp4 and not aligned and not layer.grouped else 0
    # Scales of square blocks are expanded for FP4 GEMMs; q2::transpose writes one for each row.
    expanded: Any = 0
    for role, operand in operands.items():
        square = get_scheme(operand.scheme).block[0] != 1
        if square and operand.source != "reuse" and not layer.grouped:
            side = get_scheme(operand.scheme).width
            expanded += layer.elements(role) * 8 * (1 + side) / side**2
            ahead += 1
    packed = sum(_read_bits(o) * layer.elements(role) for role, o in operands.items())
    bits = packed + HIGH * layer.elements(_RESULT[name])
    return [
        Step(
            name,
            "gemm",
            bits,
            layer.flops,
            "fp4",
            bits_before=expanded,
            launches=1 + ahead,
            by=DISPATCHED,
        )
    ]


def _read_bits(operand: Operand) -> Fraction:
    if operand.source == "reuse":
        return transposed_bits(operand.scheme)
    return packed_bits(operand.scheme)


def _dequantized(layer: Layer, name: str, operands: dict[str, Operand]) -> list[Step]:
    """Dequantizes codes for an emulated GEMM, by one launch, or one for each operand."""
    packed = {role: o for role, o in operands.items() if not _writes_dequantized(layer, name, o)}
    specs = {role: get_scheme(o.scheme) for role, o in packed.items()}
    alike = len({(spec.format, spec.block[0] == 1) for spec in specs.values()}) == 1
    return [
        Step(
            name,
            f"dequantize {role}",
            (HIGH + packed_bits(o.scheme)) * layer.elements(role),
            launches=0 if alike and role != list(packed)[-1] else 1,
            shared_by=layer.users(role),
        )
        for role, o in packed.items()
    ]


def _writes_dequantized(layer: Layer, name: str, operand: Operand) -> bool:
    """Whether an operand's quantizer writes it dequantized (`passes.dequantize_operands`)."""
    packed = not get_scheme(operand.scheme).is_tensorwise
    return (
        layer.emulated and name != "fprop" and packed and operand.source in ("fresh", "requantize")
    )


def _pairs(recipe: Recipe, gemms: list[str]) -> _Pairs:
    """Which of x and dy are read once for two GEMMs (`passes.pair_directions`)."""
    fprop, dgrad, wgrad = (getattr(recipe, name) if name in gemms else None for name in GEMMS)
    operands: dict[str, tuple[Operand, Operand]] = {}
    if dgrad and wgrad:
        operands["dy"] = dgrad.a, wgrad.a
    if fprop and wgrad and wgrad.b.source == "forward":
        operands["x"] = fprop.a, wgrad.b
    found: _Pairs = {}
    for role, (row, column) in operands.items():
        rotated = rows_when_paired(row.scheme, row.transform, column.scheme, column.transform)
        if row == column and get_scheme(row.scheme).is_tensorwise:
            found[role] = "both", column
        elif rotated is not None:
            found[role] = ("both" if rotated else ROWS_UNROTATED), column
    return found


def quantizing(
    gemm: str,
    what: str,
    quantizer: Quantizer,
    elements: Any,
    users: int = 1,
    tail: Launch | None = None,
) -> Step:
    """A call of a CUDA quantizer of so many elements, for each of so many users."""
    return Step(
        gemm,
        what,
        quantizer.bits * elements,
        quantizer=quantizer,
        elements=elements,
        bits_before=quantizer.amax_bits * elements,
        launches=quantizer.launches,
        shared_by=users,
        tail=tail,
    )


def _rowwise_and_columnwise(
    layer: Layer, name: str, role: str, kind: str, operand: Operand
) -> Step:
    if get_scheme(operand.scheme).is_tensorwise:
        return _tensorwise(layer, name, role, operand, directions=2)
    scheme = operand.scheme + (DEQUANTIZED if _writes_dequantized(layer, name, operand) else "")
    made = Quantizer(kind, scheme, operand.transform)
    tail = _tail_launch(layer, scheme, operand.transform)
    sizes = layer.elements(role), layer.users(role)
    return quantizing(name, f"quantize {role} rowwise and columnwise", made, *sizes, tail=tail)


def _tensorwise(
    layer: Layer, name: str, role: str, operand: Operand, *, directions: int = 1
) -> Step:
    """A quantizer with one scale for the tensor, by Inductor: the largest, which is part of what
    computes x, then the codes."""
    elements, fuses = layer.elements(role), role == "x" and layer.x_fuses
    what = f"quantize {role}" + " rowwise and columnwise" * (directions == 2)
    bits = (HIGH + directions * packed_bits(operand.scheme)) * elements
    step = Step(name, what, bits, launches=1 + _AMAX_LAUNCHES, by=TORCH)
    step = replace(step, shared_by=layer.users(role))
    return step if fuses else replace(step, bits_before=HIGH * elements)


def transposed_bits(scheme: str) -> Fraction:
    """Bits per element that q2::transpose writes: of square blocks, a scale for each row."""
    if get_scheme(scheme).is_tensorwise:
        return packed_bits(scheme)
    return 4 + Fraction(8, get_scheme(scheme).width)


def transposing(gemm: str, what: str, scheme: str, elements: Any) -> Step:
    """q2::transpose of so many elements."""
    bits = (packed_bits(scheme) + transposed_bits(scheme)) * elements
    return Step(gemm, what, bits, reach=TRANSPOSE_REACH)


def _quantizer(recipe: Recipe, layer: Layer, name: str, role: str, operand: Operand) -> list[Step]:
    """The steps from one operand in memory to its codes."""
    elements, users = layer.elements(role), layer.users(role)
    if operand.source == "reuse" and recipe.fprop is not None:  # codes are transposed, not rounded
        return [transposing(name, f"transpose {role}", operand.scheme, elements)]
    spec = get_scheme(operand.scheme)
    if spec.is_tensorwise:
        return [_tensorwise(layer, name, role, operand)]
    if spec.block[0] != 1:
        return [_square_blocks(layer, name, role, operand, elements)]
    if name == "fprop" and role == "x" and layer.x_fuses and _fuses(recipe, operand):
        bits = written_bits(operand.scheme) * elements
        launches = 0 if spec.takes_amax else _SPLIT_SCALES_LAUNCHES
        tail = None if spec.takes_amax else _tail_launch(layer, operand.scheme)
        step = Step(name, f"quantize {role}", bits, launches=launches, by=FUSED, tail=tail)
        return [replace(step, shared_by=users)]
    kind = "row" if name == "fprop" or (name, role) == ("dgrad", "dy") else "col"
    scheme = operand.scheme + (DEQUANTIZED if _writes_dequantized(layer, name, operand) else "")
    tail = _tail_launch(layer, scheme, operand.transform)
    if operand.source == "requantize":
        assert recipe.fprop is not None
        source = (recipe.fprop.a if role == "x" else recipe.fprop.b).scheme
        if get_scheme(source).is_tensorwise:
            bits = (packed_bits(source) + HIGH) * elements
            ahead = Step(name, f"dequantize {role}", bits, by=TORCH, shared_by=users)
            made = Quantizer("col", scheme, operand.transform)
            return [ahead, quantizing(name, f"quantize {role}", made, elements, users, tail)]
        made = Quantizer("requantize", scheme, operand.transform, source)
        return [quantizing(name, f"requantize {role}", made, elements, users, tail)]
    made = Quantizer(kind, scheme, operand.transform)
    return [quantizing(name, f"quantize {role}", made, elements, users, tail)]


def _square_blocks(layer: Layer, name: str, role: str, operand: Operand, elements: Any) -> Step:
    """Square blocks, by Inductor kernels, which read the operand twice, and q2::split_scales."""
    bits = (HIGH + written_bits(operand.scheme)) * elements
    pow2 = get_scheme(operand.scheme).global_scale == "pow2"
    launches = _INDUCTOR_SQUARE_LAUNCHES + _SPLIT_SCALES_LAUNCHES * pow2
    launches += get_scheme(operand.scheme).format == "mxfp4"  # its global scale, a constant
    tail = _tail_launch(layer, operand.scheme) if pow2 else None
    step = Step(name, f"quantize {role}", bits, launches=launches, tail=tail)
    return replace(step, bits_before=HIGH * elements)


def _tail_launch(layer: Layer, scheme: str, transform: str = "none") -> Launch | None:
    """The last launch of a quantizer, if others may share it (quantize/grouped_launch.py)."""
    spec = get_scheme(scheme)
    if (
        not layer.emulated and spec.block[0] == 1 and spec.has_block_scales
    ):  # `passes.swizzle_scales`
        spec = get_scheme(scheme + SWIZZLED)
    return plan.tail_launch_of_scheme(spec, get_transform(transform))


def _fuses(recipe: Recipe, operand: Operand) -> bool:
    """Whether a forward quantizer fuses into its producer (`beats_kernels` of
    lowering/inductor_kernels/support.py). Not if a kernel rotates the same x for the backward."""
    spec = get_scheme(operand.scheme)
    reads_saved = recipe.wgrad is not None and recipe.wgrad.b.source == "forward"
    nearest = spec.format == "nvfp4" and spec.rounding == "rtn" and operand.transform == "none"
    return nearest and not reads_saved
