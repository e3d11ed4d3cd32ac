# SPDX-License-Identifier: Apache-2.0
"""The codes of shards are those of the whole weight, bit by bit, for any values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import q2compile.linear.dense  # noqa: F401  registers the ops
from q2compile.recipes.recipe import Operand
from q2compile.runtime_kernels.numerics import shards
from q2compile.runtime_kernels.numerics.schemes import SCHEMES, Scheme
from q2compile.runtime_kernels.numerics.shards import ShardLayout
from q2compile.runtime_kernels.numerics.transforms import TRANSFORMS
from q2compile.weight_cache.cache import CodesLayout
from tests.support.pairwise import pairwise

# All that quantize a weight in the forward: deterministic, and any global scale.
OPERANDS = [s.name for s in SCHEMES.values() if not s.stochastic and not s.masked]
OPERANDS.append("h32>mxfp4_quest")
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def whole_codes(w: Tensor, operand: str, dtype: torch.dtype) -> list[Tensor]:
    return torch.ops.q2.quantize_weight(w, operand, dtype)


def scheme_of(operand: str) -> Scheme:
    return SCHEMES[Operand.parse(operand).scheme]


def why_not(operand: str, dtypes: set[torch.dtype], layout: ShardLayout) -> str:
    transform = TRANSFORMS[Operand.parse(operand).transform]
    return shards.why_not(scheme_of(operand), transform, dtypes, layout)


def gathered_codes(
    w: Tensor, operand: str, dtype: torch.dtype, ranks: int, dim: int = 0, transposed: bool = False
) -> list[Tensor]:
    """Gathered like on ranks: shards of equal rows, the last ones with padding."""
    scheme = scheme_of(operand)
    height = scheme.block[0]
    size = math.ceil(w.shape[dim] / ranks)
    if dim == 0 and w.ndim == 2 and not transposed:
        size = math.ceil(size / height) * height
    more = list(w.shape)
    more[dim] = ranks * size - w.shape[dim]
    cut = torch.cat([w, w.new_zeros(more)], dim).split(size, dim)
    layout = ShardLayout.of(w.shape, cut[0].shape, dim, transposed)
    assert not why_not(operand, {dtype}, layout)
    form, rows = CodesLayout(operand, dtype, transposed), layout.rows
    matrices = [form.matrix(s).contiguous() for s in cut]
    first = [whole_codes(m, operand, dtype) for m in matrices]
    if scheme.global_scale != "none":
        found = [(torch.ops.q2.amax(m), None) for m in matrices]
        if not scheme.takes_amax:
            found = [shards.found_in(p) for p in first]
        agreed = torch.stack([shards.agreement([one]) for one in found]).amax(0)
        global_scale = shards.global_scale(agreed)
        matrices = [shards.filled(m, scheme, agreed[0], global_scale[0]) for m in matrices]
        first = [whole_codes(m, operand, dtype) for m in matrices]
    sent = [shards.of_shard(p, rows, scheme) for p in first]
    assert {len(tensors) for tensors in sent} == {shards.sent_parts(scheme)}
    received = [torch.cat(parts) for parts in zip(*sent, strict=True)]
    codes, scales, *mask = shards.of_whole(received, layout, scheme)
    g = first[0][2]
    assert all(torch.equal(p[2], g) for p in first)
    if scheme.global_scale == "pow2":
        own, g = g, global_scale[0]
        assert torch.equal(own, g) or g.isnan()
    return [codes, scales, g, *mask]


def assert_same(
    w: Tensor, operand: str, dtype: torch.dtype, ranks: int, dim: int = 0, transposed: bool = False
) -> None:
    expected = whole_codes(CodesLayout(operand, dtype, transposed).matrix(w), operand, dtype)
    found = gathered_codes(w, operand, dtype, ranks, dim, transposed)
    assert len(found) == len(expected)
    for name, one, other in zip(("codes", "scales", "g", "mask"), found, expected, strict=False):
        assert one.dtype == other.dtype and one.shape == other.shape, name
        a, b = (t.reshape(-1).view(torch.uint8) for t in (one, other))  # of equal NaNs, too
        assert torch.equal(a, b), name


def adversarial(rows: int, columns: int, seed: int) -> Tensor:
    """fp32: in each group of 16 rows other magnitudes; blocks of zeros, of one element, of equal
    elements, of e2m1 values (ties between the candidates of 4/6) and midpoints of its grid."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=generator)
    blocks = w.view(rows, columns // 16, 16)
    kind = torch.randint(7, blocks.shape[:2], generator=generator)
    grid = E2M1[torch.randint(8, blocks.shape, generator=generator)]
    blocks[kind == 0] = 0
    blocks[kind == 1] *= torch.arange(16) == 3
    blocks[kind == 2] = 1.75
    blocks[kind == 3] = grid[kind == 3]
    blocks[kind == 4] = grid[kind == 4] * 1.25 + 0.25
    return w


def test_any_blocks() -> None:
    for ranks in [2, 3]:
        for operand in OPERANDS:
            for seed in range(2):
                w = adversarial(96, 64, seed)
                assert_same(w, operand, torch.float32, ranks)
                assert_same(w.bfloat16(), operand, torch.bfloat16, ranks)
                assert_same(w, operand, torch.bfloat16, ranks)  # cast by the quantizer


CUTS = [  # shape, ranks, the dimension that is cut, transposed
    ((4, 32, 64), 2, 0, False),
    ((3, 32, 64), 2, 0, False),  # half of the last rank's part is padding
    ((2, 32, 64), 3, 0, False),  # one rank has no expert
    ((3, 64, 64), 4, 1, False),  # fewer experts than ranks: torchtitan cuts along N
    ((3, 32, 128), 2, 2, False),
    ((4, 64, 32), 2, 0, True),  # [E, K, N]
    ((3, 64, 32), 2, 1, True),
    ((3, 64, 32), 2, 2, True),
    ((32, 128), 4, 1, False),
    ((128, 32), 2, 0, True),  # GPT-2's [K, N]
    ((128, 32), 2, 1, True),
]


def test_any_cut() -> None:
    for operand, cut in pairwise(OPERANDS, CUTS):
        shape, ranks, dim, transposed = cut
        # So large that each part holds whole blocks.
        larger = max(1, scheme_of(operand).block[0] // 16)
        shape = (*shape[:-2], shape[-2] * larger, shape[-1] * larger)
        w = adversarial(math.prod(shape[:-1]), shape[-1], 5).view(shape)
        assert_same(w, operand, torch.float32, ranks, dim, transposed)
        assert_same(w, operand, torch.bfloat16, ranks, dim, transposed)


def test_all_exponents() -> None:
    """Blocks from fp32's subnormals to 2^125, in ranges of 2^24, which is more than e4m3 and its
    subnormals span. There scales are rounded, and rounding twice would show."""
    for operand in OPERANDS:
        for lowest in (*range(-149, 126, 24), -141):  # -141: the least normal global scale
            exponents = torch.arange(lowest, min(lowest + 24, 125)).repeat_interleave(16)
            if not len(exponents):
                continue
            w = adversarial(len(exponents), 32, lowest)
            w = (w.double().clamp(-1, 1) * 2.0 ** exponents.double()[:, None]).float()
            assert_same(w, operand, torch.float32, 2)
            assert_same(w.flip(0), operand, torch.float32, 3)


def test_shards_far_apart() -> None:
    """One rank's largest value is 2^-14 to 2^-20 of another's: all its scales are subnormal, some
    underflow. Scales made under its own g and changed afterwards are then others."""
    for operand in OPERANDS:
        for exponent in range(14, 21):
            w = adversarial(64, 64, exponent)
            w[32:] *= 2.0**-exponent
            assert_same(w, operand, torch.float32, 2)


def test_a_scale_changed_afterwards_would_be_another() -> None:
    """The case that the test above depends on: its blocks do contain such a value."""
    operand, changed = "nvfp4_pow2", 0
    for step in range(200):
        w = torch.zeros(2, 32)
        w[0, 0], w[1, 0], w[1, 16] = 4.0, 1.0, 2.0**-15 * 1.02**step
        _, scales, g = whole_codes(w, operand, torch.float32)
        _, own, own_g = whole_codes(w[1:], operand, torch.float32)
        twice = (own.float() * own_g / g).to(torch.float8_e4m3fn)
        changed += not torch.equal(twice.float(), scales[1:].float())
        assert_same(w, operand, torch.float32, 2)
    assert changed > 0


def test_values_of_one_kind() -> None:
    """Zeros on all ranks, or on all but one. A NaN or Inf poisons only its own block."""
    for operand, value in pairwise(OPERANDS, [0.0, math.inf, math.nan, 1e-45]):
        w = torch.zeros(64, 32)
        w[5, 7] = value
        assert_same(w, operand, torch.float32, 2)
        w[40:] = 1.5
        assert_same(w, operand, torch.float32, 2)


def test_a_weight_beyond_the_range_has_no_global_scale() -> None:
    w = torch.full((32, 32), torch.finfo(torch.float32).max)
    w[:, ::2] *= 0.75  # so that 4/6 takes the larger scale
    _, _, g = gathered_codes(w, "nvfp4_46_pow2", torch.float32, 2)
    assert g.isnan()


def test_columns_in_half_blocks_are_gathered_as_values() -> None:
    layout = ShardLayout.of((1024, 16), (34, 16), 0, transposed=True)
    why = why_not("nvfp4_pow2", {torch.float32}, layout)
    assert why == "a rank has 34 of its 1024 columns, and a block spans 16"


@pytest.mark.parametrize(
    ("operand", "dtypes", "rows", "why"),
    [
        ("nvfp4_46_pow2", {torch.float32}, 33, ""),
        ("nvfp4_16x16_pow2", {torch.bfloat16}, 40, "40 of its rows, and a block spans 16"),
        ("nvfp4_pow2", {torch.float32, torch.float16}, 32, "fp16"),
        ("mxfp4_rtn", {torch.float16}, 32, ""),
        ("rht16_fixed>nvfp4_pow2", {torch.float32}, 32, "after the rotation rht16_fixed"),
        ("h32>mxfp4_quest", {torch.float32}, 32, ""),
    ],
)
def test_what_is_gathered_as_values(operand, dtypes, rows, why) -> None:
    layout = ShardLayout.of((2 * rows, 64), (rows, 64), 0)
    found = why_not(operand, dtypes, layout)
    assert (why in found) if why else not found
