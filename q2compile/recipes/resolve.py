# SPDX-License-Identifier: Apache-2.0
"""Turn the value of an option into a recipe that can be computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from q2compile.errors import ConfigError, naming, one_of, shown
from q2compile.recipes.published import RECIPES
from q2compile.recipes.recipe import GEMMS, SOURCES, Gemm, Operand, Recipe
from q2compile.runtime_kernels.numerics.groups import spreads
from q2compile.runtime_kernels.numerics.schemes import SCHEMES, Scheme
from q2compile.runtime_kernels.numerics.transforms import TRANSFORMS


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
            f"recipe: got {shown(spec)} ({type(spec).__name__}); allowed: a name "
            f"({', '.join(RECIPES)}) or a mapping with the keys base, {', '.join(GEMMS)}"
        )
    for key in spec:
        one_of("key of a recipe", key, ("recipe", "base", *GEMMS))
    if "recipe" in spec and "base" in spec:
        raise ConfigError("recipe: got both 'recipe' and 'base', which mean the same; give one")
    base_name = spec.get("recipe", spec.get("base", "quartet2"))
    base = RECIPES[one_of("recipe", base_name, RECIPES)]
    with naming("recipe"):
        changes: dict[str, Any] = {g: _changed_gemm(base, g, spec[g]) for g in GEMMS if g in spec}
    name = f"{base.name} with {_named(spec)}" if changes else base.name
    return _finish(replace(base, name=name, **changes), global_scale)


def _named(spec: Mapping[str, Any]) -> str:
    """The changes of a mapping, in words: "bf16 dgrad and changed wgrad"."""
    changes = {gemm: spec[gemm] for gemm in GEMMS if gemm in spec}
    return " and ".join(
        f"{change if isinstance(change, str) else 'changed'} {gemm}"
        for gemm, change in changes.items()
    )


def _changed_gemm(base: Recipe, gemm: str, change: object) -> Gemm | None:
    if isinstance(change, str):
        return getattr(RECIPES[one_of(f"recipe for {gemm}", change, RECIPES)], gemm)
    if not isinstance(change, Mapping):
        raise ConfigError(f"{gemm}: got {shown(change)}; allowed: a recipe's name or a mapping")
    old = getattr(base, gemm)
    operands = []
    for operand_name, role in zip("ab", GEMMS[gemm], strict=True):
        fields = change.get(role, {})
        if not isinstance(fields, Mapping):
            raise ConfigError(
                f"{gemm}.{role}: got {shown(fields)}; allowed: a mapping with scheme, transform, "
                "source"
            )
        for key, value in fields.items():
            one_of(f"key of {gemm}.{role}", key, ("scheme", "transform", "source"))
            if not isinstance(value, str):
                raise ConfigError(f"{gemm}.{role}.{key}: got {shown(value)}; allowed: a name")
        if old is None and "scheme" not in fields:
            raise ConfigError(
                f"{gemm}.{role}: the base {base.name!r} runs this GEMM in bf16; give a scheme, too"
            )
        operands.append(
            replace(getattr(old, operand_name), **fields) if old is not None else Operand(**fields)
        )
    for key in change:
        one_of(f"operand of {gemm}", key, GEMMS[gemm])
    return Gemm(*operands)


def _finish(recipe: Recipe, global_scale: str) -> Recipe:
    """Fill in what depends on the rest, then check."""
    recipe = recipe.only(tuple(GEMMS))  # without sources that a changed fprop no longer gives
    gemms: dict[str, Any] = {}
    for name in GEMMS:
        gemm = _with_own_codes(recipe, name)
        if gemm is not None:
            gemm = Gemm(*(_with_scale(o, global_scale) for o in (gemm.a, gemm.b)))
            _check(recipe, name, gemm)
        gemms[name] = gemm
    return replace(recipe, **gemms)


def _with_own_codes(recipe: Recipe, name: str) -> Gemm | None:
    """A backward GEMM in FP8 over a forward in another format: it quantizes w or x itself."""
    gemm: Gemm | None = getattr(recipe, name)
    if gemm is None or recipe.fprop is None or gemm.b.source != "reuse":
        return gemm
    saved = recipe.fprop.a if name == "wgrad" else recipe.fprop.b
    scheme = SCHEMES.get(gemm.b.scheme)
    if scheme is None or not scheme.is_tensorwise or saved.scheme == gemm.b.scheme:
        return gemm
    return Gemm(gemm.a, replace(gemm.b, source="fresh"))


def _with_scale(operand: Operand, global_scale: str) -> Operand:
    """The operand with its scheme's row for that kind of global scale."""
    scheme = operand.scheme
    if global_scale == "pow2" and f"{scheme}_pow2" in SCHEMES:
        scheme += "_pow2"
    return replace(operand, scheme=scheme)


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
    spread = [spreads(SCHEMES[o.scheme], TRANSFORMS[o.transform]) for o in (gemm.a, gemm.b)]
    if name == "wgrad" and spread[0] != spread[1]:
        raise ConfigError(
            f"{where}: MS-EDEN on only one operand after {gemm.a.transform}: it rotates few "
            "tokens differently (numerics/groups.py); use it for dy and x, or a shorter rotation"
        )
    formats = [SCHEMES[o.scheme].format for o in (gemm.a, gemm.b)]
    if formats[0] != formats[1]:
        raise ConfigError(f"{where}: operands in {formats[0]} and {formats[1]}: use one format")


def _operand_fault(recipe: Recipe, gemm: str, role: str, o: Operand) -> str:
    """The error in one operand and its fix; "" if there is none."""
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
        return "but only x in wgrad can be quantized during the forward: the backward has w"
    if o.source == "reuse":
        if role == "x" and not scheme.is_tensorwise:
            return "but only w has codes whose blocks are square"
        saved = recipe.fprop and (recipe.fprop.b if role == "w" else recipe.fprop.a)
        codes = saved.scheme.removesuffix("_pow2") if saved else None
        if codes not in (None, o.scheme.removesuffix("_pow2")):
            return f"but fprop's codes of {role} are {codes}: only the same scheme can be re-used"
        if not scheme.is_transposable or o.transform != "none":
            return (
                "but only square blocks, or one scale for the tensor, serve transposed codes, and "
                "only without a rotation"
            )
        return ""
    if scheme.block[0] != 1 and (gemm, role) != ("dgrad", "dy"):
        return (
            f"but {_size(scheme)} blocks are for fprop, and for w re-used in dgrad (source 'reuse')"
        )
    if scheme.block[0] != 1 and o.transform != "none":
        return f"but {_size(scheme)} blocks can't be rotated along one dimension"
    return ""


def _size(scheme: Scheme) -> str:
    return "x".join(map(str, scheme.block))
