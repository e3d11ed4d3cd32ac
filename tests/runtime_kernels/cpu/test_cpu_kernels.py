# SPDX-License-Identifier: Apache-2.0
"""CPU kernels against the references: the same bits, for every scheme and transform."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import tempfile
import threading
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

import q2compile.runtime_kernels as runtime_kernels
from q2compile.runtime_kernels.choice import choose, kernels
from q2compile.runtime_kernels.cpu import build
from q2compile.runtime_kernels.cpu import kernels as ctypes_of
from q2compile.runtime_kernels.cpu.quantize import UNSUPPORTED
from q2compile.runtime_kernels.kernel_states import KNOWN
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SCHEMES, SWIZZLED, get_scheme
from q2compile.runtime_kernels.numerics.transforms import TRANSFORMS
from q2compile.runtime_kernels.ops.requantize import rounds_by_scales
from q2compile.runtime_kernels.ops.table import QuantizerCall, rowwise_call
from q2compile.runtime_kernels.registry import (
    CPP,
    REFERENCE,
    KernelWarning,
    left_out,
    select,
)
from tests.support import quantizer_calls as calls
from tests.support.nonfinite import VALUES, assert_same, with_bad
from tests.support.pairwise import pairwise

assert runtime_kernels  # importing it registers the ops
q2 = torch.ops.q2

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((1, 1), (3, 16), (37, 152), (130, 264), (256, 128), (300, 17))
SEEDS = torch.tensor(-1234567890123456789), torch.tensor(42)
# The C++ kernels round to e2m1; PyTorch's own operations serve FP8.
FP4 = {name: s for name, s in SCHEMES.items() if s.has_block_scales}
FLAT = [s.name for s in FP4.values() if s.block[0] == 1]
SQUARE = [s.name for s in FP4.values() if s.block[0] > 1]
KINDS = ("normal", "wide", "tiny", "huge", "ties", "zeros")


def matrix(shape: tuple[int, int], dtype: torch.dtype, kind: str = "normal") -> torch.Tensor:
    """wide: magnitudes over many binades; tiny: subnormals of fp32 and 0; huge: near the largest of
    the dtype; ties: values half way between codes."""
    generator = torch.Generator().manual_seed(shape[0])
    x = torch.randn(shape, generator=generator)
    if kind == "wide":
        x = x * torch.randn(shape, generator=generator).mul(12).exp2()
    elif kind == "tiny":
        x = x * torch.where(torch.rand(shape, generator=generator) < 0.5, 2.0**-126, 2.0**-135)
    elif kind == "huge":
        x = torch.finfo(dtype).max * (2 * torch.rand(shape, generator=generator) - 1)
    elif kind == "ties":
        x = torch.randint(-24, 25, shape, generator=generator) / 4
    elif kind == "zeros":
        x = x * (torch.rand(shape, generator=generator) < 0.1)
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def both(op: str, args: tuple) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The results of the C++ kernel, called by name so that no other kernel runs, and of the
    reference."""
    got, want = select(op, args, CPP)(*args), select(op, args, REFERENCE)(*args)
    return ([got], [want]) if isinstance(want, torch.Tensor) else (got, want)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def agree(op: str, args: tuple) -> None:
    got, want = both(op, args)
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous(), i
        wrong = bits(a) != bits(b)
        if b.dtype in DTYPES:  # any NaN is as good as another
            wrong &= ~(a.isnan() & b.isnan())
        assert not wrong.any(), f"output {i}: {int(wrong.sum())} of {b.numel()} differ"


def agree_call(call: QuantizerCall) -> None:
    agree(call.spec.name, call.positional)


def quantized(scheme: str, x: torch.Tensor) -> list[torch.Tensor]:
    """The reference's results."""
    call = rowwise_call(scheme, x)
    if call.scheme.stochastic:
        call = call.replace(rowwise_seed=SEEDS[1])
    return select("quantize", call.positional, REFERENCE)(*call.positional)


def test_quantize() -> None:
    for scheme, dtype in pairwise([*FLAT, *SQUARE], DTYPES):
        for index, kind in enumerate(KINDS):
            x = matrix(SHAPES[(index + len(scheme)) % len(SHAPES)], dtype, kind)
            agree_call(calls.plain(x, None, SEEDS[0], scheme, 5))
            if get_scheme(scheme).takes_amax:
                agree_call(calls.plain(x, q2.amax(x), SEEDS[0], scheme, 5))


