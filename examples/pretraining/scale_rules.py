# SPDX-License-Identifier: Apache-2.0
"""Rules for the scale of an NVFP4 block, ranked by their error on N(0,1), without training.

    python examples/pretraining/scale_rules.py

The gap of a branched run follows the relative squared error of the forward's operands, 1.7 nats per
unit. So what a rule can gain is known before it is trained. For codes c and a stored scale s with 4
significant bits, as e4m3 has, a block's values are c s. A rule chooses both:

    nearest codes        c = e2m1(x / s), s the candidate with the least squared error
    free encode scale    c = e2m1(x / e), e any fp32 number (FOCUS, arXiv 2608.01847)
    least squares        s = <x, c> / <c, c> of these codes, to the nearest 4 bits

For a given s nearest codes have the least error. So no rule is better than the search over all s.
The range of e4m3 and the global scale are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from q2compile.runtime_kernels.numerics.formats import keep_4_bits, round_e2m1

BLOCK = 16
BLOCKS = 1 << 17
NATS = 1.7  # of the gap, per unit of relative squared error
SEARCHED = (0, 1, -1, 4, 5)  # e4m3 steps of scheme nvfp4_search
ENCODE_MAX = torch.linspace(3.4, 7.4, 16).tolist()  # what a free encode scale maps amax to


def stepped(scale: Tensor, steps: int) -> Tensor:
    """fp32 with 4 significant bits -> so many e4m3 steps up."""
    return (scale.view(torch.int32) + (steps << 20)).view(torch.float32)


def least_squares(x: Tensor, codes: Tensor) -> Tensor:
    """The stored scale of these codes: <x, c> / <c, c>, to 4 significant bits."""
    return keep_4_bits((x * codes).sum(1, keepdim=True) / codes.square().sum(1, keepdim=True))


def best(x: Tensor, candidates: Iterable[Tensor]) -> Tensor:
    """For each block the candidate's values with the least squared error."""
    values = torch.stack(list(candidates))
    chosen = (values - x).square().sum(2).argmin(0)
    return values[chosen, torch.arange(len(x))]


def rounded(x: Tensor, scales: Sequence[Tensor]) -> Tensor:
    return best(x, (round_e2m1(x / scale) * scale for scale in scales))


def fitted(x: Tensor, scales: Sequence[Tensor]) -> Tensor:
    """Codes by each scale, values by the least squares scale of these codes."""
    codes = [round_e2m1(x / scale) for scale in scales]
    return best(x, (c * least_squares(x, c) for c in codes))


def errors(x: Tensor) -> dict[str, float]:
    """Relative squared error of each rule. x: fp32 [blocks, 16], no block of zeros."""
    amax = x.abs().amax(1, keepdim=True)
    six, four = keep_4_bits(amax / 6), keep_4_bits(amax / 4)
    searched = [stepped(six, k) for k in SEARCHED]
    free = [amax / largest for largest in ENCODE_MAX]
    values = {
        "to nearest": rounded(x, [six]),
        "4/6": rounded(x, [six, four]),
        "4/6 and half the scale": rounded(x, [six, four, six / 2]),
        "4/6, least squares": fitted(x, [six, four]),
        "search": rounded(x, searched),
        "search and half the scale": rounded(x, [*searched, six / 2]),
        "search, least squares": fitted(x, searched),
        "16 free encode scales": fitted(x, free),
        "search over -2..6": rounded(x, [stepped(six, k) for k in range(-2, 7)]),
        "search over all scales": rounded(x, [stepped(six, k) for k in range(-12, 17)]),
    }
    power = x.double().square().sum()
    return {
        rule: float((found.double() - x).square().sum() / power) for rule, found in values.items()
    }


def table(found: dict[str, float]) -> str:
    """A line a rule: its error, and the nats that it should gain over the search."""
    lines = [f"{'rule':<28}{'error, 1e-3':>12}{'nats against search':>22}"]
    for rule, error in found.items():
        nats = NATS * (error - found["search"])
        lines.append(f"{rule:<28}{1e3 * error:>12.2f}{nats:>+22.5f}")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.manual_seed(0)
    print(table(errors(torch.randn(BLOCKS, BLOCK))))
