# SPDX-License-Identifier: Apache-2.0
"""The sentences that a page opens with: each rule, its figures and its policy."""

import json

import pytest

from q2compile.config import Config, resolved_policy
from q2compile.recipes.policy import Policy, patterns_of
from q2compile.recipes.recipe import GEMMS
from q2compile.report.row import Row
from q2compile.runtime_kernels.ops.gaussian import gaussian_error
from q2compile.tools.page.findings import (
    Error,
    findings,
    gaussian_of_gemm,
    gemm_errors,
    operand_errors,
    worst_by_module,
)

LAYERS = [f"layers.{i}.{name}" for i in range(2) for name in ("q", "down")]
NAMES = [*LAYERS, "lm_head"]
QUARTET2 = dict(zip(GEMMS, resolved_policy(Config()).default.texts(), strict=True))


def rows(slower=(), ratio=1.5, served=None, **predicted):
    """Matmuls that take half of BF16's time on a B200; ``slower``: last components of those that
    take ``ratio`` of it. served: name -> equal layers."""
    times = {True: 100 * ratio, False: 50.0}
    made = []
    for name in NAMES:
        own = {"microseconds": times[name.rpartition(".")[2] in slower], "bf16_microseconds": 100.0}
        own |= predicted
        row = Row(name, (64, 32, 32), taken=True, recipe="quartet2")
        row.predicted = {"b200": own, "rtx5090": own}
        row.served = (served or {}).get(name, [])
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


def found(rows, records=None, compared=None, given=()):
    """(texts, policy), the policy parsed as options take it; {} without one."""
    made = findings(rows, records, compared, operand_errors(records), given)
    written = [f for f in made if f["policy"]]
    assert len(written) <= 1
    texts = [f["text"] for f in made]
    policy = json.loads(f"{{{written[0]['policy']}}}")["policy"] if written else {}
    Config(policy=policy)  # can be used as it stands
    return texts, policy


def test_a_layer_with_more_error_than_work():
    measured = comparison([0.1, 0.1, 0.1, 0.15, 0.55], [119, 119, 119, 119, 24])
    texts, policy = found(rows(), telemetry(0.1), measured)
    assert texts[0] == (
        "lm_head accounts for 55% of the gradient's squared error but only 4.8% of the quantized "
        "FLOPs."
    )
    assert policy == {"lm_head": "bf16"}


def test_kinds_of_layers_are_added_up_and_have_one_pattern():
    """The budget is that of the comparison."""
    measured = comparison([0.02, 0.3, 0.03, 0.3, 0.35], [40, 10, 40, 5, 5])
    measured["limits"] = {"budget": 0.2, "of": "flops", "device": "b200"}
    texts, policy = found(rows(), telemetry(0.1), measured)
    assert texts[0] == (
        "down and lm_head account for 95% of the gradient's squared error but only 20% of the "
        "quantized FLOPs."
    )
    assert policy == {"*.down": "bf16", "lm_head": "bf16"}
    measured["limits"]["budget"] = 0.04
    texts, policy = found(rows(), telemetry(0.1), measured)
    assert texts[0] == (
        "down accounts for 60% of the gradient's squared error but only 15% of the quantized "
        "FLOPs. It costs more than the budget of q2compile compare, 4%."
    )
    assert policy == {}


def test_no_layer_stands_out():
    texts, policy = found(rows(), telemetry(0.1), comparison([0.2] * 5, [20] * 5))
    assert texts[0] == (
        "No kind of layer stands out: q accounts for 40% of the gradient's squared error and 40% "
        "of the quantized FLOPs."
    )
    assert policy == {}


@pytest.mark.parametrize(
    ("share", "work", "stands_out"),
    [
        (0.2, 0.1, True),  # twice its work
        (0.198, 0.1, False),
        (0.1, 0.02, True),  # a tenth of the error
        (0.099, 0.02, False),
    ],
)
def test_where_a_layer_begins_to_stand_out(share, work, stands_out):
    rest = [(1 - share) / 4] * 4
    measured = comparison([*rest, share], [1000 * (1 - work) / 4] * 4 + [1000 * work])
    texts, _ = found(rows(), telemetry(0.1), {**measured, "limits": {"budget": 0.1}})
    assert texts[0].startswith("lm_head accounts for") == stands_out
    assert texts[0].startswith("No kind of layer stands out: lm_head") != stands_out


def test_what_is_predicted_slower():
    texts, policy = found(rows(slower=("q",)), telemetry(0.1))
    assert texts[0] == "On a B200, q is predicted to take 1.50 times as long as in BF16."
    assert policy == {"*.q": "bf16"}
    texts, _ = found(rows(slower=("q",), ratio=1.051), telemetry(0.1))
    assert "1.05 times" in texts[0]
    texts, _ = found(rows(slower=("q",), ratio=1.049), telemetry(0.1))
    assert not any("predicted" in text for text in texts)


