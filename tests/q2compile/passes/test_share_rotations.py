# SPDX-License-Identifier: Apache-2.0
"""One rotated copy of x for several wgrads: the graph, and that every gradient stays unbiased."""

import pytest
import torch
from expecttest import TestCase
from torch import nn

from q2compile import explain
from q2compile.graph.quantizers import quantizers
from q2compile.passes.post_grad.merge_seeds import merge_seeds_pass
from q2compile.passes.post_grad.pair_directions import pair_directions_pass
from q2compile.passes.post_grad.share_rotations import (
    share_rotations_pass,
    share_saved_rotations_pass,
)
from q2compile.passes.verify import check_spec
from q2compile.report.graph_text import readable
from tests.support import quantizer_calls as calls
from tests.support.graph_builder import EDEN, Builder, q2

T, N, K = 48, 32, 64
SOURCE = "nvfp4_46_pow2"


def wgrads(names=("dy", "dz"), pair=False, scheme=EDEN, **changed):
    """wgrads of linears with one input x [T, K], saved as codes, and gradients [T, N].

    pair      quantize each gradient rowwise and columnwise, and draw all seeds at once
    scheme    of both operands
    changed   what the second wgrad has of its own
    """
    b = Builder()
    gradients = {name: b.placeholder(f"tangents_{name}", T, N) for name in names}
    x = [
        b.placeholder("codes", T, K // 2, dtype=torch.uint8),
        b.placeholder("scales", T, K // 16, dtype=torch.float8_e4m3fn),
        b.placeholder("global_scale", dtype=torch.float32),
    ]
    results = []
    for i, name in enumerate(names):
        dy = gradients[name]
        seed = b.call(q2.seed.default, dy, i)
        change = changed if i else {}
        scheme, transform = change.get("other", scheme), change.get("transform", "rht128")
        if pair:
            row_seed = b.call(q2.seed.default, dy, 100 + i)
            row = b.call(calls.one(dy, row_seed, scheme, transform, False, 0))
            results += b.outputs(row)
        if change.get("fresh"):
            other = b.call(q2.dequantize.default, *x, SOURCE, K, torch.bfloat16)
            again = (other, seed, scheme, transform, True, 1)
            right = b.call(calls.one(*again))
        else:
            again = (*x, seed, SOURCE, scheme, transform, change.get("rows", K), 1)
            right = b.call(calls.again(*again))
        direction = change.get("transpose", True)
        left = b.call(calls.one(dy, seed, scheme, transform, direction, 0))
        operands = [*b.outputs(left), *b.outputs(right)]
        if direction:
            operands += [None, scheme, scheme, torch.bfloat16]
            results.append(b.call(q2.gemm.default, *operands))
        else:
            results += operands
    return b.done(*results)


class TestShareRotations(TestCase):
    def test_golden(self):
        gm = wgrads()
        assert share_rotations_pass(gm.graph) == 1
        gm.graph.lint()
        self.assertExpectedInline(
            readable(gm),
            """\
tangents_dy: bf16[48, 32]
tangents_dz: bf16[48, 32]
codes: u8[48, 32]
scales: f8e4m3fn[48, 4]
global_scale: f32[]
seed_default: i64[] = q2.seed(tangents_dy, 0)
requantize_default: (u8[64, 64], f8e4m3fn[64, 8], f32[]) = q2.requantize(codes, scales, global_scale, source_scheme='nvfp4_46_pow2', scheme='nvfp4_ms_eden_pow2', transform='rht128', rows=64, columnwise_seed=seed_default, rng_offset=1)
quantize_default: (u8[32, 64], f8e4m3fn[32, 8], f32[]) = q2.quantize(tangents_dy, scheme='nvfp4_ms_eden_pow2', transform='rht128', rowwise=False, columnwise=True, columnwise_seed=seed_default)
getitem: u8[32, 64] = getitem(quantize_default, 0)
getitem_1: f8e4m3fn[32, 8] = getitem(quantize_default, 1)
getitem_2: f32[] = getitem(quantize_default, 2)
getitem_3: u8[64, 64] = getitem(requantize_default, 0)
getitem_4: f8e4m3fn[64, 8] = getitem(requantize_default, 1)
getitem_5: f32[] = getitem(requantize_default, 2)
gemm_default: bf16[32, 64] = q2.gemm(getitem, getitem_1, getitem_2, getitem_3, getitem_4, getitem_5, None, 'nvfp4_ms_eden_pow2', 'nvfp4_ms_eden_pow2', torch.bfloat16)
seed_default_1: i64[] = q2.seed(tangents_dz, 1)
quantize_default_1: (u8[32, 64], f8e4m3fn[32, 8], f32[]) = q2.quantize(tangents_dz, scheme='nvfp4_ms_eden_pow2', transform='rht128', rowwise=False, columnwise=True, columnwise_seed=seed_default, rng_offset=2)
getitem_6: u8[32, 64] = getitem(quantize_default_1, 0)
getitem_7: f8e4m3fn[32, 8] = getitem(quantize_default_1, 1)
getitem_8: f32[] = getitem(quantize_default_1, 2)
gemm_default_1: bf16[32, 64] = q2.gemm(getitem_6, getitem_7, getitem_8, getitem_3, getitem_4, getitem_5, None, 'nvfp4_ms_eden_pow2', 'nvfp4_ms_eden_pow2', torch.bfloat16)
return (gemm_default, gemm_default_1)
""",
        )
        assert share_rotations_pass(gm.graph) == 0


def counts(gm, *names):
    text = readable(gm)
    return [text.count(f"q2.{name}(") for name in names]


def test_gradients_stay_paired_and_each_has_a_stream_of_its_own():
    """q, k and v: one x, and three gradients, each quantized rowwise and columnwise from one read."""
    gm = wgrads(("dq", "dk", "dv"), pair=True)
    merge_seeds_pass(gm.graph)
    assert pair_directions_pass(gm.graph) == 3
    assert share_rotations_pass(gm.graph) == 2
    assert counts(gm, "quantize", "requantize", "gemm") == [3, 1, 3]
    both = [call for _, call in quantizers(gm.graph) if call.rowwise and call.columnwise]
    assert [call.args["rng_offset"] for call in both] == [0, 2, 3]  # x has 1
    rowwise, columnwise = zip(*(call.operands for call in both), strict=True)
    assert len({operand.seed for operand in rowwise}) == 3
    assert len({operand.seed for operand in columnwise}) == 1
    check_spec(gm.graph, "backward", "here")
    assert share_rotations_pass(gm.graph) == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"other": "nvfp4_sr_pow2"},
        {"transform": "rht64"},
        {"rows": 32},
        {"fresh": True},  # x from high precision here, from codes there
        {"transpose": False},  # a dgrad's gradient
    ],
)
def test_what_is_left_alone(changed):
    gm = wgrads(**changed)
    before = readable(gm)
    assert share_rotations_pass(gm.graph) == 0 and readable(gm) == before


