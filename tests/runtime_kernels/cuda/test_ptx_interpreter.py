# SPDX-License-Identifier: Apache-2.0
"""The PTX interpreter (tests/support/ptx): single instructions, compared with other
implementations, and planted faults in a kernel's PTX, which it must find."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from q2compile.runtime_kernels.numerics.formats import encode_e2m1, round_e2m1
from tests.support import ptx
from tests.support import quantizer_calls as calls
from tests.support.emulation.on_cpu import assert_same_bits, matrix, pretend_device
from tests.support.ptx.instructions import TABLE
from tests.support.ptx.machine import Machine, UnknownInstruction
from tests.support.ptx.memory import Global, MemoryFault
from tests.support.ptx.order import OrderedLaunch

U32 = np.uint32
RANDOM = np.random.default_rng(0)


def compute(name: str, *operands: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return TABLE[name].compute(*operands)


def floats(count: int, spread: int) -> np.ndarray:
    """float32 of both signs within 2^-spread and 2^spread."""
    x = RANDOM.standard_normal(count) * 2.0 ** RANDOM.integers(-spread, spread, count)
    return x.astype(np.float32)


def every_bf16() -> np.ndarray:
    """float32 of all bf16, their neighbors, and ties with 20 bits."""
    upper = np.arange(2**16, dtype=U32) << U32(16)
    return np.concatenate([upper + U32(n) for n in (0, 1, 2**15, 2**16 - 1)]).view(np.float32)


def nearest(exact: Fraction, toward_zero: bool) -> np.float32:
    """The float32 of a rational number, by comparing with the two around it."""
    x = np.float32(float(exact))
    around = sorted({np.nextafter(x, np.float32(-np.inf)), x, np.nextafter(x, np.float32(np.inf))})
    if toward_zero:
        return max((n for n in around if abs(Fraction(float(n))) <= abs(exact)), key=abs)
    even = lambda n: int(n.view(U32)) & 1  # noqa: E731
    return min(around, key=lambda n: (abs(Fraction(float(n)) - exact), even(n)))


@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("spread", [1, 12, 60])
def test_multiply_adds_round_once(mode, spread) -> None:
    a, b, c = (floats(400, spread) for _ in range(3))
    c[::2] = -(a * b)[::2]  # what is left is the product's rounding error
    exact = [
        Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    want = np.array([nearest(e, mode == "rz") for e in exact])
    got = compute(f"fma.{mode}.f32x2", *(x.view(np.uint64) for x in (a, b, c))).view(np.float32)
    assert (got == want).all()


def test_subnormals_are_kept_where_ftz_is_not_asked_for() -> None:
    tiny = np.array([1, 0x7FFFFF, 0x80000001], U32).view(np.float32)
    one = np.ones(3, np.float32)
    assert (compute("mul.rn.f32", tiny, one).view(U32) == tiny.view(U32)).all()
    assert (compute("fma.rn.f32", tiny, one, 0 * one).view(U32) == tiny.view(U32)).all()
    assert np.isinf(compute("rcp.approx.ftz.f32", tiny)).all()
    assert np.isfinite(compute("rcp.rn.f32", np.array([2.0**-127], np.float32))).all()


def test_conversion_to_e2m1() -> None:
    """NaN becomes the largest (PTX manual, cvt with .satfinite)."""
    x = every_bf16()
    byte = compute("cvt.rn.satfinite.e2m1x2.f32", x, x[::-1].copy())
    want = encode_e2m1(round_e2m1(torch.from_numpy(x.copy()))).numpy()
    want[np.isnan(x)] = 7
    assert (byte >> 4 == want).all() and (byte & 15 == want[::-1]).all()


def test_e2m1_by_the_manual_s_values() -> None:
    """All 16 codes; ties go to the even code; NaN of both signs becomes +6."""
    numbers = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for sign, first in ((1, 0), (-1, 8)):
        x = np.float32(sign) * numbers
        codes = compute("cvt.rn.satfinite.e2m1x2.f32", np.zeros(8, np.float32), x)
        assert codes.tolist() == list(range(first, first + 8))
        upper = compute("cvt.rn.satfinite.e2m1x2.f32", x, np.zeros(8, np.float32))
        assert upper.tolist() == [16 * code for code in range(first, first + 8)]
    ties = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    zero = np.zeros(7, np.float32)
    above, below = (np.nextafter(ties, np.float32(to)) for to in (np.inf, 0))
    for x, want in (
        (ties, [0, 2, 2, 4, 4, 6, 6]),
        (above, [1, 2, 3, 4, 5, 6, 7]),
        (below, [0, 1, 2, 3, 4, 5, 6]),
        (np.float32([6.5, 7, 1e30, np.inf, np.nan, -np.nan, -np.inf]), [7, 7, 7, 7, 7, 7, 15]),
    ):
        assert compute("cvt.rn.satfinite.e2m1x2.f32", zero, x).tolist() == want


def test_e4m3_by_the_manual_s_values() -> None:
    """448 is the largest, 2^-9 the smallest; 0x7f is NaN."""
    pairs = {
        0.0: 0x00,
        2.0**-10: 0x00,  # a tie with the smallest
        2.0**-9: 0x01,
        3 * 2.0**-10: 0x02,
        2.0**-6: 0x08,  # the smallest normal
        1.0: 0x38,
        17.0: 0x58,  # a tie of 16 and 18
        19.0: 0x5A,  # of 18 and 20
        448.0: 0x7E,
        464.0: 0x7E,
        1e30: 0x7E,
        np.inf: 0x7E,
    }
    x = np.float32(list(pairs))
    got = compute("cvt.rn.satfinite.e4m3x2.f32", -x, x)
    assert (got & 255).tolist() == list(pairs.values())
    assert (got >> 8).tolist() == [0x80 | code for code in pairs.values()]
    nan = np.float32([np.nan])
    assert compute("cvt.rn.satfinite.e4m3x2.f32", nan, nan).tolist() == [0x7F7F]


@pytest.mark.parametrize(
    "name, dtype, limit",
    [
        ("cvt.rn.satfinite.e4m3x2.f32", torch.float8_e4m3fn, 448.0),
        ("cvt.rn.f16x2.f32", torch.float16, np.inf),
        ("cvt.rn.bf16x2.f32", torch.bfloat16, np.inf),
    ],
)
def test_conversions_of_pairs(name, dtype, limit) -> None:
    x = every_bf16()
    word = compute(name, x, x[::-1].copy()).astype(U32)
    want = torch.from_numpy(x.copy()).clamp(-limit, limit).to(dtype)
    bits = 8 * want.element_size()
    want = want.view({8: torch.uint8, 16: torch.uint16}[bits]).numpy()
    number = ~np.isnan(x)
    assert (word >> U32(bits) == want)[number].all()
    assert (word & U32(2**bits - 1) == want[::-1])[number[::-1]].all()
    assert (word >> U32(bits) == {8: 0x7F, 16: 0x7FFF}[bits])[~number].all()


def test_small_formats_become_f16() -> None:
    codes = np.arange(256, dtype=np.uint8)
    halves = compute("cvt.rn.f16x2.e2m1x2", codes).view(np.float16).reshape(-1, 2)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float16)
    grid = np.concatenate([grid, -grid])
    assert (halves[:, 0] == grid[codes & 15]).all() and (halves[:, 1] == grid[codes >> 4]).all()
    pairs = np.arange(2**16, dtype=np.uint16)
    got = compute("cvt.rn.f16x2.e4m3x2", pairs).view(np.float16)
    want = torch.from_numpy(pairs.view(np.uint8).copy()).view(torch.float8_e4m3fn).half().numpy()
    assert np.array_equal(got, want, equal_nan=True)
    assert (np.signbit(got) == np.signbit(want))[~np.isnan(want)].all()


def test_arithmetic_of_halves() -> None:
    a, b, c = (RANDOM.integers(0, 2**16, 4000).astype(np.uint16) for _ in range(3))
    x, y = torch.from_numpy(a).view(torch.float16), torch.from_numpy(b).view(torch.float16)
    got = torch.from_numpy(compute("mul.rn.f16x2", a.view(U32), b.view(U32)).view(np.uint16))
    assert torch.equal((x * y).nan_to_num(), got.view(torch.float16).nan_to_num())
    got = compute("fma.rn.bf16x2", *(t.view(U32) for t in (a, b, c))).view(np.uint16)
    wide = [(t.astype(U32) << U32(16)).view(np.float32) for t in (a, b, c)]
    with np.errstate(all="ignore"):
        exact = [w.astype(np.longdouble) for w in wide]
    sums = torch.from_numpy((exact[0] * exact[1] + exact[2]).astype(np.float64))
    plain = sums.isfinite() & (sums.abs() < 1e38) & (sums.abs() > 1e-37)
    error = torch.from_numpy(got).view(torch.bfloat16).double() - sums
    assert (error.abs() <= 2.0**-8 * sums.abs())[plain].all() and plain.sum() > 1000


def test_bytes_and_bits() -> None:
    a, b, s = (RANDOM.integers(0, 2**32, 500, dtype=np.uint64).astype(U32) for _ in range(3))
    got = compute("prmt.b32", a, b, s)
    for x, y, selector, result in zip(a, b, s, got, strict=True):
        eight = int(x).to_bytes(4, "little") + int(y).to_bytes(4, "little")
        for i, byte in enumerate(int(result).to_bytes(4, "little")):
            nibble = int(selector) >> 4 * i & 15
            chosen = eight[nibble & 7]
            assert byte == (255 * (chosen >> 7) if nibble & 8 else chosen)
    first, count = RANDOM.integers(0, 40, (2, 500)).astype(U32)
    got = compute("bfi.b32", a, b, first, count)
    for x, y, f, n, result in zip(*(map(int, t) for t in (a, b, first, count, got)), strict=True):
        mask = ((1 << n) - 1) << f & 2**32 - 1
        assert result == (x << f & mask | y & ~mask)
    for name, dtype in (("bfe.u32", U32), ("bfe.s32", np.int32)):
        got = compute(name, a.view(dtype), first, count)
        for x, f, n, result in zip(*(map(int, t) for t in (a, first, count, got)), strict=True):
            word = x | (-(x >> 31) << 32 if dtype is np.int32 else 0)  # with copies of its sign
            field = (word >> f) & ((1 << n) - 1)
            negative = dtype is np.int32 and n > 0 and field >> (n - 1) & 1
            assert (result - (field - (1 << n) * negative)) % 2**32 == 0
    assert (compute("shl.b32", a, np.full(500, 32, U32)) == 0).all()
    assert (
        compute("shr.s32", a.view(np.int32), np.full(500, 99, U32)) == a.view(np.int32) >> 31
    ).all()
    assert compute("div.s32", np.array([-7], np.int32), np.array([2], np.int32))[0] == -3
    signs = compute("copysign.f32", U32([0x80000000]), U32([0x3F800000]))
    assert signs.view(np.float32)[0] == -1.0  # the first operand's sign


def test_maxima_and_nan() -> None:
    nan, one = np.float32([np.nan]), np.float32([1.0])
    assert compute("max.f32", nan, one) == 1 and compute("max.f32", one, nan) == 1
    assert compute("max.NaN.f32", nan, one).view(U32) == 0x7FFFFFFF
    signs = [
        compute("min.xorsign.abs.f32", np.float32([a]), np.float32([b]))[0]
        for a, b in ((7, 6), (-7, 6), (-2, -6), (3, -0.0), (-np.inf, 6), (-np.nan, 6))
    ]
    assert signs == [6, -6, 2, 0, -6, -6] and np.signbit(signs[3])
    zeros = np.float32([0.0]), np.float32([-0.0])
    for pair in (zeros, zeros[::-1]):
        assert not np.signbit(compute("max.f32", *pair)) and np.signbit(compute("min.f32", *pair))
    assert (
        compute("add.rn.f32", np.float32([np.inf]), np.float32([-np.inf])).view(U32) == 0x7FFFFFFF
    )
    assert compute("cvt.rzi.u32.f32", np.float32([np.nan, -5, 1e10])).tolist() == [0, 0, 2**32 - 1]


# Faults in a real kernel ----------------------------------------------------------------------


def quantize_by(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """A columnwise quantizer of two tiles, with a text of its PTX replaced by another."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings", exc_type=ImportError)
    ptx.serve(monkeypatch, "sm_100a")
    pretend_device(monkeypatch, room=228 * 1024, multiprocessors=1)
    original = ptx.text

    def changed(variant, architecture):
        made = original(variant, architecture)
        if variant.entry != "rotate_quantize":
            return made
        assert old in made
        return made.replace(old, new)

    monkeypatch.setattr(ptx, "text", changed)
    ptx.compiled.cache_clear()
    try:
        call = calls.one(matrix(700, 64), torch.tensor(3), "nvfp4_pow2", "rht16", True, 0)
        assert_same_bits(calls.launched(call), call())
    finally:
        ptx.compiled.cache_clear()


