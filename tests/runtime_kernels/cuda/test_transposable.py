# SPDX-License-Identifier: Apache-2.0
"""transposable.cu, the quantizers of scheme fp8 and of squares of MXFP4, and the transpose of fp8
codes: the bits of the reference in the emulation, in the kernel's PTX, and on a GPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch

from q2compile.runtime_kernels.cuda import other_ops
from q2compile.runtime_kernels.cuda.quantize import quantizers
from q2compile.runtime_kernels.ops.table import QUANTIZE, TRANSPOSE, QuantizerCall, rowwise_call
from q2compile.runtime_kernels.registry import select
from q2compile.runtime_kernels.small_calls import form_of, small_calls
from tests.support import ptx
from tests.support.emulation.on_cpu import assert_same_bits, launches_on_cpu

q2 = torch.ops.q2
ROW, COLUMN, BOTH = (True, False), (False, True), (True, True)
# Whole tiles; one tile with ends everywhere; several with ends, rows on 16 bytes and not.
SHAPES = (128, 64), (1, 1), (37, 24), (300, 200), (131, 133)
SQUARE = "mxfp4_rceil_32x32"
TYPES = torch.bfloat16, torch.float16, torch.float32


def matrix(rows: int, columns: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Zeros of both signs, infinities, NaN, and elements that become subnormals, ties and zeros."""
    generator = torch.Generator().manual_seed(rows * 7919 + columns)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp(4 * torch.randn(rows, 1, generator=generator))
    x[::5] = torch.randint(-16, 17, x[::5].shape, generator=generator) * 2.0**-9
    flat = x.view(-1)
    for i, value in enumerate((0.0, -0.0, torch.inf, -torch.inf, torch.nan)):
        flat[i + 7 :: 997] = value
    return (x * scale).to(dtype)


def call(x: torch.Tensor, directions: tuple[bool, bool], has_amax: bool) -> QuantizerCall:
    rowwise, columnwise = directions
    amax = q2.amax(x) if has_amax else None
    how = {"x": x, "scheme": "fp8", "rowwise": rowwise, "columnwise": columnwise, "amax": amax}
    return QuantizerCall.named(QUANTIZE, **how)


def calls() -> Iterator[QuantizerCall]:
    for shape, directions, has_amax in product(SHAPES, (ROW, COLUMN, BOTH), (True, False)):
        yield call(matrix(*shape, torch.bfloat16), directions, has_amax)
    for dtype, has_amax in product(TYPES[1:], (True, False)):
        yield call(matrix(140, 100, dtype), BOTH, has_amax)
    columns_first = matrix(72, 136, torch.bfloat16).t()
    expanded, part = torch.ones(1, 72).bfloat16().expand(136, 72), matrix(140, 200, TYPES[0])
    for x, directions in product(
        (columns_first, expanded, part[:, 8:72], part[:, 9:80]), (ROW, BOTH)
    ):
        yield call(x, directions, False)


def grouped() -> Iterator[QuantizerCall]:
    """Whole chunks and short ones, empty groups, rows of no group, all rows in one; an empty group
    with a chunk of zeros (filled) and without."""
    for rows, ends, filled in (
        (256, (128, 256), True),
        (300, (3, 140, 140, 297), False),
        (300, (0, 0, 131, 200), True),
        (5, (5,), False),
    ):
        offs = torch.tensor(ends, dtype=torch.int32)
        groups = {"offs": offs, "padded_offs": q2.padded_ends(offs, filled)}
        for width, directions in product((64, 201), (COLUMN, BOTH)):
            x = matrix(rows, width, torch.bfloat16)
            yield call(x, directions, True).replace(**groups)
    yield call(matrix(300, 64, torch.float32).t().contiguous().t(), BOTH, True).replace(
        offs=torch.tensor([300], dtype=torch.int32), padded_offs=torch.tensor([384]).int()
    )


def extremes() -> Iterator[QuantizerCall]:
    """The ends of the range of scales: subnormals, the largest numbers, amax at the ends of the
    range of codes, zeros, nothing but poison, a given amax that is none."""
    top = torch.finfo(torch.float32).max
    tops = (2.0**-149, 2.0**-126, 2.0**-118, 447.9, 448.0, 448.1, 1.75 * 2.0**127, top, 0.0)
    x = torch.linspace(-1, 1, 33).view(3, 11)
    for each in tops:
        yield call(x * each, BOTH, False)
    for value in (torch.nan, torch.inf):
        yield call(torch.full((3, 11), value), BOTH, False)
        yield call(x, BOTH, True).replace(amax=torch.tensor(value))
    yield call(x * 1000, BOTH, True).replace(amax=torch.tensor(1.0))
    for shape in ((0, 40), (40, 0)):
        yield call(torch.empty(shape), BOTH, False)


