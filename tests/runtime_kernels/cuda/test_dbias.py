# SPDX-License-Identifier: Apache-2.0
"""The quantizers that sum the columns of their operand, too, against the reference, bit by bit: in
emulation, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from q2compile.runtime_kernels.numerics.column_sums import STRANDS, TILE, column_sums
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SWIZZLED
from q2compile.runtime_kernels.ops.table import QuantizerCall
from q2compile.runtime_kernels.registry import select
from tests.support import quantizer_calls as calls
from tests.support.checked_forms import BOTH, CHECKED
from tests.support.emulation.on_cpu import assert_same_bits, matrix
from tests.support.pairwise import pairwise
from tests.support.quantizer_calls import SEEDS

emulated = pytest.mark.usefixtures("on_cpu")

EDEN = "nvfp4_ms_eden_pow2"
AMPERE, HOPPER, BLACKWELL = "sm_80", "sm_90a", "sm_100a"
BF16, FP32 = torch.bfloat16, torch.float32


def both(x: torch.Tensor, scheme: str, transform: str) -> QuantizerCall:
    return calls.both(x, *SEEDS, scheme, transform, 3)


def columnwise(x: torch.Tensor, scheme: str, transform: str) -> QuantizerCall:
    return calls.one(x, SEEDS[0], scheme, transform, True, 1)


def agree(
    x: torch.Tensor, scheme: str, transform: str, dtype: torch.dtype, kinds=(both, columnwise)
) -> None:
    """With the reference and with the calls that sum nothing."""
    for kind in kinds:
        call = kind(x, scheme, transform)
        made = calls.launched(call.replace(dbias=dtype))
        assert_same_bits(made, call.replace(dbias=dtype)())
        assert_same_bits(made[:-1], call())


# Conversion instructions do not depend on the shape.
@emulated
@pytest.mark.parametrize(
    "shape, architecture",
    [(s, HOPPER) for s in [(128, 128), (300, 201), (33, 517), (1, 1), (0, 40), (40, 0)]]
    + [((300, 201), AMPERE), ((300, 201), BLACKWELL)],
)
def test_of_quartet2(shape) -> None:
    agree(matrix(*shape), EDEN, "rht128", BF16)


# Sums are those of what is read, before it is rounded: each rule by one of the two calls, of which
# test_of_quartet2 has both.
RULES = [
    *[("nvfp4_sr_pow2", "rht16", both), ("nvfp4_sr_pow2", "rht128", columnwise)],
    *[("nvfp4_pow2", "none", both), ("mxfp4_sr", "rht64", columnwise)],
    *[("mxfp4_rtn34", "rht32", both), ("nvfp4_ms_eden", "rht128", columnwise)],
    *[(EDEN + SWIZZLED, "rht128", both), ("mxfp4_sr" + SWIZZLED, "rht64", columnwise)],
    *[(EDEN + DEQUANTIZED, "rht128", both), ("nvfp4_sr_pow2" + DEQUANTIZED, "rht16", columnwise)],
    *[("mxfp4_rtn34" + DEQUANTIZED, "rht32", both), ("nvfp4_sr_pow2", "rht16_fixed", columnwise)],
    ("nvfp4_ms_eden", "rht128", both),
]


@emulated
@pytest.mark.parametrize("scheme, transform, kind", RULES)
def test_of_every_rule(scheme, transform, kind) -> None:
    agree(matrix(140, 136), scheme, transform, BF16, [kind])


@emulated
@pytest.mark.parametrize(
    "given, dtype", [(BF16, torch.float16), (torch.float16, FP32), (FP32, BF16)]
)
def test_of_every_dtype(given, dtype) -> None:
    """One kernel reads the operand, and another writes the sums."""
    agree(matrix(140, 72, given).clamp(-30, 30), EDEN, "rht128", dtype)


@emulated
def test_of_more_tiles_than_a_thread_loads_at_once() -> None:
    """Eight warps of eight loads each, and a last one."""
    agree(matrix(TILE * STRANDS * 8 + 130, 72), EDEN, "rht128", FP32)


@emulated
def test_of_any_strides() -> None:
    """A transposed matrix is copied; an expanded one, too."""
    for x in (matrix(136, 140).t(), matrix(1, 136).expand(140, 136), matrix(140, 300)[:, 5:141]):
        agree(x, EDEN, "rht128", FP32)


@emulated
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_poison(value) -> None:
    x = matrix(300, 140)
    x[77, 88] = value
    *parts, sums = calls.launched(calls.both(x, *SEEDS, EDEN, "rht128", dbias=BF16))
    assert parts[2].isfinite() and parts[5].isfinite()
    assert (~sums.isfinite()).nonzero().tolist() == [[88]]


def test_the_order_is_as_exact_as_a_sum_in_fp32() -> None:
    """At most 41 + ceil(tiles / 8) roundings of 2^-24, of sums of magnitudes."""
    x = torch.randn((5000, 64), generator=torch.Generator().manual_seed(0))
    exact = x.double().sum(0)
    roundings = 41 + -(-5000 // TILE // STRANDS) + 1
    bound = roundings * 2.0**-24 * x.double().abs().sum(0)
    assert ((column_sums(x, FP32).double() - exact).abs() <= bound).all()


def on_gpu(call: QuantizerCall) -> list[torch.Tensor]:
    on_device = [a.cuda() if isinstance(a, torch.Tensor) else a for a in call.positional]
    return [t.cpu() for t in select(call.spec.name, on_device, "cuda")(*on_device)]


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """Run after run: the order of the sums is fixed."""
    for scheme, dtype, shape in pairwise(
        CHECKED[BOTH._replace(dbias=True)],
        [BF16, FP32],
        [(128, 128), (300, 201), (33, 517), (1, 1), (8200, 1000)],
    ):
        call = calls.both(matrix(*shape), *SEEDS, scheme, "rht128", 3, dbias=dtype)
        want = call()
        for _ in range(3):
            assert_same_bits(on_gpu(call), want)
        call = call.replace(rowwise=False, rng_offset=1)
        assert_same_bits(on_gpu(call), call())


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    x, seeds = matrix(1000, 264).cuda(), [seed.cuda() for seed in SEEDS]
    call = calls.both(x, *seeds, EDEN, "rht128", 3, dbias=BF16)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    for factor in (1.0, -2.0):
        x.copy_(factor * matrix(1000, 264))
        graph.replay()
        on_cpu = dict(zip(("rowwise_seed", "columnwise_seed"), SEEDS, strict=True))
        want = call.replace(x=x.cpu(), **on_cpu)()
        assert_same_bits([t.cpu() for t in made], want)
