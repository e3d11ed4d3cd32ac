# SPDX-License-Identifier: Apache-2.0
"""A recipe is data: its three GEMMs as text, options that change it, and changes that
are rejected."""

import re
from itertools import product
from pathlib import Path
from typing import get_args

import pytest

from q2compile.recipes.option_types import RecipeName
from q2compile.recipes.published import PAPERS, RECIPES
from q2compile.recipes.recipe import GEMMS, Gemm, parse
from q2compile.recipes.resolve import resolve

ROOT = Path(__file__).parents[3]


def text(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def test_every_list_of_recipes_has_each():
    """In the order of RECIPES, where a reader sees it: types, papers, the README and the guide of
    options, examples/paper_tables.py. The README links each paper, and the guide says when to take
    which."""
    row = r"^\| `(\w+)` \| (.*?) +\|"
    linked = r"\[(.*arXiv (\S+))\]\(https://arxiv.org/abs/\2\)"
    listed = dict(re.findall(row, re.sub(linked, r"\1", text("README.md")), re.MULTILINE))
    assert list(RECIPES) == list(listed) == list(PAPERS) == list(get_args(RecipeName))
    assert {**listed, "bf16": ""} == {**PAPERS, "bf16": ""}
    page = text("examples/guides/configure.md")
    (others,) = re.findall(r'"recipe": "quartet2",  # or (.*), or ', page)
    assert ["quartet2", *others.split(", ")] == list(RECIPES)
    (when,) = re.findall(r"\| you want \| recipe \|\n(.*?)\n\n", page, re.DOTALL)
    assert {*re.findall(r"`(\w+)`", when)} == set(RECIPES)
    (tables,) = re.findall(r"RECIPES = \((.*?)\n\)", text("examples/paper_tables.py"), re.DOTALL)
    assert {*re.findall(r'"(\w+)"', tables), "bf16"} == set(RECIPES)


def test_quartet2_as_text():
    recipe = resolve("quartet2")
    second = "rht128>nvfp4_ms_eden_pow2 @ requantize>rht128>nvfp4_ms_eden_pow2"
    assert recipe.texts() == ("nvfp4_46_pow2 @ nvfp4_46_pow2", second, second)


def test_exact_global_scale_selects_the_papers_schemes():
    recipe = resolve("quartet2", "exact")
    assert recipe.texts()[0] == "nvfp4_46 @ nvfp4_46"
    assert str(recipe.dgrad.a) == "rht128>nvfp4_ms_eden"


def test_text_and_back():
    for name, global_scale in product(RECIPES, ["pow2", "exact"]):
        recipe = resolve(name, global_scale)
        back = parse(*recipe.texts())
        assert (back.fprop, back.dgrad, back.wgrad) == (recipe.fprop, recipe.dgrad, recipe.wgrad)


def test_bf16_fprop_leaves_nothing_to_requantize():
    """Backward then quantizes the high-precision operand, whose product fprop computed."""
    recipe = resolve({"base": "quartet2", "fprop": "bf16"})
    assert recipe.fprop is None
    assert recipe.dgrad.b.source == recipe.wgrad.b.source == "fresh"


def test_an_operand_of_ones_own():
    recipe = resolve(
        {"base": "quartet2", "wgrad": {"dy": {"transform": "rht32"}, "x": {"transform": "rht32"}}}
    )
    assert str(recipe.wgrad) == ("rht32>nvfp4_ms_eden_pow2 @ requantize>rht32>nvfp4_ms_eden_pow2")
    assert recipe.name == "quartet2 with changed wgrad"


def test_illegal_combinations_are_refused_by_name():
    for spec, said in [
        (3, "recipe: got 3 (int)"),
        ({"base": "quartet2", "recipe": "bf16"}, "both 'recipe' and 'base'"),
        ({"base": "quartet2", "wgrad": {"w": {}}}, "unknown operand of wgrad 'w'"),
        ({"base": "quartet2", "wgrad": {"x": {"schema": "a"}}}, "did you mean 'scheme'?"),
        ({"base": "quartet2", "wgrad": {"x": {"scheme": "nvfp5"}}}, "did you mean 'nvfp4'?"),
        ({"base": "quartet2", "wgrad": {"x": {"transform": "rht32"}}}, "the rotations cancel only"),
        ({"base": "quartet2", "wgrad": {"x": {"scheme": "nvfp4_sr"}}}, "on only one operand"),
        ({"base": "tetrajet2", "wgrad": {"x": {"scheme": "nvfp4_ms_eden"}}}, "few tokens"),
        ({"base": "quartet2", "dgrad": {"dy": {"source": "requantize"}}}, "have another source"),
        ({"base": "quartet2", "fprop": {"x": {"scheme": "nvfp4_sr"}}}, "must be deterministic"),
        ({"base": "bf16", "fprop": {"x": {"scheme": "nvfp4_46"}}}, "fprop.w: the base 'bf16'"),
        ({"base": "quartet2", "fprop": 1}, "fprop: got 1"),
        ({"base": "quartet2", "dgrad": "nvfp4"}, "only the same scheme can be re-used"),
        ({"base": "quartet2", "wgrad": {"x": {"source": "reuse"}}}, "only w has codes"),
        ({"base": "quartet2", "dgrad": {"w": {"source": "forward"}}}, "only x in wgrad"),
        (
            {"base": "quartet2", "fprop": "quartet", "dgrad": {"dy": {"scheme": "mxfp4_quest"}}},
            "QuEST belongs to fprop",
        ),
        ({"base": "quartet", "fprop": {"x": {"transform": "none"}}}, "go together"),
        ({"base": "mxfp4", "dgrad": {"dy": {"scheme": "nvfp4_sr"}}}, "use one format"),
        ({"base": "tetrajet2", "wgrad": {"dy": {"scheme": "nvfp4_16x16"}}}, "16x16 blocks"),
        ({"base": "quartet2", "fprop": {"x": "nvfp4"}}, "fprop.x: got 'nvfp4'"),
    ]:
        with pytest.raises(ValueError) as error:
            resolve(spec)
        assert said in str(error.value)


def test_gemm_operands_stand_in_the_order_of_the_table():
    assert GEMMS == {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
    assert Gemm.parse("bf16") is None
