# SPDX-License-Identifier: Apache-2.0
"""Where a function runs several models, module names begin with the function's name for each."""

import functools
import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from q2compile import explain
from q2compile.report.report import RunReport, collector

pytestmark = pytest.mark.usefixtures("fresh_compiler", "only_rewritten")

EAGER = {"inner": "eager"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Model(nn.Module):
    """``breaks`` puts a graph break before the block, so that Dynamo compiles it on its own."""

    def __init__(self, breaks=False):
        super().__init__()
        self.block = Block()
        self.breaks = breaks

    def forward(self, x):
        if self.breaks:
            torch._dynamo.graph_break()
        return self.block(x)


def arguments(student, teacher, x):
    return student(x) - teacher(x)


def keywords(x, *, student, teacher):
    return student(x) - teacher(x)


def through_a_helper(student, teacher, x):
    def run(model):
        return model(x)

    return run(student) - run(teacher)


def with_a_break(student, teacher, x):
    y = student(x)
    torch._dynamo.graph_break()
    return y - teacher(x)


def in_a_closure(student, teacher):
    def step(x):
        return student(x) - teacher(x)

    return step


def of_globals(x):
    return STUDENT(x) - TEACHER(x)


def in_a_dict(models, x):
    return models["student"](x) - models["teacher"](x)


def in_a_list(models, x):
    return models[0](x) - models[1](x)


class Trainer:
    def __init__(self, student, teacher):
        self.student, self.teacher = student, teacher

    def step(self, x):
        return self.student(x) - self.teacher(x)


class Agent:
    def __init__(self, net):
        self.net = net


def of_two_objects(actor, critic, x):
    return actor.net(x) - critic.net(x)


def calls(breaks):
    """name -> (function, its arguments before x, its keywords, its names for the models)."""
    a, b = Model(breaks), Model(breaks)
    b.requires_grad_(False)  # or Dynamo would run it with the graph of the other
    global STUDENT, TEACHER
    STUDENT, TEACHER = a, b
    both = ("student", "teacher")
    return {
        "arguments": (arguments, (a, b), {}, both),
        "keywords": (keywords, (), {"student": a, "teacher": b}, both),
        "through a helper": (through_a_helper, (a, b), {}, both),
        "with a break": (with_a_break, (a, b), {}, both),
        "a closure": (in_a_closure(a, b), (), {}, both),
        "globals": (of_globals, (), {}, ("STUDENT", "TEACHER")),
        "a dict": (in_a_dict, ({"student": a, "teacher": b},), {}, both),
        "a list": (in_a_list, ([a, b],), {}, ("0", "1")),
        "attributes": (Trainer(a, b).step, (), {}, both),
        "two objects": (of_two_objects, (Agent(a), Agent(b)), {}, ("actor.net", "critic.net")),
        "a wrapped model": (
            arguments,
            (a if breaks else torch.compile(a, backend="eager"), b),
            {},
            both,
        ),
    }


def sites(*models):
    return [f"{m}{'.' if m else ''}block.{leaf}" for m in models for leaf in ("up", "down")]


def modules(report):
    return [row.module for row in report.rows]


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("way", calls(False))
def test_a_compiled_function(way, breaks):
    """The same names whether it is one graph or a graph for each model."""
    function, before, keywords, models = calls(breaks)[way]
    options = {**EAGER, "strict": True, "policy": {f"{models[1]}.*": "bf16"}}
    report = explain(function, *before, torch.randn(4, 32), options=options, **keywords)
    taken = {row.module: row.taken for row in report.rows}
    assert taken == dict.fromkeys(sites(models[0]), True) | dict.fromkeys(sites(models[1]), False)


def one_of_a_kind(model, x):
    return model(x)


def of_a_part(model, head, x):
    return head(model(x))


def with_a_loss(model, norm, x):
    return norm(model(x))


class OneTrainer:
    def __init__(self):
        self.model, self.norm = Model(), nn.LayerNorm(32)

    def step(self, x):
        return self.norm(self.model(x))


@pytest.mark.parametrize(
    ("function", "before", "label"),
    [
        (one_of_a_kind, (Model(),), ""),
        (with_a_loss, (Model(), nn.LayerNorm(32)), ""),
        (OneTrainer().step, (), "model"),
        (lambda models, x: models["a"](x), ({"a": Model()},), "a"),
    ],
)
def test_one_model_keeps_its_names(function, before, label):
    options = {**EAGER, "strict": True, "policy": {f"{label}*up": "bf16"}}
    report = explain(function, *before, torch.randn(4, 32), options=options)
    assert modules(report) == sites(label)


def test_a_part_of_a_model_is_no_second_one():
    model = nn.Sequential(Model(), nn.Linear(32, 32))
    report = explain(of_a_part, model[0], model[1], torch.randn(4, 32), options=EAGER)
    assert modules(report) == [*sites("model"), "head"]

    def step(model, x):
        head = model[1]
        return head(model[0](x))

    torch._dynamo.reset()
    report = explain(step, model, torch.randn(4, 32), options=EAGER)
    assert modules(report) == ["0.block.up", "0.block.down", "1"]


def test_strict_refuses_a_pattern_that_matches_no_model_of_a_function():
    """In the first graph, though another one holds the other model."""
    x = torch.randn(4, 32)
    for policy in ({"teacher": "bf16"}, {"block.*": "bf16"}, {"other.*": "bf16"}):
        torch._dynamo.reset()
        options = {**EAGER, "strict": True, "policy": policy}
        step = torch.compile(with_a_break, backend="quartet2", options=options)
        with pytest.raises(ValueError, match="match no module"):
            step(Model(), Model(), x)


def collected(call):
    """The report of a model that calls torch.compile itself."""
    report = RunReport()
    token = collector.set(report)
    try:
        call()
    finally:
        collector.reset(token)
    return report


def by_block(options, *models):
    for model in models:
        model.block.compile(backend="quartet2", options={**EAGER, **options})
    return models


def test_per_block_compile_has_each_models_own_names():
    """In a function that is not compiled, variables have no influence. Each model's blocks have
    options of their own."""
    student, teacher, x = Model(), Model(), torch.randn(4, 32)
    by_block({"policy": {"block.up": "bf16"}}, student)
    by_block({}, teacher)
    report = collected(lambda: student(x) - teacher(x))
    assert modules(report) == [*sites(""), *sites("")]
    assert [row.taken for row in report.rows] == [False, True, True, True]


def test_models_that_share_a_graph_are_not_told_apart_by_a_policy():
    """Dynamo runs both with the code compiled for the first, whose parameters are inputs."""
    for policy in ({"teacher.*": "bf16"}, {"*block.up": "bf16"}):
        student, teacher, x = Model(True), Model(True), torch.randn(4, 32)
        options = {**EAGER, "policy": policy}
        call = torch.compile(arguments, backend="quartet2", options=options)
        step = partial(call, student, teacher, x)
        if "teacher.*" in policy:
            said = "'student.block.up' and 'teacher.block.up' different recipes"
            with pytest.raises(ValueError, match=said):
                step()
        else:
            report = collected(step)
            assert modules(report) == sites("student")
            assert [row.taken for row in report.rows] == [False, True]
            assert "teacher.block.up, teacher.block.down" in report.notes[0]


def test_per_block_compile_of_one_model_keeps_its_names():
    (student,) = by_block({}, Model())
    average, x = Model(), torch.randn(4, 32)
    assert modules(collected(lambda: student(x) - average(x))) == sites("")


@pytest.mark.parametrize("breaks", [False, True])
def test_models_that_are_compiled_themselves_keep_their_names(breaks):
    student, teacher, x = Model(breaks), Model(breaks), torch.randn(4, 32)
    options = {**EAGER, "strict": True, "policy": {"block.up": "bf16"}}
    for model in (student, teacher):
        model.compile(backend="quartet2", options=options)
    found = modules(collected(lambda: arguments(student, teacher, x)))
    assert found and set(found) == set(sites(""))


def test_a_reader_of_the_report_is_told_once_of_a_pattern_that_matches_nothing():
    options = {**EAGER, "policy": {"nothing": "bf16"}}
    report = explain(with_a_break, Model(), Model(), torch.randn(4, 32), options=options)
    assert sum("'nothing'" in note for note in report.notes) == 1


def test_nothing_of_the_callers_is_kept():
    """A look at their variables must not keep them: the first batch, say."""
    student, teacher = by_block({}, Model(), Model())
    freed = []

    def step():
        batch = torch.randn(4, 32)
        reference = weakref.ref(batch)
        y = student(batch) - teacher(batch)
        del batch, y
        freed.append(reference() is None)

    gc.disable()
    try:
        with torch.no_grad():
            step()
    finally:
        gc.enable()
    assert freed == [True]


# ---- what the callers hold ----------------------------------------------------------------------


class OldNames(nn.Module):
    """The names of torch < 2.0."""

    def named_parameters(self, prefix="", recurse=True):
        raise TypeError("no remove_duplicate")


class NoInit(nn.Module):
    def __init__(self):
        pass


class NoDict:
    @property
    def __dict__(self):
        raise RuntimeError("touched")


class Untouchable(dict):
    def items(self):
        raise RuntimeError("touched")

    __iter__ = __len__ = __bool__ = values = keys = get = __getitem__ = items


class Proxy:
    def __getattribute__(self, name):
        if name == "__class__":  # Dynamo asks every variable for it
            return Proxy
        raise RuntimeError(f"touched: {name}")

    __bool__ = __len__ = __eq__ = __hash__ = lambda self: 1 / 0


def strange():
    return [OldNames(), NoInit(), NoDict(), Untouchable(a=1), Proxy(), [Proxy()], {"a": NoInit()}]


@pytest.mark.parametrize("breaks", [False, True])
def test_objects_in_scope_are_not_touched(breaks):
    """The model does not use them: variables of a caller, of the function, of its globals."""
    student, teacher, x = Model(breaks), Model(breaks), torch.randn(4, 32)
    teacher.requires_grad_(False)
    old, no_init, no_dict, untouchable, proxy, in_list, in_dict = strange()

    def step(x, kept):
        if kept is None:
            return old, no_init, no_dict, untouchable, proxy, in_list, in_dict
        return student(x) - teacher(x)

    policy = {"teacher.*": "bf16"}
    report = explain(step, x, kept=1, options={**EAGER, "strict": True, "policy": policy})
    assert modules(report) == [*sites("student"), *sites("teacher")]


def test_the_time_does_not_depend_on_a_list_in_scope():
    """Only the elements that the code names are read from a list."""
    asked = []

    class Counted(list):
        def __iter__(self):
            asked.append("iter")
            return super().__iter__()

        def __getitem__(self, i):
            asked.append(i)
            return super().__getitem__(i)

    data, model = Counted([0] * 10), Model(breaks=True)

    def step(x):
        return len(data) if x is None else model(x)

    explain(step, torch.randn(4, 32), options=EAGER)
    data = Counted([0] * 10)
    model = Model()
    compiled = torch.compile(model, backend="quartet2", options=EAGER)
    compiled(torch.randn(4, 32))
    assert asked == []


# ---- what torch.compile is given ----------------------------------------------------------------


class Holder:
    def __init__(self, model):
        self.model = model

    def __call__(self, x):
        return self.model(x)


def decorated(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


GIVEN = {
    "partial": partial,
    "partial of a partial": lambda model: partial(partial(model)),
    "partial of a bound method": lambda model: partial(model.forward),
    "bound method": lambda model: model.forward,
    "decorated forward": lambda model: decorated(model.forward),
    "decorated model": lambda model: decorated(model),
    "callable object": Holder,
    "partial of a callable object": lambda model: partial(Holder(model)),
    "lambda": lambda model: lambda x: model(x),
    "partial of a function": lambda model: partial(one_of_a_kind, model),
}


# These combine two of the others, which are all tried with a graph break.
ONCE = ("partial of a partial", "partial of a bound method", "partial of a callable object")


@pytest.mark.parametrize(
    ("way", "breaks"),
    [*((way, False) for way in GIVEN), *((way, True) for way in GIVEN if way not in ONCE)],
)
def test_names_are_the_models_whatever_holds_it(way, breaks):
    given, x = GIVEN[way](Model(breaks)), torch.randn(4, 32)
    options = {**EAGER, "strict": True, "policy": {"block.up": "bf16"}}
    compiled = torch.compile(given, backend="quartet2", options=options)
    report = collected(lambda: compiled(x))
    assert {row.module: row.taken for row in report.rows} == {"block.up": False, "block.down": True}
    torch._dynamo.reset()
    options["policy"] = {"blok.up": "bf16"}
    with pytest.raises(ValueError, match=r"'blok.up' match no module.*did you mean 'block.up'"):
        torch.compile(given, backend="quartet2", options=options)(x)


def test_partial_of_a_function_names_models_by_its_arguments():
    given = partial(partial(arguments, Model()), Model())
    report = explain(given, torch.randn(4, 32), options={**EAGER, "policy": {"teacher*": "bf16"}})
    assert [row.module for row in report.rows if row.taken] == sites("student")


def test_strict_refuses_a_pattern_also_where_no_model_was_found():
    """Models that a loop takes from a list have no name in the code."""
    models, x = [Model(), Model()], torch.randn(4, 32)

    def step(x):
        for model in models:
            x = model(x)
        return x

    options = {**EAGER, "strict": True, "policy": {"nothing": "bf16"}}
    with pytest.raises(ValueError, match="found no model.*'0.block.down', '0.block.up'"):
        torch.compile(step, backend="quartet2", options=options)(x)
    options["policy"] = {"1.*": "bf16"}
    taken = [r.module for r in explain(step, x, options=options).rows if r.taken]
    assert taken == sites("0")