def test_rotations_and_directions() -> None:
    for index, (scheme, transform) in enumerate(pairwise(FLAT, TRANSFORMS)):
        shape, kind = SHAPES[(index + len(scheme)) % len(SHAPES)], KINDS[index % len(KINDS)]
        dtype = DTYPES[(index + index // len(KINDS)) % len(DTYPES)]
        x = matrix(shape, dtype, kind) / 256  # which a rotation does not take to Inf
        agree_call(calls.both(x, *SEEDS, scheme, transform, 3))
        agree_call(calls.one(x, SEEDS[1], scheme, transform, True, 2**31 + 7))


def test_an_amax_that_is_not_the_largest() -> None:
    for scheme in (s for s in FLAT if get_scheme(s).takes_amax):
        for amax in (0.0, 1e-30, 0.01, 1.0, 1e30):
            x = matrix((37, 152), torch.bfloat16, "wide")
            agree_call(calls.plain(x, torch.tensor(amax), SEEDS[0], scheme, 5))


def test_strides_and_empty_operands() -> None:
    base = matrix((64, 96), torch.bfloat16)
    strided = base.t(), base[:, 1::2], base[3:, 5:], base[:1].expand(20, 96)
    operands = *strided, base[:0], base[:, :0]
    for scheme, transform, which in pairwise(FLAT, ["none", "rht32"], range(len(operands))):
        agree_call(calls.both(operands[which], *SEEDS, scheme, transform, 1))


def test_forms() -> None:
    for scheme, form in pairwise(FLAT, [SWIZZLED, DEQUANTIZED]):
        for dtype, transform in zip(DTYPES, ("none", "rht16", "rht128"), strict=True):
            agree_call(calls.both(matrix((150, 90), dtype), *SEEDS, scheme + form, transform, 3))


def test_dbias() -> None:
    """Beside the codes. Sums do not depend on the scheme, so each has one of nine shapes and pairs
    of dtypes; their order is compared in tests/runtime_kernels/cuda/test_dbias.py."""
    sums = list(product(zip(((1, 5), (300, 40), (2500, 20)), DTYPES, strict=True), DTYPES))
    for index, scheme in enumerate(FLAT):
        (shape, out), dtype = sums[index % len(sums)]
        x = matrix(shape, dtype, "wide")
        agree_call(calls.both(x, *SEEDS, scheme, "none", 3, dbias=out))


def test_groups() -> None:
    for scheme, transform in pairwise(
        [*FLAT, *(s + DEQUANTIZED for s in FLAT)], ["none", "rht32", "rht128"]
    ):
        offs = torch.tensor([3, 140, 140, 180], dtype=torch.int32)
        ends = {"offs": offs, "padded_offs": q2.padded_ends(offs)}
        x = matrix((200, 72), torch.bfloat16)
        agree_call(calls.both(x, *SEEDS, scheme, transform, 3, **ends))
        codes, scales, unit = quantized("nvfp4_46_pow2", x)
        agree_call(again("nvfp4_46_pow2", (codes, scales, unit), scheme, transform, 72, **ends))


def test_masks() -> None:
    for transform, dtype in pairwise(["h32", "none", "rht32_fixed", "rht128_fixed"], DTYPES):
        for shape, kind in zip(SHAPES, KINDS, strict=True):
            x = matrix(shape, dtype, kind) / 64  # which a rotation does not take to Inf
            agree_call(calls.masked(x, "mxfp4_quest", transform))


def again(source_scheme: str, source, scheme: str, transform: str, rows: int, **more: Any):
    named = dict(zip(("source", "scales", "global_scale"), source, strict=True))
    how = {"source_scheme": source_scheme, "scheme": scheme, "transform": transform}
    more = {"columnwise_seed": SEEDS[0], "rng_offset": 9, **more}
    return QuantizerCall.named("requantize", **named, **how, rows=rows, **more)


def test_requantize() -> None:
    for scheme in FLAT:
        sources = (*FP4, "nvfp4_46_pow2" + SWIZZLED, "mxfp4_rtn" + SWIZZLED)
        for index, source in list(enumerate(sources))[FLAT.index(scheme) % 4 :: 4]:
            shape, kind = SHAPES[index % len(SHAPES)], KINDS[index % len(KINDS)]
            transform = list(TRANSFORMS)[(index + len(scheme)) % len(TRANSFORMS)]
            parts = quantized(source, matrix(shape, torch.bfloat16, kind) / 256)
            agree_call(again(source, parts, scheme, transform, shape[1]))


def test_requantize_by_scales() -> None:
    for source, dtype in pairwise([s for s in FLAT if rounds_by_scales(SCHEMES[s])], DTYPES):
        for form in ("", SWIZZLED):
            for shape, kind in zip(SHAPES, KINDS, strict=True):
                x = matrix(shape, dtype, kind) / 256
                _, *scales = quantized(source + form, x)
                for scheme, transform in (("nvfp4_ms_eden_pow2", "rht128"), ("nvfp4", "none")):
                    parts = x, *scales
                    call = again(source + form, parts, scheme, transform, shape[1], by_scales=True)
                    agree_call(call)


def test_dequantize() -> None:
    for scheme in [*FP4, "nvfp4_46" + SWIZZLED]:
        for dtype, shape, kind in zip(2 * DTYPES, SHAPES, KINDS, strict=True):
            codes, scales, unit = quantized(scheme, matrix(shape, torch.bfloat16, kind))
            for columns in {shape[1], 2 * codes.shape[1], 1}:
                agree("dequantize", (codes, scales, unit, scheme, columns, dtype))
                agree("dequantize", (codes, scales, None, scheme, columns, dtype))


def test_gemm() -> None:
    for scheme, dtype in pairwise(
        ["nvfp4_46_pow2", "nvfp4", "mxfp4_rtn", "mxfp4_sr", "nvfp4_16x16"], DTYPES
    ):
        for m, n, k in ((1, 1, 16), (70, 33, 100), (0, 5, 16), (64, 128, 256)):
            a, b = (quantized(scheme, matrix((rows, k), torch.bfloat16)) for rows in (m, n))
            for bias in (None, matrix((n, 1), dtype)[:, 0], matrix((n, 1), torch.float32)[:, 0]):
                agree("gemm", (*a, *b, bias, scheme, scheme, dtype))
            if m:
                product = a[2] * b[2]
                agree("gemm", (*a[:2], product, *b[:2], None, None, scheme, scheme, dtype))


def test_nonfinite() -> None:
    for scheme, value in pairwise(FLAT, VALUES):
        x = with_bad(matrix((300, 200), torch.bfloat16), value)
        for transform in ("none", "rht128"):
            call = calls.both(x, *SEEDS, scheme, transform, 3)
            assert_same(*both("quantize", call.positional), scheme)
        parts = quantized("nvfp4_46_pow2", x)
        call = again("nvfp4_46_pow2", parts, scheme, "rht128", 200)
        assert_same(*both("requantize", call.positional), scheme)


def test_threads_change_no_bits() -> None:
    """Large enough for several threads. Any number of threads gives the same bits."""
    x = matrix((520, 640), torch.bfloat16)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            call = calls.both(x, *SEEDS, "nvfp4_ms_eden_pow2", "rht128", 3, dbias=torch.float32)
            found.append(select("quantize", call.positional, CPP)(*call.positional))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found[0], other, strict=True))