def test_a_seed_that_is_drawn_later_is_not_taken():
    """Without merge_seeds a gradient may be quantized before the other wgrad's seed is drawn."""
    gm = wgrads()
    late, call = [pair for pair in quantizers(gm.graph) if not pair[1].reads_codes][1]
    seed = call.operands[0].seed
    first = next(n for n in gm.graph.nodes if n.op == "call_function")
    first.prepend(seed)
    seed.append(late)
    assert share_rotations_pass(gm.graph) == 0


def operands():
    generator = torch.Generator().manual_seed(0)
    dy, dz, x = (torch.randn(T, n, generator=generator) for n in (N, N, K))
    return (
        dy.bfloat16(),
        dz.bfloat16(),
        q2.quantize(x.bfloat16(), scheme=SOURCE, rowwise=True, columnwise=False),
    )


def draws(gm, count, *inputs):
    torch.manual_seed(1)
    for _ in range(count):
        yield [g.float() for g in gm(*inputs)]


def test_the_first_gradient_keeps_its_bits():
    """Seeds are drawn as before, so an operand with the same seed and rng_offset has the same bits."""
    dy, dz, qx = operands()
    gm = wgrads()
    merge_seeds_pass(gm.graph)
    gm.recompile()
    ((own, other),) = draws(gm, 1, dy, dz, *qx)
    share_rotations_pass(gm.graph)
    gm.recompile()
    ((own_shared, other_shared),) = draws(gm, 1, dy, dz, *qx)
    assert torch.equal(own, own_shared) and not torch.equal(other, other_shared)


def squared_errors(gm, count, gradients, qx):
    """[draw, gradient]: relative squared error of the mean of that many draws."""
    x = q2.dequantize(*qx, SOURCE, K, torch.float32)
    truth = [dy.float().t() @ x for dy in gradients]
    sums, errors = [torch.zeros_like(t) for t in truth], []
    for b, grads in enumerate(draws(gm, count, *gradients, *qx), start=1):
        for total, grad in zip(sums, grads, strict=True):
            total += grad
        both = zip(sums, truth, strict=True)
        errors.append([((total / b - t).norm() / t.norm()).item() ** 2 for total, t in both])
    return torch.tensor(errors)


def test_every_weight_gradient_is_unbiased_and_as_good_as_before():
    """The squared error of a mean of B independent unbiased draws is 1/B of one draw's: it must
    fall 16-fold from 1 to 16 and from 8 to 128. With 2048 entries each it scatters by some percent.
    A bias of 1% of the norm would reduce the last factor to 10."""
    dy, dz, qx = operands()
    gm = wgrads()
    before = squared_errors(gm, 8, (dy, dz), qx)
    assert share_rotations_pass(gm.graph) == 1
    gm.recompile()
    after = squared_errors(gm, 128, (dy, dz), qx)
    for b in (1, 8):
        ratios = after[b - 1] / after[16 * b - 1]
        assert ((ratios > 12.5) & (ratios < 20)).all()
    assert ((after[7] / before[7] - 1).abs() < 0.15).all()