def squares() -> Iterator[QuantizerCall]:
    """Whole squares, ends, squares of zeros, one that is not finite, all exponents of fp32."""
    for (rows, columns), dtype in product(
        ((32, 256), (1, 1), (37, 24), (100, 520), (65, 133)), TYPES
    ):
        x = matrix(rows, columns, dtype).nan_to_num(0.5, 2.0, -2.0)
        x[32:64, :32] = 0
        yield rowwise_call(SQUARE, x)
    x = torch.linspace(-1, 1, 32 * 32).view(32, 32)
    yield rowwise_call(SQUARE, torch.cat([x * 2.0**i for i in range(-148, 128, 3)], 1))
    near = torch.tensor(
        [1.5, 1.5 * (1 + 2.0**-23), 1.5 * (1 - 2.0**-24), 6, 6.25, 2.5, 5, 1.75, 0.25]
    )
    yield rowwise_call(SQUARE, torch.cat([near, -near / 4, torch.tensor([0.0, -0.0])]).view(1, -1))
    yield rowwise_call(SQUARE, matrix(72, 136, TYPES[0]).nan_to_num(0, 0, 0).t())
    yield rowwise_call(SQUARE, torch.empty(0, 40))


def poisoned() -> tuple[QuantizerCall, torch.Tensor]:
    """A call with two squares that are not finite, and which codes are of the others."""
    x = torch.linspace(-3, 5, 64 * 96).view(64, 96)
    is_finite = torch.ones(64, 48, dtype=torch.bool)
    for value, row, column in ((torch.nan, 5, 40), (-torch.inf, 60, 95)):
        x[row, column] = value
        is_finite[row // 32 * 32 :, column // 32 * 16 :][:32, :16] = False
    return rowwise_call(SQUARE, x), is_finite


def codes() -> Iterator[tuple]:
    """Every code among them; all columns of it, or part; in groups of rows."""
    for rows, width, columns in (
        (128, 64, 64),
        (300, 208, 201),
        (17, 16, 3),
        (256, 256, 256),
        (0, 16, 9),
    ):
        made = torch.arange(rows * width, dtype=torch.int32).mul(7).to(torch.uint8)
        no_scales = torch.empty((0, 0), dtype=torch.float8_e4m3fn)
        given = made.view(rows, width).view(torch.float8_e4m3fn), no_scales, "fp8", columns, False
        yield *given, None, None
        offs = torch.tensor([rows // 3, rows // 3, max(rows - 1, 0)], dtype=torch.int32)
        padded_offs = q2.padded_ends(offs, rows > 128)
        apart = [ends.repeat_interleave(2)[::2] for ends in (offs, padded_offs)]
        yield *given, *(apart if rows == 300 else (offs, padded_offs))


def assert_alike(quantize: Callable, transpose: Callable, some: slice = slice(None)) -> None:
    for each in [*calls(), *grouped(), *extremes(), *squares()][some]:
        assert_same_bits(quantize(*each.positional), each())
    each, is_finite = poisoned()
    (codes_, scales, _), (want, *others) = quantize(*each.positional), each()
    assert_same_bits([scales, codes_ * is_finite], [others[0], want * is_finite])
    assert scales.view(torch.uint8).eq(255).sum() == 2
    alone = [args for args in codes() if args[-1] is None]
    in_groups = [args for args in codes() if args[-1] is not None]
    for args in [*alone[some], *in_groups[some]]:
        assert_same_bits(transpose(*args), q2.transpose(*args))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
def test_the_kernel_has_the_bits_of_the_reference(architecture, monkeypatch) -> None:
    launches_on_cpu(monkeypatch, architecture)
    assert_alike(quantizers.quantize, other_ops.transpose)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_calls_of_its_self_checks_agree(monkeypatch) -> None:
    """Each form that the recipes ask for has small calls, which the kernel serves."""
    launches_on_cpu(monkeypatch, "sm_90a")
    x = matrix(16, 16, TYPES[0])
    asked = [call(x, how, has_amax) for how, has_amax in product((ROW, BOTH), (True, False))]
    in_groups = [each for each in grouped() if each.x.shape == (256, 64)]
    for each in (*asked, *in_groups, rowwise_call(SQUARE, x)):
        for small in small_calls(form_of(QUANTIZE, each.positional)):
            want = QuantizerCall.of(QUANTIZE, small.args)()
            assert_same_bits(quantizers.quantize(*small.args), want)
    for asked_codes in [*codes()][:2]:
        for small in small_calls(form_of(TRANSPOSE, asked_codes)):
            assert_same_bits(other_ops.transpose(*small.args), q2.transpose(*small.args))


def test_its_ptx_has_too(monkeypatch) -> None:
    """The second launch may begin during the first; the interpreter checks what it reads before it
    waits."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings", exc_type=ImportError)
    ptx.serve(monkeypatch, "sm_90a")
    assert_alike(quantizers.quantize, other_ops.transpose, slice(1, None, 3))


@pytest.mark.gpu
def test_a_gpu_has_the_bits_of_the_reference() -> None:
    def on_gpu(op: str) -> Callable:
        def run(*args):
            moved = [a.cuda() if isinstance(a, torch.Tensor) else a for a in args]
            return [t.cpu() for t in select(op, moved, "cuda")(*moved)]

        return run

    assert_alike(on_gpu(QUANTIZE), on_gpu(TRANSPOSE))
    x = matrix(4096, 1544, TYPES[0])
    large = [call(x, BOTH, has_amax) for has_amax in (True, False)]
    offs = torch.arange(64, 4097, 63, dtype=torch.int32)
    large.append(large[0].replace(offs=offs, padded_offs=q2.padded_ends(offs, True)))
    for each in (*large, rowwise_call(SQUARE, x.nan_to_num(0, 1, -1))):
        assert_same_bits(on_gpu(QUANTIZE)(*each.positional), each())
