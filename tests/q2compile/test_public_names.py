# SPDX-License-Identifier: Apache-2.0
"""The public names, and the types of the options, which type checkers read: what `Config` takes."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import pytest
from torch._inductor import list_mode_options

import q2compile
from q2compile import telemetry
from q2compile.recipes.option_types import DgradChange, FpropChange, OperandChange, WgradChange
from q2compile.recipes.recipe import GEMMS, SOURCES, Operand
from q2compile.telemetry.options import TelemetryOptions

TYPES = {"Mode", "PolicyValue", "RecipeName", "__version__"}  # have no docstring of their own


@pytest.mark.parametrize("module", [q2compile, telemetry])
def test_dir_has_the_public_names_alone(module: Any) -> None:
    assert dir(module) == sorted(module.__all__)
    assert all(getattr(module, name) is not None for name in dir(module))


def test_unknown_names_are_errors() -> None:
    for module in (q2compile, telemetry):
        with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
            _ = module.no_such_name


@pytest.mark.parametrize("name", ["explain", "expect", "compare", "gather_codes", "export"])
def test_what_is_no_model_is_refused_by_name(name: str) -> None:
    others = {"compare": ([],), "export": ("folder",)}.get(name, ())
    with pytest.raises(q2compile.ConfigError, match=f"^{name}: .*got (5|'int').*; allowed: a"):
        getattr(q2compile, name)(5, *others)


def test_every_public_name_is_documented() -> None:
    """A docstring of its own, not the default of a dataclass or a base class."""
    for name in sorted({*q2compile.__all__} - TYPES):
        text = getattr(q2compile, name).__doc__ or ""
        assert text and not text.startswith(f"{name}("), name


def test_the_text_of_the_package_names_all() -> None:
    named = set(inspect.cleandoc(q2compile.__doc__ or "").replace(",", " ").split())
    named = {word.strip(".()").removeprefix("telemetry.") for word in named}
    assert {*q2compile.__all__, *telemetry.__all__} - named == {"__version__"}


def test_options_are_those_of_config() -> None:
    """In the same order, of the same types."""
    assert list(get_type_hints(q2compile.Options)) == [f.name for f in fields(q2compile.Config)]
    assert get_type_hints(q2compile.Options) == get_type_hints(q2compile.Config)
    assert set(get_type_hints(q2compile.TelemetryMapping)) == {
        f.name for f in fields(TelemetryOptions)
    }


def test_changes_of_a_recipe_are_those_that_resolve_takes() -> None:
    assert set(get_type_hints(q2compile.RecipeChange)) == {"recipe", "base", *GEMMS}
    for gemm, change in zip(GEMMS, (FpropChange, DgradChange, WgradChange), strict=True):
        assert tuple(get_type_hints(change)) == GEMMS[gemm]
    hints = get_type_hints(OperandChange)
    assert set(hints) == {f.name for f in fields(Operand)}
    assert get_args(hints["source"]) == SOURCES


def test_modes_are_those_of_inductor() -> None:
    """The modes of this torch, or of another version."""
    assert {"default", *list_mode_options()} <= {*get_args(q2compile.Mode)}
