"""The quantisers with one more output for each operand that they make: what rounding did to it.

    quantize_recorded(...)           -> what q2::quantize returns, sums
    quantize_masked_recorded(...)    -> ...
    rht_quantize_recorded(...)
    requantize_recorded(...), requantize_by_scales_recorded(...)
    rht_quantize_groups_recorded(...), requantize_groups_recorded(...)
    rht_quantize_groups_both_recorded(...)
    rht_quantize_both_recorded(...)  -> ..., sums of the rows, sums of the columns
    rht_quantize_summed_recorded(...), rht_quantize_both_summed_recorded(...)
    statistics_of_codes(codes, scales, global_scale, scheme)   codes that another graph made
    statistics_of_operand(x, codes, scales, global_scale, scheme)   of q2::quantize's x and codes
    sampled_codes(codes) -> the codes of some rows, about CODES_SAMPLE of them

sums are fp64 [len(SUMS)], of which the host makes statistics (numerics/statistics.py). A recorded
op calls the op that it stands for, with the same arguments and so by the same kernel, and returns
its very outputs: in a graph it can take that op's place and change no bit. Sums are computed beside
it, in plain torch. Of codes in the form that a bf16 GEMM reads (@bf16) the op is called once more,
without that form and with the same seed, for codes and scales to look at.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from q2compile.runtime_kernels.numerics.constants import rotation_matrix
from q2compile.runtime_kernels.numerics.groups import lay_out
from q2compile.runtime_kernels.numerics.scaled_codes import rounded_to_scales
from q2compile.runtime_kernels.numerics.schemes import WIDENED, get_scheme
from q2compile.runtime_kernels.numerics.statistics import (
    CODES_SAMPLE,
    SUMS,
    Sample,
    of_rows,
    plain_name,
    sample_of,
    source_values,
    sums,
    sums_of_codes,
)
from q2compile.runtime_kernels.numerics.swizzle import unswizzle_32x4x4
from q2compile.runtime_kernels.numerics.transforms import get_transform
from q2compile.runtime_kernels.ops import (
    quantize,
    quantize_masked,
    requantize,
    requantize_by_scales,
    requantize_groups,
    rht_quantize,
    rht_quantize_both,
    rht_quantize_groups,
    rht_quantize_groups_both,
    summed,
)
from q2compile.runtime_kernels.ops.rht_quantize_groups import spreads
from q2compile.runtime_kernels.registry import REFERENCE, define, kernel, warm_up

RECORDED = "_recorded"  # at the end of an op's name


def _largest(x: torch.Tensor) -> torch.Tensor:
    """max |x|, fp32 0-dim, NaN where there is one; no copy of x is made."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    return torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)


def _measured(values: Callable, parts, scheme: str, seed, transform: str, amax) -> torch.Tensor:
    """The sums of one operand. values(sample): its rows, [..., K], before rotation."""
    codes, scales, global_scale = parts
    spec, rotation = get_scheme(scheme), get_transform(transform)
    sample = sample_of(codes.shape[0], 2 * codes.shape[1])
    turn = None
    if rotation.size > 1:
        turn = rotation_matrix(rotation, codes.device)
        if rotation.seeded:
            turn = turn * torch.ops.q2.signs(seed, transform)[:, None]
    codes, scales = of_rows(codes, scales, spec, sample)
    return sums(values(sample), turn, codes, scales, global_scale, spec, amax)


def _rows_of(x: torch.Tensor, transpose: bool) -> Callable:
    def values(sample: Sample | None) -> torch.Tensor:
        own = x.t() if transpose else x
        return own if sample is None else sample.of(own)

    return values


