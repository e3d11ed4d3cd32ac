# SPDX-License-Identifier: Apache-2.0
"""Statistics of the rounding of an operand, for telemetry.

    quantize(..., recorded=True), requantize(..., recorded=True)
        -> the outputs of the op, then the sums of each operand that it makes
    statistics_of_codes(codes, scales, global_scale, scheme)   codes that another graph made
    statistics_of_operand(x, codes, scales, global_scale, scheme)   of q2::quantize's x and codes
    sampled_codes(codes) -> the codes of some rows, about CODES_SAMPLE of them

sums are fp64 [len(SUMS)]; the host computes statistics from them (numerics/statistics.py). A
recorded call makes the same call without `recorded`, by the same kernel, and returns its outputs:
in a graph it changes no bit. Plain torch computes the sums afterwards. For dequantized operands
(@bf16) the op is called once more, without that form and with the same seed, since the sums need
codes and scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from q2compile.runtime_kernels.numerics.constants import rotation_matrix
from q2compile.runtime_kernels.numerics.groups import lay_out, spreads
from q2compile.runtime_kernels.numerics.scaled_codes import rounded_to_scales
from q2compile.runtime_kernels.numerics.schemes import Scheme, get_scheme
from q2compile.runtime_kernels.numerics.statistics import (
    CODES_SAMPLE,
    SUMS,
    Sample,
    of_rows,
    sample_of,
    source_values,
    sums,
    sums_of_codes,
)
from q2compile.runtime_kernels.numerics.swizzle import plain_scales
from q2compile.runtime_kernels.numerics.transforms import Transform, get_transform
from q2compile.runtime_kernels.ops.table import QuantizerCall
from q2compile.runtime_kernels.registry import define


def recorded(call: QuantizerCall) -> list[torch.Tensor]:
    """The outputs of a recorded call."""
    plain, with_codes = _plain(call), _with_codes(call)
    outputs = plain()
    seen = with_codes() if with_codes.scheme.form != plain.scheme.form else outputs
    values, amax = _source(call)
    found = []
    for columnwise, seed, first, transform in call.operands:
        own = values(columnwise)
        if columnwise and call.grouped:
            own = _in_groups(call, own)
        how = with_codes.scheme, seed, transform
        found.append(_measured(own, seen[first : first + 3], *how, amax))
    return [*outputs, *found]


def empty_statistics(call: QuantizerCall) -> list[torch.Tensor]:
    """Fakes of the statistics of a call, if it is recorded."""
    return [_empty_sums(call.x) for _ in call.operands if call.recorded]


def _plain(call: QuantizerCall) -> QuantizerCall:
    return call.replace(recorded=False)


def _with_codes(call: QuantizerCall) -> QuantizerCall:
    """The call that gives codes and scales."""
    plain = _plain(call)
    return (
        plain.replace(scheme=call.scheme.with_form("").name) if call.scheme.dequantized else plain
    )


Rows = Callable[[Sample | None], torch.Tensor]  # of an operand before rotation, [..., K]


def _source(call: QuantizerCall) -> tuple[Callable[[bool], Rows], torch.Tensor]:
    """The rows that a call quantizes, rowwise or columnwise, and their largest magnitude."""
    scheme = call.source_scheme
    if scheme is None:
        return partial(_rows_of, call.x), _largest(call.x)
    source, scales, global_scale = (call.args[name] for name in call.spec.source)
    parts = (source, scales, global_scale)
    if call.by_scales:
        x = rounded_to_scales(*parts, scheme) * global_scale
        return partial(_rows_of, x), _largest(x)
    rows = call.args["rows"]

    def of_codes(sample: Sample | None) -> torch.Tensor:
        return source_values(*parts, scheme, sample)[:rows]

    return lambda columnwise: of_codes, _largest_of_codes(*parts, scheme)


def _largest(x: torch.Tensor) -> torch.Tensor:
    """max |x|, fp32 0-dim, NaN where there is one; no copy of x is made."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    return torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)


