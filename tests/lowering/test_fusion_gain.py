# SPDX-License-Identifier: Apache-2.0
"""Where a quantizer of x is a part of the kernel that computes x, and where a CUDA kernel reads x
from memory."""

from __future__ import annotations

import pytest
import torch

from q2compile.cost_model.devices import ISSUE_SHARE, MEMORY_SHARE
from q2compile.cost_model.quantizers import Quantizer
from q2compile.lowering.inductor_kernels import fusion_gain, rows  # noqa: F401  registers kernels
from q2compile.lowering.inductor_kernels.fusion_gain import ComputedOperand
from q2compile.runtime_kernels.choice import InGraph, choose
from q2compile.runtime_kernels.kernel_states import assumed_gpu
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.table import rowwise_call
from q2compile.runtime_kernels.registry import CUDA, INDUCTOR
from q2compile.torch_internals.private_names import FakeTensorMode


@pytest.mark.parametrize(
    "capability, computed, ratio",
    [(10, ComputedOperand(), 0.97), (12, ComputedOperand(), 0.41), (9, ComputedOperand(), 0.85)]
    + [
        (10, ComputedOperand(20.0, 4.0), 1.20),
        (9, ComputedOperand(20.0, 4.0), 0.92),
        (8, ComputedOperand(), 0.0),
    ],
)
def test_where_a_generated_quantizer_of_x_pays(capability, computed, ratio) -> None:
    """Behind an RMSNorm, and behind silu(gate) * up, where a CUDA kernel reads x on a B200; the
    scale search, whose CUDA kernel has as many instructions, stays fused."""
    scheme, search = get_scheme("nvfp4_46_pow2"), get_scheme("nvfp4_search_pow2")
    assert fusion_gain.expected(scheme, computed, capability) == pytest.approx(ratio, abs=0.01)
    assert fusion_gain.expected(search, computed, capability) == 0.0
    graph = InGraph(computed)
    with assumed_gpu((capability, 0)), FakeTensorMode():
        x = torch.empty(32, 64, device="cuda", dtype=torch.bfloat16)
        found = {
            spec.name: choose("quantize", rowwise_call(spec.name, x).positional, graph)
            for spec in (scheme, search)
        }
    assert found[search.name].name == INDUCTOR
    assert found[scheme.name].name == (CUDA if ratio > 1.05 else INDUCTOR)
    if ratio > 1.05:
        # Both are limited by instructions: (P + G) / (P + C), but at the high end of the rate,
        # where the CUDA kernel is limited by memory.
        assert "take 1.09-1.20 times as long" in found[scheme.name].why_not[INDUCTOR]


def test_the_ends_of_the_rate_are_the_cost_models() -> None:
    ratio = (ISSUE_SHARE / ISSUE_SHARE.middle) / (MEMORY_SHARE / MEMORY_SHARE.middle).reversed
    assert (ratio.low, ratio.high) == pytest.approx(fusion_gain.ENDS, abs=0.005)


def test_the_cuda_quantizer_of_x_has_the_instructions_that_were_counted() -> None:
    own = Quantizer("row", "nvfp4_46_pow2", "none")
    for architecture, known in fusion_gain.CUDA_INSTRUCTIONS["nvfp4_46"].items():
        assert own.instructions(architecture) == pytest.approx(known, abs=0.1)
