# SPDX-License-Identifier: Apache-2.0
"""Recipes: the number formats of a linear layer's three GEMMs. A recipe is data.

Shapes: x [T, K] activations, w [N, K] weight, dy [T, N] gradient of the output.

    fprop   y  = x wᵀ     operands x, w      contracts K
    dgrad   dx = dy w     operands dy, w     contracts N
    wgrad   dw = dyᵀ x    operands dy, x     contracts T

Each operand is an `Operand(scheme, transform, source)`; its text, as it stands in graphs, reports
and options, is the path from source to codes:

    nvfp4_46_pow2                         quantized from the high-precision tensor
    rht128>nvfp4_ms_eden_pow2             rotated, then quantized
    requantize>rht128>nvfp4_ms_eden_pow2  from the codes fprop saved, rotated, quantized
    reuse>nvfp4_16x16_pow2                the codes fprop saved, transposed
    forward>rht16>nvfp4_pow2              rotated and quantized during the forward, and saved

and a GEMM's text is ``"<a> @ <b>"`` or ``"bf16"``. The schemes themselves (format, block, rounding,
scale rule) are rows of `q2compile.runtime_kernels.numerics.schemes.SCHEMES`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache

from q2compile.runtime_kernels.numerics.schemes import SCHEMES
from q2compile.runtime_kernels.numerics.transforms import TRANSFORMS

GEMMS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
# Sources of w in dgrad and of x in wgrad. fprop's operands and dy only have "fresh", the
# high-precision tensor.
SOURCES = ("fresh", "requantize", "reuse", "forward")
BF16 = "bf16"


@dataclass(frozen=True)
class Operand:
    """How one operand of a GEMM is quantized along that GEMM's contraction.

    scheme     a row of SCHEMES
    transform  a row of TRANSFORMS, applied along the contraction before rounding; signs are drawn
               anew at every step, or "rht16_fixed" and the like keep one sign vector
    source     "fresh": from the high-precision tensor; "requantize": from the codes fprop saved;
               "reuse": those codes transposed (w in square blocks); "forward": from the
               high-precision tensor while the forward runs, so that only the codes are saved (x)
    """

    scheme: str
    transform: str = "none"
    source: str = "fresh"

    def __str__(self) -> str:
        steps = [self.source] if self.source != "fresh" else []
        steps += [self.transform] if self.transform != "none" else []
        return ">".join([*steps, self.scheme])

    @property
    def requantized(self) -> bool:
        """Whether it is made of fprop's codes, and so rounded twice."""
        return self.source == "requantize"

    @property
    def draws(self) -> bool:
        """Whether quantizing it draws random bits or signs, so needs a seed."""
        return SCHEMES[self.scheme].stochastic or TRANSFORMS[self.transform].seeded

    @classmethod
    def parse(cls, text: str) -> Operand:
        *steps, scheme = text.split(">")
        source = steps.pop(0) if steps and steps[0] in SOURCES else "fresh"
        return cls(scheme, steps.pop(0) if steps else "none", source)


@dataclass(frozen=True)
class Gemm:
    """A quantized GEMM: its two operands, in the order of `GEMMS`."""

    a: Operand
    b: Operand

    def __str__(self) -> str:
        return f"{self.a} @ {self.b}"

    def without_codes(self) -> Gemm:
        """This GEMM with high-precision operands, for when there are no codes to requantize."""
        fresh = (replace(o, source="fresh") if o.requantized else o for o in (self.a, self.b))
        return Gemm(*fresh)

    @classmethod
    def parse(cls, text: str) -> Gemm | None:
        """The GEMM written as ``text``; None for "bf16", a GEMM left in high precision."""
        if text == BF16:
            return None
        a, b = text.split(" @ ")
        return cls(Operand.parse(a), Operand.parse(b))


@dataclass(frozen=True)
class Recipe:
    """The three GEMMs of a linear layer; None is a GEMM left in the tensors' own precision.

    auto: a layer gets fp8 or bf16 where `q2compile.cost_model` predicts one of them to be faster.
    """

    name: str
    fprop: Gemm | None
    dgrad: Gemm | None
    wgrad: Gemm | None
    auto: bool = False

    @classmethod
    def parse(cls, name: str, fprop: str, dgrad: str, wgrad: str) -> Recipe:
        """The recipe of three GEMMs written as text (`Gemm.parse`)."""
        return cls(name, Gemm.parse(fprop), Gemm.parse(dgrad), Gemm.parse(wgrad))

    @property
    def quantizes(self) -> bool:
        return any((self.fprop, self.dgrad, self.wgrad))

    @property
    def random_forward(self) -> bool:
        """Whether the forward draws a seed: x quantized for wgrad during the forward may need
        one."""
        return self.wgrad is not None and self.wgrad.b.source == "forward" and self.wgrad.b.draws

    @property
    def transposes_codes(self) -> bool:
        """True if dgrad multiplies fprop's codes of w, transposed."""
        return self.fprop is not None and self.dgrad is not None and self.dgrad.b.source == "reuse"

    @property
    def block_rows(self) -> int:
        """Rows of w that share a scale."""
        of_w = [gemm.b.scheme for gemm in (self.fprop, self.dgrad) if gemm]
        return max((SCHEMES[scheme].block[0] for scheme in of_w), default=1)

    def only(self, gemms: Collection[str]) -> Recipe:
        """This recipe with all GEMMs but those named left in high precision.

        Without fprop no codes are saved to requantize from, and the gradient of what was computed
        is the one with the high-precision operand: "requantize" becomes "fresh".
        """
        chosen: dict[str, Gemm | None]
        chosen = {name: getattr(self, name) if name in gemms else None for name in GEMMS}
        if chosen["fprop"] is None:
            chosen = {name: gemm and gemm.without_codes() for name, gemm in chosen.items()}
        return Recipe(self.name, chosen["fprop"], chosen["dgrad"], chosen["wgrad"], self.auto)

    def texts(self) -> tuple[str, str, str]:
        """The three GEMMs as text, the form in which they are arguments of `q2::linear`."""
        return tuple(str(g) if g else BF16 for g in (self.fprop, self.dgrad, self.wgrad))  # type: ignore[return-value]

    def __str__(self) -> str:
        return "  ".join(f"{g}: {t}" for g, t in zip(GEMMS, self.texts(), strict=True))


@lru_cache
def parse(fprop: str, dgrad: str, wgrad: str) -> Recipe:
    """The recipe that `Recipe.texts` wrote."""
    return Recipe.parse("", fprop, dgrad, wgrad)
