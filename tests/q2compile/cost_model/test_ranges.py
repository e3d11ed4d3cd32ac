# SPDX-License-Identifier: Apache-2.0
"""Predictions as ranges, and as they are on every machine."""

import pytest

from q2compile.cost_model import rates
from q2compile.cost_model.devices import (
    B200,
    ISSUE_SHARE,
    ISSUE_SHARE_OF_RANDOM_BITS,
    LAUNCH_SECONDS,
    PIPE_SHARE,
)
from q2compile.cost_model.layer import Layer, traced
from q2compile.cost_model.prices import recipe_steps
from q2compile.cost_model.quantizers import Quantizer
from q2compile.cost_model.ranges import Range, longest, over_bf16, total
from q2compile.cost_model.step import Step
from q2compile.recipes.recipe import GEMMS
from q2compile.recipes.resolve import resolve
from q2compile.runtime_kernels import checks
from q2compile.runtime_kernels.kernel_states import disable, enable_all
from q2compile.tools.bench.cases import CASES

QUARTET2 = resolve("quartet2")
ALL = tuple(GEMMS)
T, N, K = 1024, 512, 256


def test_a_number_is_written_as_both_of_its_ends():
    """In whatever order they come; once where they are written alike."""
    assert [Range(*ends).text() for ends in ((0.5, 0.6), (0.6, 0.5), (0.501, 0.499))] == [
        "0.50-0.60",
        "0.50-0.60",
        "0.50",
    ]
    assert (1e6 * Range(2.5e-6, 4.3e-6)).text(".1f") == "2.5-4.3"


def test_ends_are_computed_apart():
    """A time of work is short where its rate is high. Sums and ratios are those of both ends."""
    own, bf16 = 12 / Range(2, 3), (12 / Range(4, 6)).reversed
    assert (own, bf16) == (Range(4, 6), Range(3, 2))
    assert own / bf16 == Range(4 / 3, 3) and (own / bf16).middle == pytest.approx(13 / 6)
    assert own - bf16 == Range(1, 4) and own + 1 == Range(5, 7)
    assert total([own, bf16]) == Range(7, 8) and longest(own, bf16, 5) == Range(5, 6)


def test_rows_of_a_report_are_summed_at_each_end():
    """A report of an earlier version has no ends: both are what it has."""
    row = {"microseconds": 5, "microseconds_low": 4, "microseconds_high": 6}
    row |= {"bf16_microseconds": 9, "bf16_microseconds_low": 10, "bf16_microseconds_high": 8}
    assert over_bf16([row, row]) == Range(0.4, 0.75)
    assert over_bf16([row, {"microseconds": 5, "bf16_microseconds": 9}]) == Range(9 / 19, 11 / 17)


def test_time_is_the_longest_of_three():
    """At the low end on B200: 0.58 of 9 PFLOP/s, 0.88 of 8 TB/s, 0.76 of 148 * 128 * 1.85e9
    instructions/s, of which requantizing takes 13.52 an element; 2.5 us a launch. At the high end:
    0.405, 0.78, 0.62, 4.3."""
    ms, low, high = 1e-3, 2.5e-6, 4.3e-6
    issued = Quantizer("requantize", "nvfp4_ms_eden_pow2", "rht128", "nvfp4_46_pow2")
    assert issued.instructions("sm_100a") == pytest.approx(13.52, abs=0.1)
    elements = 148 * 128 * 1.85e9 * 0.76 / issued.instructions("sm_100a") * ms
    flops = Step("fprop", 0, flops=0.58 * 9e15 * ms, kind="fp4")
    memory = Step("quantize x", 8 * 0.88 * 8e12 * ms)
    issue = Step("requantize w", 0, quantizer=issued, elements=elements)
    ahead = Step("quantize w", 0, bits_before=8 * 0.88 * 8e12 * ms)
    slower = (0.58 / 0.405, 0.88 / 0.78, 0.76 / 0.62, 0.88 / 0.78)
    for step, times in zip((flops, memory, issue, ahead), slower, strict=True):
        assert ends(step.seconds(B200)) == pytest.approx([ms + low, ms * times + high], rel=1e-12)
    shared = Step("quantize x", 8 * 0.88 * 8e12 * ms, launches=2, shared_by=4)
    assert shared.seconds(B200).low == pytest.approx((ms + 2 * low) / 4)


def ends(number):
    return [number.low, number.high]


def test_bf16_is_slow_where_quantization_is_favored():
    """On B200: 0.605 of 2.25 PFLOP/s at the low end, 0.67 at the high end; 2.5 and 4.3 us."""
    found = ends(Step("fprop", 0, flops=2.25e15 * 1e-3).seconds(B200))
    assert found == pytest.approx([1e-3 / 0.605 + 2.5e-6, 1e-3 / 0.67 + 4.3e-6])


def test_what_is_not_known_is_a_range():
    """On a B200, 8192 x 4096. dy: 23.4 instructions at 0.76 of the issue slots; or 2.6 FMA cycles
    and 13 of packed arithmetic, which may take two, at 0.65. x, with the scale search: 36.4
    instructions more in its producer, less what is issued while that reads and writes 16 bits per
    element, at 0.88 of 8 TB/s."""
    elements, lanes = 8192 * 4096, 148 * 128 * 1.85e9
    recipe = resolve("quartet2_search")
    steps = {s.what: s for s in recipe_steps(recipe, Layer(8192, 4096, 4096), ALL)}
    dy, x = (
        steps[name].seconds(B200) - 2 * LAUNCH_SECONDS
        for name in ("quantize dy rowwise and columnwise", "quantize x")
    )
    of_dy = [elements * 23.39 / 0.76 / lanes, elements * (2.55 + 2 * 12.97) / 0.65 / lanes]
    assert [dy.low, dy.high] == pytest.approx(of_dy, rel=0.01)
    issued, waits = elements * 36.4 / lanes, 2 * 2 * elements / (0.88 * 8e12)
    assert [x.low, x.high] == pytest.approx([issued / 0.76 - waits, issued / 0.62], rel=0.01)


def test_a_measured_rate_narrows_the_range(monkeypatch):
    """If packed arithmetic takes one cycle, the FMA pipe of a B200 does not limit dy."""
    dy = Quantizer("both", "nvfp4_ms_eden_pow2", "rht128")
    assert dy.pipe_cycles("sm_100a")["fma"].text(".1f") == "15.5-28.5"
    monkeypatch.setitem(rates.MEASURED, ("sm_100a", "FFMA2"), 128.0)
    assert dy.pipe_cycles("sm_100a")["fma"].text(".1f") == "15.5"
    seconds = Step("", 0, quantizer=dy, elements=1e9, launches=0).seconds(B200)
    assert seconds.high == pytest.approx(1e9 * 23.39 / 0.62 / B200.issue)


def test_no_measured_kernel_is_limited_by_its_pipe():
    """At PIPE_SHARE the fullest pipe of an H200 takes no longer than its instructions, whose share
    of the issue slots was fitted to what was measured."""
    for name in CASES:
        case = CASES[name]
        share = ISSUE_SHARE_OF_RANDOM_BITS if case.spec.rounding == "sr" else ISSUE_SHARE
        fullest = max(cycles.high for cycles in case.pipe_cycles("sm_90a").values())
        assert fullest / PIPE_SHARE.low < case.instructions("sm_90a") / share.low


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
