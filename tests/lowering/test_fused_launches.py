# SPDX-License-Identifier: Apache-2.0
"""Rotating quantizers that compute their operand. The kernels run on a CPU
(tests/support/emulation) for an H200 that is not there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from q2compile.lowering.prologue import fusion_rule
from q2compile.runtime_kernels.cuda.call_site import CallSite, SiteCall
from q2compile.runtime_kernels.cuda.jit import launch
from q2compile.runtime_kernels.cuda.jit.launch import Launch, LaunchError
from q2compile.runtime_kernels.cuda.quantize import fused, plan, prologue_source, rotate_quantize
from q2compile.runtime_kernels.cuda.quantize.prologue_expression import (
    PrologueExpression,
    arguments_of,
)
from q2compile.runtime_kernels.cuda.quantize.prologue_source import bytes_read
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.table import QUANTIZE
from q2compile.runtime_kernels.registry import KernelWarning
from q2compile.runtime_kernels.small_calls import form_of
from tests.support import emulation, quantizer_calls
from tests.support import quantizer_calls as calls
from tests.support.emulation.fused import Fused, made_by, run_fused
from tests.support.emulation.on_cpu import assert_same_bits, launches_on_cpu
from tests.support.prologues import (
    BF16,
    COLS,
    FP32,
    PROLOGUES,
    ROWS,
    matrices,
    normal,
    residual,
    silu_mul,
)
from tests.support.quantizer_calls import quantized_both

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
EDEN = "nvfp4_ms_eden_pow2"
SEEDS = torch.tensor([11, 12])
WHY_NOT = fusion_rule.why_not


INF, NAN = float("inf"), float("nan")


def quantized(function: Callable, scheme: str = EDEN, transform: str = "rht128") -> Callable:
    def both(seeds, *operands):
        return quantized_both(function(*operands), seeds[0], seeds[1], scheme, transform, 3)

    return both


@pytest.mark.parametrize("name", PROLOGUES)
def test_the_bits_are_those_of_two_kernels(name, monkeypatch) -> None:
    function, operands_of, exact = PROLOGUES[name]
    operands = operands_of()
    done = run_fused(monkeypatch, quantized(function), SEEDS, *operands)
    ((prologue, given),) = done.calls
    assert "fused with" in done.notes[0] and "triton_" not in done.source.partition("def call")[2]
    (x,) = made_by(prologue, given)
    assert_same_bits(done.results, quantized_both(x, *SEEDS, EDEN, "rht128", 3))
    (by_torch,) = prologue.evaluate(given[: len(prologue.inputs)])
    by_eager = function(*operands)
    if exact:
        assert torch.equal(x, by_eager) and torch.equal(by_torch, by_eager)
    else:
        for other in (by_torch, by_eager):
            # Exponentials and quotients differ by about 2^-22, more where terms cancel. A bf16 that
            # is so near to a tie is rounded the other way: one in 2^12.
            torch.testing.assert_close(x.float(), other.float(), rtol=2.0**-7, atol=2.0**-20)
            assert (x != other).float().mean() < 2.0**-10


def test_what_is_approximated() -> None:
    """Errors against double precision: 2^-24 for the polynomial of 1 + erf, |x| 2^-24 of itself for
    e^x. A GPU's exponential may add 2^-22."""
    x = torch.cat([torch.linspace(-12, 12, 64 * 128 - 4), torch.tensor([0.0, INF, -INF, NAN])])
    steps = (("load", 0, "(c + (128 * r))", "lanes", -1), ("erf_plus_one", 0), ("exp", 0))
    prologue = PrologueExpression(FP32, 64, 128, (FP32,), False, steps, (1, 2))
    erf, exp = (made.double().flatten() for made in made_by(prologue, (x,)))
    wide = x.double()
    assert torch.allclose(erf, 1 + wide.erf(), rtol=0, atol=2.0**-24 + 2.0**-22, equal_nan=True)
    finite = x.isfinite()
    far = (exp - wide.exp()).abs() > (wide.abs() * 2.0**-24 + 2.0**-22) * wide.exp()
    assert not far[finite].any()
    assert torch.equal(
        exp[~finite].nan_to_num(7, INF), torch.tensor([INF, 0, 7], dtype=torch.float64)
    )


