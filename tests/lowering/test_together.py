# SPDX-License-Identifier: Apache-2.0
"""Which quantizers wait for the next one, on graphs built by hand. What becomes of them is shown in
test_launches.py and test_launch_counts.py."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from q2compile.lowering.together import global_scales, waits
from tests.support import quantizer_calls as calls
from tests.support.graph_builder import EDEN, SOURCE, Builder, q2

aten = torch.ops.aten


def quantizers(between=None) -> tuple[Builder, fx.Node, fx.Node]:
    """x and w quantized, `between` called between them with the builder, x and its codes."""
    b = Builder()
    x, w = b.placeholder("arg0_1", 32, 64), b.placeholder("arg1_1", 48, 64)
    first = b.call(calls.plain(x, None, None, SOURCE, 0))
    qx = b.outputs(first)
    if between is not None:
        w = between(b, x, w, qx) or w
    second = b.call(calls.plain(w, None, None, SOURCE, 0))
    b.done(b.call(q2.gemm.default, *qx, *b.outputs(second), None, SOURCE, SOURCE, torch.bfloat16))
    return b, first, second


def cast(b, x, w, qx):
    return b.call(
        aten.view.default,
        b.call(torch.ops.prims.convert_element_type.default, w, torch.float32),
        [48, 64],
    )


def computed(b, x, w, qx):
    return b.call(aten.silu.default, w)


def read(b, x, w, qx):
    return b.call(q2.dequantize.default, *qx, SOURCE, 64, torch.bfloat16)


def read_by_view(b, x, w, qx):
    b.call(aten.view.default, qx[0], [-1])


def changed(b, x, w, qx):
    b.call(aten.copy_.default, x, x)


def noted(b, x, w, qx):
    b.call(q2.seed.default, x, 0)


@pytest.mark.parametrize("between", [None, cast])
def test_one_waits_for_the_next(between) -> None:
    _, first, second = quantizers(between)
    assert waits(first) and not waits(second)


@pytest.mark.parametrize("between", [computed, read, read_by_view, changed, noted])
def test_none_waits_where_more_stands_between(between) -> None:
    """What reads the codes, changes x, or takes long, while x would have to be kept."""
    _, first, _ = quantizers(between)
    assert not waits(first)


def test_none_waits_for_what_is_quantized_from_it() -> None:
    b = Builder()
    x, seed = b.placeholder("arg0_1", 32, 64), b.placeholder("arg1_1", dtype=torch.int64)
    first = b.call(calls.plain(x, None, None, SOURCE, 0))
    qx = b.outputs(first)
    b.done(b.call(calls.again(*qx, seed, SOURCE, EDEN, "rht128", 64, 1)))
    assert not waits(first)


def test_none_waits_for_a_recorded_one() -> None:
    """Its lowering is another."""
    b, first, second = quantizers()
    with b.graph.inserting_before(second):
        how = {**second.kwargs, "recorded": True}
        recorded = b.graph.call_function(second.target, second.args, how)
    second.replace_all_uses_with(recorded)
    b.graph.erase_node(second)
    assert not waits(first)


def test_global_scales_of_both_directions() -> None:
    b = Builder()
    x = b.placeholder("arg0_1", 32, 64)
    s, t = (b.placeholder(f"seed_{i}", dtype=torch.int64) for i in range(2))
    both = b.call(calls.both(x, s, t, EDEN, "rht128", 0))
    outputs = [b.call(operator.getitem, both, i) for i in range(6)]
    b.done(*outputs)
    assert global_scales(both) == [(2, outputs[2]), (5, outputs[5])]
