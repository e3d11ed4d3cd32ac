# SPDX-License-Identifier: Apache-2.0
"""The quantizers as plain functions, on any device: `quantize(x, scheme)` and back.

    q = q2compile.quantize(x, "nvfp4_46")
    q.codes, q.scales, q.global_scale      4-bit codes, one 8-bit scale per block, one fp32 scalar
    q.dequantize()                         their values, in x's shape

These are the ops that a compiled model runs (`q2compile.runtime_kernels`), called eagerly.

Packing, for x seen as a matrix [M, K], quantized along K, with Kp = K rounded up to whole blocks
(and whole chunks of the transform):

    codes         uint8 [M, Kp/2]; element k of a row is the low nibble of byte k/2 if k is even,
                  the high one if odd; a code is sign << 3 | index into {0, .5, 1, 1.5, 2, 3, 4, 6}.
                  fp8: float8_e4m3fn [M, Kp]
    scales        nvfp4: float8_e4m3fn [M, Kp/16], or [ceil(M/16), Kp/16] for 16x16 blocks;
                  mxfp4: float8_e8m0fnu [M, Kp/32]; fp8: none
    global_scale  float32, 0-dim; value = e2m1(code) * scale * global_scale
    mask          QuEST only: uint8 [M, Kp/8], bit k % 8 of byte k/8 is 1 where element k did not
                  clip

Blackwell's GEMMs read the scales in another order, to which only `swizzle_32x4x4` converts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

import q2compile.runtime_kernels  # noqa: F401  registers the ops used here
from q2compile.errors import ConfigError, shown
from q2compile.runtime_kernels.numerics.layout import Tiling
from q2compile.runtime_kernels.numerics.quantize_tiles import rotate_tiles_back
from q2compile.runtime_kernels.numerics.schemes import SCHEMES, Scheme, unknown_scheme
from q2compile.runtime_kernels.numerics.swizzle import swizzle_32x4x4, unswizzle_32x4x4
from q2compile.runtime_kernels.numerics.transforms import TRANSFORMS, get_transform

__all__ = [
    "SCHEMES",
    "TRANSFORMS",
    "QuantizedTensor",
    "quantize",
    "swizzle_32x4x4",
    "unswizzle_32x4x4",
]


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor in 4 or 8 bits. See the module's text for the layout of codes, scales and mask.

    scheme, transform: names in SCHEMES and TRANSFORMS.
    shape: the shape of the tensor that was quantized.
    transpose: whether blocks are along the first dimension of the matrix instead of the last.
    seed: the seed of signs and random bits, int64 0-dim; None if nothing was drawn.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor
    mask: Tensor | None
    scheme: str
    transform: str
    shape: torch.Size
    transpose: bool
    seed: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, global scale and mask."""
        parts = (self.codes, self.scales, self.global_scale, self.mask)
        return sum(t.nbytes for t in parts if t is not None)

    def dequantize(self, dtype: torch.dtype = torch.float32, *, rotate_back: bool = True) -> Tensor:
        """Return the values of the codes.

        Args:
            dtype: the dtype of the result, which is computed in fp32 and rounded once.
            rotate_back: undo the transform, to estimate the original tensor. False returns the
                rotated matrix as a GEMM reads it: [M, Kp], with the padding.
        """
        width = SCHEMES[self.scheme].packed * self.codes.shape[1]
        values = torch.ops.q2.dequantize(
            self.codes, self.scales, self.global_scale, self.scheme, width, torch.float32
        )
        if not rotate_back:
            return values.to(dtype)
        rotation = get_transform(self.transform)
        if rotation.size > 1:
            tiling = Tiling.of(values, rotation.size, transpose=False)
            values = tiling.join(rotate_tiles_back(tiling.cut(values), rotation, self.seed))
        if self.transpose:
            values = values.t()
        rows, columns = _matrix_shape(self.shape)
        return values[:rows, :columns].reshape(self.shape).to(dtype)


