# SPDX-License-Identifier: Apache-2.0
"""The published figures that `q2compile tables` prints beside its own.

Quartet II is arXiv 2601.22813 v2 and its released code, Quartet is 2505.14669 v4. Errors are
relative and quadratic, on N(0,1). Bits are -log2(error) / 2.
"""

# Scheme -> error x 1e-3. NVFP4: Quartet II, table 1. MXFP4: Quartet, table 2.
ERRORS = {
    "nvfp4": 9.0,
    "nvfp4_46": 7.6,
    "nvfp4_16x16": 12.4,
    "nvfp4_16x16_46": 12.4,
    "nvfp4_sr": 23.5,
    "nvfp4_sr_46": 17.5,
    "nvfp4_ms_eden": 9.4,
    "mxfp4_sr": 27.7,
    "mxfp4_rtn34": 13.7,
    "mxfp4_quest": 13.2,
}

# Scheme -> effective bits, where the notebooks of Quartet II's released code print them.
BITS = {
    "nvfp4": 3.394,
    "nvfp4_46": 3.524,
    "nvfp4_16x16": 3.167,
    "nvfp4_16x16_46": 3.168,
    "nvfp4_sr": 2.705,
}

# Minimum effective bits in the tests of Quartet II's released kernels (kernels/test).
SCHEME_FLOORS = {"nvfp4": 3.38, "nvfp4_46": 3.52, "nvfp4_ms_eden": 3.32}
REQUANTIZED_FLOOR = 4.2  # requantize, against quantizing the transposed dequantized tensor
FORWARD_FLOOR = 2.8  # a linear layer's output against BF16
# Draws -> floors for the gradients of W1, W2, W3 of a 3-layer MLP of width 256.
CONCENTRATION_FLOORS = {
    1: (1.9, 2.5, 3.8),
    16: (3.9, 4.5, 6.4),
    256: (5.9, 6.5, 8.1),
    4096: (7.6, 8.2, 8.9),
}
