# SPDX-License-Identifier: Apache-2.0
"""Predictions as ranges, and as they are on every machine."""

import pytest

from q2compile.cost_model.devices import B200, H200
from q2compile.cost_model.layer import Layer, traced
from q2compile.cost_model.prices import recipe_steps
from q2compile.recipes.recipe import GEMMS
from q2compile.recipes.resolve import resolve
from q2compile.runtime_kernels import checks
from q2compile.runtime_kernels.kernel_states import disable, enable_all
from q2compile.tools.bench.cases import CASES, step_of

QUARTET2 = resolve("quartet2")
ALL = tuple(GEMMS)
T, N, K = 1024, 512, 256


def test_what_is_not_known_is_a_range():
    """On a B200, 8192 x 4096. dy: 23.4 instructions at 0.69 of the issue slots, or 28.5 cycles of
    the FMA pipe at 0.65. x, with the scale search: 36.4 instructions more in its producer, less
    what is issued while that reads and writes 16 bits per element, at 0.83 of 8 TB/s."""
    elements, lanes, launches = 8192 * 4096, 148 * 128 * 1.85e9, 2 * 3.4e-6
    recipe = resolve("quartet2_search")
    steps = {s.what: s for s in recipe_steps(recipe, Layer(8192, 4096, 4096), ALL)}
    dy, x = steps["quantize dy rowwise and columnwise"], steps["quantize x"]
    dy, x = ([s.seconds(B200, most=most) - launches for most in (False, True)] for s in (dy, x))
    of_dy = [elements * 23.39 / 0.69 / lanes, elements * 28.48 / 0.65 / lanes]
    assert dy == pytest.approx(of_dy, rel=0.01)
    issued, waits = elements * 36.4 / 0.69 / lanes, 2 * 2 * elements / (0.83 * 8e12)
    assert x == pytest.approx([issued - waits, issued], rel=0.01)


@pytest.mark.parametrize("name", CASES)
def test_no_measured_kernel_is_limited_by_its_pipe(name):
    """At PIPE_SHARE the fullest pipe of an H200 takes no longer than was fitted to what was
    measured, so that the range of a kernel is one time there."""
    step = step_of(name, 8192 * 4096)
    assert step.seconds(H200, most=True) == step.seconds(H200)


def test_a_prediction_does_not_depend_on_this_machine(monkeypatch):
    """No kernel of a GPU that is assumed is disabled or rejected, and none is checked."""
    known = {
        capability: recipe_steps(QUARTET2, Layer(T, N, K, capability=capability), ALL)
        for capability in (9, 10, 12)
    }
    traced.cache_clear()
    monkeypatch.setattr(checks, "rejection", lambda request: pytest.fail(str(request)))
    disable(["cuda"], "a test")
    try:
        for capability, steps in known.items():
            assert recipe_steps(QUARTET2, Layer(T, N, K, capability=capability), ALL) == steps
    finally:
        enable_all()
