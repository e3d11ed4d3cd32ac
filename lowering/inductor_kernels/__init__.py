# SPDX-License-Identifier: Apache-2.0
"""Quantizers as kernels of Inductor's, so that they fuse with what computes their operand. May
import what lowering may.

quantize.py       the step of the lowering
support.py        for which schemes, and when instead of a kernel's call
selfcheck.py      on a GPU where nobody ran them: a small graph against the reference
rounding.py       the rounding rules, once, in Inductor's `ops`; nvfp4.py, mxfp4.py the formats'
blocks.py         a matrix in blocks: reduction_blocks.py as a reduction, register_blocks.py held by
                  a thread, for rotations and random bits
tile_config.py    how many blocks a program takes
fp32.py           fp32 arithmetic by its bits; philox.py random bits and signs
"""
