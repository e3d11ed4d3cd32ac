# SPDX-License-Identifier: Apache-2.0
"""Statistics of the rounding of an operand, which telemetry records.

    sums(values, rotation, codes, scales, least, global_scale, scheme, amax) -> fp64 [len(SUMS)]
    sums_of_codes(codes, scales, least, global_scale, scheme)            -> ...
    statistics(sums [..., len(SUMS)]) -> fp64 [..., len(FIELDS)]

The first two run on the operand's device, the last on the host, when a record is written. x [M, Kp]
is the operand before rounding: rotated and multiplied by the norm, the contraction last. With
x̂ = e2m1(code) * scale * global_scale:

    amax             largest magnitude of the whole tensor, before any rotation
    relative_error   ‖x̂ - x‖ / ‖x‖; 0 for a tensor of zeros
    cosine           ⟨x̂, x⟩ / (‖x̂‖ ‖x‖); 1 for a tensor of zeros
    zero             share of the elements that were not zero and are now
    saturated        share of the elements beyond the largest value of their block, 6 * scale *
                     global_scale; of fp8, beyond 448 * global_scale. Under MS-EDEN, whose scales
                     are corrected after the rounding, the scale is the corrected one
    scale_zero       share of the block scales that are 0; of e8m0, the least there is, 2^-127, as
                     blocks of zeros have
    scale_subnormal  share in e4m3's subnormals, below 2^-6, where a scale has fewer bits; of e8m0,
                     more than 2^14 below the tensor's largest, whose blocks FP8 GEMMs round
                     (ops/to_e4m3.py)
    scale_largest    share at or above the scheme's cap, the largest scale that it aims for

A statistic that is not known is NaN. All but amax are NaN if the operand has a NaN or Inf
(sums_of_codes: if the given rows have one). Tensors of more than SAMPLE elements are measured, amax
aside, on at most that many of them: whole rows, in groups of 16 spread evenly over all.

On a GPU this costs launches, some 20 for each operand, and a few views for each launch. Hence sums
of one kind are contiguous and computed by one reduction, counts are norms of order 0, and constants
are made before (constants.py). All is in fp64: the sample is small, a cosine differs from 1 by 1e-3
at most, and no product is rounded to tf32.
"""

from typing import NamedTuple

import torch

from q2compile.runtime_kernels.numerics.constants import pairs_of_bytes
from q2compile.runtime_kernels.numerics.formats import decode_e2m1
from q2compile.runtime_kernels.numerics.schemes import Scheme
from q2compile.runtime_kernels.numerics.swizzle import plain_scales

FIELDS = (
    "amax",
    "relative_error",
    "cosine",
    "zero",
    "saturated",
    "scale_zero",
    "scale_subnormal",
    "scale_largest",
)
SUMS = (
    "amax",
    "error",  # ‖x̂ - x‖
    "rounded",  # ‖x̂‖
    "size",  # ‖x‖
    "nonzero",  # elements with x != 0
    "nonzero_after",  # with x != 0 and x̂ != 0
    "saturated",
    "elements",
    "scale_nonzero",  # shares of the scales
    "scale_normal",  # those that are not subnormal
    "scale_largest",
)
SAMPLE = 2**18  # elements
CODES_SAMPLE = 2**16  # codes of a weight that are stored, to count how many change
GROUP = 16  # rows: those of a square block share a scale
_LEAST_NORMAL = 2.0**-6  # of e4m3
_E8M0_RANGE = 2.0**-14  # of scales under which one operand of an FP8 GEMM is exact
_LEAST_E8M0, _LARGEST_E8M0 = 2.0**-127, 2.0**127


