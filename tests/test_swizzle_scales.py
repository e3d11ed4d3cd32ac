"""The pass that has scales written swizzled, on a backward graph built by hand, and what it is
left out for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from q2compile.passes import swizzle_scales
from q2compile.passes.graphs import q2_nodes
from q2compile.passes.spec import check_spec, named_arguments
from q2compile.passes.swizzle_scales import swizzle_scales_pass

q2 = torch.ops.q2
EDEN, SOURCE = "nvfp4_ms_eden_pow2", "nvfp4_46_pow2"


def backward(dy, codes, scales, global_scale):
    """dgrad and wgrad with one quantisation of the gradient in both directions."""
    s, t = q2.seed(dy, 0), q2.seed(dy, 1)
    both = q2.rht_quantize_both(dy, s, t, EDEN, "rht128", 0)
    w = q2.requantize(codes, scales, global_scale, s, SOURCE, EDEN, "rht128", 72, 1)
    x = q2.requantize(codes, scales, global_scale, t, SOURCE, EDEN, "rht128", 72, 1)
    dx = q2.gemm(*both[:3], *w, None, EDEN, EDEN, torch.bfloat16)
    dw = q2.gemm(*both[3:], *x, None, EDEN, EDEN, torch.bfloat16)
    return dx, dw


def traced(function=backward):
    dy = torch.randn(40, 40).bfloat16()
    packed = q2.quantize(torch.randn(40, 72).bfloat16(), None, None, SOURCE, 0)
    inputs = (dy, *packed)
    return make_fx(function, tracing_mode="fake")(*inputs), inputs


@pytest.fixture(autouse=True)
def blackwell(monkeypatch) -> None:
    """The kernels that a Blackwell would be served by: chunks of 128 are swizzled by cuda's."""

    def serving(op, args):
        served = "rht128" in args or not any("@" in a for a in args if isinstance(a, str))
        return SimpleNamespace(name="cublaslt_fp4" if op == "gemm" else "cuda" if served else "no")

    monkeypatch.setattr(swizzle_scales, "serving", serving)


def run(graph_module, inputs):
    torch.manual_seed(1)
    return graph_module(*inputs)


def test_operands_of_gemms_alone_are_made_swizzled() -> None:
    gm, inputs = traced()
    before = run(gm, inputs)
    assert swizzle_scales_pass(gm.graph) == 3
    gm.recompile()
    for node in q2_nodes(gm.graph, "rht_quantize_both", "requantize"):
        assert named_arguments(node)["scheme"] == EDEN + "@32x4x4"
    for node in q2_nodes(gm.graph, "gemm"):
        assert node.args[7] == node.args[8] == EDEN + "@32x4x4"
    check_spec(gm.graph, "backward", "test")
    assert all(torch.equal(a, b) for a, b in zip(run(gm, inputs), before, strict=True))


def test_the_graph_says_the_new_shapes() -> None:
    gm, _ = traced()
    swizzle_scales_pass(gm.graph)
    for node in q2_nodes(gm.graph, "rht_quantize_both", "requantize"):
        args = torch.fx.node.map_arg(node.args, lambda n: n.meta["val"])
        want = node.target(*args)
        assert [t.shape for t in node.meta["val"]] == [t.shape for t in want]


def test_twice_is_once() -> None:
    gm, _ = traced()
    assert [swizzle_scales_pass(gm.graph) for _ in range(2)] == [3, 0]


def test_what_others_read_stays_plain() -> None:
    def function(*args):
        both = q2.rht_quantize_both(args[0], *(q2.seed(args[0], i) for i in (0, 1)), EDEN, "h32", 0)
        q = q2.rht_quantize(args[0], q2.seed(args[0], 2), EDEN, "rht128", False, 0)
        out = q2.gemm(*q, *q, None, EDEN, EDEN, torch.bfloat16)
        return out, q2.dequantize(*q, EDEN, 40, torch.bfloat16), both[1]

    gm, _ = traced(function)
    assert swizzle_scales_pass(gm.graph) == 0


def test_another_kernel_gets_plain_scales(monkeypatch) -> None:
    gm, _ = traced()
    monkeypatch.setattr(swizzle_scales, "serving", lambda *a: SimpleNamespace(name="cuda_bf16"))
    assert swizzle_scales_pass(gm.graph) == 0
