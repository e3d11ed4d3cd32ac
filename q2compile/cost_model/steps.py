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
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch

from q2compile.config import Config
from q2compile.matmuls import Matmul
from q2compile.recipes import GEMMS, Gemm, Operand, Recipe
from q2compile.runtime_kernels.schemes import SCHEMES
from q2compile.runtime_kernels.transforms import TRANSFORMS

# Of the dense peak that a large GEMM reaches. With half in FP4 the largest layers come out where
# the Quartet II authors report them: 4.2 times BF16 on an RTX 5090, up to 2.5 times on a B200.
GEMM_SHARE = {"bf16": 0.8, "fp4": 0.5}
MEMORY_SHARE = 0.85  # of the bandwidth that a kernel reaches
ISSUE_SHARE = 0.75  # of the issue slots that the quantisers fill; so on an H200 (KERNEL_LOG.md)
KERNEL_SECONDS = 2e-6  # from the end of one kernel's work to the start of the next one's


@dataclass(frozen=True)
class Device:
    """A GPU by its data sheet: dense FLOP/s, bytes/s, and instructions a second over all lanes.

    instructions: for an element of each rotating op, counted in its machine code
    (``examples/benchmarks/instructions.py``); the other ops are bound by memory before that.
    """

    name: str
    column: str
    capability: int
    flops: dict[str, float]
    bandwidth: float
    issue: float
    instructions: dict[str, float]


DEVICES = (
    # HGX B200 (NVIDIA data sheet, one of eight GPUs): 9 and 2.25 PFLOP/s dense, 8 TB/s; 148 SMs.
    Device(
        "B200",
        "b200",
        10,
        {"fp4": 9.0e15, "bf16": 2.25e15},
        8.0e12,
        148 * 128 * 1.85e9,
        {"rht_quantize": 16.0, "rht_quantize_both": 30.0, "requantize": 19.0},
    ),
    # RTX 5090 (NVIDIA RTX Blackwell white paper): 1676 and 209.5 TFLOP/s dense with fp32
    # accumulation, 1.792 TB/s; 170 SMs.
    Device(
        "RTX 5090",
        "rtx5090",
        12,
        {"fp4": 1.676e15, "bf16": 2.095e14},
        1.792e12,
        170 * 128 * 2.41e9,
        {"rht_quantize": 21.5, "rht_quantize_both": 41.0, "requantize": 25.0},
    ),
)
ASSUMPTIONS = (
    "predicted by data sheet, not measured: "
    + "; ".join(
        f"{d.name} {d.flops['fp4'] / 1e12:.0f} TFLOP/s FP4, {d.flops['bf16'] / 1e12:.4g} BF16, "
        f"{d.bandwidth / 1e12:.4g} TB/s"
        for d in DEVICES
    )
    + f"; a GEMM reaches {GEMM_SHARE['fp4']:.0%} of that in FP4 and {GEMM_SHARE['bf16']:.0%} in "
    f"BF16, a quantiser {MEMORY_SHARE:.0%} of the bandwidth or {ISSUE_SHARE:.0%} of the issue "
    f"slots; {KERNEL_SECONDS * 1e6:.0f} us between kernels; forward quantisers fused"
)


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
class _Layer:
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


def bf16_steps(layer: _Layer, gemms: Iterable[str]) -> list[Step]:
    """The GEMMs of a plain linear."""
    return [_plain_gemm(layer, name) for name in gemms]


def _plain_gemm(layer: _Layer, name: str) -> Step:
    roles = (*GEMMS[name], _RESULT[name])
    bits = _HIGH * sum(layer.elements(role) for role in roles)
    return Step(name, "gemm", bits, layer.flops)


def recipe_steps(recipe: Recipe, layer: _Layer, gemms: Iterable[str]) -> list[Step]:
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
        packed = sum(
            packed_bits(o.scheme) * layer.elements(role)
            for role, o in zip(GEMMS[name], (gemm.a, gemm.b), strict=True)
        )
        result = layer.elements(_RESULT[name])
        steps.append(Step(name, "gemm", packed + _HIGH * result, layer.flops, kind="fp4"))
        if name != "fprop" and recipe.fprop and SCHEMES[recipe.fprop.a.scheme].masked:
            steps.append(Step(name, "mask and rotate back", (2 * _HIGH + 1) * result))
    return steps


def _paired(recipe: Recipe, gemms: list[str]) -> bool:
    """Whether dgrad and wgrad take the gradient from one read (`passes.pair_directions`)."""
    if not {"dgrad", "wgrad"} <= set(gemms) or recipe.dgrad is None or recipe.wgrad is None:
        return False
    return recipe.dgrad.a == recipe.wgrad.a and recipe.dgrad.a.transform != "none"


def _both_directions(layer: _Layer, operand: Operand) -> Step:
    elements = layer.elements("dy")
    bits = (_HIGH + 2 * _written(operand)) * elements
    kernels = 1 + _scales_after(operand)
    op = "rht_quantize_both"
    return Step("dgrad", "quantize dy both ways", bits, op=op, elements=elements, kernels=kernels)


