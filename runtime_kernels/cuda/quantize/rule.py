# SPDX-License-Identifier: Apache-2.0
"""The rules that rotate_quantize.cu rounds by."""

from enum import IntEnum

from q2compile.runtime_kernels.numerics.schemes import Scheme

ROUNDINGS = ("rtn", "sr", "ms_eden", "quest")  # of schemes that it implements


class Rule(IntEnum):
    """Q2_RULE of rotate_quantize.cu."""

    MS_EDEN = 0
    POW2 = 1
    EXACT = 2
    MX = 3
    AMAX = 4

    @staticmethod
    def of(spec: Scheme) -> "Rule":
        if spec.rounding == "ms_eden":
            return Rule.MS_EDEN
        if spec.format == "mxfp4":
            return Rule.MX
        return Rule.EXACT if spec.global_scale == "exact" else Rule.POW2


SCALED_AFTERWARDS = (Rule.MS_EDEN, Rule.POW2)  # whose scales align_scales.cu makes
SCALED_AT_ONCE = (Rule.EXACT, Rule.MX)  # whose scales rotate_quantize.cu makes