def quantize(
    x: Tensor,
    scheme: str = "nvfp4_46",
    *,
    transform: str = "none",
    transpose: bool = False,
    seed: int | Tensor | None = None,
    stream: int = 0,
    amax: Tensor | None = None,
) -> QuantizedTensor:
    """Round a tensor to a 4-bit format or to FP8. Not differentiable.

    Args:
        x: a tensor of float32, bfloat16 or float16 with at least one dimension, of any strides and
            on any device. Leading dimensions are rows, and blocks are along the last one.
        scheme: a name in SCHEMES: "nvfp4", "nvfp4_16x16", "nvfp4_46", "nvfp4_sr", "nvfp4_ms_eden",
            "mxfp4_rtn", "mxfp4_sr", "mxfp4_quest", and more; "<name>_pow2" has a power of two as
            its global scale.
        transform: a name in TRANSFORMS, applied along the same dimension before rounding.
        transpose: quantize a matrix along its first dimension, as its transpose.
        seed: the seed of signs and random bits, if any are drawn: an int of 64 bits, or an int64
            scalar on x's device. By default it is drawn from the default generator of x's device.
        stream: a number for each of several tensors that share a seed. They get the same signs and
            different random bits.
        amax: a float32 scalar to use as max |x|, for tensors that share an exact global scale. By
            default it is measured.

    Raises:
        ValueError: the scheme or transform is unknown (the nearest name is offered); x has another
            dtype or no dimension; transpose is set for a tensor that is no matrix; a combination is
            not allowed, such as a rotation with 16x16 blocks; the seed does not fit into 64 bits;
            x or amax is no tensor.
    """
    for name, value in {"x": x, "amax": amax}.items():
        if not (isinstance(value, Tensor) or name == "amax" and value is None):
            raise ConfigError(f"quantize: {name}: got {shown(value)}; allowed: a torch.Tensor")
    if scheme not in SCHEMES:  # the ops know more names, of operands in the form that a GEMM reads
        raise unknown_scheme(scheme)
    spec, rotation = SCHEMES[scheme], get_transform(transform)
    if x.dim() == 0:
        raise ValueError("quantize takes a tensor of one dimension or more, got a scalar.")
    if transpose and x.dim() != 2:
        raise ValueError(f"quantize with transpose takes a matrix, got {x.dim()} dimensions.")
    matrix = x.detach().reshape(_matrix_shape(x.shape))
    own_seed = _seed(seed, matrix) if spec.stochastic or rotation.seeded else None
    measures = transpose or rotation.size > 1
    if measures and amax is not None:
        raise ValueError(
            f"quantize with transform {transform!r} or transpose measures the amax itself, "
            "after the transform: pass no amax."
        )
    parts = torch.ops.q2.quantize(
        matrix,
        scheme=scheme,
        transform=transform,
        rowwise=not transpose,
        columnwise=transpose,
        amax=None if measures else _amax(amax, spec, matrix),
        rowwise_seed=None if transpose else own_seed,
        columnwise_seed=own_seed if transpose else None,
        rng_offset=stream,
        mask=spec.masked and not transpose and own_seed is None,
    )
    codes, scales, global_scale, *masks = parts
    mask = masks[0] if masks else None
    how = scheme, transform, x.shape, transpose, own_seed
    return QuantizedTensor(codes, scales, global_scale, mask, *how)


def _matrix_shape(shape: torch.Size) -> tuple[int, int]:
    return shape[:-1].numel(), shape[-1]


def _amax(amax: Tensor | None, spec: Scheme, matrix: Tensor) -> Tensor | None:
    if amax is None and spec.takes_amax:
        return torch.ops.q2.amax(matrix)
    return amax


def _seed(seed: int | Tensor | None, matrix: Tensor) -> Tensor:
    if seed is None:
        return torch.ops.q2.seed(matrix, 0)
    if isinstance(seed, Tensor):
        return seed
    is_number = isinstance(seed, Integral) and not isinstance(seed, bool)
    if not (is_number and -(2**63) <= seed < 2**64):
        raise ConfigError(
            f"quantize: seed: got {shown(seed)}; allowed: an int of 64 bits, or an int64 scalar"
        )
    return torch.tensor(seed if seed < 2**63 else seed - 2**64, device=matrix.device)
