# SPDX-License-Identifier: Apache-2.0
"""Strict parsing of options: errors show the value, the allowed values and the nearest name."""

import json
from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest
import torch

from q2compile import Config
from q2compile.config import CONFIG_FILE_VARIABLE, resolved_policy
from q2compile.errors import ConfigError


def cyclic():
    value = {}
    value["*"] = value
    return value


def test_defaults_are_the_contract():
    config = Config.from_options(None)
    assert (config.recipe, config.global_scale, config.inner) == ("quartet2", "pow2", "inductor")
    assert (config.dump, config.strict, config.mode) == (None, False, None)
    assert dict(config.policy) == {} and dict(config.inductor) == {}


def test_only_options_are_public():
    """`help(q2compile.Config)` shows the options, and not what the backend derives from them."""
    options = [field.name for field in fields(Config)]
    assert {name for name in dir(Config()) if name[0] != "_"} == {*options, "from_options"}
    assert list(signature(Config).parameters) == options


def test_what_is_wrong_is_said():
    for options, said in [
        ({"recipes": "quartet2"}, "unknown option 'recipes'; did you mean 'recipe'?"),
        ({"recipe": "quartett"}, "unknown recipe 'quartett'; did you mean 'quartet'?"),
        ({"policy": {"*": "bf17"}}, "unknown recipe 'bf17'; did you mean 'bf16'?"),
        ({"policy": {"*": {"dgard": "bf16"}}}, "did you mean 'dgrad'?"),
        ({"policy": {"re:(": "bf16"}}, "policy pattern 're:('"),
        ({"policy": {"layers.[0": "bf16"}}, "not a glob"),
        ({"policy": {"!head": "bf16"}}, "because the last match wins"),
        ({"policy": {"": "bf16"}}, "policy pattern: got ''"),
        ({"policy": {"re:": "bf16"}}, "policy pattern: got 're:'"),
        ({"policy": ["head"]}, "policy: got ['head']; allowed: a mapping"),
        ({"inductor": {"max_autotun": True}}, "did you mean 'max_autotune'?"),
        ({"global_scale": "exakt"}, "did you mean 'exact'?"),
        ({"inner": "triton"}, "unknown inner 'triton'"),
        ({"mode": "max-autotun"}, "did you mean 'max-autotune"),
        ({"strict": "yes"}, "strict: got 'yes'; allowed: True, False"),
        ({"dump": 3}, "dump: got 3"),
        ({"disable_passes": ["merge_seed"]}, "did you mean 'merge_seeds'?"),
        ({"disable_passes": "merge_seeds"}, "allowed: a list of names"),
        ({"inner": "eager", "mode": "max-autotune"}, "inner='eager' runs without Inductor"),
        ({"inner": "eager", "fuse_rotations": True}, "needs Inductor's lowerings"),
        ({"inductor": {"post_grad_custom_pre_pass": None}}, "holds q2compile's passes"),
    ]:
        with pytest.raises(ValueError) as error:
            Config.from_options(options)
        assert said in str(error.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recip": "x"}, "unknown option 'recip'; did you mean 'recipe'"),
        (["recipe"], "options: got ['recipe']"),
        ({"mode": ["x"]}, "unknown mode ['x']"),
        ({"disable_passes": 3}, "disable_passes: got 3; allowed: a list"),
        ({"disable_passes": None}, "disable_passes: got None"),
        ({"disable_passes": [["x"]]}, "unknown pass in disable_passes ['x']"),
        ({"dump": "a\0b"}, "dump: cannot write a\\x00b: "),
        ({"dump": "a\ud800b"}, "dump: cannot write "),
        ({"dump": "a" * 5000}, "File name too long"),
        ({"dump": "a/" * 5000}, "File name too long"),
        ({"inductor": {"max_autotune": "yes"}}, "max_autotune got 'yes'; allowed: bool"),
        ({"policy": {"*": {"fprop": {"x": {"scheme": []}}}}}, "fprop.x.scheme: got []"),
        ({"policy": cyclic()}, "policy: nested more than"),
    ],
)
def test_a_wrong_option_is_a_value_error_through_torch_compile(options, said):
    """Dynamo wraps a backend's exceptions in BackendCompilerFailed; the user must see a
    ValueError.
    """
    compiled = torch.compile(torch.nn.Linear(16, 16), backend="quartet2", options=options)
    with pytest.raises(ConfigError) as error:
        compiled(torch.randn(2, 16))
    assert said in str(error.value)


def test_a_wrong_option_is_not_below_the_frames_of_dynamo():
    """Only torch's call of the compiled module is left."""
    compiled = torch.compile(torch.nn.Linear(16, 16), backend="quartet2", options={"recip": "x"})
    with pytest.raises(ConfigError) as error:
        compiled(torch.randn(2, 16))
    files = {Path(frame.path).name for frame in error.traceback[1:]}
    assert files == {"eval_frame.py", "module.py"} and len(error.traceback) < 8


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({"recipe": {"fwd": "bf16"}}, "fprop"),
        ({"policy": {"*": {"grad_weight": "bf16"}}}, "wgrad"),
        ({"recipe": "NVFP4"}, "nvfp4"),
        ({"recipe": "bfloat16"}, "bf16"),
        ({"mode": "reduce_overhead"}, "reduce-overhead"),
        ({"mode": "max"}, "max-autotune"),
        ({"cache": True}, "cache_weights"),
        ({"inductor": {"cudagraphs": True}}, "triton.cudagraphs"),
        ({"options": {}}, ""),
        ({"mode": "fast"}, ""),
        ({"on_error": "recipes"}, ""),
        ({"inductor": {"quux": 1}}, ""),
    ],
)
def test_a_suggestion_is_one_that_can_have_been_meant(options, meant):
    with pytest.raises(ConfigError) as error:
        Config.from_options(options)
    said = str(error.value)
    assert f"did you mean {meant!r}?" in said if meant else "did you mean" not in said


