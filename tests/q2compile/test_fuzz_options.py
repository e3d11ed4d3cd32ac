# SPDX-License-Identifier: Apache-2.0
"""Options of every wrong value and type (hypothesis): each is accepted, or rejected by our
ValueError that names the option, however it was given.

    Q2COMPILE_FUZZ=2000 .venv/bin/python -m pytest tests/q2compile/test_fuzz_options.py   # more
"""

import json
import os
from collections import OrderedDict, UserDict
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from q2compile import Config
from q2compile.config import CONFIG_FILE_VARIABLE
from q2compile.errors import ConfigError
from q2compile.passes import pass_names
from q2compile.recipes.published import RECIPES
from q2compile.recipes.recipe import GEMMS

CASES = int(os.environ.get("Q2COMPILE_FUZZ", "10"))
FUZZ = settings(max_examples=20 * CASES, suppress_health_check=list(HealthCheck))
FUZZ_COMPILED = settings(max_examples=CASES, suppress_health_check=list(HealthCheck))


class Hostile:
    """An object whose every method raises."""

    def __repr__(self):
        raise RuntimeError("repr")

    __str__ = __eq__ = __hash__ = __bool__ = __len__ = __iter__ = __fspath__ = __repr__


class HostileMeta(type):
    def __repr__(cls):
        raise RuntimeError("repr")


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"policy": value}
    return value


def cyclic():
    value = {}
    value["recipe"] = value
    return value


VALUES = [
    *(None, True, 0, 1, -1, 3.5, float("nan"), 10**5000, 1j, b"bf16", "", " ", "\0", "\ud800"),
    *((), [], {}, [[]], set(), {"bf16"}, frozenset(), range(3), object(), Hostile(), Hostile),
    *(HostileMeta("X", (), {}), int, len, lambda: 0, Ellipsis, NotImplemented, iter("a")),
    *(torch.ones(3), torch.tensor(1), nn.Linear(2, 2), torch.float32, torch.device("cpu")),
    *(np.ones(3), np.array("bf16"), np.bool_(True), Path("x"), UserDict(a=1), OrderedDict()),
    *(nested(30), nested(100_000), cyclic(), "bf16" * 10**5, ["merge_seeds", 3], "re:(" * 9),
    *("re:a{99999999999}", "re:" + "(" * 5000, "[z-a]", "[]", "!a", {3: "bf16"}, {"*": 3}),
    *({None: None}, {"*": {"fprop": 3}}, {"*": {"fprop": {"x": []}}}, {"": {}}, {"recipe": []}),
    *({"base": "nvfp4", "wgrad": {"dy": {"scheme": 3}}}, {"wgrad": {"dy": {"scheme": "x"}}}),
    *(
        {"max_autotune": "yes"},
        {"max_autotune": None},
        {"no": 1},
        {"joint_custom_post_pass": 3},
    ),
    *({"triton.cudagraphs": 2}, {"cpp.threads": "x"}, {"post_grad_fusion_options": 3}),
]
# By index, because hypothesis prints what it samples, and some of these values can't be printed.
ODD = st.integers(0, len(VALUES) - 1).map(lambda i: VALUES[i])
RIGHT = {
    "recipe": st.sampled_from([*RECIPES, {"base": "nvfp4", "fprop": "bf16"}]),
    "policy": st.just({"*": "bf16", "up": {"recipe": "nvfp4", "dgrad": "bf16"}}),
    "global_scale": st.sampled_from(["pow2", "exact"]),
    "mode": st.sampled_from([None, "default", "max-autotune"]),
    "inductor": st.just({"epilogue_fusion": False}),
    "inner": st.sampled_from(["inductor", "eager"]),
    "disable_passes": st.sampled_from([[], ["merge_seeds"], ("merge_seeds",)]),
    "on_error": st.sampled_from(["raise", "bf16"]),
}
WORDS = st.text(max_size=20) | st.sampled_from(
    [*RECIPES, *GEMMS, *pass_names(), "x", "w", "dy", "scheme"]
)
TREES = st.recursive(
    ODD | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
NAMES = [f.name for f in fields(Config)]


@st.composite
def one_wrong(draw):
    """Right options, but one of any value; and the name of that one."""
    name = draw(st.sampled_from(NAMES))
    others = draw(st.sets(st.sampled_from(sorted(RIGHT)), max_size=2)) - {name}
    if name == "inner" or "inner" in others:
        others -= {"mode", "inductor"}
    options = {other: draw(RIGHT[other]) for other in sorted(others)}
    if options.get("inner") == "eager" and name in ("mode", "inductor"):
        del options["inner"]
    options[name] = draw(TREES)
    return name, options


def said(error):
    """The message, which must be one that can be shown to people."""
    text = str(error)
    text.encode()
    assert len(text) < 4000 and "\n" not in text
    return text


@FUZZ
@given(one_wrong())
def test_an_option_is_taken_or_refused_by_name(case):
    name, options = case
    try:
        Config.from_options(options)
    except ConfigError as error:
        assert name in said(error), said(error)


@FUZZ
@given(TREES)
def test_options_of_any_type(options):
    try:
        Config.from_options(options)
    except ConfigError as error:
        assert any(word in said(error) for word in ("option", *NAMES))


@FUZZ
@given(TREES)
def test_mode_of_any_type(mode):
    try:
        Config.from_options({}, mode)
    except ConfigError as error:
        assert "mode" in said(error)


@FUZZ_COMPILED
@given(one_wrong())
def test_through_torch_compile_it_is_the_same_error(tmp_path_factory, case):
    """Dynamo lets it through as it is. A folder is made only here."""
    name, options = case
    torch._dynamo.reset()
    model = nn.Linear(16, 16)
    model.compile(backend="quartet2", options={"inner": "eager", "recipe": "bf16", **options})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.getbasetemp())
        try:
            model(torch.randn(2, 16))
        except ConfigError as error:
            assert name in said(error) or "'eager'" in said(error)


@FUZZ
@given(
    st.binary(max_size=40)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | WORDS,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(WORDS | st.sampled_from(NAMES), inner, max_size=3)
        ),
        max_leaves=6,
    ).map(lambda tree: json.dumps(tree).encode()),
    st.sampled_from(["toml", "json"]),
)
def test_a_config_file_of_anything(tmp_path_factory, content, kind):
    path = tmp_path_factory.getbasetemp() / f"q2.{kind}"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CONFIG_FILE_VARIABLE, str(path))
        try:
            Config.from_options(None)
        except ConfigError as error:
            said(error)


@pytest.mark.parametrize("kind", ["toml", "json"])
def test_a_config_file_nested_deep(tmp_path, monkeypatch, kind):
    path = tmp_path / f"q2.{kind}"
    path.write_text("[" * 10**5 if kind == "json" else "a=" + "[" * 10**5)
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, str(path))
    with pytest.raises(ConfigError, match="nested too deep"):
        Config.from_options(None)


def test_a_config_file_with_a_key_twice(tmp_path, monkeypatch):
    """JSON readers keep its first place and its last value: another line of a policy would win."""
    path = tmp_path / "q2.json"
    path.write_text('{"policy": {"*": "bf16", "up": "bf16", "*": "quartet2"}}')
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, str(path))
    with pytest.raises(ConfigError, match=r"the key '\*' occurs twice"):
        Config.from_options(None)
