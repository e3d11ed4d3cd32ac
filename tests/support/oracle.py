# SPDX-License-Identifier: Apache-2.0
"""Slow and plain: the small formats by their definition, for the tests of the fast ones.

A grid is the sorted list of a format's non-negative values; index i is also its code, so that a tie
goes to the even index.
"""

import torch

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E4M3 = torch.tensor(
    [(m / 8) * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)],
    dtype=torch.float64,
)[:127]  # the 128th pattern is NaN


def nearest(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """The grid's value nearest |x|, with x's sign, ties to the even index, saturating; float64."""
    magnitude = x.double().abs().clamp(max=grid[-1])
    above = torch.searchsorted(grid, magnitude)  # first grid point >= magnitude
    below = (above - 1).clamp(min=0)
    up, down = grid[above] - magnitude, magnitude - grid[below]
    index = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return grid[index].copysign(x.double())


def neighbors(x: torch.Tensor, grid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The grid points at or below and at or above non-negative x: float64."""
    above = torch.searchsorted(grid, x.double())
    exact = grid[above.clamp(max=len(grid) - 1)] == x.double()
    return grid[torch.where(exact, above, above - 1)], grid[above]


def relative_error(estimate: torch.Tensor, truth: torch.Tensor) -> float:
    """Mean squared error over mean square."""
    difference = estimate.double() - truth.double()
    return (difference.square().mean() / truth.double().square().mean()).item()
