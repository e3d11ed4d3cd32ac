# SPDX-License-Identifier: Apache-2.0
"""Rounding to the small formats: e2m1, e4m3, e8m0, and scales of 4 significant bits.

All inputs are fp32. Nearest means nearest even. e2m1 is {0, .5, 1, 1.5, 2, 3, 4, 6} and signs: one
mantissa bit, exponents from 0, and a subnormal step of .5. e4m3fn has three mantissa bits,
exponents from -6, a subnormal step of 2^-9, and 448 as its maximum.
"""

import torch

from q2compile.runtime_kernels.numerics.schemes import E2M1_MAX, E4M3_MAX

_EXPONENT = 0x7F800000  # exponent field of an fp32
_ONE, _HALF = 127 << 23, 126 << 23  # bits of 1.0 and 0.5
_TOP_BITS = 0xFFF00000 - (1 << 32)  # sign, exponent and 3 mantissa bits, as an int32


def _binade_bits(x: torch.Tensor, min_exponent: int) -> torch.Tensor:
    """Bits of the power of two 2^max(exponent of x, min_exponent), as a new int32 tensor."""
    bits = x.view(torch.int32).bitwise_and(_EXPONENT)
    return bits.clamp_(min=(127 + min_exponent) << 23)


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """The nearest e2m1 value, ties to even, saturating at +-6, as fp32. Keeps the sign of zero.

    The grid around x has the step 2^(e-1), e = max(exponent, 0). Adding 1.5 * 2^(22+e), whose last
    mantissa bit weighs just that step, makes the fp32 adder round to the grid; taking it off again
    is exact.
    """
    magic = _binade_bits(x, 0).add_((22 << 23) + 0x400000).view(torch.float32)
    return (x + magic).sub_(magic).clamp_(-E2M1_MAX, E2M1_MAX).copysign_(x)


def stochastic_e2m1(x: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """The e2m1 value below or above, as fp32: above with the probability of the distance from the
    one below, in steps of the grid. Saturates at +-6. Keeps the sign, of zero too.

    From 1 on, the top bits of an fp32 are its code, and its last 22 bits are the fraction of a step
    of the grid. Below 1 this holds for |x| + 1, to the nearest 2^-22 of a step.

    Args:
        random: int64 in [0, 2^22), same shape (philox.element_bits). Added to the fraction, it
            carries into the code.
    """
    magnitude = x.abs().clamp_(max=E2M1_MAX)
    small = (magnitude + 1.0).view(torch.int32) - _ONE
    position = torch.where(magnitude < 1.0, small, magnitude.view(torch.int32) - _HALF)
    return _values(((position + random) >> 22).to(torch.uint8)).copysign_(x)


def stochastic_e4m3(x: torch.Tensor, random_bits: torch.Tensor) -> torch.Tensor:
    """Non-negative fp32 -> float8_e4m3fn by stochastic rounding, also in the subnormals; saturates
    at 448.

    Args:
        random_bits: int64 words in [0, 2^32), same shape. Rounds up where they are less than
            (fraction of a step) * 2^32, as integers.
    """
    x = x.clamp(max=E4M3_MAX)
    step = _binade_bits(x, -6).sub_(3 << 23).view(torch.float32)
    position = x.div_(step)  # exact: the step is a power of two
    below = position.floor()
    fraction = position.sub_(below).mul_(2.0**32).to(torch.int64)
    return below.add_(random_bits < fraction).mul_(step).to(torch.float8_e4m3fn)


def nearest_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Non-negative fp32 -> float8_e4m3fn, ties to even. Clamped first: torch's own cast of 449 is
    448 or NaN by version."""
    return x.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """e2m1 values in fp32 -> codes, uint8 in [0, 16).

    e2m1 is the bottom of e4m3 two mantissa bits short: times 2^-6, .5 falls on an e4m3 subnormal
    and 1 on its smallest normal, so that the code is the e4m3 byte without its last two bits.
    """
    byte = (values * 2.0**-6).to(torch.float8_e4m3fn).view(torch.uint8)
    return (byte >> 2).bitwise_and_(0x7).bitwise_or_((byte >> 4).bitwise_and_(0x8))


def _values(codes: torch.Tensor) -> torch.Tensor:
    """Codes, uint8 in [0, 16) -> fp32: encode_e2m1 backwards."""
    byte = ((codes & 0x7) << 2) | ((codes & 0x8) << 4)
    return byte.view(torch.float8_e4m3fn).to(torch.float32) * 2.0**6


def byte_pairs(device: torch.device) -> torch.Tensor:
    """The two fp32 values of each byte of codes, packed into one int64: [256]."""
    byte = torch.arange(256, dtype=torch.uint8, device=device)
    return _values(torch.stack([byte & 15, byte >> 4], dim=1)).view(torch.int64).flatten()


def decode_e2m1(codes: torch.Tensor, pairs: torch.Tensor | None = None) -> torch.Tensor:
    """Packed codes uint8 [..., Kp/2], of any strides -> fp32 values [..., Kp]. pairs: the result of
    `byte_pairs`, if the caller has it."""
    if pairs is None:
        pairs = byte_pairs(codes.device)
    values = pairs.index_select(0, codes.to(torch.int32).reshape(-1)).view(torch.float32)
    return values.view(*codes.shape[:-1], 2 * codes.shape[-1])


def keep_4_bits(x: torch.Tensor) -> torch.Tensor:
    """x >= 0 rounded to 4 significant bits (as many as e4m3 has), ties to even, at any exponent."""
    bits = x.view(torch.int32)
    odd = (bits >> 20) & 1
    return (bits + 0x7FFFF + odd).bitwise_and_(_TOP_BITS).view(torch.float32)


def exponent_of(x: torch.Tensor) -> torch.Tensor:
    """floor(log2 x) of x >= 0 as int32, by its bits; -127 for zero and fp32 subnormals."""
    return (x.view(torch.int32) >> 23) - 127


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in fp32 for integers within [-126, 127], by its bits: a pow() need not be
    exact."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)
