# SPDX-License-Identifier: Apache-2.0
"""Operands and amax near the smallest fp32, and amax far from their operand: the reference,
compared with the emulated kernels of each branch, their PTX, the C++ kernels and Inductor's.

A divisor that is flushed to zero turns a block into Inf or NaN, and with it a training run. So the
sweep has tensors of every magnitude from fp32's smallest subnormal on, rows of different ones in
one tensor, zeros of both signs, and amax from 0 to the largest float.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.utils import run_and_get_code

from q2compile.runtime_kernels.cuda import other_ops
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import not_served
from q2compile.runtime_kernels.numerics.formats import decode_e2m1
from q2compile.runtime_kernels.numerics.scaled_codes import scaled_codes
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SCHEMES, SWIZZLED, get_scheme
from q2compile.runtime_kernels.ops.table import QuantizerCall
from q2compile.runtime_kernels.registry import CPP, REFERENCE, select
from tests.support import ptx
from tests.support import quantizer_calls as calls
from tests.support.emulation.inductor import lower_on_cpu
from tests.support.emulation.on_cpu import assert_same_bits, launches_on_cpu, pretend_device
from tests.support.machine_code import HOT, OTHERS
from tests.support.pairwise import pairwise
from tests.support.ptx.floats import flushed
from tests.support.ptx.instructions import TABLE
from tests.support.quantizer_calls import SEEDS

q2 = torch.ops.q2
TINY, LEAST = 2.0**-126, 2.0**-149  # the smallest normal and the smallest subnormal
EXPONENTS = (-149, -140, -130, -127, -126, -125, -122, -116, -104, -97, -96, -60, -24, -14, 0)
AMAX = (0.0, LEAST, 2.0**-140, 2.0**-127, TINY, 3e-35, 2.0**-115, 2.0**-100, 1.0, 2.0**60, 3.4e38)
AMPERE, HOPPER, BLACKWELL = "sm_80", "sm_90a", "sm_100a"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SERVED = [s for s in SCHEMES if not not_served(s, "none")]
GIVEN = [s for s in SCHEMES if SCHEMES[s].takes_amax]


def normal() -> torch.Tensor:
    """fp64 [64, 128], within 4."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn((64, 128), generator=generator, dtype=torch.float64).clamp_(-4, 4)


