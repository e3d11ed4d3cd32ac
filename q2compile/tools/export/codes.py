# SPDX-License-Identifier: Apache-2.0
"""The codes of a weight, as its forward multiplies them, and common global scales.

A loader that fuses q, k and v (or gate and up) keeps one global scale for all. Ours are powers of
two, so block scales move to another one by an exact power of two, as long as e4m3 holds them: 4
significant bits down to 2^-6, fewer down to 2^-9, up to 448.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import q2compile.linear.dense  # noqa: F401  registers q2::quantize_weight
from q2compile.errors import ConfigError
from q2compile.recipes.recipe import Operand
from q2compile.runtime_kernels.numerics.nvfp4 import pow2_global_scale
from q2compile.runtime_kernels.numerics.schemes import E4M3_MAX, SCHEMES
from q2compile.tools.export.places import Place, matrix_of
from q2compile.tools.export.traced import WeightUse

_SCALES = {"nvfp4": "block scales", "mxfp4": "block scales", "fp8": "FP8 codes"}


@dataclass(frozen=True)
class Codes:
    """A quantized weight; value = e2m1(code) * scale * global_scale. FP8 has no code beside the
    scale of an element, so that its global scale moves as that of block scales does.

    codes         uint8 [R, Kp/2], low nibble the even column; no minus zero. Kp is K rounded up to
                  whole blocks, with zeros. None for FP8
    scales        float8_e4m3fn [R, Kp/16] or float8_e8m0fnu [R, Kp/32]; for FP8 [R, K]
    global_scale  float32, 0-dim
    operand       how they were made: scheme and transform
    columns       K
    """

    codes: Tensor | None
    scales: Tensor
    global_scale: Tensor
    operand: Operand
    columns: int

    @property
    def is_padded(self) -> bool:
        return self.codes is not None and self.columns != 2 * self.codes.shape[1]

    @property
    def block_format(self) -> str:
        """ "fp8", or "nvfp4" or "mxfp4" by the scales: codes of one may be moved to the other."""
        if self.codes is None:
            return "fp8"
        return "mxfp4" if self.scales.dtype == torch.float8_e8m0fnu else "nvfp4"


class InexactError(ConfigError):
    """A format can't hold a layer's codes as they are."""


def codes_of(parameter: Tensor, uses: Sequence[WeightUse]) -> Codes:
    """The codes of all rows of a parameter, from what its matmuls make of it.

    Raises InexactError where the matmuls quantize it in more than one way, or not all of it, or
    where the parts that they quantize apart have no common global scale; ConfigError for a weight
    that is not finite.
    """
    first = uses[0]
    how = {(use.fprop.b, use.dtype, use.place.k, use.place.transposed) for use in uses}
    if len(how) > 1:
        raise InexactError("its matmuls quantize it in several ways")
    matrix = matrix_of(parameter.detach(), first.place.k, first.place.transposed)
    places = sorted({use.place for use in uses}, key=lambda place: place.start)
    ends = [0, *(place.stop for place in places)]
    if [place.start for place in places] != ends[:-1] or ends[-1] != matrix.shape[0]:
        rows = ", ".join(f"{place.start}:{place.stop}" for place in places)
        raise InexactError(f"only rows {rows} of {matrix.shape[0]} are multiplied quantized")
    whole = [
        _cut_codes(matrix[place.start : place.stop], place, first, place.cuts) for place in places
    ]
    return _joined(whole, 0)


def _cut_codes(w: Tensor, place: Place, use: WeightUse, cuts: Sequence[tuple[int, int]]) -> Codes:
    """Codes of w [N, K], each rank's part for itself, as tensor parallelism has it."""
    if not cuts:
        return _quantized(w, use)
    (dim, ranks), *inner = cuts
    parts = [_cut_codes(part, place, use, inner) for part in w.chunk(ranks, dim)]
    if dim == 1 and any(part.is_padded for part in parts):
        raise InexactError(
            f"each rank pads its {parts[0].columns} columns to whole blocks, in the middle of a row"
        )
    return _joined(parts, dim)


