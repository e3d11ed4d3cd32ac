# SPDX-License-Identifier: Apache-2.0
"""The first large GEMM of each algorithm or specialization, plain or grouped, compared with a BF16
GEMM.

Self-checks are small, and cuBLASLt has other algorithms for large products, Triton other tiles. So
the first time that a GEMM of 2^30 FLOPs or more runs with one, 128 rows of its result, from all
over the matrix, are compared on the device with the same rows by a BF16 GEMM of the dequantized
operands. This is done once for each class of counts of rows, and the result is stored on disk
(check_results.py). If it is wrong, the call raises: the kernel is rejected, and the next one serves
the call. Nothing is compared while a CUDA graph is captured, since the warm-up run has been. Rows
that are zero or not finite show nothing, and a product with few others is compared the next time.

Such a launch is marked on disk before it begins. If it crashes or hangs, the mark stays, which is a
strike: the next process has the child process of self-checks run a product of these sizes first,
and a second strike rejects the kernel.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from q2compile.runtime_kernels import check_results, checks
from q2compile.runtime_kernels.check_results import Request
from q2compile.runtime_kernels.choice import device_of, kernel_named
from q2compile.runtime_kernels.kernel_states import (
    KNOWN,
    Result,
    kernels_own,
    lacks_memory,
    rejected,
)
from q2compile.runtime_kernels.numerics.formats import decode_e2m1
from q2compile.runtime_kernels.numerics.swizzle import plain_scales
from q2compile.runtime_kernels.ops.gemm import Factor, alpha_of, factors_of
from q2compile.runtime_kernels.ops.table import GEMM, GROUPED_GEMM
from q2compile.runtime_kernels.selfcheck import GEMM_ERROR, apart

LOG = logging.getLogger("q2compile")
FLOPS = 2**30
ROWS = 128
_COLUMNS = 512  # of b that are dequantized at once, some 100 MiB where a row is long
_CHUNK = 128  # columns that are compared as one
# Bounds a chunk of a row, whose few elements may add up to more or less than usual.
_OF_CHUNK = 4.0
# A chunk that is smaller than this share of the usual one is compared with that one.
_SMALL = 2.0**-6
_TELLING = 1 / 8  # of the compared rows: as many must be finite and not zero
_GROUPS = 8  # of a grouped GEMM that are compared


class WrongError(RuntimeError):
    """A GEMM's first large result is wrong, or its first large launch did not end."""


UNENDED = "its first large launch did not end in an earlier process"


def needed(m: int, n: int, k: int) -> bool:
    """Whether a product is large enough to be compared."""
    return 2 * m * n * k >= FLOPS


def rows_class(m: int) -> tuple[int, int]:
    """Products whose counts of rows are of one class are compared once: counts between the same
    powers of two, that are divisible by the same power of two. An algorithm takes other paths for
    the last tile, for few tiles and for many, and a fault at only 3072 rows was reported."""
    return m.bit_length(), m & -m


def known(what: Request, call: Sequence[Any] = ()) -> bool:
    """Whether it was compared before, here or by an earlier process.

    call: the arguments of the op. If a process has ended at such a launch, the child process runs
        it first; without memory for it, nothing is known.

    Raises:
        WrongError: it was wrong, or did not end.
    """
    found = KNOWN.checks.get(what.check) or check_results.found(what, UNENDED)
    on_gpu = what.check[2].type == "cuda"
    is_capturing = on_gpu and torch.cuda.is_current_stream_capturing()
    if found is None and call and check_results.is_struck(what) and not is_capturing:
        again = *what.check[:3], [_described(each) for each in call]
        try:
            checks.rejection(what._replace(arguments=again))
        except Exception as error:
            if not lacks_memory(error):
                raise
        found = KNOWN.checks.get(what.check)
    if found is None:
        return False
    KNOWN.checks[what.check] = found
    if found.reason is not None:
        raise WrongError(found.reason.removeprefix(rejected("")))
    return True