def test_what_no_result_comes_from_is_left_out(monkeypatch) -> None:
    """1 + erf(x) needs no step for erf alone."""
    function, operands_of, _ = PROLOGUES["gelu"]
    ((prologue, _),) = run_fused(monkeypatch, quantized(function), SEEDS, *operands_of()).calls
    names = [step[0] for step in prologue.steps]
    assert names.count("erf_plus_one") == 1 and "erf" not in names
    used = {arg for step in prologue.steps for arg in arguments_of(step)} | {*prologue.results}
    assert used == set(range(len(names)))


def test_quest_of_the_forward(monkeypatch) -> None:
    def function(g, u):
        return torch.ops.q2.quantize(
            silu_mul(g, u),
            scheme="mxfp4_quest",
            transform="h32",
            rowwise=True,
            columnwise=False,
            mask=True,
        )

    done = run_fused(monkeypatch, function, *matrices(2))
    ((prologue, given),) = done.calls
    want = quantizer_calls.masked(*made_by(prologue, given), "mxfp4_quest", "h32")()
    assert_same_bits(done.results, want)


SCHEMES = [
    (EDEN + "@bf16", "rht128", BF16),
    (EDEN, "rht128", FP32),
    (EDEN, "rht128", torch.float16),
    ("nvfp4_sr_pow2", "rht128", BF16),
    ("nvfp4_sr", "rht128", BF16),
    ("mxfp4_sr@32x4x4", "rht64", BF16),
    ("mxfp4_rtn34", "rht32", BF16),
]


@pytest.mark.parametrize(("scheme", "transform", "dtype"), SCHEMES)
def test_schemes_and_types(scheme, transform, dtype, monkeypatch) -> None:
    function = quantized(lambda a, b: a + b, scheme, transform)
    operands = matrices(2, dtype)
    done = run_fused(monkeypatch, function, SEEDS, *operands)
    assert len(done.calls) == 1
    assert_same_bits(done.results, function(SEEDS, *operands))


@pytest.mark.parametrize("transpose", [False, True])
def test_one_direction(transpose, monkeypatch) -> None:
    def function(seeds, a, b):
        return torch.ops.q2.quantize(
            a * b,
            scheme="nvfp4_pow2",
            transform="rht16",
            rowwise=not transpose,
            columnwise=transpose,
            rng_offset=3,
            rowwise_seed=seeds[1],
            columnwise_seed=seeds[1],
        )

    operands = matrices(2, FP32)
    done = run_fused(monkeypatch, function, SEEDS, *operands)
    assert len(done.calls) == 1
    assert_same_bits(done.results, function(SEEDS, *operands))


def test_the_other_half_is_one_read(monkeypatch) -> None:
    """RoPE's backward takes the second half of a head's gradient for the first, and the first for
    the second: two reads with masks that exclude each other, each of dq and of sin."""
    function, operands_of, _ = PROLOGUES["rope"]
    done = run_fused(monkeypatch, quantized(function), SEEDS, *operands_of())
    reads = [step for step in done.calls[0][0].steps if step[0] == "load"]
    assert [(input_, mask) for _, input_, _, _, mask in reads] == [
        *((0, -1), (1, -1)),
        *((0, -1), (2, -1)),
    ]
    half = operands_of()[0].shape[-1] // 2
    assert all(f"floordiv(mod(c, {2 * half}), {half})" in index for _, _, index, *_ in reads[2:])


def test_reads_with_other_masks_are_left(monkeypatch) -> None:
    """The first half of a head from the second, and its last quarter from the third: a part of the
    columns is in both, and each read keeps its mask."""

    def parts(a):
        head = a.view(ROWS, -1, 64)
        first = torch.ops.aten.slice_backward(head[..., 32:], head.shape, 2, 0, 32, 1)
        last = torch.ops.aten.slice_backward(head[..., 32:48], head.shape, 2, 48, 64, 1)
        return (head + first + last).view_as(a)

    a = normal(ROWS, 256)
    done = run_fused(monkeypatch, quantized(parts), SEEDS, a)
    ((prologue, given),) = done.calls
    masks = [step[4] for step in prologue.steps if step[0] == "load"]
    assert masks[0] == -1 and len(masks) == 3 and min(masks[1:]) >= 0
    assert torch.equal(*made_by(prologue, given), parts(a))


