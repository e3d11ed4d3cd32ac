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
    reuse>nvfp4_16x16_pow2                the codes fprop saved, transposed
    forward>rht16>nvfp4_pow2              rotated and quantised during the forward, and saved

and a GEMM's text is ``"<a> @ <b>"`` or ``"bf16"``. The schemes themselves (format, block, rounding,
scale rule) are rows of `q2compile.runtime_kernels.schemes.SCHEMES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from q2compile.errors import ConfigError
from q2compile.runtime_kernels.schemes import SCHEMES
from q2compile.runtime_kernels.transforms import TRANSFORMS
from q2compile.suggest import one_of

GEMMS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
# What w in dgrad and x in wgrad are made of. "fresh", the high-precision tensor, is all that
# fprop's operands and dy can have.
SOURCES = ("fresh", "requantize", "reuse", "forward")
BF16 = "bf16"


@dataclass(frozen=True)
class Operand:
    """How one operand of a GEMM is quantised along that GEMM's contraction.

    scheme     a row of SCHEMES
    transform  a row of TRANSFORMS, applied along the contraction before rounding; signs are drawn
               anew at every step, or "rht16_fixed" and the like keep one sign vector
    source     "fresh": from the high-precision tensor; "requantize": from the codes fprop saved;
               "reuse": those codes transposed (w in 16x16 blocks); "forward": from the
               high-precision tensor while the forward runs, so that only the codes are saved (x)
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
    """The three GEMMs of a linear layer; None is a GEMM left in the tensors' own precision.

    auto: a layer that the cost model (`q2compile.cost`) predicts to lose by it stays in bf16.
    """

    name: str
    fprop: Gemm | None
    dgrad: Gemm | None
    wgrad: Gemm | None
    auto: bool = False

    @property
    def quantises(self) -> bool:
        return any((self.fprop, self.dgrad, self.wgrad))

    @property
    def random_forward(self) -> bool:
        """Whether the forward draws a seed: x quantised for wgrad during the forward needs one."""
        return self.wgrad is not None and self.wgrad.b.source == "forward"

    def texts(self) -> tuple[str, str, str]:
        """The three GEMMs as text, the form in which they are arguments of `q2::linear`."""
        return tuple(str(g) if g else BF16 for g in (self.fprop, self.dgrad, self.wgrad))  # type: ignore[return-value]

    def __str__(self) -> str:
        return "  ".join(f"{g}: {t}" for g, t in zip(GEMMS, self.texts(), strict=True))


def _recipe(name: str, fprop: str, dgrad: str, wgrad: str) -> Recipe:
    return Recipe(name, Gemm.parse(fprop), Gemm.parse(dgrad), Gemm.parse(wgrad))


# One screen: every recipe. Schemes are written by their paper names, with a global scale from amax;
# the option global_scale="pow2" (the default) selects their "_pow2" rows. Q is quantisation along
# the contraction, H the rotation with the signs of this step, M a trust mask.
_EDEN = "rht128>nvfp4_ms_eden"
_SR64 = "rht64>mxfp4_sr"
RECIPES = {
    r.name: r
    for r in [
        # Quartet II (arXiv 2601.22813 v2, section 5 and figure 3).
        #   y  = Q46(x) Q46(w)ᵀ
        #   dx = Qeden(dy H) Qeden(Q46(w)ᵀ H)ᵀ       RHT-128 along N
        #   dw = Qeden(dyᵀ H) Qeden(Q46(x)ᵀ H)ᵀ      RHT-128 along T
        _recipe(
            "quartet2",
            fprop="nvfp4_46 @ nvfp4_46",
            dgrad=f"{_EDEN} @ requantize>{_EDEN}",
            wgrad=f"{_EDEN} @ requantize>{_EDEN}",
        ),
        # NVIDIA, "Pretraining LLMs with NVFP4" (arXiv 2509.25149, section 4), with signs per step
        # and SR that never clips (Quartet II, section 3.1). NVIDIA's library itself: transform
        # "rht16_fixed", scheme "nvfp4_sr_clip".
        #   y  = Q(x) Q16x16(w)ᵀ
        #   dx = Qsr(dy) Q16x16(w)                   the same codes of w
        #   dw = Qsr(dyᵀ H) Q(xᵀ H)ᵀ                 RHT-16 along T; x quantised in the forward
        _recipe(
            "nvfp4",
            fprop="nvfp4 @ nvfp4_16x16",
            dgrad="nvfp4_sr @ reuse>nvfp4_16x16",
            wgrad="rht16>nvfp4_sr @ forward>rht16>nvfp4",
        ),
        # Quartet (arXiv 2505.14669 v4, section 4.4 and algorithm 1). The 3/4 of RTN 3/4 comes back
        # in the operands' global scale, 4/3 each, so alpha is 16/9.
        #   y  = Qq(x H) Qq(w H)ᵀ                    H32 without signs along K, QuEST
        #   dx = (Mx ∘ (Q34(dy H) Q34(Qq(wH)ᵀ H)ᵀ)) H⁻¹      RHT-32 along N
        #   dw = (Mw ∘ (Q34(dyᵀ H) Q34(Qq(xH)ᵀ H)ᵀ)) H⁻¹     RHT-32 along T
        _recipe(
            "quartet",
            fprop="h32>mxfp4_quest @ h32>mxfp4_quest",
            dgrad="rht32>mxfp4_rtn34 @ requantize>rht32>mxfp4_rtn34",
            wgrad="rht32>mxfp4_rtn34 @ requantize>rht32>mxfp4_rtn34",
        ),
        # "Training LLMs with MXFP4" (arXiv 2502.20586).
        #   y  = x wᵀ
        #   dx = Qsr34(dy H) Qsr34(wᵀ H)ᵀ            RHT-64 along N
        #   dw = Qsr34(dyᵀ H) Qsr34(xᵀ H)ᵀ           RHT-64 along T
        _recipe("mxfp4", BF16, f"{_SR64} @ {_SR64}", f"{_SR64} @ {_SR64}"),
        # TetraJet-v2, as Quartet II compares it (section 2): SR where quartet2 has MS-EDEN, RTN
        # where it has 4/6.
        #   y  = Q(x) Q(w)ᵀ
        #   dx = Qsr(dy H) Qsr(Q(w)ᵀ H)ᵀ             RHT-128 along N
        #   dw = Qsr(dyᵀ H) Qsr(Q(x)ᵀ H)ᵀ            RHT-128 along T
        _recipe(
            "tetrajet2",
            fprop="nvfp4 @ nvfp4",
            dgrad="rht128>nvfp4_sr @ requantize>rht128>nvfp4_sr",
            wgrad="rht128>nvfp4_sr @ requantize>rht128>nvfp4_sr",
        ),
        # The switch off: bit-identical to plain Inductor, because nothing is rewritten.
        _recipe("bf16", BF16, BF16, BF16),
    ]
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
            _check(recipe, name, gemm)
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
    no_codes = recipe.fprop is None and operand.source == "requantize"
    return replace(operand, scheme=scheme, source="fresh" if no_codes else operand.source)


def _check(recipe: Recipe, name: str, gemm: Gemm) -> None:
    """Refuse, by name, combinations that compute something else than their GEMM, or can't."""
    where = f"recipe {recipe.name!r}, {name}"
    for role, o in zip(GEMMS[name], (gemm.a, gemm.b), strict=True):
        one_of(f"scheme of {role} in {where}", o.scheme, SCHEMES)
        one_of(f"transform of {role} in {where}", o.transform, TRANSFORMS)
        one_of(f"source of {role} in {where}", o.source, SOURCES)
        why = _operand_fault(recipe, name, role, o)
        if why:
            raise ConfigError(f"{where}: {role} is {o}, {why}")
    if gemm.a.transform != gemm.b.transform:
        raise ConfigError(
            f"{where}: {gemm.a.transform} on {GEMMS[name][0]} and {gemm.b.transform} on "
            f"{GEMMS[name][1]}: the rotations cancel only if both operands have the same one"
        )
    formats = [SCHEMES[o.scheme].format for o in (gemm.a, gemm.b)]
    if formats[0] != formats[1]:
        raise ConfigError(f"{where}: operands in {formats[0]} and {formats[1]}: use one format")


def _operand_fault(recipe: Recipe, gemm: str, role: str, o: Operand) -> str:
    """What is wrong with one operand and what to do; "" if nothing."""
    scheme, transform = SCHEMES[o.scheme], TRANSFORMS[o.transform]
    if o.source != "fresh" and (gemm == "fprop" or role == "dy"):
        return "but only w in dgrad and x in wgrad have another source than 'fresh'"
    if gemm == "fprop":
        if scheme.stochastic or transform.seeded:
            return (
                "which is random; fprop must be deterministic, because activation checkpointing "
                "computes it twice: use an RTN or 4/6 scheme"
            )
        if scheme.masked != (o.transform != "none"):
            return "but in fprop a rotation and QuEST go together: its backward undoes both"
        return ""
    if scheme.masked:
        return "but QuEST belongs to fprop: a trust mask is of no use in a backward GEMM"
    if o.source == "forward" and (gemm, role) != ("wgrad", "x"):
        return "but only x in wgrad can be quantised during the forward: w is there anyway"
    if o.source == "reuse":
        square = scheme.block[0] == scheme.block[1]
        if role != "w":
            return "but only w has codes whose blocks are square"
        codes = recipe.fprop.b.scheme.removesuffix("_pow2") if recipe.fprop else None
        if codes not in (None, o.scheme.removesuffix("_pow2")):
            return f"but fprop's codes of w are {codes}: only the same scheme can be re-used"
        if not square or o.transform != "none":
            return "but only 16x16 blocks without a rotation stay blocks when transposed"
        return ""
    if scheme.block[0] != 1 and (gemm, role) != ("dgrad", "dy"):
        return "but 16x16 blocks are for fprop, and for w re-used in dgrad (source 'reuse')"
    if scheme.block[0] != 1 and o.transform != "none":
        return "but 16x16 blocks can't be rotated along one dimension"
    return ""


@lru_cache
def parse(fprop: str, dgrad: str, wgrad: str) -> Recipe:
    """The recipe that `Recipe.texts` wrote."""
    return _recipe("", fprop, dgrad, wgrad)