def _quantized(w: Tensor, use: WeightUse) -> Codes:
    """fprop's codes of w [N, K]."""
    operand = use.fprop.b
    scheme = SCHEMES[operand.scheme]
    if not w.isfinite().all():
        raise ConfigError(f"export: the weight of {use.site!r} holds a NaN or an Inf")
    made = torch.ops.q2.quantize_weight(w.contiguous(), str(operand), use.dtype)
    codes, scales, global_scale = made[:3]
    if scheme.is_tensorwise:
        return Codes(None, codes[:, : w.shape[1]], global_scale, operand, w.shape[1])
    if scheme.block[0] > 1:
        each_row = scales.view(torch.uint8).repeat_interleave(scheme.block[0], 0)[: w.shape[0]]
        scales = each_row.view(scales.dtype)
    return Codes(_plus_zero(codes), scales, global_scale, operand, w.shape[1])


def _plus_zero(codes: Tensor) -> Tensor:
    """Minus zero, code 8, becomes plus zero: loaders that unpack by a table may have none."""
    low, high = codes & 15, codes >> 4
    low, high = (torch.where(half == 8, 0, half) for half in (low, high))
    return low | (high << 4)


def _joined(parts: Sequence[Codes], dim: int) -> Codes:
    if len(parts) == 1:
        return parts[0]
    first, *rest = with_common_scale({f"part {i}": p for i, p in enumerate(parts)}).values()
    every = [first, *rest]
    scales = torch.cat([p.scales.view(torch.uint8) for p in every], dim)
    return replace(
        first,
        codes=None if first.codes is None else torch.cat([_packed(p) for p in every], dim),
        scales=scales.view(first.scales.dtype),
        columns=sum(p.columns for p in every) if dim else first.columns,
    )


def _packed(codes: Codes) -> Tensor:
    assert codes.codes is not None, "FP8 is not packed"
    return codes.codes


def with_common_scale(members: dict[str, Codes]) -> dict[str, Codes]:
    """The same values with one global scale: the least power of two under which e4m3 holds the
    largest block scale of all. Raises InexactError saying which block scales e4m3 would round.
    """
    if len({float(codes.global_scale) for codes in members.values()}) <= 1:
        return members
    for name, codes in members.items():
        if not is_power_of_two(codes.global_scale):
            raise InexactError(
                f"{name}: its global scale {float(codes.global_scale):g} is no power of two "
                "(global_scale='exact', or a scheme that shrinks), so its block scales can't be "
                "moved to another one exactly"
            )
    tops = [codes.scales.float().abs().amax() * codes.global_scale for codes in members.values()]
    common = pow2_global_scale(torch.stack(tops).amax(), E4M3_MAX)
    found = {}
    for name, codes in members.items():
        try:
            found[name] = _moved(codes, codes.scales.float(), common)
        except InexactError as error:
            raise InexactError(f"{name}: {error}") from None
    return found


def as_nvfp4(codes: Codes) -> Codes:
    """MXFP4 codes as NVFP4: each block of 32 as two of 16 with the same scale, a power of two.
    Raises InexactError where the powers of two are further apart than e4m3's."""
    if codes.block_format != "mxfp4":
        return codes
    zero = (_packed(codes).view(*codes.scales.shape, 16) == 0).all(-1)
    if ((codes.scales.view(torch.uint8) == 0) & ~zero).any():
        raise InexactError("block scales of 2^-127 are below what NVFP4 holds")
    # The scale of a block of zeros may be any.
    values = torch.where(zero, 0.0, codes.scales.float()).repeat_interleave(2, 1)
    return _moved(codes, values, pow2_global_scale(values.amax() * codes.global_scale, E4M3_MAX))


def _moved(codes: Codes, values: Tensor, common: Tensor) -> Codes:
    """The same codes with e4m3 scales under the global scale ``common``. values: of the scales that
    they have, in fp32."""
    wanted = values * (codes.global_scale / common)
    scales = wanted.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    lost = int((scales.float() != wanted).sum())
    if lost:
        raise InexactError(
            f"{lost} of {scales.numel()} {_SCALES[codes.block_format]} are too small for "
            f"e4m3 under the global scale {float(common):g} and would be rounded. Its largest one, "
            "or those of layers that a loader fuses with it, need that global scale"
        )
    return replace(codes, scales=scales, global_scale=common)


def is_power_of_two(scale: Tensor) -> bool:
    return bool(torch.frexp(scale).mantissa == 0.5)
