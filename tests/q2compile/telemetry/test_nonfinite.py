# SPDX-License-Identifier: Apache-2.0
"""A NaN or Inf is found where it first appeared: module, GEMM, operand and step, although that step
was not recorded, and without a second run."""

import math

import pytest
import torch

from q2compile.telemetry.folder import TelemetryWarning, flush
from q2compile.telemetry.watch import EVERY, STEPS
from tests.q2compile.telemetry.training import (
    batch,
    compiled,
    events,
    forget_all,
    new_model,
    train,
)
from tests.support.warned import texts

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(autouse=True)
def fresh_telemetry():
    forget_all()
    yield
    forget_all()


class Bad(torch.autograd.Function):
    """x, with one number of it, or of its gradient, replaced."""

    @staticmethod
    def forward(ctx, x, number, in_gradient):
        ctx.number = number if in_gradient else None
        y = x.clone()
        if not in_gradient:
            y.view(-1)[77] = number
        return y

    @staticmethod
    def backward(ctx, dy):
        dy = dy.clone()
        if ctx.number is not None:
            dy.view(-1)[77] = ctx.number
        return dy, None, None


def poison(model, where, number):
    if where == "weight":
        model.layers[1].up.weight.data[3, 5] = number
    else:
        in_gradient = where == "gradient"
        model.layers[0].register_forward_hook(
            lambda module, args, y: Bad.apply(y, number, in_gradient)
        )


WANTED = {
    "weight": ("layers.1.up", "fprop", "w"),
    "activation": ("layers.1.gate", "fprop", "x"),
    "gradient": ("layers.0.down", "dgrad", "dy"),
}


@pytest.mark.parametrize(
    ("where", "number"),
    [("weight", math.nan), ("activation", math.inf), ("gradient", math.nan)],
)
def test_found_where_it_appeared(where, number, tmp_path):
    """At step 3 of a run that records every 100; the blocks are graphs of their own, one shared."""
    model = new_model()

    def before(step):
        if step == 3:
            poison(model, where, number)

    options = {"inner": "eager", "telemetry": {"every": 100, "to": str(tmp_path)}}
    for layer in model.layers:
        layer.compile(backend="quartet2", options=options)
    train(model, model, steps=5, before=before)
    with pytest.warns(TelemetryWarning, match="NaN or Inf first in .* at step 3"):
        (event,) = events(tmp_path)
    assert (event["module"], event["gemm"], event["operand"]) == WANTED[where]
    assert event["step"] == 3


@pytest.mark.parametrize("recipe", ["nvfp4", "quartet", "mxfp4"])
def test_whatever_the_recipe(recipe, tmp_path):
    """A weight; mxfp4 multiplies it in bf16, and quantizes it for dgrad."""
    model = new_model(blocks=1)

    def before(step):
        if step == 2:
            model.layers[0].down.weight.data[3, 5] = math.nan

    train(model, compiled(model, tmp_path, recipe=recipe, every=100), steps=3, before=before)
    with pytest.warns(TelemetryWarning):
        (event,) = events(tmp_path)
    assert event["step"] == 2 and event["module"] == "layers.0.down"
    # A NaN in y makes the loss NaN, and returns as dy before the weight is read.
    assert (event["gemm"], event["operand"]) == {
        "mxfp4": ("dgrad", "dy"),
    }.get(recipe, ("fprop", "w"))


def test_without_waiting_for_the_end(tmp_path):
    """Reported during the run, at most EVERY steps and a look late; and once."""
    model = new_model(blocks=1)
    seen = []

    def before(step):
        if step == 5:
            model.layers[0].up.weight.data[0, 0] = math.nan
        path = tmp_path / "rank0.jsonl"
        if path.exists() and "nonfinite" in path.read_text():
            seen.append(step)

    call = compiled(model, tmp_path, every=1000)
    with pytest.warns(TelemetryWarning) as warned:
        train(model, call, steps=5 + EVERY + 3, before=before)
        flush()
    assert seen and seen[0] <= 5 + EVERY + 1 < 5 + STEPS
    assert len(texts(warned, TelemetryWarning)) == len(events(tmp_path)) == 1
    assert events(tmp_path)[0]["step"] == 5


def test_of_an_accumulated_gradient(tmp_path):
    """A part of a step that is not the last."""
    model = new_model(blocks=1)
    call = compiled(model, tmp_path, every=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for part in range(3):
            x = batch(0, model)
            if (step, part) == (1, 0):
                x[0, 0] = math.inf
            call(x).sum().backward()
        for p in model.parameters():
            p.grad.nan_to_num_()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.warns(TelemetryWarning):
        (event,) = events(tmp_path)
    assert event["step"] == 1 and event["module"] == "layers.0.gate"


def test_a_healthy_run_has_none(tmp_path, recwarn):
    model = new_model(blocks=1)
    train(model, compiled(model, tmp_path, every=100), steps=EVERY + 3)
    assert events(tmp_path) == []
    assert not texts(recwarn, TelemetryWarning)
