"""Recipes: what each of a linear layer's three GEMMs is computed in. A recipe is data.

Shapes: x [T, K] activations, w [N, K] weight, dy [T, N] gradient of the output.

    fprop   y  = x wᵀ     operands x, w      contracts K
    dgrad   dx = dy w     operands dy, w     contracts N
    wgrad   dw = dyᵀ x    operands dy, x     contracts T

Each operand is an `Operand(scheme, transform, source)`; its text, as it stands in graphs, reports
and options, is the path the numbers take, from source to codes:

    nvfp4_46_pow2                         quantised from the high-precision tensor
    rht128>nvfp4_ms_eden_pow2             rotated, then quantised
    requantize>rht128>nvfp4_ms_eden_pow2  from the codes fprop saved, rotated, quantised

and a GEMM's text is ``"<a> @ <b>"`` or ``"bf16"``. The schemes themselves (format, block, rounding,
scale rule) are rows of `q2compile.runtime_kernels.schemes.SCHEMES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from q2compile.compat import ConfigError
from q2compile.runtime_kernels.schemes import SCHEMES
from q2compile.runtime_kernels.transforms import TRANSFORMS
from q2compile.suggest import one_of

GEMMS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
SOURCES = ("fresh", "requantize")
BF16 = "bf16"


@dataclass(frozen=True)
class Operand:
    """How one operand of a GEMM is quantised along that GEMM's contraction.

    scheme     a row of SCHEMES
    transform  a row of TRANSFORMS, applied along the contraction before rounding
    source     "fresh": from the high-precision tensor; "requantize": from the codes fprop saved
    """

    scheme: str
    transform: str = "none"
    source: str = "fresh"

    def __str__(self) -> str:
        steps = [self.source] if self.source != "fresh" else []
        steps += [self.transform] if self.transform != "none" else []
        return ">".join([*steps, self.scheme])

    @classmethod
    def parse(cls, text: str) -> Operand:
        *steps, scheme = text.split(">")
        source = steps.pop(0) if steps and steps[0] in SOURCES else "fresh"
        return cls(scheme, steps.pop(0) if steps else "none", source)


@dataclass(frozen=True)
class Gemm:
    """A quantised GEMM: its two operands, in the order of `GEMMS`."""

    a: Operand
    b: Operand

    def __str__(self) -> str:
        return f"{self.a} @ {self.b}"

    @classmethod
    def parse(cls, text: str) -> Gemm | None:
        """The GEMM written as ``text``; None for "bf16", a GEMM left in high precision."""
        if text == BF16:
            return None
        a, b = text.split(" @ ")
        return cls(Operand.parse(a), Operand.parse(b))


@dataclass(frozen=True)
class Recipe:
    """The three GEMMs of a linear layer; None is a GEMM left in the tensors' own precision."""

    name: str
    fprop: Gemm | None
    dgrad: Gemm | None
    wgrad: Gemm | None

    @property
    def quantises(self) -> bool:
        return any((self.fprop, self.dgrad, self.wgrad))

    def texts(self) -> tuple[str, str, str]:
        """The three GEMMs as text, the form in which they are arguments of `q2::linear`."""
        return tuple(str(g) if g else BF16 for g in (self.fprop, self.dgrad, self.wgrad))  # type: ignore[return-value]

    def __str__(self) -> str:
        return "  ".join(f"{g}: {t}" for g, t in zip(GEMMS, self.texts(), strict=True))


def _gemm(a: str, b: str) -> Gemm:
    return Gemm(Operand.parse(a), Operand.parse(b))


# One screen: every recipe. A scheme whose global scale comes in two kinds is written with its paper
# name; the option global_scale="pow2" (the default) selects its "_pow2" row.
RECIPES = {
    # Quartet II (arXiv 2601.22813 v2, section 4 and algorithm 1).
    #   y  = Q46(x) Q46(w)ᵀ
    #   dx = MSEDEN(dy H) MSEDEN(Q46(w)ᵀ H)ᵀ          H = RHT-128 along N, the same signs on both
    #   dw = MSEDEN(dyᵀ H) MSEDEN(Q46(x)ᵀ H)ᵀ         H = RHT-128 along T, the same signs on both
    "quartet2": Recipe(
        "quartet2",
        fprop=_gemm("nvfp4_46", "nvfp4_46"),
        dgrad=_gemm("rht128>nvfp4_ms_eden", "requantize>rht128>nvfp4_ms_eden"),
        wgrad=_gemm("rht128>nvfp4_ms_eden", "requantize>rht128>nvfp4_ms_eden"),
    ),
    # The switch off: bit-identical to plain Inductor, because nothing is rewritten.
    "bf16": Recipe("bf16", None, None, None),
}


