# SPDX-License-Identifier: Apache-2.0
"""torch's estimate of a graph's memory, on graphs that can be counted by hand."""

import torch

from q2compile.torch_internals.memory import estimated_peak
from tests.support.graph_builder import Builder

aten = torch.ops.aten
KIB = 1024


def test_a_chain_of_products():
    """x and each product take 16 KiB, w takes 32. A product is freed once it is read, and so is x,
    but not a parameter."""
    for name, peak in (("x", 64), ("primals_1", 80)):
        b = Builder()
        x, w = b.placeholder(name, 64, 128), b.placeholder("primals_2", 128, 128)
        two = b.call(aten.mm.default, b.call(aten.mm.default, x, w), w)
        assert estimated_peak(b.done(two).graph) == peak * KIB


def test_views_take_no_memory_and_element_wise_results_do():
    b = Builder()
    x = b.placeholder("primals_1", 64, 128)
    view = b.call(aten.view.default, b.call(aten.tanh.default, x), [128, 64])
    assert estimated_peak(b.done(view).graph) == 32 * KIB
