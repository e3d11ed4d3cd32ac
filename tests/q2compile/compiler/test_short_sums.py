# SPDX-License-Identifier: Apache-2.0
"""Sums over the experts of a token are computed as sums, and no reduction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config

from q2compile.torch_internals.inductor import short_sums_unrolled

K = 64


class Mixed(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.linear = nn.Linear(K, K, bias=False)
        self.count = count

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.linear(x)[rows].view(-1, self.count, K).sum(1)


def code(count: int, folder: Any, **options: Any) -> str:
    torch._dynamo.reset()
    x, rows = torch.randn(32, K), torch.randint(32, (16 * count,))
    compiled = torch.compile(Mixed(count), backend="quartet2", options={"dump": folder, **options})
    with torch.no_grad():
        compiled(x, rows)
    return (folder / "graph_0" / "5_output_code_forward.py").read_text()


@pytest.mark.parametrize(
    ("count", "options", "loops"),
    [
        (8, {}, False),
        (10, {}, False),
        (11, {}, True),
        (8, {"inductor": {"unroll_reductions_threshold": 8}}, True),
    ],
)
def test_code(count, options, loops, tmp_path) -> None:
    """The only loop of that length is the one over the rows of a sum."""
    assert (f"<static_cast<int64_t>({count}L)" in code(count, tmp_path, **options)) == loops


def test_what_the_user_has_set_stays() -> None:
    assert short_sums_unrolled() == {"unroll_reductions_threshold": 11}
    with config.patch(unroll_reductions_threshold=4):
        assert short_sums_unrolled() == {}