def test_serves_all_that_is_not_listed() -> None:
    x = matrix((4, 32), torch.bfloat16)
    for scheme in FP4:
        call = calls.plain(x, None, SEEDS[0], scheme)
        assert choose("quantize", call.positional).name == CPP
    parts = quantized("nvfp4_46_pow2", x)
    left = (
        call.replace(recorded=True),
        calls.plain(x, None, None, "nvfp4_46_pow2", 1 << 32),
        calls.plain(x, None, None, "fp8"),
        again("nvfp4_46_pow2" + DEQUANTIZED, parts, "nvfp4", "none", 32),
    )
    *reasons, _ = UNSUPPORTED  # the last: no scheme of the table has a rounding without a rule
    for other, reason in zip(left, reasons, strict=True):
        op, args = other.spec.name, other.positional
        assert choose(op, args).name == REFERENCE
        with pytest.raises(ValueError, match=reason):
            select(op, args, CPP)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing is built or checked, before the test and after it."""
    KNOWN.forget()
    made = build.begin, build.why_missing, ctypes_of.entry
    for cached in made:
        cached.cache_clear()
    yield
    for cached in made:
        cached.cache_clear()


# Processors that this machine is not, as far as it can run their code: the last one's is that of a
# processor without x86's instructions.
TARGETS = {
    "AVX512": build.VECTORS["AVX512"],
    "AVX2": build.VECTORS["AVX2"],
    "SSE2": (),
    "plain C++": ("-U__SSE2__",),
}


def results_of_all_kernels() -> list[torch.Tensor]:
    """The loaded library's results for adversarial operands, with every scheme. No self-checks:
    `agree` has run them with this machine's own library."""

    def made(op: str, args: tuple) -> list[torch.Tensor]:
        got = next(k.function for k in kernels(op) if k.name == CPP)(*args)
        return [got] if isinstance(got, torch.Tensor) else list(got)

    found, x = [], matrix((130, 264), torch.float32, "wide")
    transforms = list(TRANSFORMS)
    for index, scheme in enumerate(FLAT):
        kind, dtype = KINDS[index % len(KINDS)], DTYPES[index % len(DTYPES)]
        operand = matrix((130, 264), dtype, kind) / 256
        transform = transforms[index % len(transforms)]
        call = calls.both(operand, *SEEDS, scheme, transform, 3, dbias=torch.float32)
        codes, scales, unit, *_ = parts = made("quantize", call.positional)
        found += parts
        call = again(scheme, (codes, scales, unit), FLAT[-index], transforms[-index % 5], 264)
        found += made("requantize", call.positional)
        found += made("dequantize", (codes, scales, unit, scheme, 264, dtype))
        found += made("gemm", (*parts[:3], *parts[:3], None, scheme, scheme, dtype))
    for scheme in SQUARE:
        found += made("quantize", calls.plain(x, None, SEEDS[0], scheme).positional)
    return found + made("quantize", calls.masked(x, "mxfp4_quest", "h32").positional)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="compares x86's vectors")
