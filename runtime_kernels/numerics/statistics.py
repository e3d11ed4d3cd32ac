"""What quantising did to an operand, in numbers: the statistics that telemetry records.

    statistics(values, codes, scales, global_scale, scheme, amax) -> fp32 [len(FIELDS)]

values [M, Kp] is the operand as it was rounded: rotated, norm and all, the contraction last. With
x̂ = e2m1(code) * scale * global_scale:

    amax             largest magnitude of the whole tensor, before any rotation
    relative_error   ‖x̂ - x‖ / ‖x‖; 0 for a tensor of zeros
    cosine           ⟨x̂, x⟩ / (‖x̂‖ ‖x‖); 1 for a tensor of zeros
    zero             share of the elements that were not zero and are now
    saturated        share of the elements beyond the largest number of their block, 6 * scale *
                     global_scale. Under MS-EDEN, whose scales are corrected after the rounding,
                     the scale is the corrected one
    scale_zero       share of the block scales that are 0
    scale_subnormal  share in e4m3's subnormals, below 2^-6, where a scale has fewer bits; 0 for
                     e8m0, which has none
    scale_largest    share at or above the scheme's cap, the largest that it aims for

NaN where a number is not known, and all but amax where the operand has a NaN or Inf. Tensors of
more than SAMPLE elements are measured, amax aside, on at most that many of them: whole rows, in
groups of 16 spread evenly over all.

On a GPU what this costs is launches, some 60 an operand: hence views in the place of indices.
"""

from typing import NamedTuple

import torch

from q2compile.runtime_kernels.numerics.formats import decode_e2m1
from q2compile.runtime_kernels.numerics.scaled_codes import scaled_codes
from q2compile.runtime_kernels.numerics.schemes import (
    E2M1_MAX,
    SCHEMES,
    SWIZZLED,
    WIDENED,
    Scheme,
)
from q2compile.runtime_kernels.numerics.swizzle import unswizzle_32x4x4

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
SAMPLE = 2**18  # elements
CODES_SAMPLE = 2**16  # codes of a weight that are kept, to see how many change
GROUP = 16  # rows: those of a square block share a scale
_LEAST_NORMAL = 2.0**-6  # of e4m3
_LARGEST_E8M0 = 2.0**127


def plain_name(scheme: str) -> str:
    """The scheme's name without the form in which a GEMM reads it."""
    return scheme.removesuffix(SWIZZLED).removesuffix(WIDENED)


