# SPDX-License-Identifier: Apache-2.0
"""Sums of a gradient's columns come from the quantizer that reads it."""

# ruff: noqa: E501  the golden text is as wide as what it shows
import operator

import pytest
import torch
from expecttest import TestCase

from q2compile.graph.quantizers import quantizers
from q2compile.passes.post_grad.sum_columns import sum_columns_pass
from q2compile.passes.verify import check_spec
from q2compile.report.graph_text import readable
from tests.support import quantizer_calls as calls
from tests.support.emulation.inductor import serve_as_on
from tests.support.graph_builder import EDEN, Builder, q2

T, N, K = 256, 64, 48
BF16, FP32 = torch.bfloat16, torch.float32
aten, prims = torch.ops.aten, torch.ops.prims


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    serve_as_on(monkeypatch, 100)


def backward(
    op="both", scheme=EDEN, over=0, dtype=FP32, casts=(BF16,), early=False, in_columns=False
):
    """wgrad, and dgrad with it, and a bias's gradient.

    op: the quantizer of dy, "both", "col" or "row".  over: the dimension that is summed, None: all.
    dtype: of the sums.  casts: of the result, one after the other.
    early: something reads the sums ahead of the quantizer.
    """
    b = Builder()
    dy = b.placeholder("tangents_1", *((N, T) if in_columns else (T, N)))
    if in_columns:
        dy = b.call(aten.t.default, dy)
    seeds = [b.call(q2.seed.default, dy, i) for i in range(2)]

    def with_dbias():
        dims = over if over is None else [over]
        found = b.graph.call_function(aten.sum.dim_IntList, (dy, dims), {"dtype": dtype})
        found.meta["val"] = dy.meta["val"].sum(over, dtype=dtype)
        for cast in casts:
            found = b.call(prims.convert_element_type.default, found, cast)
        return found

    more = [b.call(aten.neg.default, with_dbias())] if early else []
    if op == "both":
        made = b.call(calls.both(dy, *seeds, scheme, "rht128", 0))
        parts = [b.call(operator.getitem, made, i) for i in range(6)][3:]
    else:
        along_columns = op == "col"
        args = (dy, seeds[1], scheme, "rht128", along_columns, 0)
        parts = b.outputs(b.call(calls.one(*args)))
    saved = b.placeholder("x", K, T if op != "row" else N)
    x = b.outputs(b.call(calls.one(saved, seeds[1], EDEN, "rht128", False, 1)))
    gemm = b.call(q2.gemm.default, *parts, *x, None, scheme, EDEN, BF16)
    return b.done(gemm, *more, *([] if early else [with_dbias()]))


class TestSumColumns(TestCase):
    def test_golden(self):
        gm = backward()
        assert sum_columns_pass(gm.graph) == 1
        gm.graph.lint()
        check_spec(gm.graph, "backward", "here")
        self.assertExpectedInline(
            readable(gm),
            """\
tangents_1: bf16[256, 64]
seed_default: i64[] = q2.seed(tangents_1, 0)
seed_default_1: i64[] = q2.seed(tangents_1, 1)
quantize_default: (u8[256, 64], f8e4m3fn[256, 8], f32[], u8[64, 128], f8e4m3fn[64, 16], f32[], bf16[64]) = q2.quantize(tangents_1, scheme='nvfp4_ms_eden_pow2', transform='rht128', rowwise=True, columnwise=True, rowwise_seed=seed_default, columnwise_seed=seed_default_1, dbias=torch.bfloat16)
getitem_9: bf16[64] = getitem(quantize_default, 6)
getitem: u8[256, 64] = getitem(quantize_default, 0)
getitem_1: f8e4m3fn[256, 8] = getitem(quantize_default, 1)
getitem_2: f32[] = getitem(quantize_default, 2)
getitem_3: u8[64, 128] = getitem(quantize_default, 3)
getitem_4: f8e4m3fn[64, 16] = getitem(quantize_default, 4)
getitem_5: f32[] = getitem(quantize_default, 5)
x: bf16[48, 256]
quantize_default_1: (u8[48, 128], f8e4m3fn[48, 16], f32[]) = q2.quantize(x, scheme='nvfp4_ms_eden_pow2', transform='rht128', rowwise=True, columnwise=False, rowwise_seed=seed_default_1, rng_offset=1)
getitem_6: u8[48, 128] = getitem(quantize_default_1, 0)
getitem_7: f8e4m3fn[48, 16] = getitem(quantize_default_1, 1)
getitem_8: f32[] = getitem(quantize_default_1, 2)
gemm_default: bf16[64, 48] = q2.gemm(getitem_3, getitem_4, getitem_5, getitem_6, getitem_7, getitem_8, None, 'nvfp4_ms_eden_pow2', 'nvfp4_ms_eden_pow2', torch.bfloat16)
return (gemm_default, getitem_9)
""",
        )


@pytest.mark.parametrize("casts", [(), (BF16,), (torch.float16,), (BF16, FP32)])
@pytest.mark.parametrize("op", ["both", "col"])
def test_the_op_gives_what_is_returned(op, casts):
    """A second run changes nothing."""
    gm = backward(op, casts=casts)
    dtypes = [node.meta["val"].dtype for node in gm.graph.output_node().args[0]]
    assert sum_columns_pass(gm.graph) == 1
    assert sum_columns_pass(gm.graph) == 0
    last = gm.graph.output_node().args[0][-1]
    (with_dbias,) = [node for node, call in quantizers(gm.graph) if call.dbias is not None]
    assert last.target is operator.getitem and last.args == (with_dbias, 6 if op == "both" else 3)
    assert [node.meta["val"].dtype for node in gm.graph.output_node().args[0]] == dtypes
    assert with_dbias.kwargs["dbias"] == dtypes[-1] and last.meta["val"].shape == (N,)
    assert not gm.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)


@pytest.mark.parametrize(
    "how",
    [
        {"op": "row"},
        {"op": "col", "over": 1},
        {"over": None},
        {"op": "col", "dtype": BF16, "casts": ()},
        {"scheme": "nvfp4_sr"},
        {"early": True},
        {"in_columns": True},
    ],
    ids=lambda how: str(how),
)
def test_left_alone(how):
    """Not replaced: sums of rows; over the other dimension; over both, as in a norm; in bf16; with
    an exact global scale; a sum that is read earlier; a transposed matrix."""
    assert sum_columns_pass(backward(**how).graph) == 0


def test_without_the_kernel_nothing_changes(monkeypatch):
    """The reference would sum slower than Inductor."""
    monkeypatch.undo()
    assert sum_columns_pass(backward().graph) == 0


@pytest.mark.parametrize("op", ["both", "col"])
def test_the_numbers(op):
    """The results are those of the original graph, except for the order of fp32 sums, which
    integers do not show."""
    dy = torch.randint(-8, 9, (T, N), generator=torch.Generator().manual_seed(0)).to(BF16)
    x = torch.randn(K, T, generator=torch.Generator().manual_seed(1)).to(BF16)
    gm = backward(op)
    results = []
    for changes in (False, True):
        if changes:
            assert sum_columns_pass(gm.graph) == 1
        gm.recompile()
        torch.manual_seed(2)
        results.append(gm(dy, x))
    assert all(map(torch.equal, *results))