def test_the_kernel_as_it_is(monkeypatch) -> None:
    quantize_by(monkeypatch, "ret;", "ret;")


def test_an_unknown_instruction_is_named(monkeypatch) -> None:
    with pytest.raises(UnknownInstruction, match=r"no such instruction.*: fma\.rm\.f32x2"):
        quantize_by(monkeypatch, "fma.rn.f32x2", "fma.rm.f32x2")


def test_a_missing_barrier_is_a_race(monkeypatch) -> None:
    with pytest.raises(MemoryFault, match=r"race: byte \d+ of shared memory is read by thread \d+"):
        quantize_by(monkeypatch, "bar.sync \t0;", "")


def test_copies_that_nobody_waits_for_never_arrive(monkeypatch) -> None:
    with pytest.raises(AssertionError, match="bytes of .* differ"):
        quantize_by(monkeypatch, "cp.async.wait_group 0;", "")


def test_a_wrong_conversion_is_seen(monkeypatch) -> None:
    monkeypatch.setitem(
        TABLE,
        "cvt.rn.satfinite.e2m1x2.f32",
        TABLE["cvt.rn.satfinite.e2m1x2.f32"]._replace(
            compute=lambda a, b: np.zeros(a.shape, np.uint8)
        ),
    )
    with pytest.raises(AssertionError, match="bytes of .* differ"):
        quantize_by(monkeypatch, "ret;", "ret;")


