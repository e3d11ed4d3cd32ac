# SPDX-License-Identifier: Apache-2.0
"""Philox4x32 in torch integer arithmetic: counter-based random words, the same on every device.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). One call of the
cipher turns a 128-bit counter and a 64-bit key into four 32-bit words:

    key     = (seed low, seed high)
    counter = (index low, index high, rng_offset, purpose)

A word needs no state, so a kernel that walks the tensor in any order draws the same random bits.
Word i of a sequence is word i % 4 of the block with index i // 4. `rng_offset` gives the operands
of one GEMM different words under a shared seed; `purpose` separates random bits from signs.
"""

import torch

SIGNS = 1  # the diagonal of a randomized Hadamard transform
RANDOM_BITS = 2  # stochastic rounding, of elements or of block scales
SECOND_RANDOM_BITS = 3  # of elements under the second candidate scale of 4/6

# Seven rounds pass all of TestU01's BigCrush (section 4 of the paper), and rounding draws millions
# of words. Signs are few: with the customary ten, fixed signs stay those of earlier versions.
ROUNDS = {SIGNS: 10, RANDOM_BITS: 7, SECOND_RANDOM_BITS: 7}
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF

Counter = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Counter, key: tuple[torch.Tensor, torch.Tensor], rounds: int) -> Counter:
    """Philox with this many rounds. All values are int64 tensors holding unsigned 32-bit words;
    shapes broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # int64 products wrap modulo 2^64, so that their bits are those of the unsigned product.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & _LOW, (product1 >> 32) & _LOW
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _LOW, high0 ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    return c0, c1, c2, c3


def words(seed: torch.Tensor, count: int, *, rng_offset: int, purpose: int) -> torch.Tensor:
    """The first `count` words for a seed, an rng_offset and a purpose.

    Args:
        seed: int64, 0-dim; all 64 bits are the key. It is not read on the host.
        count: words wanted.

    Returns:
        int64 [count], each in [0, 2^32).
    """
    index = torch.arange((count + 3) // 4, device=seed.device)
    constant = torch.full_like
    counter = (index & _LOW, index >> 32, constant(seed, rng_offset), constant(seed, purpose))
    blocks = philox4x32(counter, (seed & _LOW, (seed >> 32) & _LOW), ROUNDS[purpose])
    return torch.stack(blocks, dim=1).flatten()[:count]


def element_bits(seed: torch.Tensor, count: int, *, rng_offset: int, purpose: int) -> torch.Tensor:
    """22 random bits for each of `count` elements: int64 [count].

    A word serves two elements. Bits 31 to 10 are those of the first one. The second one has the
    same of the word with its halves swapped. So each element's bits are uniform, and two elements
    share only bits that weigh less than 2^-16 in one of them.
    """
    pairs = words(seed, (count + 1) // 2, rng_offset=rng_offset, purpose=purpose)
    second = ((pairs & 0xFFFF) << 6) | (pairs >> 26)
    return torch.stack([pairs >> 10, second], dim=1).flatten()[:count]