def test_every_width_of_vectors_has_the_same_bits(fresh, monkeypatch) -> None:
    """The library for every kind of processor that this one can run. ATEN_CPU_CAPABILITY (avx2,
    default) makes torch, and q2compile with it, use narrower vectors."""
    own = results_of_all_kernels()
    usual = build.options()
    base = tuple(o for o in usual if not o.startswith("-mavx"))
    has = torch.backends.cpu.get_cpu_capability()
    for name, flags in TARGETS.items():
        if name == "AVX512" and has != name or name == "AVX2" and has == "DEFAULT":
            continue  # it has no such instructions
        monkeypatch.setattr(build, "options", lambda flags=flags: (*base, *flags))
        build.begin.cache_clear()
        ctypes_of.entry.cache_clear()
        for index, (a, b) in enumerate(zip(results_of_all_kernels(), own, strict=True)):
            assert a.shape == b.shape and a.dtype == b.dtype
            wrong = bits(a) != bits(b)
            if b.dtype in DTYPES:
                wrong &= ~(a.isnan() & b.isnan())
            assert not wrong.any(), f"{name}, result {index}: {int(wrong.sum())} elements differ"


@pytest.mark.parametrize(
    ("scheme", "given", "message"),
    [
        ("nvfp4_5", {}, "unknown quantization scheme 'nvfp4_5'"),
        ("nvfp4_pow2", {"amax": torch.tensor(1.0)}, "takes no amax"),
        ("nvfp4_sr_pow2", {}, "draws random bits: give it a seed"),
        ("nvfp4_pow2", {"rowwise": False}, "has no output"),
    ],
)
def test_a_wrong_call_is_no_fault_of_the_kernel(fresh, scheme, given, message) -> None:
    """The caller gets the error, and nothing is rejected."""
    x = matrix((4, 32), torch.bfloat16)
    given, before = {"rowwise": True, "columnwise": False, **given}, left_out()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((ValueError, AssertionError), match=message):
            torch.ops.q2.quantize(x, scheme=scheme, **given)
    assert left_out() == before


