# SPDX-License-Identifier: Apache-2.0
"""Paired operands at the peak of memory become two quantizations."""

# ruff: noqa: E501  the golden text is as wide as what it shows
import operator

import pytest
import torch
from expecttest import TestCase

from q2compile.passes import live_bytes
from q2compile.passes.live_bytes import LiveBytes, held_outside
from q2compile.passes.post_grad.part_directions import part_directions_pass
from q2compile.report.graph_text import readable
from tests.support import quantizer_calls as calls
from tests.support.graph_builder import EDEN, Builder, q2

T, N, K = 256, 2048, 64


@pytest.fixture(autouse=True)
def everything_is_worth_a_kernel(monkeypatch):
    monkeypatch.setattr(live_bytes, "SMALL", 0)


def backward(later=0, both=True):
    """dgrad and wgrad, or dgrad alone, of one gradient [T, N] quantized rowwise and columnwise.

    later: rows of a product of the gradient that comes after them, and is the peak if there are
        enough
    """
    b = Builder()
    dy = b.placeholder("tangents_1", T, N)
    seeds = [b.call(q2.seed.default, dy, i) for i in range(2)]
    pair = b.call(calls.both(dy, *seeds, EDEN, "rht128", 0))
    parts = [b.call(operator.getitem, pair, i) for i in range(6)]
    results = []
    for i, size in enumerate((N, T)[: 1 + both]):
        other = b.placeholder(f"other_{i}", K, size)
        single = b.call(calls.one(other, seeds[i], EDEN, "rht128", False, 1))
        operand = b.outputs(single)
        gemm = (*parts[3 * i : 3 * i + 3], *operand, None, EDEN, EDEN, torch.bfloat16)
        results.append(b.call(q2.gemm.default, *gemm))
    if later:
        results.append(b.call(torch.ops.aten.mm.default, b.placeholder("v", later, T), dy))
    return b.done(*results)


class TestPartDirections(TestCase):
    def test_golden(self):
        gm = backward()
        assert part_directions_pass(gm.graph) == 1
        gm.graph.lint()
        self.assertExpectedInline(
            readable(gm),
            """\
tangents_1: bf16[256, 2048]
seed_default: i64[] = q2.seed(tangents_1, 0)
seed_default_1: i64[] = q2.seed(tangents_1, 1)
other_0: bf16[64, 2048]
quantize_default_1: (u8[64, 1024], f8e4m3fn[64, 128], f32[]) = q2.quantize(other_0, scheme='nvfp4_ms_eden_pow2', transform='rht128', rowwise=True, columnwise=False, rowwise_seed=seed_default, rng_offset=1)
getitem_6: u8[64, 1024] = getitem(quantize_default_1, 0)
getitem_7: f8e4m3fn[64, 128] = getitem(quantize_default_1, 1)
getitem_8: f32[] = getitem(quantize_default_1, 2)
quantize_default_3: (u8[256, 1024], f8e4m3fn[256, 128], f32[]) = q2.quantize(tangents_1, scheme='nvfp4_ms_eden_pow2', transform='rht128', rowwise=True, columnwise=False, rowwise_seed=seed_default)
getitem_12: u8[256, 1024] = getitem(quantize_default_3, 0)
getitem_13: f8e4m3fn[256, 128] = getitem(quantize_default_3, 1)
getitem_14: f32[] = getitem(quantize_default_3, 2)
gemm_default: bf16[256, 64] = q2.gemm(getitem_12, getitem_13, getitem_14, getitem_6, getitem_7, getitem_8, None, 'nvfp4_ms_eden_pow2', 'nvfp4_ms_eden_pow2', torch.bfloat16)
other_1: bf16[64, 256]
quantize_default_2: (u8[64, 128], f8e4m3fn[64, 16], f32[]) = q2.quantize(other_1, scheme='nvfp4_ms_eden_pow2', transform='rht128', rowwise=True, columnwise=False, rowwise_seed=seed_default_1, rng_offset=1)
getitem_9: u8[64, 128] = getitem(quantize_default_2, 0)
getitem_10: f8e4m3fn[64, 16] = getitem(quantize_default_2, 1)
getitem_11: f32[] = getitem(quantize_default_2, 2)
quantize_default_4: (u8[2048, 128], f8e4m3fn[2048, 16], f32[]) = q2.quantize(tangents_1, scheme='nvfp4_ms_eden_pow2', transform='rht128', rowwise=False, columnwise=True, columnwise_seed=seed_default_1)
getitem_15: u8[2048, 128] = getitem(quantize_default_4, 0)
getitem_16: f8e4m3fn[2048, 16] = getitem(quantize_default_4, 1)
getitem_17: f32[] = getitem(quantize_default_4, 2)
gemm_default_1: bf16[2048, 64] = q2.gemm(getitem_15, getitem_16, getitem_17, getitem_9, getitem_10, getitem_11, None, 'nvfp4_ms_eden_pow2', 'nvfp4_ms_eden_pow2', torch.bfloat16)
return (gemm_default, gemm_default_1)
""",
        )
        assert part_directions_pass(gm.graph) == 0


@pytest.mark.parametrize("changed", [{"later": 4096}, {"both": False}])
def test_what_stays_a_pair(changed):
    """The peak is elsewhere, or one of the operands is not read."""
    gm = backward(**changed)
    before = readable(gm)
    assert part_directions_pass(gm.graph) == 0 and readable(gm) == before


def test_little_memory_is_worth_no_kernel(monkeypatch):
    monkeypatch.setattr(live_bytes, "SMALL", 2**20)  # the column's codes are 288 KiB
    assert part_directions_pass(backward().graph) == 0


def test_the_peak_falls_by_one_direction():
    """From both operands at once to one of them."""
    gm = backward()
    before = max(LiveBytes(gm.graph, held_outside(gm.graph).keys()).alive)
    part_directions_pass(gm.graph)
    after = max(LiveBytes(gm.graph, held_outside(gm.graph).keys()).alive)
    one = N * T * 9 / 16  # 4.5 bits
    assert before - after == pytest.approx(one, rel=0.2)


def test_the_same_bits():
    inputs = [torch.randn(s, dtype=torch.bfloat16) for s in ((T, N), (K, N), (K, T))]
    gm = backward()
    torch.manual_seed(0)
    pair = gm(*inputs)
    part_directions_pass(gm.graph)
    gm.recompile()
    torch.manual_seed(0)
    assert all(map(torch.equal, pair, gm(*inputs)))