def operands(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Operands of one magnitude; of another magnitude in each row; and of -0, with one element that
    is tiny or 0."""
    x = normal()
    for exponent in EXPONENTS:
        yield (x * 2.0**exponent).to(dtype)
    rows = torch.tensor([2.0 ** EXPONENTS[i % len(EXPONENTS)] for i in range(64)])
    yield (x * rows[:, None].double()).to(dtype)
    for smallest in (LEAST, TINY, 0.0):
        one = torch.full_like(x, -0.0)
        one[3, 5] = smallest
        yield one.to(dtype)


def dequantized(parts, scheme: str) -> torch.Tensor:
    return scaled_codes(*parts[:2], get_scheme(scheme)).double() * parts[2].double()


# The reference --------------------------------------------------------------------------------


def test_the_reference_loses_no_more_than_it_must() -> None:
    """No NaN, no Inf, and no block has a larger error than one of normal size, except 8 * 2^-126
    and the value of e4m3's smallest scale.

    - Normal size: half the largest step of the codes, stochastic a whole one, of 6 in all; more in
      mxfp4, whose scales may clip a quarter of the largest.
    - 2^-126: pow2 has zeros for smaller raw scales. Exact has no smaller global scale, and what x
      is multiplied by ends at fp32's largest, so that blocks below 1.5 * 2^-126 shrink.
    """
    for scheme, dtype in pairwise(SCHEMES, DTYPES):
        spec = SCHEMES[scheme]
        for x in operands(dtype):
            parts = q2.quantize(
                x,
                scheme=scheme,
                rowwise=True,
                columnwise=False,
                amax=calls.amax_of(x, scheme),
                rowwise_seed=SEEDS[0],
                mask=spec.masked,
            )
            got, unit = dequantized(parts, scheme), parts[2].double()
            assert got.isfinite().all() and unit >= TINY
            largest = x.double().abs().unflatten(1, (-1, spec.width)).amax(2, keepdim=True)
            if spec.block[0] > 1:
                largest = (
                    largest.unflatten(0, (-1, 16)).amax(1, keepdim=True).expand(-1, 16, -1, -1)
                )
                largest = largest.flatten(0, 1)
            relative = 0.5 if spec.format == "mxfp4" or spec.rounding in ("sr", "ms_eden") else 0.25
            floor = 8 * TINY + 6 * 2.0**-9 * unit.item() * (spec.format == "nvfp4")
            floor += 2.0**-10 * unit.item() * spec.is_tensorwise  # half a step of e4m3's subnormals
            error = (got - x.double()).abs().unflatten(1, (-1, spec.width))
            assert (error <= relative * largest + floor).all()


def test_an_amax_that_is_given_makes_nothing_but_numbers() -> None:
    """Far too small: scales and codes saturate. Too large: scales become subnormals and zeros."""
    for scheme in GIVEN:
        for amax, exponent in product(AMAX, (-149, -127, -110, -10, 10, 100, 124)):
            x = (normal()[:16] * 2.0**exponent).float()
            parts = q2.quantize(
                x,
                scheme=scheme,
                rowwise=True,
                columnwise=False,
                amax=torch.tensor(amax),
                rowwise_seed=SEEDS[0],
            )
            assert dequantized(parts, scheme).isfinite().all() and TINY <= parts[2] <= 2.0**120
            if amax < 2.0**-20 and exponent == 100:
                assert (parts[1].float() == 448).all()
                spec = get_scheme(scheme)
                codes = parts[0].float() if spec.is_tensorwise else decode_e2m1(parts[0])
                nearly_all = codes.abs().eq(spec.code_max).float().mean()
                assert nearly_all > (0.99 if amax > 0 else 0.9)


# The kernels ----------------------------------------------------------------------------------


def agree(call: QuantizerCall) -> None:
    """The same bits; but a norm of 1/4 or 1/8, which the kernels apply with the scale, may round an
    element up that fp32's smallest step has cut: a byte of codes in ten thousand."""
    got, want = calls.launched(call), call()
    x, pow2_size = (
        call.x,
        call.transform.size in (16, 64) and call.scheme.rounding != "ms_eden",
    )
    if pow2_size and x.dtype == torch.float32 and 0 < x.abs().max() < TINY:
        wrong = (got[0] != want[0]).sum().item()
        assert wrong <= want[0].numel() / 4000, wrong
        got, want = got[1:], want[1:]
    assert_same_bits(got, want)


def sweep(scheme: str, transform: str, dtype: torch.dtype, columnwise: bool) -> None:
    for x in operands(dtype):
        if get_scheme(scheme).masked:
            agree(calls.masked(x, scheme, transform))
        elif transform == "none" and not columnwise:
            agree(calls.with_amax(x, SEEDS[0], scheme))
        else:
            agree(calls.one(x, SEEDS[0], scheme, transform, columnwise, 1))


emulated = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
CASES = [(s, "none") for s in SERVED] + [("mxfp4_quest", "h32")]
CASES += [(s, "rht128") for s in ("nvfp4_ms_eden_pow2", "nvfp4_ms_eden", "nvfp4_sr_pow2")]
CASES += [("nvfp4", "rht16"), ("nvfp4_sr_pow2", "rht16"), ("mxfp4_sr", "rht64")]
CASES += [("mxfp4_rtn34", "rht32"), ("nvfp4_ms_eden_pow2" + SWIZZLED, "rht128")]


# Kernels read a dtype before they do anything that depends on the scheme: without chunks, with
# chunks, and with a mask.
READS = [("nvfp4_46_pow2", "none"), ("nvfp4_ms_eden_pow2", "rht128"), ("mxfp4_quest", "h32")]
BRANCHES = [(*case, HOPPER) for case in CASES]
# Its conversions to fp4: roundings and kinds of scales beside those of PTX_CASES.
BRANCHES += [(*case, BLACKWELL) for case in READS]
BRANCHES += [(s, "none", BLACKWELL) for s in ("nvfp4_search", "nvfp4_sr_pow2", "mxfp4_sr")]
BRANCHES += [(s, "none", AMPERE) for s in ("nvfp4", "nvfp4_46_pow2", "nvfp4_sr_pow2", "mxfp4_sr")]


@emulated
@pytest.mark.parametrize("scheme, transform, architecture", BRANCHES)
def test_emulated_kernels(scheme, transform, architecture, monkeypatch) -> None:
    launches_on_cpu(monkeypatch, architecture)
    every_dtype = architecture == BLACKWELL and (scheme, transform) in READS
    for dtype in DTYPES if every_dtype else DTYPES[:1]:
        sweep(scheme, transform, dtype, False)
    if transform.startswith("rht"):
        sweep(scheme, transform, torch.float32, True)


@emulated
@pytest.mark.parametrize("scheme", ["nvfp4_ms_eden_pow2", "nvfp4_46_pow2", "nvfp4", "mxfp4_sr"])
def test_emulated_kernels_that_dequantize(scheme, monkeypatch) -> None:
    """On a Hopper: scales and products of subnormals, fixed up by finalize_dequantized.cu."""
    launches_on_cpu(monkeypatch, HOPPER)
    transform = "rht128" if get_scheme(scheme).rounding == "ms_eden" else "none"
    for x in operands(torch.float32):
        if get_scheme(scheme).takes_amax:
            call = calls.plain(x, q2.amax(x), SEEDS[0], scheme + DEQUANTIZED)
        else:
            call = calls.one(x, SEEDS[0], scheme + DEQUANTIZED, transform, False, 1)
        assert_same_bits(calls.launched(call), call())


@emulated
@pytest.mark.parametrize(
    "scheme, architecture",
    [(s, HOPPER) for s in GIVEN if s in SERVED]
    + [*product(["nvfp4"], [AMPERE, BLACKWELL]), ("nvfp4_sr", BLACKWELL), ("nvfp4_46", BLACKWELL)],
)
def test_emulated_kernels_with_an_amax(scheme, architecture, monkeypatch) -> None:
    """The kernels once made NaN of scales, and wrong codes, where x / (448 * g) overflows."""
    launches_on_cpu(monkeypatch, architecture)
    for amax, exponent in product(AMAX, (-149, -127, -110, -10, 10, 100, 124)):
        x = (normal()[:16, :64] * 2.0**exponent).float()
        agree(calls.plain(x, torch.tensor(amax), SEEDS[0], scheme))


@emulated
@pytest.mark.parametrize("source", ["nvfp4_46_pow2", "nvfp4_46", "mxfp4_rtn"])
def test_emulated_requantizing_and_dequantizing(source, monkeypatch) -> None:
    scheme = "mxfp4_rtn34" if source == "mxfp4_rtn" else "nvfp4_ms_eden_pow2"
    transform = "rht32" if source == "mxfp4_rtn" else "rht128"
    launches_on_cpu(monkeypatch, BLACKWELL)
    for x in operands(torch.float32):
        packed = calls.with_amax(x, None, source)()
        call = calls.again(*packed, SEEDS[0], source, scheme, transform, 128, 1)
        got, want = calls.launched(call), call()
        if packed[2] < 2.0**-120:  # times the norm it is a subnormal, which is rounded
            steps = got[1].view(torch.uint8).int() - want[1].view(torch.uint8).int()
            assert steps.abs().max() <= 1 and steps.ne(0).float().mean() < 1 / 500
            got, want = got[::2], want[::2]
        assert_same_bits(got, want)
        for dtype in DTYPES:
            args = (*packed, source, 128, dtype)
            assert_same_bits((other_ops.dequantize(*args),), (q2.dequantize(*args),))


# Kernels of a CPU, and Inductor's -------------------------------------------------------------


def agree_on_cpu(call: QuantizerCall) -> None:
    """The C++ kernel, called by name."""
    op, args = call.spec.name, call.positional
    assert_same_bits(select(op, args, CPP)(*args), select(op, args, REFERENCE)(*args))


def test_cpu_kernels() -> None:
    """They read an operand as those of a GPU do, in one function of csrc/operand.h. Any two of
    scheme, operand and rotation meet."""
    for number, scheme in enumerate(s for s in SCHEMES if not SCHEMES[s].is_tensorwise):
        for dtype in DTYPES if scheme in dict(READS) else DTYPES[:1]:
            for place, x in enumerate(operands(dtype)):
                amax = calls.amax_of(x, scheme)
                agree_on_cpu(calls.plain(x, amax, SEEDS[0], scheme))
                if get_scheme(scheme).block[0] > 1:
                    continue
                if (number + place) % 2:
                    agree_on_cpu(calls.both(x, *SEEDS, scheme, "rht128", 1))
                else:
                    agree_on_cpu(calls.one(x, SEEDS[0], scheme, "rht16", True, 1))
        for amax, exponent in product(AMAX if scheme in GIVEN else (), (-149, -127, 10, 124)):
            x = (normal()[:16] * 2.0**exponent).float()
            agree_on_cpu(calls.plain(x, torch.tensor(amax), SEEDS[0], scheme))


def test_cpu_kernels_that_read_codes() -> None:
    for source in ["nvfp4_46_pow2", "nvfp4_46", "nvfp4_16x16", "mxfp4_rtn"]:
        for x in operands(torch.float32):
            packed = calls.with_amax(x, None, source)()
            for scheme in ("nvfp4_ms_eden_pow2", "nvfp4_sr", "mxfp4_rtn34"):
                agree_on_cpu(calls.again(*packed, SEEDS[0], source, scheme, "rht128", 128, 1))
            for dtype in DTYPES:
                args = (*packed, source, 128, dtype)
                made = (select("dequantize", args, name)(*args) for name in (CPP, REFERENCE))
                assert_same_bits(*((x,) for x in made))


# One of each rounding and kind of scales: tests/lowering/test_lowering.py has the other schemes, on
# operands with rows of subnormals.
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("scheme", ["nvfp4_46_pow2", "nvfp4"])
def test_inductor_kernels(scheme, monkeypatch) -> None:
    """In the form that Inductor generates for a CPU."""
    lower_on_cpu(monkeypatch)

    def quantized(x: torch.Tensor, amax: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        return q2.quantize(x, scheme=scheme, rowwise=True, columnwise=False, amax=amax)

    with inductor_config.patch(force_disable_caches=True):
        compiled = torch.compile(quantized)
        x, *others = operands(torch.float32)
        got, (code,) = run_and_get_code(compiled, x, calls.amax_of(x, scheme))
        assert "torch.ops.q2.quantize.default(" not in code
        assert_same_bits(got, quantized(x, calls.amax_of(x, scheme)))
        for x in others:
            assert_same_bits(
                compiled(x, calls.amax_of(x, scheme)), quantized(x, calls.amax_of(x, scheme))
            )


# The PTX --------------------------------------------------------------------------------------

PTX_CASES = [
    ("nvfp4_46_pow2", "none", False),
    ("nvfp4", "none", False),
    ("nvfp4_sr", "none", False),
    ("nvfp4_ms_eden_pow2", "rht128", True),
    ("nvfp4_ms_eden", "rht128", True),
    ("mxfp4_rtn34", "rht32", True),
    ("mxfp4_quest", "h32", False),
]


@pytest.fixture
def interpreted(monkeypatch) -> None:
    """Launches run as PTX, with rcp.approx.ftz off by an ulp, and flushing as it does."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings", exc_type=ImportError)
    ptx.serve(monkeypatch, BLACKWELL)
    pretend_device(monkeypatch, room=228 * 1024)


def mixed() -> torch.Tensor:
    """fp32, all magnitudes in one operand."""
    rows = torch.tensor([2.0 ** EXPONENTS[i % len(EXPONENTS)] for i in range(64)])
    return (normal() * rows[:, None].double()).float()


@pytest.mark.parametrize("scheme, transform, columnwise", PTX_CASES)
def test_ptx_of_blackwell(scheme, transform, columnwise, interpreted) -> None:
    tiny = (normal() * 2.0**-127).float()
    for x in (mixed().t().contiguous() if columnwise else mixed(), tiny, torch.zeros_like(tiny)):
        if get_scheme(scheme).masked:
            agree(calls.masked(x, scheme, transform))
        elif not columnwise:
            agree(calls.with_amax(x, SEEDS[0], scheme))
        else:
            agree(calls.one(x, SEEDS[0], scheme, transform, True, 1))
    if get_scheme(scheme).takes_amax:
        for amax in (0.0, LEAST, TINY, 3.4e38):
            agree(calls.plain((normal() * 2.0**10).float(), torch.tensor(amax), SEEDS[0], scheme))


@pytest.mark.parametrize(
    "source, scheme", [("nvfp4_46_pow2", "nvfp4_ms_eden_pow2"), ("nvfp4_46", "nvfp4_sr_pow2")]
)
def test_ptx_that_reads_codes(source, scheme, interpreted) -> None:
    packed = calls.plain(mixed(), calls.amax_of(mixed(), source), None, source)()
    agree(calls.again(*packed, SEEDS[0], source, scheme, "rht128", 128, 1))
    args = (*packed, source, 128, torch.float32)
    assert_same_bits((other_ops.dequantize(*args),), (q2.dequantize(*args),))


@pytest.mark.parametrize("scheme", ["nvfp4", "nvfp4_46_pow2"])
def test_a_flush_is_seen(scheme, interpreted, monkeypatch) -> None:
    """Products as with .ftz: operands and results that are subnormal are 0."""
    for name in ("mul.rn.f32", "mul.rn.f32x2"):

        def flushing(*operands, exact=TABLE[name].compute):
            return flush(exact(*map(flush, operands)))

        monkeypatch.setitem(TABLE, name, TABLE[name]._replace(compute=flushing))
    x = (normal() * 2.0**-127).float()
    with pytest.raises(AssertionError, match="differ"):
        agree(calls.with_amax(x, None, scheme))


def flush(x: np.ndarray) -> np.ndarray:
    """Flushes float32 values, or pairs of them in 64 bits."""
    return flushed(x.view(np.float32)).view(x.dtype)


@pytest.mark.parametrize(
    "architecture, names",
    [
        (AMPERE, ["quartet2 fprop"]),
        (HOPPER, ["rht_quantize_both", "requantize"]),
        (
            BLACKWELL,
            ["rht_quantize_both", "quartet2 fprop", "requantize", "mxfp4 both", "nvfp4 wgrad"],
        ),
    ],
)
def test_only_one_instruction_flushes_subnormals(architecture, names) -> None:
    """rcp.approx.ftz, whose operands are scales from 2^-126 on: a Newton step follows. Everything
    else keeps subnormals. (Producers' exponentials flush results that vanish in a sum with 1.)"""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings", exc_type=ImportError)
    for name in names:
        text = ptx.text({**HOT, **OTHERS}[name].variant, architecture)
        assert set(re.findall(r"\b[\w.]+\.ftz[\w.]*", text)) <= {"rcp.approx.ftz.f32"}
        assert "div.full" not in text and ".approx.f32" not in text
