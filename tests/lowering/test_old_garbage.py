"""When old garbage is left, and that a graph's compilation is such a time."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn

from q2compile.lowering.old_garbage import old_garbage_left, torch_leaves_it

NEVER = 2**31 - 1
ours = pytest.mark.skipif(torch_leaves_it(), reason="this torch leaves old garbage itself")


@pytest.fixture(autouse=True)
def thresholds():
    usual = gc.get_threshold()
    gc.set_threshold(600, 11, 12)
    yield
    gc.set_threshold(*usual)


@ours
def test_young_garbage_is_collected_as_ever() -> None:
    with old_garbage_left():
        assert gc.get_threshold() == (600, 11, NEVER)
        gc.set_threshold(500, 9, NEVER)  # what somebody else sets meanwhile stays
    assert gc.get_threshold() == (500, 9, 12)


@ours
def test_an_error_ends_it() -> None:
    with pytest.raises(ValueError), old_garbage_left():
        raise ValueError
    assert gc.get_threshold() == (600, 11, 12)


@ours
def test_two_threads_that_overlap() -> None:
    """The second is inside before the first leaves, and leaves after it."""
    entered, go = threading.Event(), threading.Event()

    def second() -> None:
        with old_garbage_left():
            entered.set()
            assert go.wait(10)

    with old_garbage_left():
        thread = threading.Thread(target=second)
        thread.start()
        assert entered.wait(10)
    assert gc.get_threshold() == (600, 11, NEVER)
    go.set()
    thread.join()
    assert gc.get_threshold() == (600, 11, 12)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("backend", "left"), [("quartet2", NEVER), ("inductor", 12)])
def test_while_forward_and_backward_are_compiled(backend, left, monkeypatch) -> None:
    """Those of q2compile; another's graphs are as torch has them."""
    from torch._dynamo import config
    from torch._inductor.graph import GraphLowering

    if torch_leaves_it():
        left = config.gc_gen2_threshold_during_compile  # type: ignore[attr-defined]
    seen: list[int] = []
    run = GraphLowering.run

    def watched(*args):
        seen.append(gc.get_threshold()[2])
        return run(*args)

    torch.compile(nn.Linear(64, 64), backend="quartet2")(torch.zeros(64, 64))  # registers
    monkeypatch.setattr(GraphLowering, "run", watched)
    layer = nn.Linear(128, 128)
    with inductor_config.patch(force_disable_caches=True):
        y = torch.compile(layer, backend=backend)(torch.zeros(64, 128))
        assert seen == [left] and gc.get_threshold() == (600, 11, 12)
        y.sum().backward()
        assert seen == [left, left] and gc.get_threshold() == (600, 11, 12)
