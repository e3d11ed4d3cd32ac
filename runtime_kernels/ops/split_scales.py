# SPDX-License-Identifier: Apache-2.0
"""q2::split_scales: splits the raw scale of each block into an e4m3 scale for the block and a power
of two for the tensor.

    split_scales(raw scale fp32 [R, B], scheme) -> scales e4m3 [R, B], global_scale fp32 0-dim

With a swizzled scheme the scales are [tiles, 512], in the order that FP4 GEMMs read (swizzle.py).

It is the last step of a quantizer that is an Inductor kernel (q2compile.lowering), for schemes with
global scale "pow2" and block scales rounded to nearest. A poisoned block's raw scale and scale are
NaN; the global scale is that of the others (numerics/blocks.py).
"""

import torch

from q2compile.runtime_kernels.numerics.blocks import poison
from q2compile.runtime_kernels.numerics.formats import nearest_e4m3
from q2compile.runtime_kernels.numerics.layout import scales_shape
from q2compile.runtime_kernels.numerics.nvfp4 import pow2_global_scale
from q2compile.runtime_kernels.numerics.schemes import Scheme, get_scheme
from q2compile.runtime_kernels.numerics.swizzle import swizzle_32x4x4
from q2compile.runtime_kernels.registry import define


def splits_scales(scheme: Scheme) -> bool:
    """Whether a scheme's global scale is a power of two found after the codes, and its block scales
    are rounded to nearest."""
    return scheme.global_scale == "pow2" and scheme.rounding != "ms_eden"


def checked_split_scales(raw_scale: torch.Tensor, scheme: str) -> Scheme:
    """The scheme by name."""
    spec = get_scheme(scheme)
    right = raw_scale.dtype == torch.float32 and raw_scale.dim() == 2
    assert right, f"raw scales are fp32 [R, B], got {raw_scale.dtype} in {raw_scale.dim()}"
    assert splits_scales(spec), f"q2::split_scales makes no scales of {scheme}"
    return spec


def fake(raw_scale, scheme):
    spec = checked_split_scales(raw_scale, scheme)
    shape = scales_shape(*raw_scale.shape, spec) if spec.swizzled else raw_scale.shape
    return raw_scale.new_empty(shape, dtype=torch.float8_e4m3fn), raw_scale.new_empty(())


@define("split_scales(Tensor raw_scale, str scheme) -> (Tensor, Tensor)", fake=fake)
def split_scales(raw_scale: torch.Tensor, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference: see the top of this file."""
    spec = checked_split_scales(raw_scale, scheme)
    poisoned = raw_scale.isnan()
    global_scale = pow2_global_scale(torch.where(poisoned, 0.0, raw_scale), spec.cap)
    scales = poison(nearest_e4m3(raw_scale / global_scale), poisoned)
    return swizzle_32x4x4(scales).view(-1, 512) if spec.swizzled else scales, global_scale