def test_rounding_in_between(monkeypatch) -> None:
    """Under emulate_precision_casts each operation rounds to bf16, as without a compiler."""
    function = quantized(lambda a, b, c: (a * b + c) * 3)
    operands = matrices(3)
    done = run_fused(monkeypatch, function, SEEDS, *operands, emulate_precision_casts=True)
    ((prologue, _),) = done.calls
    assert [step[0] for step in prologue.steps].count("round") >= 2
    assert_same_bits(done.results, function(SEEDS, *operands))


def two_readers(seeds, a, b):
    x = a + b
    return quantized_both(x, seeds[0], seeds[1], EDEN, "rht128", 3), x.sum(0)


def with_dbias(seeds, a, b):
    how = EDEN, "rht128", 3
    return quantized_both(a + b, seeds[0], seeds[1], *how, dbias=torch.bfloat16)


NOT_FUSED = {
    "it returns dbias": (with_dbias, lambda: matrices(2)),
    "sum_1 also read the operand": (two_readers, lambda: matrices(2)),
    "does not go along a row": (
        quantized(lambda a, b: a + b.t()),
        lambda: [normal(ROWS, COLS), normal(COLS, ROWS)],
    ),
    "are not a multiple of": (quantized(lambda a: a * 2), lambda: [normal(ROWS, 12)]),
    "do not begin on 16 bytes": (
        quantized(lambda a: a[:, 4:] * 2),
        lambda: [normal(ROWS, COLS + 4)],
    ),
    "is of torch.int32": (
        quantized(lambda a, i: a[i] * 2),
        lambda: [normal(ROWS, COLS), torch.arange(ROWS).to(torch.int32)],
    ),
    "in memory already": (quantized(lambda a: a), lambda: matrices(1)),
    "no rule for ops.": (quantized(lambda a: torch.sin(a)), lambda: matrices(1)),
}


@pytest.mark.parametrize("why", NOT_FUSED)
def test_what_is_not_fused_and_why(why, monkeypatch) -> None:
    function, operands = NOT_FUSED[why]
    done = run_fused(monkeypatch, function, SEEDS, *operands())
    assert done.calls == [] and "prologue=" not in done.source
    (note,) = done.notes
    assert ": not fused: " in note and why in note


def test_the_rule(monkeypatch) -> None:
    """A sum of three is little work for the eight bytes it reads; four logarithms are not."""
    done = run_fused(monkeypatch, quantized(residual), SEEDS, *PROLOGUES["residual"][1]())
    prologue, spec = done.calls[0][0], get_scheme(EDEN)
    assert bytes_read(prologue) == 8
    assert WHY_NOT(prologue, spec, 2, 9) is None
    last = len(prologue.steps) - 1
    steps = (*prologue.steps, *(("log", last + i) for i in range(4)))
    slow = replace(prologue, steps=steps, results=(last + 4,))
    assert "are expected to take" in WHY_NOT(slow, spec, 2, 9)
    # With an exact global scale the expression is computed twice, so one logarithm more is too
    # much.
    exact = get_scheme("nvfp4_sr")
    assert WHY_NOT(prologue, exact, 2, 9) is None
    steps = (*prologue.steps, ("log", last))
    dear = replace(prologue, steps=steps, results=(last + 1,))
    assert WHY_NOT(dear, spec, 2, 9) is None
    assert "per element, twice for an exact global scale" in WHY_NOT(dear, exact, 2, 9)


def gated(scheme: str = EDEN) -> Callable:
    """The dg and du of a SwiGLU, quantized."""

    def pair(seeds, dh, g, u):
        dg = torch.ops.aten.silu_backward(dh * u, g)
        first = quantized_both(dg, seeds[0], seeds[1], scheme, "rht128", 3)
        second = quantized_both(silu_mul(g, dh), seeds[1], seeds[0], scheme, "rht128", 5)
        return [*first, *second]

    return pair


PAIRED = [
    (EDEN, BF16),
    (EDEN + "@bf16", BF16),
    (EDEN + "@32x4x4", torch.float16),
    ("nvfp4_sr_pow2", BF16),
]


