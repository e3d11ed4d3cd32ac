# SPDX-License-Identifier: Apache-2.0
"""The memory of a step by the code that Inductor writes for an H200: quartet2 stays below BF16."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from q2compile.passes.post_grad import gather_quantizers
from tests.support.planned_memory import MIB, Peak, generated_step, peaks_of_step

# Two of the four layers, and half the vocabulary, of the model of `steps.py --only moe`.
# Nothing runs, so its sizes cost nothing.
MIXTURE = {
    "hidden_size": 2048,
    "intermediate_size": 768,
    "moe_intermediate_size": 768,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16000,
    "use_cache": False,
}
TOKENS = 4, 2048


@pytest.fixture(scope="module")
def mixture() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**MIXTURE))
    model.set_experts_implementation("grouped_mm")
    return model.to(torch.bfloat16).to_empty(device="cpu")


def step(model: nn.Module, **how) -> tuple[Peak, Peak]:
    tokens = torch.zeros(TOKENS, dtype=torch.int64)
    compiled = torch.compile(model, **how)
    return peaks_of_step(*generated_step(90, compiled, input_ids=tokens, labels=tokens))


def test_a_mixture_of_experts_stays_below_bf16(mixture) -> None:
    bf16 = max(peak.bytes for peak in step(mixture, backend="inductor"))
    peaks = step(mixture, backend="quartet2")
    assert max(peak.bytes for peak in peaks) <= bf16, peaks[1].table()


class Small(nn.Module):
    """Sizes that can be added up by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(1024, 1024, bias=False).bfloat16() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))).float().square().mean()


def small(**how) -> tuple[Peak, Peak]:
    x = torch.zeros(2048, 1024, dtype=torch.bfloat16)
    return peaks_of_step(*generated_step(90, torch.compile(Small(), **how), x=x))


def test_a_step_that_is_counted_by_hand() -> None:
    """In MiB. Two weights of 2 and x of 4 are always alive. The forward allocates y of 4, which it
    overwrites with tanh, and the result of 4. The backward overwrites that one with the gradient,
    and allocates dw of 2 and the gradient of tanh of 4."""
    forward, backward = small(backend="inductor")
    assert forward.bytes / MIB == pytest.approx(8 + 4 + 4, abs=0.001)  # and some scalars
    assert backward.bytes / MIB == pytest.approx(8 + 4 + 4 + 2 + 4, abs=0.001)
    assert sum(forward.alive.values()) == forward.bytes
    assert [line.split()[0] for line in forward.table().splitlines()] == ["4.0"] * 3 + ["2.0"] * 2


def test_workspaces_are_counted(monkeypatch) -> None:
    """While 2048 x 1024 elements are requantized, there are also four bytes for each of their
    blocks of 16 (cuda/quantize/plan.py). Operands that wait for a GEMM would take more."""
    monkeypatch.setattr(gather_quantizers, "SMALL", 0)
    _, backward = small(backend="quartet2")
    assert backward.at.startswith("q2_site")
    assert backward.alive[backward.at] == 2048 * 1024 // 4