class Sample(NamedTuple):
    """The rows that are measured: the first GROUP of each ``apart``, ``groups`` times."""

    groups: int
    apart: int

    @property
    def rows(self) -> int:
        return self.groups * GROUP

    def of(self, x: torch.Tensor, dim: int = 0, per: int = 1) -> torch.Tensor:
        """Of a matrix with rows / per along dim those of the sample: a view, in the place of dim
        with [groups, GROUP / per], or [groups, 1]."""
        apart = self.apart // per
        spread = x.narrow(dim, 0, self.groups * apart).unflatten(dim, (self.groups, apart))
        return spread.narrow(dim + 1, 0, max(GROUP // per, 1))


def sample_of(rows: int, width: int, limit: int = SAMPLE) -> Sample | None:
    """Of a matrix, with at most ``limit`` elements or one group; None for all rows."""
    wanted = max(1, limit // (GROUP * max(width, 1)))
    if wanted >= rows // GROUP:
        return None
    step = -(-(rows // GROUP) // wanted)
    step += step % 2  # blocks of 32 begin where groups do
    return Sample(rows // GROUP // step, step * GROUP)


def of_rows(
    codes: torch.Tensor, scales: torch.Tensor, scheme: Scheme, sample: Sample | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and block scales of some rows; the scales as they lie unswizzled."""
    if scheme.swizzled:
        scales = unswizzle_32x4x4(scales, codes.shape[0], 2 * codes.shape[1] // scheme.width)
    if sample is None:
        return codes, scales
    stored = sample.of(scales.view(torch.uint8), per=scheme.block[0])  # few functions take fp8
    return sample.of(codes).flatten(0, 1), stored.flatten(0, 1).view(scales.dtype)


def statistics(
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    scheme: Scheme,
    amax: torch.Tensor,
) -> torch.Tensor:
    """See the top of this file. All of one and the same rows, scales unswizzled."""
    rounded = scaled_codes(codes, scales, _unswizzled(scheme)).mul_(global_scale)
    rounded = rounded[:, : values.shape[1]]
    size, rounded_size = _norm(values), _norm(rounded)
    nothing = size == 0
    error = torch.where(nothing, size, _norm(rounded - values) / size)
    product = (rounded * values).sum(dtype=torch.float64)
    cosine = torch.where(nothing, 1.0, product / (size * rounded_size))
    largest = E2M1_MAX * _per_element(scales, scheme, values.shape) * global_scale
    zero = ((rounded == 0) & (values != 0)).mean(dtype=torch.float32)
    saturated = (values.abs() > largest).mean(dtype=torch.float32)
    shares = _of_scales(scales, scheme)
    known = torch.stack([error.float(), cosine.float(), zero, saturated, *shares])
    # A sum of squares below fp64's largest has none but finite addends; else this adds NaN.
    known += size - size
    return torch.cat([amax.float().reshape(1), known])


def statistics_of_codes(
    codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, scheme: Scheme
) -> torch.Tensor:
    """The same where what was rounded is not known: the share of zeros counts those that were zero
    before, errors and saturation are NaN, and amax is that of x̂."""
    rounded = scaled_codes(codes, scales, _unswizzled(scheme)) * global_scale
    unknown = torch.full((), torch.nan, device=codes.device)
    zero = (rounded == 0).mean(dtype=torch.float32)
    amax = rounded.abs().amax() if rounded.numel() else rounded.new_zeros(())
    shares = _of_scales(scales, scheme)
    return torch.stack([amax, unknown, unknown, zero, unknown, *shares])


def source_values(
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    scheme: Scheme,
    sample: Sample | None,
) -> torch.Tensor:
    """Some columns (groups of 16, or all) of a quantised matrix [T, Kp], as rows: fp32 [columns,
    T]."""
    if sample is None:
        return (scaled_codes(codes, scales, scheme) * global_scale).t()
    if scheme.swizzled:
        scales = unswizzle_32x4x4(scales, codes.shape[0], 2 * codes.shape[1] // scheme.width)
    values = decode_e2m1(sample.of(codes, 1, per=2).flatten(1))
    scale = sample.of(scales, 1, per=scheme.width).float()  # a group lies in one block
    if scheme.block[0] > 1:
        scale = scale.repeat_interleave(scheme.block[0], 0)[: codes.shape[0]]
    values = values.unflatten(1, (sample.groups, GROUP)).mul_(scale * global_scale)
    return values.flatten(1).t()


def largest_of_codes(
    codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, scheme: Scheme
) -> torch.Tensor:
    """max |x̂| of a quantised matrix: the largest code of each block, found in bytes, times its
    scale."""
    if codes.numel() == 0:
        return global_scale.new_zeros(())
    if scheme.swizzled:
        scales = unswizzle_32x4x4(scales, codes.shape[0], 2 * codes.shape[1] // scheme.width)
    magnitude = torch.maximum(codes & 7, (codes >> 4) & 7)
    blocks = magnitude.view(codes.shape[0], -1, scheme.width // 2).amax(2)
    scale = scales.float()
    if scheme.block[0] > 1:
        scale = scale.repeat_interleave(scheme.block[0], 0)[: codes.shape[0]]
    return (decode_e2m1(blocks)[:, ::2] * scale).amax() * global_scale


def _norm(x: torch.Tensor) -> torch.Tensor:
    """In fp64: a cosine is off 1 by no more than 1e-3, which fp32 sums would leave 3 digits of."""
    return torch.linalg.vector_norm(x, dtype=torch.float64)


def _unswizzled(scheme: Scheme) -> Scheme:
    return SCHEMES[plain_name(scheme.name)]


def _per_element(scales: torch.Tensor, scheme: Scheme, shape: torch.Size) -> torch.Tensor:
    scale = scales.float().repeat_interleave(scheme.width, 1)[:, : shape[1]]
    if scheme.block[0] > 1:
        scale = scale.repeat_interleave(scheme.block[0], 0)[: shape[0]]
    return scale


def _of_scales(scales: torch.Tensor, scheme: Scheme) -> list[torch.Tensor]:
    """Shares of zero, of subnormal and of largest scales."""
    value = scales.float()
    nvfp4 = scheme.format == "nvfp4"
    least, cap = (_LEAST_NORMAL, scheme.cap) if nvfp4 else (0.0, _LARGEST_E8M0)
    subnormal = (value > 0) & (value < least)
    return [found.mean(dtype=torch.float32) for found in (value == 0, subnormal, value >= cap)]
