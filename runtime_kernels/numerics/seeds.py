# SPDX-License-Identifier: Apache-2.0
"""Seeds from a counter: the option ``seed``, in place of torch's default generator.

Seed n of key k is output n of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), started at the mixed key:

    state = mix(k) + (n + 1) * 0x9E3779B97F4A7C15
    seed  = mix(state)

`mix` is a bijection of 64 bits, so no seed of a key comes twice within 2^64 draws. Keys are mixed,
too: those of neighboring numbers have nothing in common.
"""

import torch

_GAMMA = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST = 31
_BITS = 64


def seeds(drawn: torch.Tensor, count: int, key: int) -> torch.Tensor:
    """Seeds ``drawn`` to ``drawn + count - 1`` of ``key``.

    drawn: int64, 0-dim: how many were drawn before. It is not read on the host.

    Returns int64 [count]; all 64 bits count.
    """
    # Inductor's decomposition of torch.arange: a pass inserts these ops after decomposition.
    more = {"start": 1, "step": 1, "dtype": torch.int64, "requires_grad": False}
    numbers = drawn + torch.ops.prims.iota(count, device=drawn.device, **more)
    # int64 products and sums wrap modulo 2^64, so that their bits are those of unsigned ones.
    state = numbers * signed(_GAMMA) + signed(mixed(key))
    for shift, factor in _ROUNDS:
        state = (state ^ _shifted(state, shift)) * signed(factor)
    return state ^ _shifted(state, _LAST)


def mixed(key: int) -> int:
    """The same bijection as `mix`, of a number on the host, in [0, 2^64)."""
    key %= 1 << _BITS
    for shift, factor in _ROUNDS:
        key = (key ^ (key >> shift)) * factor % (1 << _BITS)
    return key ^ (key >> _LAST)


def signed(bits: int) -> int:
    """64 bits as the int64 that has them."""
    return bits - (1 << _BITS) if bits >> (_BITS - 1) else bits


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """``x`` shifted to the right as an unsigned number."""
    return (x >> by) & ((1 << (_BITS - by)) - 1)
