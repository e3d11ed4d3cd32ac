# SPDX-License-Identifier: Apache-2.0
"""Dynamo reuses a graph that an equal call of torch.compile compiled. Calls are equal only if their
options now mean the same, however the options were given."""

import copy
import json
import os

import pytest
import torch
from torch import nn

from q2compile import Config
from q2compile.config import CONFIG_FILE_VARIABLE, CallArguments, resolved_policy
from q2compile.torch_internals.dynamo import own_compile_call

pytestmark = pytest.mark.usefixtures("fresh_compiler", "only_rewritten")

EAGER = {"inner": "eager"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(self.up(x).relu())


@pytest.fixture
def formats(monkeypatch):
    """The formats of fprop of up and down, in every compiled graph; the last graph is the current
    one."""
    from q2compile import backend

    compiled, rewrite = [], backend.rewrite

    def spy(gm, config, names):
        rows = rewrite(gm, config, names)
        compiled.append({row.module: row.fprop for row in rows})
        return rows

    monkeypatch.setattr(backend, "rewrite", spy)
    return compiled


def by_module_compile(model, options):
    model.compile(backend="quartet2", options=options)
    return model


def by_torch_compile(model, options):
    return torch.compile(model, backend="quartet2", options=options)


def by_function(model, options):
    return torch.compile(model.forward, backend="quartet2", options=options)


def by_config(model, options):
    return torch.compile(model, backend="quartet2", options=Config(**options))


def by_file(model, options):
    with open(os.environ[CONFIG_FILE_VARIABLE], "w") as file:
        json.dump(options, file)
    return torch.compile(model, backend="quartet2")


def by_one_dict(model, options, shared={}):  # noqa: B006  a user's, changed from call to call
    shared.clear()
    shared.update(options)
    return torch.compile(model, backend="quartet2", options=shared)


def by_nested_dict(model, options, shared={"policy": {}}):  # noqa: B006
    """The dict in the options' dict is changed."""
    for key in [k for k in shared if k != "policy"]:
        del shared[key]
    shared["policy"].clear()
    shared["policy"].update(options.get("policy", {}))
    shared.update({k: v for k, v in options.items() if k != "policy"})
    return torch.compile(model, backend="quartet2", options=shared)


WAYS = [
    by_module_compile,
    by_torch_compile,
    by_function,
    by_config,
    by_file,
    by_one_dict,
    by_nested_dict,
]
OTHER_ORDER = {"policy": {"up": "quartet2", "*": "bf16"}}
CHANGES = {
    "the order of a policy": ({"policy": {"*": "bf16", "up": "quartet2"}}, OTHER_ORDER),
    "a recipe": ({"recipe": "nvfp4"}, {"recipe": "bf16"}),
    "the inside of a recipe": (
        {"recipe": {"base": "quartet2", "dgrad": "bf16"}},
        {"recipe": {"base": "nvfp4", "dgrad": "bf16"}},
    ),
    "a line of a policy": ({"policy": {"up": {"fprop": "nvfp4"}}}, {"policy": {"up": "bf16"}}),
    "no options": ({"policy": {"up": "bf16"}}, {}),
}


@pytest.fixture(autouse=True)
def config_file(tmp_path, monkeypatch, request):
    if "by_file" in request.node.name:
        monkeypatch.setenv(CONFIG_FILE_VARIABLE, str(tmp_path / "q2.json"))


@pytest.mark.parametrize(
    ("way", "change"),
    [(way, "the order of a policy") for way in WAYS]
    + [(by_torch_compile, change) for change in CHANGES]
    + [(by_file, "no options"), (by_one_dict, "a recipe"), (by_nested_dict, "no options")],
)
def test_other_options_are_in_force_at_once(formats, way, change):
    model, x = Net(), torch.randn(4, 32)
    for options in CHANGES[change]:
        way(model, {**EAGER, **options})(x)
        policy = resolved_policy(Config(**options))
        wanted = {name: policy.resolve(name)[0].texts()[0] for name in ("up", "down")}
        assert formats[-1] == wanted
    assert len(formats) == 2


@pytest.mark.parametrize("way", WAYS)
def test_equal_options_share_one_graph(formats, way):
    """Also after the first compiled call has read its own: per-block compile makes one each."""
    model, x = Net(), torch.randn(4, 32)
    options = {**EAGER, "policy": {"*": "bf16", "up": {"recipe": "nvfp4", "dgrad": "bf16"}}}
    for _ in range(3):
        compiled = way(model, copy.deepcopy(options))
        compiled(x)
        compiled(x)
    assert len(formats) == 1


def test_nothing_of_the_user_is_written_to():
    """Neither the options nor torch's record of a call change."""
    given = [{**EAGER, "policy": {"up": "bf16"}} for _ in range(2)]
    before, model, x = copy.deepcopy(given), Net(), torch.randn(4, 32)
    compiled = [by_torch_compile(model, options) for options in given]
    for call in compiled:
        call(x)
        call(x)
    assert given == before and all(type(options["policy"]) is dict for options in given)
    assert own_compile_call(compiled[1]).kwargs == {"options": given[1]}
    assert own_compile_call(compiled[1]).kwargs["options"] is given[1]


def test_a_compiled_model_does_not_follow_its_options(formats):
    """A later graph of it, for another rank of input, is compiled by the options of the first."""
    options = {**EAGER, "policy": {"up": "bf16"}}
    compiled = by_torch_compile(Net(), options)
    compiled(torch.randn(4, 32))
    options["policy"]["down"] = "bf16"
    compiled(torch.randn(2, 4, 32))
    assert len(formats) == 2 and formats[0] == formats[1]


def test_a_wrong_option_raises_though_an_equal_value_was_right():
    """1 == True in Python."""
    model, x = Net(), torch.randn(4, 32)
    by_torch_compile(model, {**EAGER, "strict": True})(x)
    with pytest.raises(ValueError, match="strict: got 1"):
        by_torch_compile(model, {**EAGER, "strict": 1})(x)


def test_options_of_another_backend_are_left_alone():
    """The wrapper of a backend that calls ours is the user's."""
    from q2compile.backend import quartet2

    def own(gm, inputs, options):
        return quartet2(gm, inputs, options={**EAGER, **options})

    seen = []

    def spy(gm, inputs, **kwargs):
        seen.append(kwargs["options"])
        return own(gm, inputs, **kwargs)

    compiled = torch.compile(Net(), backend=spy, options={"recipe": "nvfp4"})
    compiled(torch.randn(4, 32))
    compiled(torch.randn(2, 4, 32))
    assert seen == [{"recipe": "nvfp4"}] * 2 and all(type(s) is dict for s in seen)


@pytest.mark.parametrize(
    "one, other",
    [
        ({"policy": {"a": "bf16", "b": "nvfp4"}}, {"policy": {"b": "nvfp4", "a": "bf16"}}),
        ({"inductor": {"debug": True}}, {"inductor": {"debug": False}}),
        (
            {"inductor": {"post_grad_fusion_options": {"a": {}, "b": {}}}},
            {"inductor": {"post_grad_fusion_options": {"b": {}, "a": {}}}},
        ),
        ({"dump": "a"}, {"dump": "b"}),
        ({"dump": "a"}, {}),
        ({"telemetry": {"every": 10}}, {"telemetry": {"every": 20}}),
        ({"telemetry": {"every": 10}}, {"telemetry": {}}),
        ({"telemetry": {}}, {}),
        ({"mode": "max-autotune"}, {}),
        ({"disable_passes": ["merge_seeds"]}, {}),
    ],
)
def test_call_arguments_compare_by_meaning(one, other):
    read = CallArguments(Config(**one))
    for kwargs in ({"options": one}, {"options": Config(**one)}, CallArguments(Config(**one))):
        assert read == kwargs and kwargs == read
    for kwargs in (
        {"options": other},
        {"options": Config(**other)},
        CallArguments(Config(**other)),
    ):
        assert read != kwargs and kwargs != read
    assert read != {} and read != {"options": {"recip": 3}} and read != 3
    assert CallArguments(Config(mode="max-autotune")) == {"mode": "max-autotune"}
    assert CallArguments(Config()) == {}
