# SPDX-License-Identifier: Apache-2.0
"""Seeds of a counter: SplitMix64."""

import torch

from q2compile.runtime_kernels.numerics.seeds import seeds, signed

# Outputs from state 0, as Vigna's splitmix64.c prints them; `mix` leaves key 0 as it is.
SPLIT_MIX = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
ZERO = torch.zeros((), dtype=torch.int64)


def test_the_outputs_are_those_of_split_mix() -> None:
    assert seeds(ZERO, 3, 0).tolist() == [signed(x) for x in SPLIT_MIX]


def test_seeds_go_on_where_the_last_draw_ended() -> None:
    assert torch.equal(seeds(ZERO, 10, 5)[4:], seeds(ZERO + 4, 6, 5))


def test_no_seed_of_neighboring_keys_comes_twice() -> None:
    drawn = torch.cat([seeds(ZERO, 1 << 12, key) for key in range(-8, 8)])
    assert drawn.unique().numel() == drawn.numel()


def test_bits_are_balanced_and_independent() -> None:
    """Ones of each bit, and agreements of each two bits: within 5 standard errors of a half, of 64
    and of 2016 normal deviates."""
    count = 1 << 14
    drawn = seeds(ZERO, count, 3)
    bits = torch.stack([(drawn >> i) & 1 for i in range(64)]).double() * 2 - 1
    together = bits @ bits.t() / count**0.5
    together.fill_diagonal_(0)
    assert together.abs().max() < 5
    assert (bits.sum(1) / count**0.5).abs().max() < 5