def test_a_kernel_that_differs_is_rejected(fresh, monkeypatch) -> None:
    call = calls.plain(matrix((4, 32), torch.bfloat16), None, None, "nvfp4_46_pow2")
    entry = ctypes_of.entry

    def wrong(name):
        def call_wrongly(struct):
            entry(name)(struct)
            struct._obj.codes and ctypes.memset(struct._obj.codes, 0x11, 1)

        return call_wrongly

    monkeypatch.setattr(ctypes_of, "entry", wrong)
    with pytest.warns(KernelWarning, match="'cpp' of q2::quantize rowwise on cpu is rejected"):
        served = choose("quantize", call.positional)
    assert served.name == REFERENCE
    with pytest.raises(ValueError, match="rejected: its self-check failed: 1 of .* codes differ"):
        select("quantize", call.positional, CPP)


def test_without_a_compiler_the_references_run(fresh, monkeypatch, tmp_path, caplog) -> None:
    """The log says so once, and so do reports."""

    def none():
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "cpp_compiler", none)
    call = calls.plain(matrix((4, 32), torch.bfloat16), None, None, "nvfp4_46_pow2")
    with caplog.at_level("WARNING", "q2compile"):
        for _ in range(2):
            assert choose("quantize", call.positional).name == REFERENCE
    (said,) = [r.message for r in caplog.records if r.name == "q2compile"]
    assert "Inductor finds no C++ compiler (No working C++ compiler found)" in said
    assert said in build.reasons()
    with pytest.raises(ValueError, match="no library of CPU kernels.*Install g"):
        select("quantize", call.positional, CPP)
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_may_be_written_the_references_run(fresh, monkeypatch, tmp_path) -> None:
    """Neither the cache nor the folder for temporary files, as in a read-only container."""

    def read_only(**_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path))
    build.library_path().write_bytes(b"no library")
    monkeypatch.setattr(tempfile, "mkstemp", read_only)
    monkeypatch.setattr(build, "cpp_compiler", lambda: "g++")
    call = calls.plain(matrix((4, 32), torch.bfloat16), None, None, "nvfp4_46_pow2")
    assert choose("quantize", call.positional).name == REFERENCE
    with pytest.raises(build.BuildError, match="no folder accepts .*Read-only file system"):
        build.library()


def test_a_library_is_compiled_once_and_a_broken_one_again(fresh, monkeypatch, tmp_path) -> None:
    """Trap: a power cut or a full quota leaves a shorter file. Loading it, or calling what it has
    lost, ends the process with SIGBUS."""
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path))
    path = build.library_path()
    path.write_bytes(b"no library")
    assert build.library().q2_quantize and path.stat().st_size > 10_000
    build.begin.cache_clear()
    monkeypatch.setattr(build, "cpp_compiler", lambda: "/nowhere/g++")
    assert build.library().q2_quantize, "from the cache"
    assert list(tmp_path.iterdir()) == [path]
    content = path.read_bytes()
    monkeypatch.setattr(build, "cpp_compiler", lambda: "g++")
    monkeypatch.setattr(build, "compiled_library", lambda *_: "built again")
    flipped = content[:5000] + bytes([content[5000] ^ 1]) + content[5001:]
    for broken in (content[:-1], flipped, content[: len(content) // 2], b""):
        path.unlink()  # the mapped file stays whole
        path.write_bytes(broken)
        build.begin.cache_clear()
        assert build.library() == "built again"


def test_a_library_is_begun_in_a_thread_once_a_process(fresh, monkeypatch, tmp_path) -> None:
    asked, go = threading.Event(), threading.Event()

    def slow():
        asked.set()
        assert go.wait(60)
        raise RuntimeError("none found at last")

    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "cpp_compiler", slow)
    begun = build.begin(os.getpid())
    assert asked.wait(60) and not begun.done()
    assert build.begin(os.getpid()) is begun
    fork = build.begin(-1)
    go.set()
    assert fork is not begun
    for future in (begun, fork):
        with pytest.raises(build.BuildError, match="none found at last"):
            future.result(60)
    with pytest.raises(build.BuildError, match="none found at last"):
        build.library()