def test_of_a_small_model_one_sentence_and_no_policy():
    small = ("q", "down", "lm_head")
    said = "On a B200 the quantized matmuls are predicted to take 1.50 times as long as in BF16"
    texts, policy = found(rows(slower=small, gpu_microseconds=9, host_microseconds=8), telemetry())
    assert texts[0].startswith(f"{said}, because the layers are too small") and policy == {}
    texts, policy = found(rows(slower=small, gpu_microseconds=8, host_microseconds=9), telemetry())
    assert texts[0].startswith(f"{said}, because the GPU waits for the host") and policy == {}
    assert '{"mode": "reduce-overhead"}' in texts[0]
    ends = {"microseconds_low": 130, "microseconds_high": 180}
    texts, _ = found(rows(slower=small, **ends), telemetry())
    assert "predicted to take 1.30-1.80 times as long" in texts[0]


def test_an_operand_with_outliers():
    texts, policy = found(rows(), telemetry(0.1, 0.2))
    assert texts == [
        "Outliers take up the range of their blocks in dy of wgrad of layers.0.down: its error is "
        "2.00 times that of Gaussian data (0.200, step 40).",
        "No NaN or Inf appeared up to step 60, the last recorded one.",
        "To see which layers cause the gradient's error, run q2compile compare "
        "FILE.py:FUNCTION --out RUN/compare.",
    ]
    assert policy == {"layers.0.down": {"wgrad": "bf16"}}
    assert found(rows(), telemetry(0.11))[0][0] == (
        "No outlier problem: the worst operand (layers.0.q) is 10% less accurate than Gaussian "
        "data."
    )
    assert "not less accurate" in found(rows(), telemetry(0.1))[0][0]
    assert found(rows(), telemetry(0.12499))[0][0].startswith("No outlier problem")
    assert found(rows(), telemetry(0.12501))[0][0].startswith("Outliers")


def test_a_nan_comes_first():
    bad = {"step": 7, "module": "layers.1.q", "gemm": "dgrad", "operand": "dy", "rank": 1}
    texts, policy = found(rows(), telemetry(0.1, nonfinite=[{**bad, "step": 9}, bad]))
    assert texts[0].startswith(
        "The first NaN or Inf appeared in dy of dgrad of layers.1.q, at step 7."
    )
    assert policy == {"layers.1.q": "bf16"}
    assert not any("No NaN" in text for text in texts)


def test_layers_that_share_a_graph_are_treated_alike():
    """A policy that tells them apart would be refused. Without a dump nobody knows which do."""
    bad = {"step": 7, "module": "layers.1.q", "gemm": "dgrad", "operand": "dy", "rank": 1}
    records = telemetry(0.1, 0.2, 0.1, 0.1, nonfinite=[bad])
    shared = {"layers.0.q": ["layers.1.q"], "layers.0.down": ["layers.1.down"]}
    alike = {"*.down": {"wgrad": "bf16"}, "*.q": "bf16"}
    assert found(rows(served=shared), records)[1] == found([], records)[1] == alike
    apart = {"layers.0.down": {"wgrad": "bf16"}, "layers.1.q": "bf16"}
    assert found(rows(), records)[1] == apart


def test_the_rules_that_are_in_force_come_first():
    measured = comparison([0.02, 0.3, 0.03, 0.3, 0.35], [40, 10, 40, 5, 5])
    given = {"lm_head": "nvfp4", "layers.0.*": {"recipe": "nvfp4", "dgrad": "bf16"}}
    records = telemetry(0.3)
    _, policy = found(rows(), records, measured, [given])
    assert list(policy.items()) == [
        ("layers.0.*", {"recipe": "nvfp4", "dgrad": "bf16"}),
        ("layers.0.q", {"recipe": "nvfp4", "dgrad": "bf16", "wgrad": "bf16"}),
        ("lm_head", "bf16"),  # once, after what it is to win over
    ]
    # Two parts with policies of their own: neither policy is repeated.
    made = findings(rows(), records, measured, operand_errors(records), [given, {}])
    (written,) = [f for f in made if f["policy"]]
    assert written["about"] == "Rules for the end of the policy of each part:"
    assert "layers.0.*" not in written["policy"]


def test_never_more_than_four_and_none_without_figures():
    bad = {"step": 7, "module": "layers.1.q", "gemm": "dgrad", "operand": "dy", "rank": 1}
    everything = telemetry(0.2, nonfinite=[bad]), comparison([0.2] * 5, [20] * 5)
    assert len(found(rows(slower=("q",)), *everything)[0]) == 4
    assert found([]) == ([], {})
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
