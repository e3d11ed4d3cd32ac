# SPDX-License-Identifier: Apache-2.0
"""The recipe of each module."""

import pytest

from q2compile.recipes.policy import Policy


def recipe_of(policy, name, default="quartet2"):
    recipe, pattern = Policy.build(default, policy, "pow2").resolve(name)
    return recipe.name, pattern


def test_the_last_match_wins():
    policy = {"*": "bf16", "layers.*": "quartet2", "layers.0.*": "bf16"}
    assert recipe_of(policy, "lm_head") == ("bf16", "*")
    assert recipe_of(policy, "layers.1.up") == ("quartet2", "layers.*")
    assert recipe_of(policy, "layers.0.up") == ("bf16", "layers.0.*")
    assert recipe_of(dict(reversed(policy.items())), "layers.0.up") == ("bf16", "*")
    assert recipe_of({}, "anything") == ("quartet2", "")


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("*lm_head*", "model.lm_head", True),
        ("lm_head", "model.lm_head", False),  # a pattern covers the whole name
        ("model.layers.[01].*", "model.layers.1.mlp.up", True),
        ("model.layers.[01].*", "model.layers.10.mlp.up", False),
        ("model.layers.[!0].*", "model.layers.3.q", True),
        ("*.q?", "a.q1", True),
        ("re:layers\\.\\d+\\.up", "layers.12.up", True),
        ("re:layers\\.\\d", "layers.12", False),  # the whole name here too
        ("*Head*", "lm_head", False),  # case counts
    ],
)
def test_patterns(pattern, name, matches):
    assert recipe_of({pattern: "bf16"}, name)[0] == ("bf16" if matches else "quartet2")


def test_a_rule_for_one_gemm_changes_that_gemm_of_the_default():
    policy = Policy.build("quartet2", {"down": {"dgrad": "bf16"}}, "pow2")
    recipe, _ = policy.resolve("down")
    assert recipe.dgrad is None and recipe.fprop is not None
    assert recipe.wgrad == policy.default.wgrad
    assert recipe.name == "quartet2 with bf16 dgrad"


def test_patterns_that_match_nothing_are_found():
    policy = Policy.build("quartet2", {"*head": "bf16", "*.qq": "bf16"}, "pow2")
    assert policy.unmatched(["lm_head", "a.q"]) == ["*.qq"]
