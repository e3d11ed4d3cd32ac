# SPDX-License-Identifier: Apache-2.0
"""The random words behind signs and stochastic rounding."""

import pytest
import torch

from q2compile.runtime_kernels.numerics import philox

_ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)  # its digits
# kat_vectors of Random123 1.14 (Salmon et al.), philox4x32: rounds, counter, key, result.
KNOWN_ANSWERS = [
    (7, (0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (10, (0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (7, 4 * (_ONES,), 2 * (_ONES,), (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (10, 4 * (_ONES,), 2 * (_ONES,), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (7, PI[:4], PI[4:], (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (10, PI[:4], PI[4:], (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("rounds", "counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(rounds, counter, key, answer):
    as_tensors = [torch.tensor(word) for word in (*counter, *key)]
    result = philox.philox4x32(tuple(as_tensors[:4]), tuple(as_tensors[4:]), rounds)
    assert tuple(word.item() for word in result) == answer


def test_word_i_is_word_i_mod_4_of_block_i_div_4():
    seed = torch.tensor(-(2**63) + 12345)  # all 64 bits are key, the sign bit too
    words = philox.words(seed, 11, rng_offset=3, purpose=philox.RANDOM_BITS)
    assert words.shape == (11,)
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for i in range(11):
        counter = tuple(torch.tensor(c) for c in (i // 4, 0, 3, philox.RANDOM_BITS))
        assert words[i] == philox.philox4x32(counter, (low, high), 7)[i % 4]


def test_words_are_32_uniform_bits():
    words = philox.words(torch.tensor(7), 1 << 16, rng_offset=0, purpose=philox.RANDOM_BITS)
    assert words.min() >= 0 and words.max() < 2**32
    ones = ((words[:, None] >> torch.arange(32)) & 1).double().mean(0)
    # 5 standard deviations of the mean of 2^16 fair random bits
    assert (ones - 0.5).abs().max() < 5 * 0.5 / 2**8
    assert words.unique().numel() > (1 << 16) - 10  # birthday: 0.5 collisions expected


@pytest.mark.parametrize("other", [(8, 0, 2), (7, 1, 2), (7, 0, 1)])
def test_seed_stream_and_purpose_each_change_the_words(other):
    seed, rng_offset, purpose = other
    words = philox.words(torch.tensor(7), 64, rng_offset=0, purpose=2)
    others = philox.words(torch.tensor(seed), 64, rng_offset=rng_offset, purpose=purpose)
    assert (words != others).all()


def test_bits_of_elements_are_windows_of_their_word():
    seed = torch.tensor(7)
    words = philox.words(seed, 500, rng_offset=0, purpose=philox.RANDOM_BITS).tolist()
    bits = philox.element_bits(seed, 999, rng_offset=0, purpose=philox.RANDOM_BITS).tolist()
    assert bits[0::2] == [w >> 10 for w in words]
    assert bits[1::2] == [((w << 16 | w >> 16) & 0xFFFFFFFF) >> 10 for w in words][:499]


FIRST = (0, 1, 63, 64, 65, 2**16 + 77, 2**21, 2**21 + 1, 2**22 - 1)
SECOND = (1, 64, 12345, 2**21 + 63, 2**22 - 64)


@pytest.mark.parametrize("first, second", [*zip(FIRST, SECOND * 2, strict=False), (2**21, 64)])
def test_two_elements_of_a_word_are_nearly_independent(first, second):
    """Exactly, over all 2^32 words: how often the bits of one are below `first`, those of the other
    below `second`, and both at once. Each alone is as often as it is for uniform bits; the
    covariance of both is at most 2^-17, since in all but 2^-16 of the cases a half of the word
    decides alone."""
    half = torch.arange(2**16)
    # The number of values of `low` that pass, for a word (high, low). All values below a threshold
    # pass; at the threshold it depends on the other half.
    whole, rest = first >> 6, first & 63
    passing_low = torch.where(half < whole, 2**16, torch.where(half == whole, rest << 10, 0))
    assert passing_low.sum() == first << 10  # uniform: first / 2^22 of 2^32
    own, own_rest = second >> 6, second & 63
    limit = own + ((half >> 10) < own_rest).long()  # `low` below it pass the second one
    both = torch.minimum(passing_low, limit).sum().item()
    independent = (first << 10) * second / 2**22
    assert abs(both - independent) / 2**32 <= 2.0**-17
