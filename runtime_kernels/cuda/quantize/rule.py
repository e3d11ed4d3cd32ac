# SPDX-License-Identifier: Apache-2.0
"""The rules that rotate_quantize.cu rounds by."""

from enum import IntEnum

from q2compile.runtime_kernels.numerics.schemes import Scheme

ROUNDINGS = ("rtn", "sr", "ms_eden", "quest")  # of schemes that it implements


class ScaleRule(IntEnum):
    """Q2_RULE of rotate_quantize.cu."""

    MS_EDEN = 0
    POW2 = 1
    EXACT = 2
    MX = 3
    AMAX = 4

    @staticmethod
    def of(spec: Scheme) -> "ScaleRule":
        if spec.rounding == "ms_eden":
            return ScaleRule.MS_EDEN
        if spec.format == "mxfp4":
            return ScaleRule.MX
        return ScaleRule.EXACT if spec.takes_amax else ScaleRule.POW2


SCALED_AFTERWARDS = (ScaleRule.MS_EDEN, ScaleRule.POW2)  # whose scales align_scales.cu makes
SCALED_AT_ONCE = (ScaleRule.EXACT, ScaleRule.MX)  # whose scales rotate_quantize.cu makes
