# SPDX-License-Identifier: Apache-2.0
"""The random words behind signs and coins."""

import pytest
import torch

from q2compile.runtime_kernels.numerics import philox

# kat_vectors of Random123 1.14 (Salmon et al.), philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter, key, answer):
    as_tensors = [torch.tensor(word) for word in (*counter, *key)]
    result = philox.philox4x32(tuple(as_tensors[:4]), tuple(as_tensors[4:]))
    assert tuple(word.item() for word in result) == answer


def test_word_i_is_word_i_mod_4_of_block_i_div_4():
    seed = torch.tensor(-(2**63) + 12345)  # all 64 bits are key, the sign bit too
    words = philox.words(seed, 11, stream=3, purpose=philox.COINS)
    assert words.shape == (11,)
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for i in range(11):
        counter = tuple(torch.tensor(c) for c in (i // 4, 0, 3, philox.COINS))
        assert words[i] == philox.philox4x32(counter, (low, high))[i % 4]


def test_words_are_32_uniform_bits():
    words = philox.words(torch.tensor(7), 1 << 16, stream=0, purpose=philox.COINS)
    assert words.min() >= 0 and words.max() < 2**32
    ones = ((words[:, None] >> torch.arange(32)) & 1).double().mean(0)
    # 5 standard deviations of the mean of 2^16 fair coins
    assert (ones - 0.5).abs().max() < 5 * 0.5 / 2**8
    assert words.unique().numel() > (1 << 16) - 10  # birthday: 0.5 collisions expected


@pytest.mark.parametrize("other", [(8, 0, 2), (7, 1, 2), (7, 0, 1)])
def test_seed_stream_and_purpose_each_change_the_words(other):
    seed, stream, purpose = other
    words = philox.words(torch.tensor(7), 64, stream=0, purpose=2)
    others = philox.words(torch.tensor(seed), 64, stream=stream, purpose=purpose)
    assert (words != others).all()
