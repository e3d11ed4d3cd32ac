# SPDX-License-Identifier: Apache-2.0
"""recompute_weights="auto": weights that the backward rounds by the scales which the forward has
found."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn

import q2compile
from q2compile.passes.joint import saved_weights
from q2compile.torch_internals.partitioner import PARTITIONER_SLOT, MinCut
from tests.support import quantizer_calls as calls

WIDTH, TOKENS = 256, 256


@pytest.fixture(autouse=True)
def no_memory_is_too_small(monkeypatch):
    """At these sizes the codes of weights are above 2% of the peak, and the scales are not."""
    torch._dynamo.reset()
    monkeypatch.setattr(saved_weights, "SMALL", 0)


class Stack(nn.Module):
    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.first, self.second, self.third = (
            nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(3)
        )

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Looking(MinCut):
    """Keeps the graphs that it has cut, which are changed afterwards."""

    def __call__(self, gm, joint_inputs, **kwargs):
        self.results = kwargs["num_fwd_outputs"]
        self.cut = [m.graph for m in super().__call__(gm, joint_inputs, **kwargs)]
        return tuple(graph.owning_module for graph in self.cut)


def step(dtype=torch.bfloat16, tiny=False, inner="eager", **options):
    """Gradients, and the cut graphs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Stack(dtype)
    if tiny:
        with torch.no_grad():  # blocks down to 2^-24 of the largest
            model.first.weight.mul_(2.0 ** -torch.arange(24).repeat_interleave(16)[:WIDTH])
    x = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    looking = Looking()
    with inductor_config.patch({PARTITIONER_SLOT: looking}):
        compiled = torch.compile(model, backend="quartet2", options={"inner": inner, **options})
        compiled(x).float().square().mean().backward()
    return [x.grad, *(p.grad for p in model.parameters())], looking


def ops(graph):
    names = (str(node.target) for node in graph.nodes)
    return Counter(name.split(".")[1] for name in names if name.startswith("q2."))


def saved(looking):
    """Dtypes and numbers of elements of the saved tensors."""
    outputs = looking.cut[0].output_node().args[0][looking.results :]
    return Counter((n.meta["val"].dtype, n.meta["val"].numel()) for n in outputs)


E4M3, CODES, SCALES = torch.float8_e4m3fn, WIDTH * WIDTH // 2, WIDTH * WIDTH // 16


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_the_same_bits_as_from_codes(inner):
    values = ("auto", True, False) if inner == "eager" else ("auto", False)
    results = [step(recompute_weights=value, inner=inner)[0] for value in values]
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_scales_are_saved_and_codes_are_not():
    """The three activations are as large as the weights, and are saved with codes and scales."""
    _, auto = step()
    for graph in auto.cut:
        graph.lint()
    backward = ops(auto.cut[1])
    by_scales = len(calls.nodes(auto.cut[1], by_scales=True))
    assert by_scales == 3 and calls.nodes(auto.cut[1], columnwise=False, rotated=False) == []
    assert backward["requantize"] - by_scales == 3  # of activations
    kept = saved(auto)
    assert kept[torch.uint8, CODES] == 3
    assert kept[E4M3, SCALES] == 3 + 3 and kept[torch.float32, 1] == 3 + 3


def test_subnormal_scales_leave_a_small_difference():
    """Only dx depends on them. tests/runtime_kernels/ops/test_requantize_by_scales.py bounds the
    difference of a weight: 2^-14 of its amax. Here two of three blocks of the first weight have
    subnormal scales. The gradient differs by a rounding of bf16 where this changes a decision of
    MS-EDEN's random bits."""
    (dx, *others), _ = step(tiny=True)
    (wanted, *of_codes), _ = step(tiny=True, recompute_weights=True)
    assert all(map(torch.equal, others, of_codes))
    off = (dx.float() - wanted.float()).norm() / wanted.float().norm()
    assert 0 < off < 2**-8


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float32},
        {"global_scale": "exact"},
        {"recipe": "nvfp4"},
        {"recompute_weights": True},
        {"recompute_weights": False},
        {"cache_weights": True},
        {"telemetry": {"every": 2}},
    ],
    ids=str,
)
def test_where_scales_are_not_enough(options, tmp_path, monkeypatch):
    """Parameters that are not bf16; exact global scales, which the codes depend on; transposed
    codes; an option that says otherwise; and telemetry, which reads the codes."""
    monkeypatch.chdir(tmp_path)  # of telemetry
    _, looking = step(**options)
    if hasattr(looking, "cut"):
        assert not calls.nodes(looking.cut[1], by_scales=True)


def test_the_report_says_so():
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    report = q2compile.explain(Stack(), x, options={"inner": "eager"})
    (text,) = {row.weight for row in report.rows}
    assert text.startswith("recomputed: ") and text.endswith("; their scales are saved")