def error_correlation(scheme):
    """How much of their errors two wgrads of the same gradient have in common, over 24 draws."""
    dy, _, qx = operands()
    truth = dy.float().t() @ q2.dequantize(*qx, SOURCE, K, torch.float32)
    gm = wgrads(scheme=scheme)
    assert share_rotations_pass(gm.graph) == 1
    gm.recompile()
    errors = [(a - truth, b - truth) for a, b in draws(gm, 24, dy, dy, *qx)]
    return sum((a * b).sum() for a, b in errors) / sum(a.square().sum() for a, _ in errors)


def test_equal_gradients_draw_their_own_random_bits():
    """Stochastic rounding has the same error on either operand, so two wgrads share half of their
    error, x's. With equal random bits they would share all of it. 24 draws scatter by a few
    percent."""
    assert 0.4 < error_correlation("nvfp4_sr_pow2") < 0.6


def test_equal_gradients_rounded_by_ms_eden_err_alike():
    """MS-EDEN's codes depend only on the signs, which are shared, and its scales on random bits.
    Two equal gradients therefore get nearly equal errors, but each stays unbiased."""
    assert 0.9 < error_correlation(EDEN) < 1


def nvfp4_wgrads(backward_seed=False):
    """The joint graph of two wgrads of the nvfp4 recipe: x is rotated in the forward.

    backward_seed: draw the seeds in the backward instead
    """
    b = Builder()
    x = b.placeholder("primals_1", T, K)
    tangents = [b.placeholder(f"tangents_{i}", T, N) for i in (1, 2)]
    seeds = [
        b.call(q2.seed.default, tangents[i] if backward_seed else x, 2 * i + 1) for i in (0, 1)
    ]
    rotated = [
        b.outputs(b.call(calls.one(x, seed, "nvfp4_pow2", "rht16", True, 1))) for seed in seeds
    ]
    results = []
    for dy, seed, qx in zip(tangents, seeds, rotated, strict=True):
        rounded = (dy, seed, "nvfp4_sr_pow2", "rht16", True, 0)
        a = b.outputs(b.call(calls.one(*rounded)))
        gemm = (*a, *qx, None, "nvfp4_sr_pow2", "nvfp4_pow2", torch.bfloat16)
        results.append(b.call(q2.gemm.default, *gemm))
    return b.done(*results)


def test_x_that_is_rotated_in_the_forward_is_rotated_and_saved_once():
    gm = nvfp4_wgrads()
    assert share_saved_rotations_pass(gm.graph) == 1
    rotations = [call for _, call in quantizers(gm.graph)]
    assert all(call.columnwise and not call.rowwise for call in rotations)
    assert [call.args["rng_offset"] for call in rotations] == [1, 0, 2]
    assert len({call.operands[0].seed for call in rotations}) == 1
    assert counts(gm, "gemm") == [2]
    assert share_saved_rotations_pass(gm.graph) == 0


def test_before_the_partitioner_seeds_of_the_backward_are_left_alone():
    gm = nvfp4_wgrads(backward_seed=True)
    before = readable(gm)
    assert share_saved_rotations_pass(gm.graph) == 0 and readable(gm) == before


class Heads(nn.Module):
    """q, k and v of one x behind a linear, so that x needs a gradient."""

    def __init__(self, between=torch.tanh):
        super().__init__()
        self.between = between
        self.inner, self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x):
        h = self.between(self.inner(x))
        return self.q(h).square() + self.k(h).sin() + self.v(h).cos()


def test_nvfp4_saves_x_once(tmp_path):
    """Codes of x along T take 4.5 bits, once instead of three times for q, k and v. With and
    without the pass the gradients point the same way. (Behind a tanh, x would be saved for its
    derivative anyway, and rotated in the backward.)"""
    torch.manual_seed(0)
    model, x = Heads(between=torch.neg), torch.randn(64, 64)
    saved, grads = [], []
    for left_out in ((), ("share_saved_rotations",)):
        torch._dynamo.reset()
        options = {"recipe": "nvfp4", "inner": "eager", "disable_passes": left_out}
        report = explain(model, x, options=options)
        saved.append(sum(row.saved_bytes for row in report.rows))
        model.zero_grad()
        torch.compile(model, backend="quartet2", options=options)(x).sum().backward()
        grads.append([p.grad.flatten() for p in model.parameters()])
    assert saved[1] - saved[0] == 2 * (64 * 64 * 4.5 / 8 + 4)
    for one, other in zip(*grads, strict=True):
        assert torch.cosine_similarity(one, other, 0) > 0.95