class _Described(NamedTuple):
    """A tensor without its values; ends: those of groups, which matter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    ends: list[int]

    def made(self, device: torch.device) -> torch.Tensor:
        """A tensor like it, of random codes and of scales near 1."""
        if self.dtype == torch.int32:
            return torch.tensor(self.ends, dtype=torch.int32, device=device)
        if self.dtype.is_floating_point and self.dtype.itemsize > 1:
            return torch.ones(self.shape, dtype=self.dtype, device=device)
        low, high = _BYTES.get(self.dtype, (0, 256))
        made = torch.randint(low, high, self.shape, dtype=torch.uint8, device=device)
        return made.view(self.dtype)


_BYTES = {torch.float8_e4m3fn: (0x30, 0x40), torch.float8_e8m0fnu: (126, 129)}


def _described(arg: Any) -> Any:
    if not isinstance(arg, torch.Tensor):
        return arg
    ends = arg.tolist() if arg.dtype == torch.int32 else []
    return _Described(tuple(arg.shape), arg.dtype, ends)


def disagreement(op: str, name: str, device: torch.device, call: Sequence[Any]) -> str | None:
    """Runs a large product, which is compared as any first one: how it is wrong, None if it is
    not."""
    with apart(device):
        args = [each.made(device) if isinstance(each, _Described) else each for each in call]
        try:
            kernel_named(op, name).function(*args)
        except WrongError as error:
            return str(error)
    return None


@contextmanager
def marked(what: Request) -> Iterator[None]:
    """A context for the launch and its comparison. The mark stays if the process ends here, or if
    the device fails."""
    check_results.mark(what)
    LOG.debug("q2compile: compares the first large launch of %s", what.label)
    try:
        yield
    except Exception as error:
        op, name, device, *_ = what.check
        kernels_own(error, op, name, device)  # raises if the device has failed
        check_results.unmark(what)
        raise
    except BaseException:
        check_results.unmark(what)
        raise
    check_results.unmark(what)


def request(op: str, name: str, device: torch.device, *which: Hashable) -> Request:
    """which: the algorithm or the specialization, and the types of bias and result."""
    return Request((op, name, device, "first launch", *which), __name__, ())


def launched(
    op: str,
    name: str,
    args: Sequence[Any],
    size: tuple[int, int, int],
    which: Sequence[Hashable],
    run: Callable[[], torch.Tensor],
) -> torch.Tensor:
    """The result of run(), a launch by a kernel of an op with these arguments, which is compared if
    it is large and was not compared before.

    size: m, n and k of the product.
    which: the algorithm or the specialization, and the types of bias and result.

    Raises:
        WrongError: it is wrong, or was wrong before, or did not end.
    """
    if not needed(*size):
        return run()
    what = request(op, name, device_of(args), *which)
    if known(what, args):
        return run()
    with marked(what):
        out = run()
        compare(what, out, args)
    return out


def compare(what: Request, out: torch.Tensor, args: Sequence[Any]) -> None:
    """Compares rows of a result of a GEMM with a BF16 GEMM, and stores the outcome; of
    q2::grouped_gemm rows of some groups, from all over, and the rows of no group, which must be
    zero. Does nothing if there is not enough memory. args: of the op.

    Raises:
        WrongError: they differ.
    """
    if out.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    try:
        with torch.no_grad():
            worst, telling = _worst_of(what.check[0], out, args)
    except Exception as error:
        if lacks_memory(error):
            return
        raise
    limit = GEMM_ERROR[out.dtype]
    reason = None
    if worst <= 1 and telling < _TELLING:
        return
    if not worst <= 1:
        reason = (
            f"its first large result, {out.shape[0]} x {out.shape[1]} in {out.dtype}, differs from "
            f"a BF16 GEMM's by {worst:.1e} times the {limit:.1e} that rounding explains"
        )
    result = Result(reason and rejected(reason), bool(reason))
    KNOWN.checks[what.check] = result
    check_results.store(what, result)
    if reason is not None:
        raise WrongError(reason)


def _worst_of(op: str, out: torch.Tensor, args: Sequence[Any]) -> tuple[float, float]:
    (a, b), (third, *_, more, _) = factors_of(args), args[6:]
    if op == GROUPED_GEMM:
        return _worst_of_groups(out, a, b, third, more)
    if op == GEMM:
        return _worst(out, a, b, third)

    def finish(product: torch.Tensor, rows: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        part = third[rows, begin // 8 : end // 8].contiguous()
        return torch.ops.q2.masked_unrotate(product, part, more)

    return _worst(out, a, b, finish=finish)


def _worst_of_groups(
    out: torch.Tensor, a: Factor, b: Factor, offs: torch.Tensor, gemm: str
) -> tuple[float, float]:
    ends = offs.tolist()
    m, half = a.codes.shape[0], a.codes.shape[1]
    spans = list(enumerate(zip([0, *ends], ends, strict=False)))
    if gemm != "wgrad":  # where a group without rows has a result, which is zero
        spans = [(group, (start, end)) for group, (start, end) in spans if end > start]
    every = max(1, len(spans) // _GROUPS)
    spans = [*spans[::every], *spans[-1:]]
    rows = max(1, ROWS // len(spans)) if spans else 0
    found = [(0.0, 0.0)]
    if gemm != "wgrad" and bool(out[ends[-1] :].count_nonzero()):
        found.append((math.inf, 0.0))
    for group, (start, end) in spans:
        if gemm == "wgrad":
            of_group = out[group * m : (group + 1) * m]
            own = _contracted(a, start, end), _contracted(b, start, end)
            firsts = 0, 0
        elif gemm == "fprop":
            of_group, own, firsts = out[start:end], (a, b), (start, group * out.shape[1])
        else:
            weight = _contracted(b, 2 * half * group, 2 * half * (group + 1))
            of_group, own, firsts = out[start:end], (a, weight), (start, 0)
        found.append(_worst(of_group, *own, firsts=firsts, most=rows))
    # Without any rows there is nothing to see, ever.
    return max(w for w, _ in found), max(t for _, t in found) if spans else 1.0


def _contracted(factor: Factor, start: int, end: int) -> Factor:
    """A part of the contraction, of whole blocks."""
    codes, width = factor.codes[:, start // 2 : end // 2], factor.spec.width
    return factor._replace(codes=codes, scales=factor.scales[:, start // width : end // width])


def _worst(
    out: torch.Tensor,
    a: Factor,
    b: Factor,
    bias: torch.Tensor | None = None,
    finish: Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor] | None = None,
    firsts: Sequence[int] = (0, 0),
    most: int = ROWS,
) -> tuple[float, float]:
    """The largest error, of the whole and of any chunk, divided by what rounding explains; and
    which part of the rows is finite and not zero.

    finish: the epilogue, of some rows of the rounded product, their indices, and the first and the
        last column.
    firsts: the rows of a and of b that the result begins with.  most: rows that are compared.
    """
    rows, columns = out.shape
    picked = torch.linspace(0, rows - 1, min(most, rows), device=out.device).round().long()
    a_rows = _values(_rows_of(a, picked + firsts[0]))
    alpha, dtype = alpha_of(a, b), out.dtype
    errors: list[torch.Tensor] = []
    sizes: list[torch.Tensor] = []
    finite = torch.ones_like(picked, dtype=torch.bool)
    for begin in range(0, columns, _COLUMNS):
        end = min(begin + _COLUMNS, columns)
        part = torch.arange(begin, end, device=out.device)
        want = bf16_product(a_rows, _values(_rows_of(b, part + firsts[1]))) * alpha
        if bias is not None:
            want += bias[begin:end]
        want = want.to(dtype)
        if finish is not None:
            want = finish(want, picked, begin, end)
        got = out[picked, begin:end].float()
        want = want.float()
        finite &= want.isfinite().all(1)
        difference = (got - want).nan_to_num_(0, 0, 0)
        # Elements must be finite in both results or in none.
        difference += (got.isfinite() != want.isfinite()) * 1e30
        for each, into in ((difference, errors), (want.nan_to_num(0, 0, 0), sizes)):
            padded = torch.nn.functional.pad(each, (0, -each.shape[1] % _CHUNK))
            into.append(padded.unflatten(1, (-1, _CHUNK)).square().sum(2))
    error, size = torch.cat(errors, 1), torch.cat(sizes, 1)
    usual = size.mean()
    limit = GEMM_ERROR[dtype]
    whole = error.sum() / (limit**2 * size.sum()).clamp_min(1e-30)
    chunk = error / ((_OF_CHUNK * limit) ** 2 * size.clamp_min(_SMALL**2 * usual)).clamp_min(1e-30)
    telling = (finite & (size.sum(1) > 0)).float().mean()
    found: list[float] = torch.stack([torch.maximum(whole, chunk.max()).sqrt(), telling]).tolist()
    return found[0], found[1]


def bf16_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.is_cuda:
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    return a.float() @ b.float().t()


def _rows_of(factor: Factor, rows: torch.Tensor) -> Factor:
    """The given rows of an operand, with scales that are not swizzled and one per row."""
    codes, scales, global_scale, spec = factor
    scales = plain_scales(scales, codes.shape[0], factor.contraction, spec)
    # A scale has no index on every device.
    picked = scales.view(torch.uint8)[rows // spec.block[0]].view(scales.dtype)
    return Factor(codes[rows], picked, global_scale, spec)


def _values(factor: Factor) -> torch.Tensor:
    """code * scale in bf16, which is exact."""
    codes, scales, _, spec = factor
    values = decode_e2m1(codes)
    return (values * scales.float().repeat_interleave(spec.width, 1)).to(torch.bfloat16)