def test_the_settings_of_inductor_are_not_listed():
    with pytest.raises(ConfigError) as error:
        Config(inductor={"max_autotun": True})
    said = str(error.value).partition("?")[2]
    assert said.endswith("are allowed; torch._inductor.list_options() lists them.")
    assert len(said) < 80


def test_equal_options_are_equal_configs_and_order_counts():
    """Equal options share compiled code; the order of a policy is part of its meaning."""
    one = {"policy": {"a": "bf16", "b": {"recipe": "quartet2", "dgrad": "bf16"}}}
    assert Config(**one) == Config(**json.loads(json.dumps(one)))
    assert hash(Config(**one)) == hash(Config(**one))
    other = {"policy": dict(reversed(one["policy"].items()))}
    assert Config(**one) != Config(**other)


def test_a_config_is_frozen_and_does_not_follow_its_options():
    options = {"policy": {"a": "bf16"}}
    config = Config(**options)
    options["policy"]["b"] = "bf16"
    assert list(config.policy) == ["a"]
    with pytest.raises(AttributeError):
        config.recipe = "bf16"


@pytest.mark.parametrize("kind", ["toml", "json"])
def test_the_config_file_is_the_base_and_options_win(tmp_path, monkeypatch, kind):
    """TOML keeps the order of a policy's lines, which decides between matching patterns."""
    path = tmp_path / f"q2.{kind}"
    if kind == "toml":
        path.write_text(
            'recipe = "bf16"\nstrict = true\n[policy]\n"*" = "quartet2"\n"a" = "bf16"\n'
        )
    else:
        policy = {"*": "quartet2", "a": "bf16"}
        path.write_text(json.dumps({"recipe": "bf16", "strict": True, "policy": policy}))
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, str(path))
    config = Config.from_options({"strict": False})
    assert (config.recipe, config.strict) == ("bf16", False)
    assert Config.from_options(config) is config  # the file is not read again over these options
    over = Config.from_options(Config(recipe="nvfp4"))
    assert (over.recipe, over.strict, over.policy) == ("nvfp4", True, config.policy)
    assert list(config.policy) == ["*", "a"]
    assert resolved_policy(config).resolve("a")[1] == "a"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("q2.toml", "recipe = ", "Invalid value"),
        ("q2.json", "{", "Expecting property name"),
        ("q2.json", "[1]", "got a list; allowed: a table of options"),
        ("q2.yaml", "recipe: bf16", "must end in .toml or .json"),
        ("q2.toml", 'recip = "bf16"', "did you mean 'recipe'?"),
    ],
)
def test_a_config_file_that_cannot_be_used(tmp_path, monkeypatch, name, text, said):
    (tmp_path / name).write_text(text)
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, str(tmp_path / name))
    with pytest.raises(ValueError, match=".*") as error:
        Config.from_options(None)
    assert str(error.value).startswith(f"{CONFIG_FILE_VARIABLE}={tmp_path / name}: ")
    assert said in str(error.value)


def test_a_config_file_is_blamed_for_its_own_mistakes_alone(tmp_path, monkeypatch):
    path = tmp_path / "q2.toml"
    path.write_text("strict = true")
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, str(path))
    for options in ({"recip": "bf16"}, {"inner": "triton"}, {"on_error": "bf16"}):
        with pytest.raises(ConfigError) as error:
            Config.from_options(options)
        assert CONFIG_FILE_VARIABLE not in str(error.value)
    path.write_text('inner = "triton"')
    assert Config.from_options({"inner": "eager"}).inner == "eager"  # replaces what is wrong there


def test_config_itself_names_the_nearest_option():
    with pytest.raises(ConfigError, match="unknown option 'recip'; did you mean 'recipe'"):
        Config(recip="bf16")


def test_a_pass_of_both_tables_is_listed_once():
    with pytest.raises(ConfigError) as error:
        Config(disable_passes=["x"])
    assert str(error.value).count("share_operands") == 1


def test_a_config_file_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, str(tmp_path / "none.toml"))
    with pytest.raises(ValueError, match="No such file"):
        Config.from_options(None)


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_a_file_with_a_byte_order_mark_is_read(suffix, tmp_path, monkeypatch):
    """Windows editors write one."""
    text = {"json": '{"recipe": "nvfp4"}', "toml": 'recipe = "nvfp4"\n'}[suffix]
    path = tmp_path / f"q2.{suffix}"
    path.write_text(text, encoding="utf-8-sig")
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, str(path))
    assert Config.from_options({}).recipe == "nvfp4"