@pytest.mark.parametrize(("scheme", "dtype"), PAIRED)
def test_two_operands_of_one_read_are_one_kernel(scheme, dtype, monkeypatch) -> None:
    done = run_fused(monkeypatch, gated(scheme), SEEDS, *matrices(3, dtype))
    ((prologue, given),) = done.calls
    names = [step[0] for step in prologue.steps]
    assert names.count("load") == 3 and len(names) == 11  # as GATED of prologue_expressions.py
    dg, du = made_by(prologue, given)
    one = quantized_both(dg, *SEEDS, scheme, "rht128", 3)
    two = quantized_both(du, *SEEDS.flip(0), scheme, "rht128", 5)
    assert_same_bits(done.results, [*one, *two])
    first, second = done.notes
    assert "fused with" in first and ", in one kernel with " in second
    # The tail kernel computes all results that depend on the amax of all four operands.
    body = done.source.partition("def call")[2]
    assert body.count("q2_fused_") == 1 and "q2_site" not in body and "triton_" not in body


def test_two_launches_make_what_four_made(monkeypatch) -> None:
    """One launch quantizes all four operands; one computes the results that depend on
    their amax."""
    operands = matrices(3)
    done = run_fused(monkeypatch, gated(), SEEDS, *operands)
    one = calls.both(None, *SEEDS, EDEN, "rht128", 3)
    rotate, align = fused.fused_plan(done.calls[0][0], 0, [one, one]).steps
    assert rotate.launch.variant.file == "rotate_quantize.cu"
    assert (align.launch.variant.file, align.grid[1]) == ("align_scales.cu", 4)


def of_other_scheme(seeds, dh, g, u):
    dg = torch.ops.aten.silu_backward(dh * u, g)
    first = quantized_both(dg, *seeds, EDEN, "rht128", 3)
    return [*first, *quantized_both(silu_mul(g, dh), *seeds, "nvfp4_sr_pow2", "rht128", 3)]


def of_each_other(seeds, dh, g, u):
    """The second operand depends on the codes of the first."""
    first = quantized_both(silu_mul(g, dh) * u, *seeds, EDEN, "rht128", 3)
    return [*first, *quantized_both(silu_mul(g, dh) * u * first[2], *seeds, EDEN, "rht128", 3)]


def of_other_rows(seeds, dh, g, u):
    first = quantized_both(silu_mul(g, dh) * u, *seeds, EDEN, "rht128", 3)
    return [*first, *quantized_both((silu_mul(g, dh) * u)[:64] * 2, *seeds, EDEN, "rht128", 3)]


@pytest.mark.parametrize("function", [of_other_scheme, of_each_other, of_other_rows])
def test_what_is_no_pair(function, monkeypatch) -> None:
    operands = matrices(3)
    done = run_fused(monkeypatch, function, SEEDS, *operands)
    assert [len(prologue.results) for prologue, _ in done.calls] == [1] * len(done.notes)
    assert not any("one kernel" in note for note in done.notes) and len(done.notes) == 2


@pytest.mark.parametrize(("scheme", "dtype"), [("mxfp4_sr", BF16), (EDEN, FP32)])
def test_where_two_do_not_fit(scheme, dtype, monkeypatch) -> None:
    done = run_fused(monkeypatch, gated(scheme), SEEDS, *matrices(3, dtype))
    apart, *notes = done.notes
    assert ": not in one kernel: " in apart and len(done.calls) == 2
    assert ("do not fit" if dtype == FP32 else "are not quantized") in apart
    assert all("fused with" in note for note in notes)


def test_the_rule_knows_operands_of_one_read(monkeypatch) -> None:
    """Inductor computes SwiGLU's dg and du in one kernel, with one read of dh, g and u."""
    asked = []

    def why_not(prologue, spec, directions, capability, shared):
        asked.append((len(prologue.results), shared))
        return "" if len(prologue.results) > 1 else None

    def alone(seeds, dh, g, u):
        return quantized_both(silu_mul(g, dh), *seeds, EDEN, "rht128", 3)

    for function in (gated(), alone):
        monkeypatch.setattr(fusion_rule, "why_not", why_not)
        run_fused(monkeypatch, function, SEEDS, *matrices(3), always=False)
    assert asked == [(2, False), (1, True), (1, True), (1, False)]


