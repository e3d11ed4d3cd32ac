# SPDX-License-Identifier: Apache-2.0
"""The policy: which module gets which recipe.

A policy is an ordered list of (pattern, recipe); the last match wins, as in .gitignore. A pattern
is a glob over the whole module name (``*`` also crosses dots, ``?``, ``[01]``, ``[!0]``), or
``re:`` and a regular expression that must match the whole name. A pattern is data: nothing in it is
evaluated.

"auto" in a recipe's place is the default recipe, fp8 or bf16, whichever the cost model predicts to
be the fastest for a layer (`rewrite.decide`).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from q2compile.errors import ConfigError, naming, shown
from q2compile.recipes.published import RECIPES
from q2compile.recipes.recipe import Recipe
from q2compile.recipes.resolve import resolve

AUTO = "auto"
_SPECIAL = re.compile(r"[*?\[\]:!]")  # what means something else in a glob


@dataclass(frozen=True)
class Rule:
    """One line of a policy: what its pattern matches gets its recipe."""

    pattern: str
    recipe: Recipe

    def matches(self, name: str) -> bool:
        return compiled_pattern(self.pattern).fullmatch(name) is not None


@dataclass(frozen=True)
class Policy:
    """A default recipe and the rules over it.

    ``resolve(name)`` gives the recipe and the pattern that decided ("" for the default). The
    default does not reach the router of a mixture, whose errors send tokens to other experts, and
    which is little work. A pattern asks for it.
    """

    default: Recipe
    rules: tuple[Rule, ...] = ()

    @classmethod
    def build(cls, recipe: Any, policy: Mapping[str, Any], global_scale: str) -> Policy:
        """The policy of the options ``recipe``, ``policy``, ``global_scale``; ValueError says what
        is wrong.

        A rule that names only some GEMMs changes those of the default recipe.
        """
        if isinstance(recipe, str) and recipe == AUTO:
            raise ConfigError(
                "recipe: 'auto' chooses between a recipe, fp8 and bf16, matmul by matmul; name the "
                "recipe here, and give policy={'*': 'auto'}"
            )
        default = resolve(recipe, global_scale)
        rules = []
        for pattern, spec in policy.items():
            compiled_pattern(pattern)
            if isinstance(spec, str) and spec == AUTO:
                rules.append(Rule(pattern, replace(default, auto=True)))
                continue
            if isinstance(spec, Mapping) and "recipe" not in spec and "base" not in spec:
                spec = {**_as_mapping(recipe), **spec}
            with naming(f"policy {shown(pattern)}"):
                rules.append(Rule(pattern, resolve(spec, global_scale)))
        return cls(default, tuple(rules))

    def resolve(self, name: str, *, router: bool = False) -> tuple[Recipe, str]:
        for rule in reversed(self.rules):
            if rule.matches(name):
                return rule.recipe, rule.pattern
        return RECIPES["bf16"] if router else self.default, ""

    @property
    def recipes(self) -> list[Recipe]:
        return [self.default, *(rule.recipe for rule in self.rules)]

    @property
    def quantizes(self) -> bool:
        """True if any recipe of the policy quantizes."""
        return any(recipe.quantizes for recipe in self.recipes)

    @property
    def random_forward(self) -> bool:
        """Whether any recipe in it draws a seed in the forward."""
        return any(recipe.random_forward for recipe in self.recipes)

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """The patterns that match none of ``names``, in order."""
        names = list(names)
        return [r.pattern for r in self.rules if not any(r.matches(n) for n in names)]


def _as_mapping(recipe: Any) -> Mapping[str, Any]:
    return recipe if isinstance(recipe, Mapping) else {"recipe": recipe}


def patterns_of(wanted: Collection[str], names: Collection[str]) -> list[str]:
    """Patterns that match ``wanted`` and nothing else in ``names``: one for a last component, or
    one glob over all layer numbers, where that is possible; else each name."""
    leaf = f"*.{min(wanted).rpartition('.')[2]}"
    for glob in (leaf, over_layers(min(wanted))):
        if len(wanted) > 1 and not _SPECIAL.search(glob.replace("*", "")):
            matches = compiled_pattern(glob).fullmatch
            if {name for name in {*names, *wanted} if matches(name)} == set(wanted):
                return [glob]
    return [pattern_of(name) for name in wanted]


def over_layers(name: str) -> str:
    """The glob over all layer numbers: "layers.3.mlp.up" -> "layers.*.mlp.up"."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def pattern_of(name: str) -> str:
    """A pattern that matches this name alone."""
    return f"re:{re.escape(name)}" if _SPECIAL.search(name) else name


def compiled_pattern(pattern: object) -> re.Pattern[str]:
    """The expression that a whole module name has to match. Raises ConfigError for no pattern."""
    allowed = "allowed: a glob such as 'model.layers.[01].*', or 're:' and a regular expression"
    if not isinstance(pattern, str) or not pattern.removeprefix("re:"):
        raise ConfigError(f"policy pattern: got {shown(pattern)}; {allowed}")
    if pattern.startswith("re:"):
        try:
            return re.compile(pattern[3:])
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"policy pattern {shown(pattern)}: {error}; {allowed}") from None
    if pattern.startswith("!"):
        raise ConfigError(
            f"policy pattern {shown(pattern)}: negation is not supported; write the exception as a "
            f"later pattern, because the last match wins; {allowed}"
        )
    if ":" in pattern or pattern.count("[") != pattern.count("]"):
        raise ConfigError(f"policy pattern {shown(pattern)}: not a glob; {allowed}")
    return re.compile(fnmatch.translate(pattern))
