# SPDX-License-Identifier: Apache-2.0
"""Which nodes swap the last two dimensions."""

import pytest
import torch
from torch import fx

from q2compile.graph.views import transposes


@pytest.mark.parametrize(
    "target, dims, sizes, swaps",
    [
        ("t", (), (2, 3), True),
        ("T", (), (2, 3), True),
        ("T", (), (2, 3, 4), False),  # torch's T reverses all dimensions
        ("mT", (), (2, 3, 4), True),
        ("transpose", (1, 2), (2, 3, 4), True),
        ("transpose", (-1, -2), (2, 3, 4), True),
        ("transpose", (0, 1), (2, 3, 4), False),
        ("transpose", (-1, 0), (2, 3, 4), False),
        ("view", (2, 3), (2, 3), False),
    ],
)
def test_transposes(target, dims, sizes, swaps) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    if target in ("T", "mT"):
        node = graph.call_function(getattr, (x, target))
    else:
        node = graph.call_method(target, (x, *dims))
    node.meta["example_value"] = torch.empty(sizes)
    assert transposes(node) is swaps
