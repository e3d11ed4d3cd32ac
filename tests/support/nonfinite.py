# SPDX-License-Identifier: Apache-2.0
"""Operands with NaN and Inf, and where their quantized forms must be NaN (numerics/blocks.py)."""

from __future__ import annotations

import torch

from q2compile.runtime_kernels.numerics.scaled_codes import scaled_codes
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.numerics.transforms import get_transform

VALUES = [float("nan"), float("inf"), -float("inf")]


def with_bad(x: torch.Tensor, value: float) -> torch.Tensor:
    """A copy of x [M, K], M >= 40 and K >= 72, with `value` at the start and the end of blocks,
    twice in a block, beside its negative, and in all blocks of row 33. Most blocks stay finite,
    along rows and along columns."""
    x = x.clone()
    x[0, 0] = x[17, 31] = x[17, 64] = x[21, 64] = value
    x[17, 66], x[17, 67] = value, -value
    x[33, ::32] = value
    return x


def spread(bad: torch.Tensor, scheme: str, transform: str) -> torch.Tensor:
    """bool [M, K], the non-finite elements of an operand with its contraction last -> bool [M, Kp],
    the elements of the poisoned blocks of its quantized form."""
    spec, size = get_scheme(scheme), get_transform(transform).size
    rows, columns = bad.shape
    height, width = spec.block
    unit = max(width, size)
    bad = torch.nn.functional.pad(bad, (0, -columns % unit, 0, -rows % height))
    for along in (
        size,
        1 if spec.is_tensorwise else width,
    ):  # a rotated chunk, then the blocks that it lies in
        bad = bad.unflatten(1, (-1, along)).any(2).repeat_interleave(along, 1)
    bad = bad.unflatten(0, (-1, height)).any(1).repeat_interleave(height, 0)
    return bad[:rows]


def poisoned_elements(
    codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, scheme: str
) -> torch.Tensor:
    """Which elements of a quantized operand are NaN: bool [M, Kp]."""
    return (scaled_codes(codes, scales, get_scheme(scheme)) * global_scale).isnan()


def assert_same(got, want, scheme: str) -> None:
    """Outputs of a quantizer, three for an operand and maybe a mask at the end: the same bits, but
    for codes of poisoned blocks and the payload of NaN."""
    assert len(got) == len(want)
    spec = get_scheme(scheme)
    for first in range(0, len(want) - len(want) % 3, 3):
        (codes, scales, unit), expected = got[first : first + 3], want[first : first + 3]
        _assert_equal(scales.view(torch.uint8), expected[1].view(torch.uint8), "scales")
        _assert_equal(unit, expected[2], "global scale")
        if spec.dequantized:
            _assert_equal(codes, expected[0], "numbers")
            continue
        nan = poisoned_elements(*expected, scheme)
        known = ~nan.unflatten(1, (-1, 2)).any(2)
        assert known.any() and nan.any(), "a test of both"
        _assert_equal(codes[known], expected[0][known], "codes")
    for more, expected in zip(got[len(want) // 3 * 3 :], want[len(want) // 3 * 3 :], strict=True):
        _assert_equal(more, expected, "the last output")


def _assert_equal(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype, what
    if got.is_floating_point():
        assert torch.equal(got.isnan(), want.isnan()), what
        known = ~want.isnan()
        width = {2: torch.int16, 4: torch.int32}[got.element_size()]
        got, want = got[known].view(width), want[known].view(width)
    assert torch.equal(got, want), f"{what}: {(got != want).sum()} of {want.numel()} differ"