def _largest_of_codes(codes, scales, global_scale, scheme: str) -> torch.Tensor:
    """max |x̂| of a quantised matrix. Without the global scale bf16 holds its numbers exactly."""
    spec = get_scheme(scheme)
    if spec.swizzled:
        scales = unswizzle_32x4x4(scales, codes.shape[0], 2 * codes.shape[1] // spec.width)
    args = _dequantized(codes, scales, plain_name(scheme))
    return _largest(torch.ops.q2.dequantize(*args)) * global_scale


def _looked_at(scheme: str) -> str:
    """The form of a scheme that has codes and scales."""
    return scheme.removesuffix(WIDENED)


def _dequantized(codes, scales, scheme: str) -> tuple:
    return codes, scales, None, scheme, 2 * codes.shape[1], torch.bfloat16


def _quantize(x, amax, seed, scheme, stream, *, made):
    parts = made(lambda s: torch.ops.q2.quantize(x, amax, seed, s, stream))
    return [_measured(_rows_of(x, False), parts, _looked_at(scheme), None, "none", _largest(x))]


def _quantize_masked(x, scheme, transform, *, made):
    *parts, _ = made(lambda s: torch.ops.q2.quantize_masked(x, s, transform))
    scheme = _looked_at(scheme)
    return [_measured(_rows_of(x, False), parts, scheme, None, transform, _largest(x))]


def _rht_quantize(x, seed, scheme, transform, transpose, stream, *, made):
    parts = made(lambda s: torch.ops.q2.rht_quantize(x, seed, s, transform, transpose, stream))
    rows = _rows_of(x, transpose)
    return [_measured(rows, parts, _looked_at(scheme), seed, transform, _largest(x))]


def _rht_quantize_both(x, row_seed, col_seed, scheme, transform, stream, *, made):
    six = made(
        lambda s: torch.ops.q2.rht_quantize_both(x, row_seed, col_seed, s, transform, stream)
    )
    scheme, amax = _looked_at(scheme), _largest(x)
    sides = ((False, six[:3], row_seed), (True, six[3:], col_seed))
    return [
        _measured(_rows_of(x, transpose), parts, scheme, seed, transform, amax)
        for transpose, parts, seed in sides
    ]


def _requantize(
    codes, scales, global_scale, seed, source_scheme, scheme, transform, rows, stream, *, made
):
    source = (codes, scales, global_scale)
    parts = made(
        lambda s: torch.ops.q2.requantize(*source, seed, source_scheme, s, transform, rows, stream)
    )
    spec = get_scheme(source_scheme)

    def values(sample: Sample | None) -> torch.Tensor:
        return source_values(codes, scales, global_scale, spec, sample)[:rows]

    amax = _largest_of_codes(*source, source_scheme)
    return [_measured(values, parts, _looked_at(scheme), seed, transform, amax)]


def _requantize_by_scales(
    x, scales, global_scale, seed, source_scheme, scheme, transform, stream, *, made
):
    how, op = (seed, source_scheme), torch.ops.q2.requantize_by_scales
    parts = made(lambda s: op(x, scales, global_scale, *how, s, transform, stream))
    source = rounded_to_scales(x, scales, global_scale, get_scheme(source_scheme)) * global_scale
    rows, scheme = _rows_of(source, True), _looked_at(scheme)
    return [_measured(rows, parts, scheme, seed, transform, _largest(source))]


def _in_groups(values: Callable, offs, padded_offs, scheme: str, transform: str) -> Callable:
    """``values`` of rows that lie [K, T], in the padded layout of their groups."""
    spread = spreads(get_scheme(scheme), get_transform(transform))

    def laid(sample: Sample | None) -> torch.Tensor:
        x, shares = lay_out(values(sample).flatten(0, -2).t(), offs, padded_offs, spread=spread)
        if shares is not None:
            x = x * shares.repeat_interleave(x.shape[0] // shares.shape[0])[:, None]
        return x.t()

    return laid


def _rht_quantize_groups(x, offs, padded_offs, seed, scheme, transform, stream, *, made):
    groups = (offs, padded_offs)
    parts = made(lambda s: torch.ops.q2.rht_quantize_groups(x, *groups, seed, s, transform, stream))
    scheme = _looked_at(scheme)
    values = _in_groups(_rows_of(x, True), *groups, scheme, transform)
    return [_measured(values, parts, scheme, seed, transform, _largest(x))]


def _rht_quantize_groups_both(
    x, offs, padded_offs, row_seed, col_seed, scheme, transform, stream, *, made
):
    groups = (offs, padded_offs)
    six = made(
        lambda s: torch.ops.q2.rht_quantize_groups_both(
            x, *groups, row_seed, col_seed, s, transform, stream
        )
    )
    scheme, amax = _looked_at(scheme), _largest(x)
    columns = _in_groups(_rows_of(x, True), *groups, scheme, transform)
    sides = ((_rows_of(x, False), six[:3], row_seed), (columns, six[3:], col_seed))
    return [
        _measured(values, parts, scheme, seed, transform, amax) for values, parts, seed in sides
    ]


def _requantize_groups(
    codes,
    scales,
    global_scale,
    offs,
    padded_offs,
    seed,
    source_scheme,
    scheme,
    transform,
    rows,
    stream,
    *,
    made,
):
    source, groups = (codes, scales, global_scale), (offs, padded_offs)
    spec = get_scheme(source_scheme)
    parts = made(
        lambda s: torch.ops.q2.requantize_groups(
            *source, *groups, seed, source_scheme, s, transform, rows, stream
        )
    )

    def values(sample: Sample | None) -> torch.Tensor:
        return source_values(codes, scales, global_scale, spec, sample)[:rows]

    scheme, amax = _looked_at(scheme), _largest_of_codes(*source, source_scheme)
    laid = _in_groups(values, *groups, scheme, transform)
    return [_measured(laid, parts, scheme, seed, transform, amax)]


def _rht_quantize_summed(x, seed, scheme, transform, stream, dtype, *, made):
    op = torch.ops.q2.rht_quantize_summed
    *parts, _ = made(lambda s: op(x, seed, s, transform, stream, dtype))
    return _rht_quantize(x, seed, scheme, transform, True, stream, made=lambda _: parts)


def _rht_quantize_both_summed(x, row_seed, col_seed, scheme, transform, stream, dtype, *, made):
    seeds, op = (row_seed, col_seed), torch.ops.q2.rht_quantize_both_summed
    *six, _ = made(lambda s: op(x, *seeds, s, transform, stream, dtype))
    return _rht_quantize_both(x, *seeds, scheme, transform, stream, made=lambda _: six)


def _recorded(op: str, observe: Callable, at: int, args: tuple) -> tuple:
    """The outputs of an op, and what ``observe`` measures. at: which argument is the scheme."""
    outputs = getattr(torch.ops.q2, op)(*args)

    def made(call: Callable) -> tuple:
        form = _looked_at(args[at])
        return outputs if form == args[at] else call(form)

    return (*outputs, *observe(*args, made=made))


def _define_recorded(op: str, fake: Callable, observe: Callable, at: int, operands: int) -> None:
    schema = getattr(torch.ops.q2, op).default._schema
    arguments = str(schema).partition("(")[2].partition(") ->")[0]
    returned = ", ".join(["Tensor"] * (len(schema.returns) + operands))

    def recorded_fake(*args):
        first = next(a for a in args if isinstance(a, torch.Tensor))
        return *fake(*args), *(_empty_sums(first) for _ in range(operands))

    def prepare(*args):
        warm_up(op, args)
        for signed in [a for a in args if isinstance(a, torch.Tensor) and a.dtype == torch.int64]:
            warm_up("signs", (signed, "rht128"))
        warm_up(op, (*args[:at], _looked_at(args[at]), *args[at + 1 :]))
        if op in ("requantize", "requantize_groups"):
            warm_up("dequantize", _dequantized(*args[:2], plain_name(args[at - 1])))

    name = op + RECORDED
    define(f"{name}({arguments}) -> ({returned})", fake=recorded_fake)
    run = partial(_recorded, op, observe, at)
    kernel(name, REFERENCE, prepare=prepare)(lambda *args: run(args))


def _empty_sums(like: torch.Tensor) -> torch.Tensor:
    return like.new_empty((len(SUMS),), dtype=torch.float64)


_define_recorded("quantize", quantize.fake, _quantize, 3, 1)
_define_recorded("quantize_masked", quantize_masked.fake, _quantize_masked, 1, 1)
_define_recorded("rht_quantize", rht_quantize.fake, _rht_quantize, 2, 1)
_define_recorded("rht_quantize_both", rht_quantize_both.fake, _rht_quantize_both, 3, 2)
_define_recorded("rht_quantize_summed", summed.fake, _rht_quantize_summed, 2, 1)
_define_recorded("rht_quantize_both_summed", summed.fake_both, _rht_quantize_both_summed, 3, 2)
_define_recorded("requantize", requantize.fake, _requantize, 5, 1)
_define_recorded("requantize_by_scales", requantize_by_scales.fake, _requantize_by_scales, 5, 1)
_define_recorded("rht_quantize_groups", rht_quantize_groups.fake, _rht_quantize_groups, 4, 1)
_define_recorded(
    "rht_quantize_groups_both", rht_quantize_groups_both.fake, _rht_quantize_groups_both, 5, 2
)
_define_recorded("requantize_groups", requantize_groups.fake, _requantize_groups, 7, 1)


define(
    "statistics_of_codes(Tensor codes, Tensor scales, Tensor global_scale, str scheme) -> Tensor",
    fake=lambda codes, *_: _empty_sums(codes),
)
define(
    "statistics_of_operand(Tensor x, Tensor codes, Tensor scales, Tensor global_scale, str scheme)"
    " -> Tensor",
    fake=lambda x, *_: _empty_sums(x),
)


@kernel("statistics_of_codes", REFERENCE)
def codes_alone(codes, scales, global_scale, scheme) -> torch.Tensor:
    """See above. Not for codes @bf16."""
    spec = get_scheme(scheme)
    sample = sample_of(codes.shape[0], 2 * codes.shape[1])
    return sums_of_codes(*of_rows(codes, scales, spec, sample), global_scale, spec)


@kernel("statistics_of_operand", REFERENCE)
def operand_and_codes(x, codes, scales, global_scale, scheme) -> torch.Tensor:
    """See above."""
    parts = (codes, scales, global_scale)
    return _measured(_rows_of(x, False), parts, scheme, None, "none", _largest(x))


def _sampled_codes_fake(codes):
    sample = sample_of(codes.shape[0], 2 * codes.shape[1], CODES_SAMPLE)
    rows = codes.shape[0] if sample is None else sample.rows
    return codes.new_empty((rows, codes.shape[1]))


define("sampled_codes(Tensor codes) -> Tensor", fake=_sampled_codes_fake)


@kernel("sampled_codes", REFERENCE)
def sampled_codes(codes: torch.Tensor) -> torch.Tensor:
    """A copy of codes uint8 [M, Kp/2]: of all rows, or of groups spread evenly."""
    sample = sample_of(codes.shape[0], 2 * codes.shape[1], CODES_SAMPLE)
    return codes.clone() if sample is None else sample.of(codes).flatten(0, 1)
