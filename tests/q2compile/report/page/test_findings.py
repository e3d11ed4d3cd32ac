# SPDX-License-Identifier: Apache-2.0
"""The sentences that a page opens with: each rule, its figures and its policy."""

import json

import pytest

from q2compile import Config
from q2compile.recipes.policy import Policy, patterns_of
from q2compile.recipes.recipe import GEMMS
from q2compile.report.page.errors import (
    Error,
    gaussian_of_gemm,
    gemm_errors,
    operand_errors,
    worst_by_module,
)
from q2compile.report.page.findings import findings
from q2compile.report.row import Row
from q2compile.runtime_kernels.ops.gaussian import gaussian_error

LAYERS = [f"layers.{i}.{name}" for i in range(2) for name in ("q", "down")]
NAMES = [*LAYERS, "lm_head"]
QUARTET2 = dict(zip(GEMMS, Config().resolved_policy.default.texts(), strict=True))


def rows(slower=()):
    """Matmuls that take half of BF16's time on a B200; ``slower``: last components of those that
    take one and a half of it."""
    times = {True: 150.0, False: 50.0}
    made = []
    for name in NAMES:
        own = {"microseconds": times[name.rpartition(".")[2] in slower], "bf16_microseconds": 100.0}
        predicted = {"b200": own, "rtx5090": own}
        row = Row(name, (64, 32, 32), taken=True, recipe="quartet2", predicted=predicted)
        made.append({**row.to_json(), **QUARTET2})
    return made


def comparison(shares, flops):
    modules = [
        {"module": n, "share": s, "flops": f, "fprop": 0.2, "dgrad": None, "wgrad": None}
        for n, s, f in zip(NAMES, shares, flops, strict=True)
    ]
    return {"modules": modules}


def telemetry(*errors, nonfinite=(), last=60):
    operands = [
        {
            "module": module,
            "gemm": "wgrad",
            "operand": "dy",
            "gaussian": 0.1,
            "last": {"step": 40, "relative_error": error},
        }
        for module, error in zip(NAMES, errors, strict=False)
    ]
    return {"operands": operands, "nonfinite": list(nonfinite), "last": last}


def found(rows, records=None, compared=None):
    """(texts, policies), the policies parsed as options take them."""
    made = findings(rows, records, compared, operand_errors(records))
    policies = [f["policy"] and json.loads(f"{{{f['policy']}}}")["policy"] for f in made]
    for policy in filter(None, policies):
        Config(policy=policy)  # can be used as it stands
    return [f["text"] for f in made], policies


def test_a_layer_with_more_error_than_work():
    measured = comparison([0.1, 0.1, 0.1, 0.15, 0.55], [119, 119, 119, 119, 24])
    texts, policies = found(rows(), telemetry(0.1), measured)
    assert texts[0] == (
        "lm_head makes 55% of the gradient's squared error for 4.8% of the quantized FLOPs."
    )
    assert policies[0] == {"lm_head": "bf16"}


def test_kinds_of_layers_are_added_up_and_have_one_pattern():
    measured = comparison([0.02, 0.3, 0.03, 0.3, 0.35], [40, 10, 40, 5, 5])
    texts, policies = found(rows(), telemetry(0.1), measured)
    assert texts[0] == (
        "down and lm_head make 95% of the gradient's squared error for 20% of the quantized FLOPs."
    )
    assert policies[0] == {"*.down": "bf16", "lm_head": "bf16"}


def test_no_layer_stands_out():
    texts, policies = found(rows(), telemetry(0.1), comparison([0.2] * 5, [20] * 5))
    assert texts[0] == (
        "No kind of layer stands out: q makes 40% of the gradient's squared error for 40% of the "
        "quantized FLOPs."
    )
    assert policies[0] is None


def test_what_is_predicted_slower():
    texts, policies = found(rows(slower=("q",)), telemetry(0.1))
    assert texts[0] == "q is predicted slower than BF16 on a B200, 1.50 times its time."
    assert policies[0] == {"*.q": "bf16"}
    texts, policies = found(rows(slower=("q", "down", "lm_head")), telemetry(0.1))
    assert texts[0].startswith("At these sizes every matmul taken is predicted slower than BF16")
    assert policies[0] == {"*": "auto"}


