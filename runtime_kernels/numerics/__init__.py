# SPDX-License-Identifier: Apache-2.0
"""The numerics of 4-bit operands, in torch alone, obvious before fast. Imports nothing else of the
project.

schemes.py, transforms.py     what an operand can be, as data
layout.py, swizzle.py         shapes and packing; the order of scales in Blackwell's tensor cores
formats.py                    rounding to e2m1, e4m3, e8m0
nvfp4.py, mxfp4.py            the rounding rules of the two formats, on blocks.py
quantize_tiles.py             tiles to codes;  scaled_codes.py  codes times scales
groups.py                     rows of experts, each padded to whole chunks
philox.py                     random bits and signs
"""
