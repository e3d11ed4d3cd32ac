"""What a linear layer costs under a recipe and in BF16, by data sheet: bytes, FLOPs, time.

    shape [T, N, K]: y[T, N] = x[T, K] wᵀ; for E experts w is [E, N, K] and T counts all rows

Sizes may be sympy expressions; FLOPs and bytes then are, too. Each GEMM and each quantiser is a
`Step`; its time is the longest of three: its multiplications at the rate of the tensor cores, its
bytes at the rate of the memory, its instructions at the rate they can be issued. Steps run one
after another, each kernel with a fixed overhead. Nothing here was measured on a Blackwell, which
nobody of the project has; what is assumed is `ASSUMPTIONS` and `DEVICES`, printed in every report.

The steps are those of the ops after the passes (`q2compile.passes`, `q2compile.lowering`):

    forward    a quantiser local to its blocks writes x's codes from inside x's producer, which
               costs no read; x of q, k and v is quantised once, and each pays its share
    backward   the gradient is read once for dgrad and wgrad where both take it rotated alike; x and
               w are read as the codes that fprop saved, x once for all that share it
    a scale    found afterwards: fp32 block scales are written, and read again to be rounded
    experts    a grouped GEMM in FP4 is taken to be as fast as one of a single weight. What pads an
               expert's tokens to whole chunks and tiles, half a chunk each, is not counted
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from q2compile.cost_model.devices import (
    GEMM_SHARE,
    ISSUE_SHARE,
    KERNEL_SECONDS,
    MEMORY_SHARE,
    Device,
)
from q2compile.recipes.recipe import GEMMS, Gemm, Operand, Recipe
from q2compile.runtime_kernels.numerics.schemes import SCHEMES
from q2compile.runtime_kernels.numerics.transforms import TRANSFORMS


@dataclass(frozen=True)
class Step:
    """One kernel, or a quantiser with the small kernel that rounds its scales.

    bits moved; flops at the rate of ``kind``; elements that ``op`` works on; and how many matmuls
    share the result.
    """

    gemm: str
    what: str
    bits: Any
    flops: Any = 0
    kind: str = "bf16"
    op: str = ""
    elements: Any = 0
    kernels: int = 1
    shared_by: int = 1

    def seconds(self, device: Device) -> float:
        times = (
            self.flops / (device.flops[self.kind] * GEMM_SHARE[self.kind]),
            self.bits / 8 / (device.bandwidth * MEMORY_SHARE),
            self.elements * device.instructions.get(self.op, 0) / (device.issue * ISSUE_SHARE),
        )
        return (float(max(times)) + self.kernels * KERNEL_SECONDS) / self.shared_by


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer, how many matmuls share its x, and how often fprop's codes of w are made in
    a forward and backward.
    """

    t: Any
    n: Any
    k: Any
    experts: int = 1
    x_users: int = 1
    w_quantised: int = 1

    def elements(self, role: str) -> Any:
        """Of x, w, dy, or y."""
        n, k, t = self.n, self.k, self.t
        return {"x": t * k, "w": self.experts * n * k, "dy": t * n, "y": t * n}[role]

    def users(self, role: str) -> int:
        return self.x_users if role == "x" else 1

    @property
    def flops(self) -> Any:
        return 2 * self.t * self.n * self.k


# What each GEMM writes.
_RESULT = {"fprop": "y", "dgrad": "x", "wgrad": "w"}
_HIGH = 16  # bits of a number in high precision


def packed_bits(scheme: str) -> Fraction:
    """Bits of an element: a code, its part of a block scale, and of a trust mask."""
    rows, columns = SCHEMES[scheme].block
    return 4 + Fraction(8, rows * columns) + SCHEMES[scheme].masked


def bf16_steps(layer: Layer, gemms: Iterable[str]) -> list[Step]:
    """The GEMMs of a plain linear."""
    return [_plain_gemm(layer, name) for name in gemms]


def _plain_gemm(layer: Layer, name: str) -> Step:
    roles = (*GEMMS[name], _RESULT[name])
    bits = _HIGH * sum(layer.elements(role) for role in roles)
    return Step(name, "gemm", bits, layer.flops)