def _quantiser(recipe: Recipe, layer: _Layer, name: str, role: str, operand: Operand) -> list[Step]:
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


@dataclass(frozen=True)
class Prediction:
    """What one layer moves and multiplies under a recipe, and its time beside BF16's.

    flops, bytes: numbers, or sympy expressions where a size is symbolic
    seconds, bf16_seconds: by `Device.column`, at the hint of a symbolic size
    at: {symbol: hint} of what was put in for symbols
    """

    flops: Any
    bytes: Any
    seconds: dict[str, float]
    bf16_seconds: dict[str, float]
    at: dict[str, int] = field(default_factory=dict)

    def speed(self, device: Device) -> float:
        """How many times as fast as BF16."""
        return self.bf16_seconds[device.column] / self.seconds[device.column]

    def plain(self) -> tuple[int | str, int | str, dict[str, dict[str, float]]]:
        """FLOPs, bytes and times for a `report.Row`; text where a size is symbolic."""
        exact = [self.flops, self.bytes]
        if not self.at:
            exact = [int(n) for n in exact]
        times = {
            d.column: {
                "speed": round(self.speed(d), 3),
                "microseconds": round(1e6 * self.seconds[d.column], 2),
                "bf16_microseconds": round(1e6 * self.bf16_seconds[d.column], 2),
            }
            for d in DEVICES
        }
        flops, bytes_ = (n if isinstance(n, int) else str(n) for n in exact)
        return flops, bytes_, times


def predict(
    recipe: Recipe,
    shape: tuple[Any, ...],
    gemms: Iterable[str] = tuple(GEMMS),
    x_users: int = 1,
    w_quantised: int = 1,
) -> Prediction | None:
    """The cost of a layer of ``shape`` (T, N, K), or (E, T, N, K) for experts.

    Sizes are ints, SymInts or sympy symbols with hints. A symbolic size is read by its hint, and no
    guard is added: another size would be predicted otherwise, and runs in the same graph. None if a
    symbol has no hint, or the layer has no rows: nothing can be said.
    """
    gemms = list(gemms)
    experts = shape[0] if len(shape) == 4 else 1
    hints = [_hint(n) for n in shape[-3:]]
    if None in hints or 0 in hints:
        return None
    t, n, k = map(_expression, shape[-3:])
    layer = _Layer(t, n, k, experts, x_users, w_quantised)
    concrete = replace(layer, **dict(zip("tnk", hints, strict=True)))
    steps = recipe_steps(recipe, layer, gemms)
    at = {str(n): hint for n, hint in zip(shape[-3:], hints, strict=True) if str(n) != str(hint)}
    return Prediction(
        flops=sum(s.flops for s in steps),
        bytes=sum(s.bits / s.shared_by for s in steps) / 8,
        seconds=_by_device(recipe_steps(recipe, concrete, gemms)),
        bf16_seconds=_by_device(bf16_steps(concrete, gemms)),
        at=at,
    )


def _by_device(steps: list[Step]) -> dict[str, float]:
    return {d.column: sum(s.seconds(d) for s in steps) for d in DEVICES}


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _hint(size: Any) -> Any:
    return size.node.hint if isinstance(size, torch.SymInt) else size


def deciding_device() -> Device:
    """The device whose times decide under "auto": the Blackwell present, or else a B200."""
    if torch.cuda.is_available():
        major, _ = torch.cuda.get_device_capability()
        for device in DEVICES:
            if device.capability == major:
                return device
    return DEVICES[0]


def predict_matmul(found: Matmul, recipe: Recipe, config: Config) -> Prediction | None:
    """The prediction for a matmul of a Dynamo graph, for the GEMMs that it will run: without
    gradients fprop alone, for a frozen weight no wgrad. A weight whose codes are cached is not
    quantised.
    """
    x, _, _ = found.operands()
    gemms = ["fprop"]
    if torch.is_grad_enabled():
        gemms += ["dgrad"] * x.requires_grad + ["wgrad"] * found.parameter.requires_grad
    kin = (found.node.target, getattr(torch.ops.q2, found.op).default)  # those already rewritten
    x_users = 1 if found.x_views else sum(user.target in kin for user in found.x.users)
    again = config.recompute_weights and "dgrad" in gemms
    w_quantised = 0 if config.cache_weights else 1 + again
    return predict(recipe, found.shape, gemms, max(x_users, 1), w_quantised)


def why_left(prediction: Prediction | None) -> str:
    """Why "auto" leaves a layer in BF16; "" if it is taken, as one is of which nothing is known."""
    if prediction is None:
        return ""
    device = deciding_device()
    speed = prediction.speed(device)
    if speed >= 1:
        return ""
    at = ", ".join(f"{symbol} = {hint}" for symbol, hint in prediction.at.items())
    where = f" for {at}, the size it was compiled with" if at else ""
    return f"auto: predicted {speed:.2f}x of BF16 on {device.name}{where}"