def site_of(done: Fused) -> CallSite:
    """One like that of generated code."""
    _, keywords = calls.both(None, ..., ..., EDEN, "rht128", 3).written()
    call = SiteCall(QUANTIZE, (None,), (1,) * 6, **keywords)
    return CallSite(call, fixed=True, prologue=done.calls[0][0])


def test_inputs_off_16_bytes_are_computed_apart(monkeypatch) -> None:
    operands = matrices(2)
    done = run_fused(monkeypatch, quantized(lambda a, b: a + b), SEEDS, *operands)
    shifted = torch.empty(ROWS * COLS + 1, dtype=BF16)[1:].view(ROWS, COLS).copy_(operands[0])
    outputs = [torch.empty_like(t) for t in done.results]
    site_of(done)(shifted, operands[1], *SEEDS, *outputs)
    assert_same_bits(outputs, done.results)


def test_a_launch_that_fails_is_replaced_once_and_for_all(monkeypatch) -> None:
    operands = matrices(2)
    done = run_fused(monkeypatch, quantized(lambda a, b: a + b), SEEDS, *operands)
    tried = []

    def failing(launch, *args):
        tried.append(launch)
        raise LaunchError("cannot launch rotate_quantize.cu: CUDA_ERROR_INVALID_IMAGE")

    monkeypatch.setattr(Launch, "bind", failing)
    site, outputs = site_of(done), [torch.empty_like(t) for t in done.results]
    with pytest.warns(KernelWarning, match="INVALID_IMAGE"):
        site(*operands, *SEEDS, *outputs)
    assert_same_bits(outputs, done.results)
    site(*operands, *SEEDS, *outputs)
    assert len(tried) == 1


BOTH = calls.both(None, ..., ..., EDEN, "rht128")


@pytest.mark.parametrize(
    "operands, dtype", [(1, torch.bfloat16), (2, torch.bfloat16), (1, torch.float32)]
)
def test_the_self_check_finds_a_kernel_that_computes_otherwise(
    operands, dtype, monkeypatch
) -> None:
    launches_on_cpu(monkeypatch, "sm_90a")
    monkeypatch.setattr(fused, "apart", lambda device: nullcontext())
    check = torch.device("cpu"), form_of("quantize", BOTH.positional), operands, dtype
    assert fused.disagreement(*check) is None
    prologue = fused.representative(operands, dtype=dtype)
    assert prologue.dtype == dtype
    text = prologue_source.cuda_source(prologue)
    assert text.count(" + v1)") == 1
    wrong = text.replace(" + v1)", " - v1)")
    monkeypatch.setattr(rotate_quantize, "cuda_source", lambda prologue: wrong)
    rotate_quantize._rotate_launch.cache_clear()
    assert "differ from the reference" in str(fused.disagreement(*check))
    rotate_quantize._rotate_launch.cache_clear()


def test_the_self_check_has_thread_blocks_with_several_tiles(monkeypatch) -> None:
    """With one tile for each there is nothing wrong."""
    launches_on_cpu(monkeypatch, "sm_90a")
    monkeypatch.setattr(plan, "multiprocessors", launch.multiprocessors)
    monkeypatch.setattr(launch, "all_multiprocessors", lambda index: 132)
    tiles = 28  # where their number is among the parameters of rotate_quantize.cu

    def run(launched, architecture, grid, *values):
        values = list(values)
        if launched.variant.file == "rotate_quantize.cu":
            values[tiles] = min(values[tiles], grid[0])  # no second one is worked on
        emulation.emulate(launched, architecture, grid, *values)

    emulation.serve(monkeypatch, "sm_90a", run)

    def poisoned(size, stride, dtype):
        bytes_ = torch.full((*size, dtype.itemsize), 77, dtype=torch.uint8)
        return bytes_.view(dtype).view(size)

    monkeypatch.setattr("q2compile.runtime_kernels.cuda.calls.empty", poisoned)
    found = fused.disagreement(torch.device("cpu"), form_of("quantize", BOTH.positional), 1)
    assert found is not None and found.endswith("with several tiles for each thread block")