def recipe_steps(recipe: Recipe, layer: Layer, gemms: Iterable[str]) -> list[Step]:
    """The kernels of a quantised linear, for those of its GEMMs that are wanted."""
    steps: list[Step] = []
    gemms = list(gemms)
    paired = _paired(recipe, gemms)
    for name in gemms:
        gemm: Gemm | None = getattr(recipe, name)
        if gemm is None:
            steps.append(_plain_gemm(layer, name))
            continue
        for role, operand in zip(GEMMS[name], (gemm.a, gemm.b), strict=True):
            if role == "dy" and paired:
                if name == "dgrad":
                    steps.append(_both_directions(layer, operand))
            else:
                times = layer.w_quantised if (name, role) == ("fprop", "w") else 1
                steps += times * _quantiser(recipe, layer, name, role, operand)
        result = layer.elements(_RESULT[name])
        packed = sum(
            packed_bits(o.scheme) * layer.elements(role)
            for role, o in zip(GEMMS[name], (gemm.a, gemm.b), strict=True)
        )
        steps.append(Step(name, "gemm", packed + _HIGH * result, layer.flops, kind="fp4"))
        if name != "fprop" and recipe.fprop and SCHEMES[recipe.fprop.a.scheme].masked:
            steps.append(Step(name, "mask and rotate back", (2 * _HIGH + 1) * result))
    return steps


def _paired(recipe: Recipe, gemms: list[str]) -> bool:
    """Whether dgrad and wgrad take the gradient from one read (`passes.pair_directions`)."""
    if not {"dgrad", "wgrad"} <= set(gemms) or recipe.dgrad is None or recipe.wgrad is None:
        return False
    return recipe.dgrad.a == recipe.wgrad.a and recipe.dgrad.a.transform != "none"


def _both_directions(layer: Layer, operand: Operand) -> Step:
    elements = layer.elements("dy")
    bits = (_HIGH + 2 * _written(operand)) * elements
    kernels = 1 + _scales_after(operand)
    op = "rht_quantize_both"
    return Step("dgrad", "quantize dy both ways", bits, op=op, elements=elements, kernels=kernels)


def _quantiser(recipe: Recipe, layer: Layer, name: str, role: str, operand: Operand) -> list[Step]:
    """One operand's way from where it lies to codes."""
    elements = layer.elements(role)
    if operand.source == "reuse" and recipe.fprop is not None:  # the codes turned, not rounded
        step = Step(name, f"transpose {role}", 8 * elements, shared_by=layer.users(role))
        return [step]
    read: Any = _HIGH
    op = "" if operand.transform == "none" else "rht_quantize"
    if operand.source == "requantize":
        assert recipe.fprop is not None
        source = recipe.fprop.a if role == "x" else recipe.fprop.b
        read, op = packed_bits(source.scheme), "requantize"
    elif name == "fprop" and role == "x" and _fuses(operand):
        read = 0
    if SCHEMES[operand.scheme].takes_amax and not (name == "fprop" and role == "x"):
        read += _HIGH  # its amax first; that of x comes with x's producer
    return [
        Step(
            name,
            f"{'requantize' if op == 'requantize' else 'quantize'} {role}",
            (read + _written(operand)) * elements,
            op=op,
            elements=elements,
            kernels=1 + _scales_after(operand),
            shared_by=layer.users(role),
        )
    ]


def _fuses(operand: Operand) -> bool:
    """Whether a forward quantiser runs inside its producer: it looks at its own block alone."""
    scheme, size = SCHEMES[operand.scheme], TRANSFORMS[operand.transform].size
    return scheme.block[0] == 1 and size <= 32 and (scheme.folds or scheme.format == "mxfp4")


def _scales_after(operand: Operand) -> bool:
    """Whether block scales are rounded in a second kernel, once the global scale is known."""
    scheme = SCHEMES[operand.scheme]
    return scheme.global_scale == "pow2" or scheme.rounding == "ms_eden"


def _written(operand: Operand) -> Fraction:
    """Bits an element that a quantiser writes, and reads again for its scales."""
    scheme = SCHEMES[operand.scheme]
    block = scheme.block[0] * scheme.block[1]
    return packed_bits(operand.scheme) + _scales_after(operand) * Fraction(2 * 32, block)
