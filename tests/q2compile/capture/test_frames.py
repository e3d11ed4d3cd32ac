# SPDX-License-Identifier: Apache-2.0
"""A look at the variables of other functions changes nothing for them."""

import sys
import weakref

import pytest

from q2compile.capture.frames import look


class Thing:
    pass


def own(frame):
    return look(frame, lambda variables: dict(variables))


def test_it_sees_every_kind_of_variable():
    def outer(argument, *rest, **others):
        local, cell = 1, 2  # noqa: F841  it is looked at
        del argument

        def inner():
            return cell, names(sys._getframe(1))

        return inner()[1]

    def names(frame):
        return own(frame)

    found = outer(0, 3, key=4)
    assert found.pop("inner").__name__ == "inner"
    assert found == {"rest": (3,), "others": {"key": 4}, "local": 1, "cell": 2, "names": names}


def test_it_keeps_nothing_alive():
    def function():
        thing = Thing()
        seen = weakref.ref(thing)
        assert own(sys._getframe())["thing"] is thing
        del thing
        return seen() is None

    def generator():
        thing = Thing()
        seen = weakref.ref(thing)
        frame = sys._getframe()
        look(frame, lambda variables: variables["thing"])
        del thing
        yield seen() is None

    assert function() and next(generator())


def test_it_leaves_the_variables_of_a_module_alone():
    frame = sys._getframe()
    while frame.f_code.co_name != "<module>":
        frame = frame.f_back
    before = dict(frame.f_globals)
    assert own(frame) == before == dict(frame.f_globals)
    scope = {"own": own, "sys": sys}
    exec("class Body:\n    kept = 1\n    own(sys._getframe())\n", scope)
    assert scope["Body"].kept == 1


def test_it_leaves_what_others_have_of_a_frame_alone():
    def function():
        variable = 1
        mine = locals()
        own(sys._getframe())
        return mine["variable"], variable

    assert function() == (1, 1)


@pytest.fixture
def tracing():
    """sys.settrace for the test, and the coverage tool's own trace function afterwards."""
    before = sys.gettrace()
    yield sys.settrace
    sys.settrace(before)


def test_variables_survive_a_look_from_inside_a_debugger(tracing):
    """As when a model is compiled at pdb's prompt. Python then writes the frame's variables back,
    and they must still have their values."""
    looked = []

    def tracer(frame, event, argument):
        if event == "line" and frame.f_code is function.__code__:
            looked.append(own(frame).get("variable"))
        return tracer

    def function():
        variable = 1
        variable += 1
        return variable

    tracing(tracer)
    try:
        assert function() == 2
    finally:
        tracing(None)
    assert looked == [None, 1, 2]