def _measured(
    values: Rows, parts: Sequence[torch.Tensor], scheme: Scheme, seed, rotation: Transform, amax
) -> torch.Tensor:
    """The sums of one operand."""
    codes, scales, global_scale = parts
    sample = sample_of(codes.shape[0], scheme.packed * codes.shape[1])
    rotating = None
    if rotation.size > 1:
        rotating = rotation_matrix(rotation, codes.device)
        if rotation.seeded:
            rotating = rotating * torch.ops.q2.signs(seed, rotation.name)[:, None]
    rows = of_rows(codes, scales, scheme, sample)
    return sums(values(sample), rotating, *rows, global_scale, scheme, amax)


def _rows_of(x: torch.Tensor, columnwise: bool) -> Rows:
    def values(sample: Sample | None) -> torch.Tensor:
        own = x.t() if columnwise else x
        return own if sample is None else sample.of(own)

    return values


def _largest_of_codes(codes, scales, global_scale, scheme: Scheme) -> torch.Tensor:
    """max |x̂| of a quantized matrix. Without the global scale its elements are exact in bf16."""
    scales = plain_scales(scales, codes.shape[0], 2 * codes.shape[1], scheme)
    args = _dequantized(codes, scales, scheme.with_form(""))
    return _largest(torch.ops.q2.dequantize(*args)) * global_scale


def _dequantized(codes, scales, scheme: Scheme) -> tuple:
    return codes, scales, None, scheme.name, scheme.packed * codes.shape[1], torch.bfloat16


def _in_groups(call: QuantizerCall, values: Rows) -> Rows:
    """``values`` [K, T], with T in the padded layout of the groups."""
    ends = call.args["offs"], call.args["padded_offs"]
    spread = spreads(call.scheme, call.transform)

    def laid(sample: Sample | None) -> torch.Tensor:
        x, shares = lay_out(values(sample).flatten(0, -2).t(), *ends, spread=spread)
        if shares is not None:
            x = x * shares.repeat_interleave(x.shape[0] // shares.shape[0])[:, None]
        return x.t()

    return laid


def _empty_sums(like: torch.Tensor) -> torch.Tensor:
    return like.new_empty((len(SUMS),), dtype=torch.float64)


@define(
    "statistics_of_codes(Tensor codes, Tensor scales, Tensor global_scale, str scheme) -> Tensor",
    fake=lambda codes, *_: _empty_sums(codes),
)
def codes_alone(codes, scales, global_scale, scheme) -> torch.Tensor:
    """See above. Not for codes @bf16."""
    spec = get_scheme(scheme)
    sample = sample_of(codes.shape[0], spec.packed * codes.shape[1])
    return sums_of_codes(*of_rows(codes, scales, spec, sample), global_scale, spec)


@define(
    "statistics_of_operand(Tensor x, Tensor codes, Tensor scales, Tensor global_scale, str scheme)"
    " -> Tensor",
    fake=lambda x, *_: _empty_sums(x),
)
def operand_and_codes(x, codes, scales, global_scale, scheme) -> torch.Tensor:
    """See above."""
    parts = (codes, scales, global_scale)
    how = get_scheme(scheme), None, get_transform("none")
    return _measured(_rows_of(x, False), parts, *how, _largest(x))


def _sampled_codes_fake(codes):
    sample = sample_of(codes.shape[0], 2 * codes.shape[1], CODES_SAMPLE)
    rows = codes.shape[0] if sample is None else sample.rows
    return codes.new_empty((rows, codes.shape[1]), dtype=torch.uint8)


@define("sampled_codes(Tensor codes) -> Tensor", fake=_sampled_codes_fake)
def sampled_codes(codes: torch.Tensor) -> torch.Tensor:
    """A copy of 4-bit or 8-bit codes [M, n] as bytes: of all rows, or of groups spread evenly."""
    stored = codes.view(torch.uint8)
    sample = sample_of(codes.shape[0], 2 * codes.shape[1], CODES_SAMPLE)
    return stored.clone() if sample is None else sample.of(stored).flatten(0, 1)