def resolve(spec: str | Mapping[str, Any], global_scale: str = "pow2") -> Recipe:
    """The recipe that an option's value means, with every default filled in and checked.

    spec: a recipe's name; or a mapping with ``recipe`` (or ``base``): a name, and for each of
        ``fprop``, ``dgrad``, ``wgrad`` to change: "bf16", the name of a recipe whose GEMM to take,
        or a mapping {operand: {"scheme", "transform", "source"}} of what differs from the base.
    global_scale: "pow2", a power of two found after the codes, or "exact", the papers' own.

    Raises ValueError naming what came, what is allowed and the nearest right name.
    """
    if isinstance(spec, str):
        return _finish(RECIPES[one_of("recipe", spec, RECIPES)], global_scale)
    if not isinstance(spec, Mapping):
        raise ConfigError(
            f"recipe: got {spec!r} ({type(spec).__name__}); allowed: a name ({', '.join(RECIPES)}) "
            f"or a mapping with the keys base, {', '.join(GEMMS)}"
        )
    for key in spec:
        one_of("key of a recipe", key, ("recipe", "base", *GEMMS))
    if "recipe" in spec and "base" in spec:
        raise ConfigError("a recipe takes either 'recipe' or 'base', they mean the same; got both")
    base_name = spec.get("recipe", spec.get("base", "quartet2"))
    base = RECIPES[one_of("recipe", base_name, RECIPES)]
    changes: dict[str, Any] = {g: _changed_gemm(base, g, spec[g]) for g in GEMMS if g in spec}
    name = base.name if not changes else f"{base.name}+{'+'.join(changes)}"
    return _finish(replace(base, name=name, **changes), global_scale)


def _changed_gemm(base: Recipe, gemm: str, change: object) -> Gemm | None:
    if isinstance(change, str):
        return getattr(RECIPES[one_of(f"recipe for {gemm}", change, RECIPES)], gemm)
    if not isinstance(change, Mapping):
        raise ConfigError(f"{gemm}: got {change!r}; allowed: a recipe's name or a mapping")
    old = getattr(base, gemm)
    operands = []
    for side, role in zip("ab", GEMMS[gemm], strict=True):
        fields = change.get(role, {})
        if not isinstance(fields, Mapping):
            raise ConfigError(
                f"{gemm}.{role}: got {fields!r}; allowed: a mapping with scheme, transform, source"
            )
        for key in fields:
            one_of(f"key of {gemm}.{role}", key, ("scheme", "transform", "source"))
        if old is None and "scheme" not in fields:
            raise ConfigError(f"{gemm}.{role}: the base {base.name!r} has bf16 here: give a scheme")
        operands.append(
            replace(getattr(old, side), **fields) if old is not None else Operand(**fields)
        )
    for key in change:
        one_of(f"operand of {gemm}", key, GEMMS[gemm])
    return Gemm(*operands)


def _finish(recipe: Recipe, global_scale: str) -> Recipe:
    """Fill in what depends on the rest, then check."""
    gemms: dict[str, Any] = {}
    for name in GEMMS:
        gemm: Gemm | None = getattr(recipe, name)
        if gemm is not None:
            gemm = Gemm(*(_finish_operand(recipe, o, global_scale) for o in (gemm.a, gemm.b)))
            _check(recipe.name, name, gemm)
        gemms[name] = gemm
    return replace(recipe, **gemms)


def _finish_operand(recipe: Recipe, operand: Operand, global_scale: str) -> Operand:
    """Select the global scale's kind, and the source that exists.

    With fprop in bf16 no codes are saved to requantise from, and the gradient of what was computed
    is the one with the high-precision operand: "requantize" becomes "fresh".
    """
    scheme = operand.scheme
    if global_scale == "pow2" and f"{scheme}_pow2" in SCHEMES:
        scheme += "_pow2"
    source = "fresh" if recipe.fprop is None else operand.source
    return replace(operand, scheme=scheme, source=source)


def _check(recipe: str, name: str, gemm: Gemm) -> None:
    """Refuse, by name, combinations that compute something else than their GEMM."""
    where = f"recipe {recipe!r}, {name}"
    for role, o in zip(GEMMS[name], (gemm.a, gemm.b), strict=True):
        one_of(f"scheme of {role} in {where}", o.scheme, SCHEMES)
        one_of(f"transform of {role} in {where}", o.transform, TRANSFORMS)
        one_of(f"source of {role} in {where}", o.source, SOURCES)
        if o.source != "fresh" and (role == "dy" or name == "fprop"):
            raise ConfigError(
                f"{where}: {role} has source {o.source!r}, but only w in dgrad and x in wgrad have "
                "codes from fprop; use 'fresh'"
            )
        if name == "fprop" and (SCHEMES[o.scheme].stochastic or TRANSFORMS[o.transform].seeded):
            raise ConfigError(
                f"{where}: {role} is {o}, which is random; fprop must be deterministic, because "
                "activation checkpointing computes it twice; use an RTN or 4/6 scheme"
            )
    if gemm.a.transform != gemm.b.transform:
        raise ConfigError(
            f"{where}: {gemm.a.transform} on {GEMMS[name][0]} and {gemm.b.transform} on "
            f"{GEMMS[name][1]}: the rotations cancel only if both operands have the same one"
        )
    formats = [SCHEMES[o.scheme].format for o in (gemm.a, gemm.b)]
    if formats[0] != formats[1]:
        raise ConfigError(f"{where}: operands in {formats[0]} and {formats[1]}: use one format")


@lru_cache
def parse(fprop: str, dgrad: str, wgrad: str) -> Recipe:
    """The recipe that `Recipe.texts` wrote."""
    return Recipe("", Gemm.parse(fprop), Gemm.parse(dgrad), Gemm.parse(wgrad))
