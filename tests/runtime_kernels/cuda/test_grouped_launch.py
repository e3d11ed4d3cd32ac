# SPDX-License-Identifier: Apache-2.0
"""Calls that share a tail launch: the bits of separate calls, by emulated kernels, and the products
of the quantizers' global scales."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from q2compile.runtime_kernels.cuda.call_site import CallSite, SiteCall
from q2compile.runtime_kernels.cuda.calls import MOST_OPERANDS, BoundCall, tensors_of
from q2compile.runtime_kernels.cuda.jit import launch, nvrtc
from q2compile.runtime_kernels.cuda.other_ops import split_scales
from q2compile.runtime_kernels.cuda.quantize import grouped_launch, quantizers, rotate_quantize
from q2compile.runtime_kernels.cuda.quantize.grouped_launch import ScaleProduct, grouped_plan
from q2compile.runtime_kernels.cuda.quantize.plan import tail_launch
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import batched_launch
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SWIZZLED
from q2compile.runtime_kernels.ops.table import QuantizerCall
from tests.support import quantizer_calls as calls
from tests.support.emulation.on_cpu import assert_same_bits, launches_on_cpu, matrix
from tests.support.quantizer_calls import SEEDS

EDEN, SR, RTN = "nvfp4_ms_eden_pow2", "nvfp4_sr_pow2", "nvfp4_46_pow2"
q2 = torch.ops.q2
Members = list[tuple[Any, tuple]]


def run(members: Members, products=(), others=()) -> list[torch.Tensor]:
    """The outputs of all, and the products, of one call of them."""
    call = grouped_plan([op.plan(*args) for op, args in members], products, len(others))
    operands = [t for _, args in members for t in tensors_of(args)]
    outputs = [torch.empty(o.shape, dtype=o.dtype) for o in call.outputs]
    BoundCall(call, 0)([*operands, *others, *outputs])
    return outputs


def apart(members: Members) -> list[torch.Tensor]:
    return [output for op, args in members for output in op(*args)]


@pytest.fixture(params=["sm_90a", "sm_100a"])
def emulated(request, monkeypatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    launches_on_cpu(monkeypatch, request.param)


def member(call: QuantizerCall) -> tuple:
    return getattr(quantizers, call.spec.name), call.positional


def both(scheme: str, transform: str = "rht128", *shape: int) -> tuple:
    return member(calls.both(matrix(*(shape or (130, 200))), *SEEDS, scheme, transform, 3))


def again(scheme: str, height: int = 145, rows: int = 72) -> tuple:
    packed = q2.quantize(matrix(height, rows), scheme=RTN, rowwise=True, columnwise=False)
    return member(calls.again(*packed, SEEDS[1], RTN, scheme, "rht128", rows, 1))


def forward(scheme: str, *shape: int) -> tuple:
    return member(calls.plain(matrix(*shape), None, None, scheme))


def masked(scheme: str, *shape: int) -> tuple:
    return member(calls.masked(matrix(*shape), scheme, "h32"))


def again_mx(scheme: str, height: int, rows: int) -> tuple:
    packed = q2.quantize(matrix(height, rows), scheme="mxfp4_rtn34", rowwise=True, columnwise=False)
    return member(calls.again(*packed, SEEDS[0], "mxfp4_rtn34", scheme, "rht32", rows, 2))


def grouped(scheme: str, rows: int, cols: int) -> tuple:
    offs = torch.tensor([rows // 3, rows // 2, rows], dtype=torch.int32)
    args = (matrix(rows, cols), offs, q2.padded_ends(offs), SEEDS[0], scheme, "rht128", 1)
    return member(calls.grouped(*args))


def with_dbias(scheme: str, rows: int) -> tuple:
    x = matrix(rows, 200)
    return member(calls.both(x, *SEEDS, scheme, "rht128", 3, dbias=torch.bfloat16))


def summed_columns(scheme: str, rows: int) -> tuple:
    x = matrix(rows, 136)
    return member(calls.one(x, SEEDS[1], scheme, "rht128", True, 1, dbias=torch.float32))


@pytest.mark.parametrize(
    "scheme, emulated",
    [(EDEN + SWIZZLED, "sm_100a"), (EDEN + DEQUANTIZED, "sm_90a"), ("mxfp4_sr", "sm_90a")],
    indirect=["emulated"],
)
def test_sums_of_columns_among_others(scheme, emulated) -> None:
    """Whoever has some, the last launch is the one that adds them up."""
    kinds = [
        [with_dbias(scheme, 130), again(scheme)],
        [again(scheme), summed_columns(scheme, 300), summed_columns(scheme, 140)],
    ]
    for members in kinds:
        assert len({tail_launch(*_named(member)) for member in members}) == 1
        assert_same_bits(run(members), apart(members))


def _named(member: tuple) -> tuple[str, tuple]:
    op, args = member
    return op.plan.__name__, args


@pytest.mark.parametrize(
    "scheme, emulated",
    [
        *((EDEN, each) for each in ("sm_90a", "sm_100a")),
        *((EDEN + SWIZZLED, "sm_100a"), (SR + SWIZZLED, "sm_100a"), ("mxfp4_sr", "sm_90a")),
    ],
    indirect=["emulated"],
)
def test_the_bits_are_those_of_the_calls_apart(scheme, emulated) -> None:
    """Also for calls with four operands, of which the largest is not the first."""
    members = [again(scheme), both(scheme)]
    assert_same_bits(run(members), apart(members))
    members = [again(scheme), again(scheme), both(scheme, "rht128", 33, 517)]
    assert_same_bits(run(members), apart(members))


@pytest.mark.parametrize("emulated", ["sm_90a"], indirect=True)
def test_numbers_instead_of_codes(emulated) -> None:
    members = [both(EDEN + DEQUANTIZED), again(EDEN + DEQUANTIZED)]
    assert_same_bits(run(members), apart(members))


# The emulated GPU has two multiprocessors, so the first of each has more tiles than thread blocks.
SIZES = [(300, 520), (3, 64), (130, 200)]
ALIKE = {
    "fprop": [forward(RTN, *size) for size in SIZES],
    "requantize": [again(EDEN, *size) for size in SIZES],
    "both": [both(EDEN, "rht128", *size) for size in SIZES[:2]],
    "sr": [again(SR, *size) for size in SIZES],
    "quartet fprop": [masked("mxfp4_quest", *size) for size in ((300, 512), (3, 64))],
    "mx": [again_mx("mxfp4_rtn34", *size) for size in SIZES],
    "groups": [grouped(EDEN, *size) for size in SIZES],
}
# Schemes of the backward also write dequantized operands, or codes with swizzled scales: of each
# rounding and each source, but not each source of each rounding.
EQUAL = [(name, "", "sm_90a") for name in ALIKE]
EQUAL += [(name, DEQUANTIZED, "sm_90a") for name in ("requantize", "sr", "mx", "groups")]
EQUAL += [(name, SWIZZLED, "sm_100a") for name in ("both", "sr", "mx")]


def with_suffix(members: Members, suffix: str) -> Members:
    """The same calls, with the schemes of their outputs."""
    made = []
    for op, args in members:
        call = QuantizerCall.of(op.plan.__name__, args)
        made.append(member(call.replace(scheme=call.args["scheme"] + suffix)))
    return made


@pytest.mark.parametrize("name, suffix, emulated", EQUAL, indirect=["emulated"])
def test_equal_launches_are_one(name, suffix, emulated) -> None:
    """With the bits of each by itself: also where one is much smaller than another."""
    members = with_suffix(ALIKE[name], suffix)
    call = grouped_plan([op.plan(*args) for op, args in members])
    rotated, _ = call.steps
    own = [op.plan(*args).steps[0] for op, args in members]
    assert rotated.launch is own[0].batched is batched_launch(own[0].launch)
    assert dict(rotated.launch.variant.defines)["Q2_BATCH"] == MOST_OPERANDS
    assert rotated.grid == (max(step.grid[0] for step in own), len(members))
    assert len({step.grid for step in own}) > 1
    assert_same_bits(run(members), apart(members))


def test_other_launches_stay(emulated) -> None:
    """Calls of another kernel, in the order of the calls; and calls with large operands."""
    members = [both(EDEN), again(EDEN), again(EDEN, 300, 520)]
    steps = grouped_plan([op.plan(*args) for op, args in members]).steps
    assert [step.grid[1] for step in steps] == [1, 2, 4]
    rows = 17 * 128  # by four thread blocks
    sizes = (rows, 4 * 128), (rows - 128, 4 * 128), (rows, 3 * 128)
    made = [quantizers.quantize.plan(*forward(RTN, *size)[1]) for size in sizes]
    assert [call.steps[0].batched is None for call in made] == [True, False, False]
    assert [step.grid for step in grouped_plan(made).steps[:-1]] == [(4, 1), (4, 2)]


@pytest.mark.parametrize(
    "scheme, make, there",
    [
        *((scheme, both, scheme == EDEN) for scheme in (EDEN, "mxfp4_sr", "nvfp4_sr")),
        *((scheme, with_dbias, False) for scheme in (EDEN, SR + DEQUANTIZED)),
        *((SR + DEQUANTIZED, make, make is again) for make in (both, again)),
    ],
)
def test_which_have_a_launch_for_several(scheme, make, there, emulated) -> None:
    op, args = make(scheme, 130) if make is with_dbias else make(scheme)
    assert (op.plan(*args).steps[0].batched is not None) == there


def test_what_is_launched_together_is_compiled_ahead(emulated, monkeypatch) -> None:
    """In threads, as soon as these calls are known."""
    begun: list[Any] = []
    monkeypatch.setattr(nvrtc, "begin", lambda variant, architecture: begun.append(variant))
    monkeypatch.setattr(launch, "architecture", lambda index: "sm_90a")
    members = [both(EDEN), again(EDEN), again(EDEN, 300, 520)]
    monkeypatch.setattr(rotate_quantize, "shared_memory", lambda index: 228 * 1024)
    grouped_launch.compile_ahead([op.launches_of([args]) for op, args in members], 0)
    rotated = grouped_plan([op.plan(*args) for op, args in members]).steps[1]
    assert begun == [rotated.launch.variant]


def test_scales_of_inductor_s_loops(emulated) -> None:
    raw_scale = matrix(40, 9, torch.float32).abs()
    quantize = forward(RTN + SWIZZLED, 72, 144)
    members = [(split_scales, (raw_scale, RTN + SWIZZLED)), quantize]
    assert_same_bits(run(members), apart(members))


@pytest.mark.parametrize(
    "scheme, emulated",
    [(EDEN + SWIZZLED, "sm_100a"), ("nvfp4_ms_eden", "sm_90a"), ("mxfp4_rtn34", "sm_90a")],
    indirect=["emulated"],
)
def test_products_of_global_scales(scheme, emulated) -> None:
    """Products of two scales that are computed here, or of one and a known scale, for either
    operand."""
    members = [both(scheme), again(scheme)]
    other = torch.tensor(0.3)
    products = [ScaleProduct((0, 2), (1, 2)), ScaleProduct((0, 5), 0)]
    *outputs, first, second = run(members, products, [other])
    assert_same_bits(outputs, apart(members))
    assert first == outputs[2] * outputs[8] and second == outputs[5] * other


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_poison_reaches_the_products(value, emulated) -> None:
    op, args = again(EDEN)
    args[2].fill_(value)
    *_, product = run([both(EDEN), (op, args)], [ScaleProduct((0, 2), (1, 2))])
    assert product.isnan()


def test_calls_that_end_alike() -> None:
    def named(call: QuantizerCall) -> tuple:
        return call.spec.name, call.positional

    quantize = named(calls.plain(None, None, None, RTN))
    assert tail_launch(*quantize) is tail_launch("split_scales", (None, RTN))
    assert tail_launch(*quantize) is not tail_launch("split_scales", (None, RTN + SWIZZLED))
    assert tail_launch(*named(calls.plain(None, None, None, "nvfp4_46"))) is None
    assert tail_launch("dequantize", (None,) * 6) is None
    rotated = named(calls.one(None, None, EDEN, "rht128", False))
    assert tail_launch(*rotated) is tail_launch("requantize", again(EDEN)[1])
    assert tail_launch(*rotated) is not tail_launch(
        *named(calls.one(None, None, EDEN, "rht16", False))
    )


def test_more_sides_than_a_launch_has(emulated) -> None:
    with pytest.raises(AssertionError):
        run([both(EDEN)] * (MOST_OPERANDS // 2 + 1))


def site_call(call: QuantizerCall, outputs: int) -> SiteCall:
    args, keywords = call.written()
    return SiteCall(call.spec.name, args, (1,) * outputs, **keywords)


class OnGpu:
    """dy rowwise and columnwise and a saved operand requantized, by a call site as in generated
    code."""

    def __init__(self, rows: int, scheme: str = EDEN + SWIZZLED) -> None:
        self.scheme, self.rows = scheme, rows
        made = (
            site_call(calls.both(..., ..., ..., scheme, "rht128"), 6),
            site_call(calls.again(..., ..., ..., ..., RTN, scheme, "rht128", 200, 1), 3),
        )
        products = ((0, 2), (1, 2)), ((0, 5), 0)
        self.site = CallSite(*made, fixed=True, products=products, others=1)
        self.given = [t.cuda() for t in self.fresh(0)]
        self.buffers = [torch.zeros_like(t).cuda() for t in self.want()]

    def fresh(self, number: int) -> list[torch.Tensor]:
        """The operands of a call: dy, its seeds; a saved operand and its seed; a global scale."""
        torch.manual_seed(number)
        saved = torch.randn(self.rows, 200).bfloat16()
        seeds = [torch.tensor(number * 3 + i) for i in range(3)]
        packed = q2.quantize(saved, scheme=RTN, rowwise=True, columnwise=False)
        return [
            torch.randn(self.rows, 200).bfloat16(),
            *seeds[:2],
            *packed,
            seeds[2],
            0.3 * saved[0, 0].float(),
        ]

    def want(self) -> list[torch.Tensor]:
        x, s, t, *packed, u, other = (t.cpu() for t in self.given)
        first = q2.quantize(
            x,
            scheme=self.scheme,
            transform="rht128",
            rowwise=True,
            columnwise=True,
            rowwise_seed=s,
            columnwise_seed=t,
        )
        second = q2.requantize(
            *packed,
            source_scheme=RTN,
            scheme=self.scheme,
            transform="rht128",
            rows=200,
            columnwise_seed=u,
            rng_offset=1,
        )
        return [*first, *second, first[2] * second[2], first[5] * other]

    def change(self, number: int) -> None:
        for t, new in zip(self.given, self.fresh(number), strict=True):
            t.copy_(new)

    def run(self) -> None:
        self.site(*self.given, *self.buffers)

    def check(self) -> None:
        torch.cuda.synchronize()
        assert_same_bits([t.cpu() for t in self.buffers], self.want())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 130, 5000])
def test_on_a_gpu(rows) -> None:
    """The same call site repeatedly, with other operands."""
    on_gpu = OnGpu(rows)
    for number in range(4):
        on_gpu.change(number)
        on_gpu.run()
        on_gpu.check()


@pytest.mark.gpu
def test_on_two_streams_at_once() -> None:
    streams, calls = [torch.cuda.Stream() for _ in range(2)], [OnGpu(3000), OnGpu(3001)]
    torch.cuda.synchronize()
    for _ in range(100):
        for stream, call in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                call.run()
    for call in calls:
        call.check()


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    on_gpu = OnGpu(700)
    on_gpu.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        on_gpu.run()
    for number in (1, 2):
        on_gpu.change(number)
        graph.replay()
        on_gpu.check()
