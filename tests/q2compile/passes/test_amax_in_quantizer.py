# SPDX-License-Identifier: Apache-2.0
"""The pass that leaves an amax to the kernel of a quantizer."""

from __future__ import annotations

import operator
from types import SimpleNamespace

import pytest
import torch
from torch import fx

from q2compile.graph.quantizers import quantizers
from q2compile.passes.post_grad.amax_in_quantizer import amax_in_quantizer_pass
from q2compile.runtime_kernels.ops.table import QuantizerCall, rowwise_call
from q2compile.runtime_kernels.registry import CUDA, INDUCTOR
from tests.support.graph_builder import Builder, q2, run
from tests.support.serving import serve_by

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def hopper(monkeypatch) -> None:
    """A CUDA kernel serves what has no amax."""

    def serving(op, args):
        has_amax = QuantizerCall.of(op, args).args["amax"] is not None
        return SimpleNamespace(name=INDUCTOR if has_amax else CUDA)

    serve_by(monkeypatch, serving)


def quantized(b: Builder, x: fx.Node) -> fx.Node:
    return b.call(rowwise_call("fp8", x, amax=b.call(q2.amax.default, x)))


def given_amax(gm: fx.GraphModule) -> list[bool]:
    return [call.args["amax"] is not None for _, call in quantizers(gm.graph)]


def test_of_what_is_in_memory_and_not_of_what_inductor_computes() -> None:
    b = Builder()
    w, x = b.placeholder("w", 32, 64), b.placeholder("x", 2, 16, 64)
    of_weight = quantized(b, b.call(aten.t.default, b.call(aten.t.default, w)))
    of_input = quantized(b, b.call(aten.view.default, x, [32, 64]))
    y = b.call(
        q2.gemm.default,
        *b.outputs(of_input),
        *b.outputs(of_weight),
        None,
        "fp8",
        "fp8",
        torch.bfloat16,
    )
    sorted_ = b.call(aten.sort.default, y)
    of_product, of_item = quantized(b, y), quantized(b, b.call(operator.getitem, sorted_, 0))
    computed = quantized(b, b.call(aten.neg.default, w))
    calls = (of_weight, of_input, of_product, of_item, computed)
    gm = b.done(*(output for node in calls for output in b.outputs(node)))
    inputs = torch.randn(32, 64).bfloat16(), torch.randn(2, 16, 64).bfloat16()
    before = run(gm, inputs)
    assert given_amax(gm) == [True] * 5
    assert amax_in_quantizer_pass(gm.graph) == 4
    gm.recompile()
    assert given_amax(gm) == [False] * 4 + [True]
    assert len(gm.graph.find_nodes(op="call_function", target=q2.amax.default)) == 1
    for got, want in zip(run(gm, inputs), before, strict=True):
        assert torch.equal(got.float(), want.float())
    assert amax_in_quantizer_pass(gm.graph) == 0


def test_an_amax_with_another_reader_or_of_another_tensor_stays() -> None:
    b = Builder()
    w, other = b.placeholder("w", 32, 64), b.placeholder("other", 32, 64)
    amax = b.call(q2.amax.default, w)
    shared = b.call(rowwise_call("fp8", w, amax=amax))
    foreign = b.call(rowwise_call("fp8", other, amax=b.call(q2.amax.default, w)))
    given = b.call(rowwise_call("fp8", w, amax=b.placeholder("a", dtype=torch.float32)))
    gm = b.done(amax, *(o for node in (shared, foreign, given) for o in b.outputs(node)))
    assert amax_in_quantizer_pass(gm.graph) == 0
    assert given_amax(gm) == [True] * 3


def test_it_stays_where_no_cuda_kernel_looks_for_it(monkeypatch) -> None:
    serve_by(monkeypatch, lambda op, args: SimpleNamespace(name=INDUCTOR))
    b = Builder()
    gm = b.done(*b.outputs(quantized(b, b.placeholder("w", 32, 64))))
    assert amax_in_quantizer_pass(gm.graph) == 0