class Sample(NamedTuple):
    """The rows that are measured: the first GROUP of each ``apart``, ``groups`` times."""

    groups: int
    apart: int

    @property
    def rows(self) -> int:
        return self.groups * GROUP

    def of(self, x: torch.Tensor, dim: int = 0, per: int = 1) -> torch.Tensor:
        """The rows of the sample, of a matrix that has rows / per along dim: a view with
        [groups, GROUP / per] or [groups, 1] in place of dim."""
        size, stride = list(x.shape), list(x.stride())
        size[dim : dim + 1] = [self.groups, max(GROUP // per, 1)]
        stride.insert(dim, self.apart // per * stride[dim])
        return x.as_strided(size, stride, x.storage_offset())


def sample_of(rows: int, width: int, limit: int = SAMPLE) -> Sample | None:
    """The sample of a matrix: at most ``limit`` elements, or one group; None for all rows."""
    wanted = max(1, limit // (GROUP * max(width, 1)))
    if wanted >= rows // GROUP:
        return None
    step = -(-(rows // GROUP) // wanted)
    step += step % 2  # blocks of 32 begin where groups do
    return Sample(rows // GROUP // step, step * GROUP)


def of_rows(
    codes: torch.Tensor, scales: torch.Tensor, scheme: Scheme, sample: Sample | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]:
    """Views of the codes and block scales of some rows, [rows, n] or [groups, rows of one, n]; the
    scales unswizzled. And the least scale that is normal, by all rows."""
    least = _least_normal(scales, scheme)
    scales = plain_scales(scales, codes.shape[0], 2 * codes.shape[1], scheme)
    if sample is None:
        return codes, scales, least
    if scheme.is_tensorwise:
        return sample.of(codes.view(torch.uint8)).view(codes.dtype), scales, least
    return sample.of(codes), sample.of(scales, per=scheme.block[0]), least


def _least_normal(scales: torch.Tensor, scheme: Scheme) -> torch.Tensor | float:
    if scheme.format != "mxfp4" or scales.numel() == 0:
        return _LEAST_NORMAL
    finite = scales.to(torch.float64).nan_to_num_(0.0)
    return finite.amax().mul_(_E8M0_RANGE).clamp_(min=2 * _LEAST_E8M0)


def sums(
    values: torch.Tensor,
    rotation: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    least: torch.Tensor | float,
    global_scale: torch.Tensor,
    scheme: Scheme,
    amax: torch.Tensor,
) -> torch.Tensor:
    """See the top of this file. All arguments are of the same rows, as `of_rows` gives them.

    values: any floating dtype [..., K], before rotation.  rotation: fp64 [size, size] of 1 and -1,
    by which a chunk is multiplied to rotate it, or None.
    """
    rows, width = codes.shape[:-1].numel(), scheme.packed * codes.shape[-1]
    counted = values.shape[-1] if rotation is None else width
    found = amax.new_full((len(SUMS),), rows * counted, dtype=torch.float64)
    largest, norms, counts, _, shares = found.split([1, 3, 3, 1, 3])
    largest.copy_(amax)
    spread = found.new_empty((5, rows * width))
    error, rounded, x, nonzero_after, beyond = spread.unbind()
    if rotation is None:
        _fill(x, values, width)
    else:
        _fill(beyond, values, width)
        size = rotation.shape[0]
        torch.mm(beyond.view(-1, size), rotation, out=x.view(-1, size))
        x.mul_(size**-0.5)  # not in the matrix: sums that cancel out are exactly 0
    scale = scales.to(torch.float64)
    unit = _units(scale, global_scale, scheme, rows)
    _decode(codes, unit, scheme, rounded)
    torch.sub(rounded, x, out=error)
    torch.mul(rounded, x, out=nonzero_after)
    torch.abs(x, out=beyond)
    beyond.view(*unit.shape[:2], scheme.scale_width(codes)).gt_(unit * scheme.code_max)
    # A sum of squares is finite only if all its addends are. For rows that are not here, amax shows
    # what is not finite.
    torch.linalg.vector_norm(spread[:3], dim=1, out=norms)
    torch.linalg.vector_norm(spread[2:], 0, dim=1, out=counts)
    _shares_of_scales(scale, least, scheme, shares)
    return found


def sums_of_codes(
    codes: torch.Tensor,
    scales: torch.Tensor,
    least: torch.Tensor | float,
    global_scale: torch.Tensor,
    scheme: Scheme,
) -> torch.Tensor:
    """The sums of codes whose x is not known: the share of zeros includes elements that were zero
    before, errors and saturation are NaN, and amax is that of x̂."""
    rows, width = codes.shape[:-1].numel(), scheme.packed * codes.shape[-1]
    found = global_scale.new_full((len(SUMS),), rows * width, dtype=torch.float64)
    scale = scales.to(torch.float64)
    rounded = found.new_empty((rows * width,))
    _decode(codes, _units(scale, global_scale, scheme, rows), scheme, rounded)
    if rows * width:
        for name, order in (("amax", torch.inf), ("size", 2), ("nonzero_after", 0)):
            torch.linalg.vector_norm(rounded, order, out=found[SUMS.index(name)])
    for name in ("error", "saturated"):
        found[SUMS.index(name)].fill_(torch.nan)
    _shares_of_scales(scale, least, scheme, found[-3:])
    return found


def statistics(sums: torch.Tensor) -> torch.Tensor:
    """See the top of this file."""
    amax, error, rounded, size, nonzero, nonzero_after, saturated, elements, *shares = (
        sums.double().unbind(-1)
    )
    scale_nonzero, scale_normal, scale_largest = shares
    nothing = size == 0
    # ⟨x̂, x⟩ by the law of cosines, of which fp64 leaves enough digits.
    product = (rounded.square() + size.square() - error.square()) / 2
    known = [
        torch.where(nothing, error, error / size),
        torch.where(nothing, 1 + error, product / (size * rounded)),
        (nonzero - nonzero_after) / elements,
        saturated / elements,
        1 - scale_nonzero,
        scale_nonzero - scale_normal,
        scale_largest,
    ]
    unknown = (size - size) + (rounded - rounded) + (amax - amax)  # NaN, or 0
    return torch.stack([amax, *(share + unknown for share in known)], -1)


def source_values(
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    scheme: Scheme,
    sample: Sample | None,
) -> torch.Tensor:
    """Some columns (groups of 16, or all) of a quantized matrix [T, Kp], as rows: fp64 [columns,
    T], a view."""
    if scheme.is_tensorwise:
        values = codes if sample is None else sample.of(codes, 1).flatten(1)
        return (values.to(torch.float64) * global_scale).t()
    scales = plain_scales(scales, codes.shape[0], 2 * codes.shape[1], scheme)
    if sample is None:
        codes, scales = codes.unflatten(1, (-1, scheme.width // 2)), scales.unsqueeze(2)
    else:  # a group lies in one block
        codes, scales = sample.of(codes, 1, per=2), sample.of(scales, 1, per=scheme.width)
    scale = scales.to(torch.float64)
    if scheme.block[0] > 1:
        scale = scale.repeat_interleave(scheme.block[0], 0)[: codes.shape[0]]
    values = decode_e2m1(codes, pairs_of_bytes(codes.device)) * (scale * global_scale)
    return values.permute(1, 2, 0).flatten(0, 1)


def _fill(rows: torch.Tensor, values: torch.Tensor, width: int) -> None:
    """Writes values [..., K] to the beginning of each of the rows, as many [..., width], and zeros
    to its rest."""
    target = rows.view(*values.shape[:-1], width)
    if values.shape[-1] < width:
        target[..., values.shape[-1] :].zero_()
        target = target[..., : values.shape[-1]]
    target.copy_(values)


def _units(
    scale: torch.Tensor, global_scale: torch.Tensor, scheme: Scheme, rows: int
) -> torch.Tensor:
    """The value of code 1: fp64 [rows, blocks, 1]; one block if the tensor has one scale."""
    if scheme.is_tensorwise:
        return global_scale.to(torch.float64).expand(rows, 1, 1)
    unit = (scale * global_scale).flatten(0, -2).unsqueeze(2)
    return unit if scheme.block[0] == 1 else unit.repeat_interleave(scheme.block[0], 0)[:rows]


def _decode(codes: torch.Tensor, unit: torch.Tensor, scheme: Scheme, out: torch.Tensor) -> None:
    """x̂ of codes [..., Kp/2], of fp8 [..., Kp]: fp64 [rows * Kp]."""
    if scheme.is_tensorwise:
        values = codes.to(torch.float64)
    else:
        values = decode_e2m1(codes, pairs_of_bytes(codes.device))
    blocks = (*unit.shape[:2], scheme.scale_width(codes))
    torch.mul(values.view(blocks), unit, out=out.view(blocks))


def _shares_of_scales(
    scale: torch.Tensor, least: torch.Tensor | float, scheme: Scheme, out: torch.Tensor
) -> None:
    if scheme.is_tensorwise:  # there are none that could be too small or too large
        out[:2].fill_(1.0)
        out[2:].zero_()
        return
    nvfp4 = scheme.format == "nvfp4"
    zero, cap = (0.0, scheme.cap) if nvfp4 else (_LEAST_E8M0, _LARGEST_E8M0)
    found = scale.new_empty((3, scale.numel()))
    nonzero, normal, largest = found.unbind()
    scale = scale.flatten()
    torch.ne(scale, zero, out=nonzero)
    torch.ge(scale, least, out=normal)
    torch.ge(scale, cap, out=largest)
    torch.mean(found, 1, out=out)
