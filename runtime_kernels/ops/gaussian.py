# SPDX-License-Identifier: Apache-2.0
"""The error of a scheme on Gaussian data, with which errors of real operands are compared."""

from __future__ import annotations

from functools import cache

import torch

from q2compile.runtime_kernels.numerics.schemes import SCHEMES

_ROWS, _COLUMNS = 256, 512
_OCTAVE = 2.0


@cache
def gaussian_error(scheme: str) -> float | None:
    """Relative error ‖x̂ - x‖ / ‖x‖ of rounding N(0, 1) by ``scheme``, measured on a CPU with a
    fixed seed; None for an unknown scheme.

    Rotated Gaussian data is Gaussian, so this holds behind every transform, too. The rows' scales
    are spread over an octave: MXFP4's error depends on where a block lies between two powers of
    two.
    """
    spec = SCHEMES.get(scheme)
    if spec is None:
        return None
    with torch.no_grad(), torch.device("cpu"):  # whatever the default device is
        x = torch.randn(_ROWS, _COLUMNS, generator=torch.Generator().manual_seed(0))
        x *= (_OCTAVE ** (torch.arange(_ROWS) / _ROWS))[:, None]
        seed = torch.tensor(0) if spec.stochastic else None
        codes, scales, global_scale, *_ = torch.ops.q2.quantize(
            x,
            scheme=scheme,
            rowwise=True,
            columnwise=False,
            amax=torch.ops.q2.amax(x) if spec.takes_amax else None,
            rowwise_seed=seed,
        )
        rounded = torch.ops.q2.dequantize(
            codes, scales, global_scale, scheme, _COLUMNS, torch.float32
        )
        errors = (rounded - x).square().sum(1) / x.square().sum(1)
        return float(errors.mean().sqrt())