def test_an_operand_with_outliers():
    texts, policies = found(rows(), telemetry(0.1, 0.2))
    assert texts == [
        "dy of wgrad of layers.0.down is rounded with 2.00 times the error of Gaussian data "
        "(0.200, step 40): outliers take its blocks' range.",
        "No NaN or Inf up to step 60, the last that was recorded.",
        "This run did not measure which layers make the gradient's error: q2compile compare "
        "FILE.py:FUNCTION --out RUN/compare measures it.",
    ]
    assert policies == [{"layers.0.down": {"wgrad": "bf16"}}, None, None]
    assert found(rows(), telemetry(0.11))[0][0] == (
        "No operand is rounded with more than 1.10 times the error of Gaussian data (layers.0.q)."
    )


def test_a_nan_comes_first():
    bad = {"step": 7, "module": "layers.1.q", "gemm": "dgrad", "operand": "dy", "rank": 1}
    texts, policies = found(rows(), telemetry(0.1, nonfinite=[{**bad, "step": 9}, bad]))
    assert texts[0].startswith("NaN or Inf came first in dy of dgrad of layers.1.q, at step 7.")
    assert policies[0] == {"layers.1.q": "bf16"}
    assert not any("No NaN" in text for text in texts)


def test_never_more_than_four_and_none_without_figures():
    bad = {"step": 7, "module": "layers.1.q", "gemm": "dgrad", "operand": "dy", "rank": 1}
    everything = telemetry(0.2, nonfinite=[bad]), comparison([0.2] * 5, [20] * 5)
    assert len(found(rows(slower=("q",)), *everything)[0]) == 4
    assert found([]) == ([], [])
    (text,), _ = found(rows())
    assert 'options={"telemetry"' in text and "q2compile compare" in text


def test_patterns_match_what_they_stand_for_and_nothing_else():
    def matched(wanted, names):
        policy = Policy.build("quartet2", dict.fromkeys(patterns_of(wanted, names), "bf16"), "pow2")
        return [name for name in names if policy.resolve(name)[1]]

    names = [*NAMES, "vision.down", "layers.0.mlp.q", "we[i]rd.1.q"]
    for wanted in (["lm_head"], LAYERS[::2], LAYERS[1::2], ["we[i]rd.1.q"], LAYERS):
        assert matched(wanted, names) == [name for name in names if name in wanted]
    assert patterns_of(LAYERS[::2], NAMES) == ["*.q"]
    assert patterns_of(LAYERS[1::2], names) == ["layers.*.down"]
    assert patterns_of(LAYERS[::2], names) == LAYERS[::2]  # layers.*.q is layers.0.mlp.q, too


def test_errors_over_those_of_gaussian_data():
    row = {**rows()[0], "module": "q"}
    fprop, requantized = gaussian_error("nvfp4_46_pow2"), gaussian_error("nvfp4_ms_eden_pow2")
    assert gaussian_of_gemm(row, "fprop") == pytest.approx(2**0.5 * fprop)
    # dy is rounded once, w for fprop and again.
    assert gaussian_of_gemm(row, "dgrad") == pytest.approx((2 * requantized**2 + fprop**2) ** 0.5)
    assert gaussian_of_gemm({**row, "fprop": "bf16"}, "fprop") is None
    module = {"module": "q", "fprop": 0.2, "dgrad": None, "wgrad": None}
    (error,) = gemm_errors({"modules": [module, {**module, "module": "other"}]}, [row])
    assert error.ratio == pytest.approx(0.2 / (2**0.5 * fprop))
    errors = operand_errors(telemetry(0.1, 0.3))
    assert [e.module for e in errors] == ["layers.0.down", "layers.0.q"]
    worst = worst_by_module(errors)["layers.0.q"]
    assert worst == Error("layers.0.q", "wgrad", "dy of wgrad", 0.1, 0.1, 40)
