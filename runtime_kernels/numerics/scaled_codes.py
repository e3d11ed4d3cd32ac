# SPDX-License-Identifier: Apache-2.0
"""Codes times block scales, without the global scale: from codes, or from a matrix that is rounded
to them."""

import torch

from q2compile.runtime_kernels.numerics.formats import decode_e2m1, round_e2m1
from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.numerics.schemes import Scheme
from q2compile.runtime_kernels.numerics.swizzle import plain_scales


def scaled_codes(codes: torch.Tensor, scales: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """code * scale, exact in fp32 and in bf16: fp32 [M, Kp], a new tensor. The codes of a scheme
    without block scales are their values."""
    if not scheme.has_block_scales:
        return codes.float()
    values = decode_e2m1(codes)
    rows, width = values.shape
    scale = plain_scales(scales, rows, width, scheme).to(torch.float32)
    if scheme.block[0] > 1:
        scale = scale.repeat_interleave(scheme.block[0], 0)[:rows]
    blocks = values.view(rows, width // scheme.width, scheme.width)
    return blocks.mul_(scale.unsqueeze(-1)).view(rows, width)


def rounded_to_scales(
    x: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, scheme: Scheme
) -> torch.Tensor:
    """e2m1(x / (scale * global_scale)) * scale, fp32 [M, K].

    These are the bits of scaled_codes after rule "pow2" of nvfp4.py, if the scales are those that
    the rule has found and are above 2^-6.

    The rule rounds a smaller scale (an e4m3 subnormal, or the least normal value) after the codes.
    Here the codes are rounded by the rounded scale, and come nearer to x. Such a block has a
    maximum below about 2^-13 of the tensor's. Under a scale of 0 codes have the signs of x in both
    cases.
    """
    rows, columns = x.shape
    blocks = ceil_div(columns, scheme.width)
    scale = plain_scales(scales, rows, columns, scheme).to(torch.float32)
    step = (scale * global_scale).clamp_(min=torch.finfo(torch.float32).tiny)
    inverse = torch.where(scale == 0, 0.0, 1.0 / step)
    padded = torch.nn.functional.pad(x.float(), (0, blocks * scheme.width - columns))
    values = round_e2m1(padded.view(rows, blocks, scheme.width) * inverse.unsqueeze(-1))
    values = values.mul_(scale.unsqueeze(-1)).view(rows, blocks * scheme.width)
    return values[:, :columns]
