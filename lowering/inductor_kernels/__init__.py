# SPDX-License-Identifier: Apache-2.0
"""Quantizers as Inductor kernels, so that they fuse with the producer of their operand. May import
what lowering may.

quantize.py       what emits the quantizer
rows.py           supported calls, and which of them use this instead of a CUDA kernel
selfcheck.py      the first use on a machine: a small graph, compared with the reference
nvfp4.py, fp8.py  the rounding rules of each format
blocks.py         a matrix in blocks
tile_config.py    tile sizes
fp32.py           fp32 arithmetic by its bits
"""
