# SPDX-License-Identifier: Apache-2.0
"""Rotations of the contraction dimension: y = H (x * D), in chunks of a fixed size.

H is the Sylvester-Hadamard matrix over sqrt(size), D a diagonal of signs, the same for every chunk
of a tensor. Both operands of a GEMM are rotated alike, so that the product is unchanged: (a D H)(b
D H)^T = a b^T. The signs go in before H; after it they would do nothing.

Names: "none"; "h32" (no signs); "rht16|rht32|rht64|rht128" (signs drawn from the seed); the same
    with "_fixed" (the signs of FIXED_SIGN_SEED, for every tensor and every step).

Sources: "Pretraining LLMs with NVFP4" (arXiv 2509.25149), appendix C, and section 4.2 for 16 and
    one fixed sign vector; Quartet (2505.14669 v4), section 4.4, for 32; "Training LLMs with MXFP4"
    (2502.20586) for 64; Quartet II (2601.22813 v2), appendix A, for 128 with the same signs in
    every chunk, drawn anew for each tensor and micro-batch.
"""

import difflib
import math
from dataclasses import dataclass

import torch

from q2compile.runtime_kernels.numerics import philox

FIXED_SIGN_SEED = 0


@dataclass(frozen=True)
class Transform:
    """size: elements of a chunk (1: no rotation); signs: "none" | "seed" | "fixed"."""

    name: str
    size: int
    signs: str

    @property
    def seeded(self) -> bool:
        return self.signs == "seed"

    @property
    def norm(self) -> float:
        """The factor of a chunk's sums and differences that makes H orthogonal."""
        return 1.0 / math.sqrt(self.size)


TRANSFORMS: dict[str, Transform] = {
    t.name: t
    for t in [
        Transform("none", 1, "none"),
        Transform("h32", 32, "none"),
        *(Transform(f"rht{n}", n, "seed") for n in (16, 32, 64, 128)),
        *(Transform(f"rht{n}_fixed", n, "fixed") for n in (16, 32, 64, 128)),
    ]
}


def get_transform(name: str) -> Transform:
    """The transform of that name.

    Raises:
        ValueError: no such transform; the message names the nearest one and all of them.
    """
    if name in TRANSFORMS:
        return TRANSFORMS[name]
    near = difflib.get_close_matches(name, TRANSFORMS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"unknown transform {name!r}.{hint} Known transforms: {', '.join(TRANSFORMS)}."
    )


def signs_of(
    transform: Transform, seed: torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:
    """The diagonal D, fp32 [size] of +-1, or None for a transform without signs.

    Sign j is -1 where bit j % 32 of word j // 32 of one Philox block (purpose SIGNS) is set: the
    two operands of a GEMM share a seed and so share their signs, whatever their streams.
    """
    if transform.signs == "none":
        return None
    if transform.signs == "fixed":
        seed = torch.full((), FIXED_SIGN_SEED, dtype=torch.int64, device=device)
    assert seed is not None, "the op checks that a seeded transform has a seed"
    words = philox.words(seed, 4, rng_offset=0, purpose=philox.SIGNS)
    bits = (words[:, None] >> torch.arange(32, device=words.device)) & 1
    return 1.0 - 2.0 * bits.flatten()[: transform.size].to(torch.float32)


def hadamard(tiles: torch.Tensor) -> torch.Tensor:
    """sqrt(size) * H along the middle dimension of fp32 tiles [n, size, lanes], which are
    overwritten.

    The order of operations is part of the contract, since kernels are held to the same bits: signs
    have been multiplied in before (quantize_tiles.py, rotate_tiles); for h = 1, 2, 4, ..., size/2
    each pair (a, b) at positions (i, i + h) becomes (a + b, a - b) in fp32. The norm is the
    caller's to apply (Transform.norm).
    """
    n, size, lanes = tiles.shape
    if size == 1:
        return tiles
    spare = torch.empty_like(tiles)
    h = 1
    while h < size:
        shape = (n, size // (2 * h), 2, h, lanes)
        a, b = tiles.view(shape).unbind(2)
        total, difference = spare.view(shape).unbind(2)
        torch.add(a, b, out=total)
        torch.sub(a, b, out=difference)
        tiles, spare = spare, tiles
        h *= 2
    return tiles
