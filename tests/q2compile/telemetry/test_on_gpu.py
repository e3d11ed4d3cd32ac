# SPDX-License-Identifier: Apache-2.0
"""Telemetry on a GPU: no bit changes, CUDA graphs replay it, and nothing waits for the device."""

from __future__ import annotations

import math

import pytest
import torch
from torch._dynamo.utils import counters

from q2compile import telemetry
from q2compile.telemetry.folder import TelemetryWarning
from q2compile.telemetry.watch import EVERY
from tests.q2compile.telemetry.training import (
    WIDTH,
    all_operands,
    events,
    forget_all,
    names,
    new_model,
    operands,
    records,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_compiler")]

GPU = torch.device("cuda")
MODES = [None, "reduce-overhead"]
RECIPES = ["quartet2", "nvfp4", "quartet", "mxfp4", "tetrajet2"]


@pytest.fixture(autouse=True)
def fresh_telemetry():
    forget_all()
    yield
    forget_all()


def training(folder=None, mode=None, recipe="quartet2", every=4):
    """A model, and a function that runs a step of it and returns loss and gradients."""
    torch._dynamo.reset()
    model = new_model(dtype=torch.bfloat16).to(GPU)
    options = {"recipe": recipe, **({"mode": mode} if mode else {})}
    if folder is not None:
        options["telemetry"] = {"every": every, "to": str(folder)}
    compiled = torch.compile(model, backend="quartet2", options=options)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(512, WIDTH, generator=generator).to(GPU, torch.bfloat16)

    def step():
        model.zero_grad(set_to_none=True)
        loss = compiled(x).float().square().mean()
        loss.backward()
        telemetry.step()
        return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]

    return model, step


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_bit_changes(recipe, mode, tmp_path):
    seen = []
    for folder in (None, tmp_path):
        _, step = training(folder, mode, recipe)
        telemetry.step(0)
        for _ in range(8):  # after this all graphs are captured
            step()
        torch.manual_seed(1)
        seen.append([tensor for _ in range(8) for tensor in step()])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    if mode:
        assert counters["inductor"]["cudagraph_skips"] == 0
    found = records(tmp_path)
    assert {r["step"] for r in found} == {0, 4, 8, 12}


@pytest.mark.parametrize("mode", MODES)
def test_replays_record_what_they_compute(mode, tmp_path):
    """Each replay records its own step: the weight grows from record to record."""
    model, step = training(tmp_path, mode)
    for _ in range(17):
        step()
        with torch.no_grad():
            model.layers[0].up.weight.mul_(1.125)
    found = records(tmp_path)
    assert operands(found, 16) == all_operands(names())
    rows = [r for r in found if (r["module"], r["gemm"]) == ("layers.0.up", "fprop")]
    amax = [r["amax"] for r in rows if r["operand"] == "w"]
    assert len(amax) == 5
    for one, other in zip(amax, amax[1:], strict=False):
        assert other / one == pytest.approx(1.125**4, rel=0.05)  # bf16 weights
    changed = [r["changed"] for r in rows if r["operand"] == "w"]
    assert changed[0] is None and all(0 < c < 1 for c in changed[1:])
    errors = [r["relative_error"] for r in found if r["operand"] == "dy"]
    assert all(0.05 < e < 0.2 for e in errors)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_waits_for_the_device(mode, tmp_path):
    """Neither steps between records, nor recorded steps, nor checks of the marks wait."""
    _, step = training(tmp_path, mode)
    for _ in range(10):  # compiles, and captures both variants
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2 * EVERY + 2):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert {r["step"] for r in records(tmp_path)} >= {0, 4, 8, 12, 40}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", ["quartet2", "mxfp4"])
def test_a_nan_is_found_in_a_replay(recipe, mode, tmp_path):
    model, step = training(tmp_path, mode, recipe, every=1000)
    with pytest.warns(TelemetryWarning, match="at step 9"):
        for number in range(9 + EVERY + 4):
            if number == 9:
                model.layers[1].up.weight.data[3, 5] = math.nan
            step()
        torch.cuda.synchronize()
        step()
    (event,) = events(tmp_path)
    assert event["module"] == ("layers.1.up" if recipe == "quartet2" else "layers.1.down")


def test_records_leave_no_memory_behind(tmp_path):
    _, step = training(tmp_path, every=2)
    for _ in range(6):
        step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
