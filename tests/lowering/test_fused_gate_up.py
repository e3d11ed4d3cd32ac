# SPDX-License-Identifier: Apache-2.0
"""Grouped quantizers that compute their operand, the gradients of gate and up of a mixture of
experts, which are the halves of one tensor. The kernels run on a CPU (tests/support/emulation)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from q2compile.lowering.prologue import fusion_rule
from q2compile.runtime_kernels.cuda.fused_call_site import FusedCallSite
from q2compile.runtime_kernels.cuda.quantize import fused, prologue_source, rotate_quantize
from tests.support import quantizer_calls
from tests.support.emulation.fused import Fused, made_by, run_fused
from tests.support.emulation.on_cpu import assert_same_bits, launches_on_cpu
from tests.support.prologues import BF16, normal

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
q2, aten = torch.ops.q2, torch.ops.aten
EDEN = "nvfp4_ms_eden_pow2"
SEEDS = torch.tensor([11, 12])
HALF = 128
# Sizes of groups, and rows of none: every filling of a chunk, whole tiles, no group at all.
ROUTINGS = {
    "every filling": ([0, 1, 8, 9, 17, 0, 33, 65, 130, 0], 20),
    "whole tiles": ([128, 256], 0),
    "nothing but rows of no group": ([0, 0], 150),
}


def operands(routing: str, half: int = HALF) -> list[torch.Tensor]:
    """Seeds, ends of groups, dh, gate and up in one tensor, and a mask of the rows of no group."""
    sizes, more = ROUTINGS[routing]
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    rows = sum(sizes) + more
    both = normal(rows, 2 * half, seed=2)
    return [SEEDS, ends, q2.padded_ends(ends), normal(rows, half), both, torch.arange(rows) >= 300]


def halves(dh: torch.Tensor, both: torch.Tensor) -> list[torch.Tensor]:
    g, u = both.chunk(2, -1)
    return [aten.silu_backward(dh * u, g), dh * torch.nn.functional.silu(g)]


def quantized(function: Callable, scheme: str = EDEN) -> Callable:
    def experts(seeds, ends, padded, dh, both, tail):
        x = function(dh, both, tail)
        groups = {"offs": ends, "padded_offs": padded}
        return quantizer_calls.quantized_both(x, seeds[0], seeds[1], scheme, "rht128", 3, **groups)

    return experts


def swiglu(dh, both, tail):
    return torch.cat(halves(dh, both), 1)


def masked(dh, both, tail):
    zero = torch.zeros((), dtype=dh.dtype)
    return torch.where(tail[:, None], zero, torch.cat(halves(dh, both), 1))


def of_the_same_operand(done: Fused, args: list[torch.Tensor], scheme: str) -> tuple:
    """The outputs of two kernels, for the operand that the fused kernel computes."""
    ((prologue, given),) = done.calls
    x = torch.cat(made_by(prologue, given), 1)
    return quantizer_calls.grouped_both(x, *args[1:3], *SEEDS, scheme, "rht128", 3)()


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("scheme", [EDEN + "@bf16", EDEN, EDEN + "@32x4x4", "nvfp4_sr_pow2"])
def test_the_bits_are_those_of_two_kernels(scheme, routing, monkeypatch) -> None:
    function = masked if "@" in scheme else swiglu
    args = operands(routing)
    done = run_fused(monkeypatch, quantized(function, scheme), *args)
    assert "fused with gate and up of cat" in done.notes[0]
    assert "triton_" not in done.source.partition("def call")[2]
    assert_same_bits(done.results, of_the_same_operand(done, args, scheme))


def test_several_tiles_across(monkeypatch) -> None:
    args = operands("every filling", 3 * HALF)
    done = run_fused(monkeypatch, quantized(masked, EDEN + "@bf16"), *args)
    assert_same_bits(done.results, of_the_same_operand(done, args, EDEN + "@bf16"))
    ((prologue, given),) = done.calls
    (by_torch,) = prologue.evaluate(given[: len(prologue.inputs)])
    by_eager = masked(*args[3:])
    assert by_torch.shape == by_eager.shape == (283, 6 * HALF)
    torch.testing.assert_close(by_torch, by_eager, rtol=2.0**-7, atol=2.0**-20)


def test_any_number_of_tokens(monkeypatch) -> None:
    args = operands("every filling")
    for x in args[3:]:
        torch._dynamo.mark_dynamic(x, 0)
    done = run_fused(monkeypatch, quantized(masked, EDEN + "@bf16"), *args)
    assert done.calls and done.calls[0][0].sizes, done.notes
    assert_same_bits(done.results, of_the_same_operand(done, args, EDEN + "@bf16"))


def test_inputs_off_16_bytes_are_computed_apart(monkeypatch) -> None:
    args = operands("every filling")
    done = run_fused(monkeypatch, quantized(swiglu), *args)
    ((prologue, given),) = done.calls
    dh, both = given[:2]
    shifted = torch.empty(dh.numel() + 1, dtype=BF16)[1:].view(dh.shape).copy_(dh)
    names = ("rowwise_seed", "columnwise_seed", "offs", "padded_offs")
    how = {"scheme": EDEN, "transform": "rht128", "rowwise": True, "columnwise": True}
    call = {**how, "rng_offset": 3, **dict.fromkeys(names, ...)}, (1,) * 6
    outputs = [torch.empty_like(t) for t in done.results]
    site = FusedCallSite(prologue, [call])
    site(shifted, both, *SEEDS, *args[1:3], *outputs)
    by_torch = prologue.evaluate((dh, both))
    want = quantizer_calls.grouped_both(*by_torch, *args[1:3], *SEEDS, EDEN, "rht128", 3)()
    assert_same_bits(outputs, want)


def in_three(dh, both, tail):
    return torch.cat([*halves(dh, both), dh + 1], 1)


def of_two_widths(dh, both, tail):
    return torch.cat([dh + 1, both + 1], 1)


def narrow(dh, both, tail):
    return torch.cat([dh[:, :64] + 1, both[:, :64] + 1], 1)


def in_memory(dh, both, tail):
    return torch.cat([dh, both[:, :HALF] + 1], 1)


def with_another_reader(dh, both, tail):
    dg, du = halves(dh, both)
    return torch.cat([dg, du], 1), dg


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (in_three, "its columns are not two equal parts"),
        (of_two_widths, "its columns are not two equal parts"),
        (narrow, "parts of 64 columns, not a multiple of 128"),
        (in_memory, "the operand is in memory already"),
    ],
)
def test_what_is_not_fused_and_why(function, why, monkeypatch) -> None:
    done = run_fused(monkeypatch, quantized(function), *operands("whole tiles"))
    assert not done.calls and why in done.notes[0]


def test_a_half_with_another_reader_is_written(monkeypatch) -> None:
    def experts(seeds, ends, padded, dh, both, tail):
        x, dg = with_another_reader(dh, both, tail)
        made = q2.quantize(
            x,
            scheme=EDEN,
            transform="rht128",
            rowwise=True,
            columnwise=True,
            offs=ends,
            padded_offs=padded,
            rowwise_seed=seeds[0],
            columnwise_seed=seeds[1],
            rng_offset=3,
        )
        return (*made, dg * 2)

    done = run_fused(monkeypatch, experts, *operands("whole tiles"))
    assert not done.calls and "a part has other readers" in done.notes[0]


@pytest.mark.parametrize(("scheme", "why"), [("mxfp4_sr", "two operands of mxfp4_sr")])
def test_schemes_that_have_no_kernel_of_two(scheme, why, monkeypatch) -> None:
    done = run_fused(monkeypatch, quantized(swiglu, scheme), *operands("whole tiles"))
    assert not done.calls and why in done.notes[0]


def test_the_rule_is_that_of_two_operands(monkeypatch) -> None:
    """Two elements take six bytes of reads: gate and up are in one tensor, but are two reads."""
    asked = []

    def why_not(*args):
        asked.append(args)
        return "it would not pay"

    monkeypatch.setattr(fusion_rule, "why_not", why_not)
    args = operands("whole tiles")
    done = run_fused(monkeypatch, quantized(swiglu), *args, always=False)
    assert not done.calls and "it would not pay" in done.notes[0]
    ((prologue, spec, directions, capability, shared),) = asked
    assert (spec.name, directions, capability, shared) == (EDEN, 2, 9, False)
    assert len(prologue.results) == 2 and prologue.gate_and_up
    assert prologue_source.bytes_read(prologue) == pytest.approx(6.0, rel=0.01)


def test_the_self_check_finds_a_kernel_that_computes_otherwise(monkeypatch) -> None:
    launches_on_cpu(monkeypatch, "sm_90a")
    monkeypatch.setattr(fused, "apart", lambda device: nullcontext())
    _, keywords = quantizer_calls.grouped_both(None, *4 * [...], EDEN, "rht128").written()
    check = torch.device("cpu"), keywords, 2
    assert fused.disagreement(*check) is None
    text = prologue_source.cuda_source(fused.representative(2, True))
    wrong = text.replace(" + v1)", " - v1)")
    monkeypatch.setattr(rotate_quantize, "cuda_source", lambda prologue: wrong)
    rotate_quantize._rotate_launch.cache_clear()
    assert "differ from the reference" in str(fused.disagreement(*check))
    rotate_quantize._rotate_launch.cache_clear()