# Small kernels by hand ------------------------------------------------------------------------


def run(body: str, threads: int = 64, window: int | None = None) -> np.ndarray:
    """The array that a thread block writes, one word per thread."""
    out = np.zeros(threads, U32)
    first = out.ctypes.data
    windows = [(first, first + (out.nbytes if window is None else window))]
    memory = Global(windows, OrderedLaunch("small"))
    kernel = ptx.small_kernel(body)
    Machine(kernel, threads, (1, 1), [(0, 0)], first.to_bytes(8, "little"), 0, memory).run()
    return out


def test_other_spellings() -> None:
    """NVRTC 13.2's: bits of a float moved as .b32, integers with a U, generic addresses."""
    out = run(
        """
        mov.b32 %r2, 0f3F800000;
        add.s32 %r2, %r2, 0x10U;
        st.b32 [%rd3], %r2;
        ld.b32 %r4, [%rd3];
        add.s32 %r4, %r4, 1U;
        st.global.u32 [%rd3], %r4;
        """
    )
    assert (out == 0x3F800011).all()


def test_lanes_diverge_and_meet_again() -> None:
    """Each lane counts down from its number; then they exchange."""
    out = run(
        """
        mov.u32 %r2, 0;
        mov.u32 %r3, %r1;
        $again:
        setp.eq.u32 %p1, %r3, 0;
        @%p1 bra $done;
        add.s32 %r2, %r2, %r3;
        sub.s32 %r3, %r3, 1;
        bra.uni $again;
        $done:
        shfl.sync.bfly.b32 %r4|%p2, %r2, 1, 31, -1;
        st.global.u32 [%rd3], %r4;
        """
    )
    lane = np.arange(64) ^ 1
    assert (out == lane * (lane + 1) // 2).all()


def test_a_store_beyond_a_tensor() -> None:
    with pytest.raises(MemoryFault, match="in no tensor of the launch"):
        run("st.global.u32 [%rd3], %r1;", window=252)
    with pytest.raises(MemoryFault, match="misaligned"):
        run("st.global.u32 [%rd3+2], %r1;")


def test_lanes_that_wait_for_each_other_at_two_places() -> None:
    body = """
        and.b32 %r2, %r1, 1;
        setp.eq.u32 %p1, %r2, 0;
        @%p1 bra $even;
        bar.warp.sync -1;
        bra.uni $end;
        $even:
        redux.sync.max.u32 %r3, %r1, -1;
        $end:
        """
    with pytest.raises(AssertionError, match="wait for others, at .*bar.warp.sync.*redux.sync"):
        run(body)


@pytest.mark.parametrize("barrier, races", [("bar.sync 0;", False), ("bar.warp.sync -1;", True)])
def test_threads_of_two_warps(barrier, races) -> None:
    """Each writes its word of shared memory and reads that of a thread of the other warp."""
    body = f"""
        mov.b64 %rd4, place;
        cvt.u32.u64 %r2, %rd4;
        shl.b32 %r3, %r1, 2;
        add.s32 %r4, %r2, %r3;
        st.shared.u32 [%r4], %r1;
        {barrier}
        xor.b32 %r5, %r3, 128;
        add.s32 %r6, %r2, %r5;
        ld.shared.u32 %r7, [%r6];
        st.global.u32 [%rd3], %r7;
        """
    if races:
        with pytest.raises(MemoryFault, match="race"):
            run(body)
    else:
        assert (run(body) == np.arange(64) ^ 32).all()
