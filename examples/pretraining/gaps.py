# SPDX-License-Identifier: Apache-2.0
"""Gaps between runs: paired by seed, each with its standard error.

Two runs of one seed start from the same weights and see the same batches, and all are validated on
the same batches, so their difference has far less noise than either loss. What is left is

    the spread over seeds: the standard deviation of the differences over seeds. With three seeds it
    is hardly known for one pair, so it is pooled over all pairs of a comparison that have several
    seeds (the root of the mean variance, weighted by degrees of freedom); a pair whose own spread
    is larger than that, or that has four seeds or more, has its own;
    the validation set's own noise: the standard deviation of the difference over validation
    batches, over the root of their number. It is the same for all seeds, who share the set.

    standard error = sqrt(spread² / seeds + validation noise²)

A difference smaller than two standard errors is called none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pretraining.record import Result

BASELINE = "bf16"
OWN_SPREAD = 4  # seeds from which on a pair's spread is its own


@dataclass(frozen=True)
class Pair:
    """The runs of two names with the seeds that both have. differences: of each seed."""

    run: str
    against: str
    differences: tuple[float, ...]
    validation_noise: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.differences)

    @property
    def variance(self) -> float:
        return statistics.variance(self.differences)


@dataclass(frozen=True)
class Gap:
    """The gap of one pair of runs. error: standard error; None if no pair had two seeds."""

    run: str
    against: str
    seeds: int
    mean: float
    error: float | None
    validation_noise: float

    @property
    def none(self) -> bool:
        """Whether the gap is too small to be distinguished from none."""
        return self.error is not None and abs(self.mean) < 2 * self.error

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.mean:+.4f}"
        return f"{self.mean:+.4f} ± {self.error:.4f}" + (" (none)" if self.none else "")


def pair(run: Sequence[Result], against: Sequence[Result]) -> Pair | None:
    """None where no seed, from the same stem if they branched, finished with both."""
    others = {start(result): result for result in against if not result.diverged_at}
    both = [(r, others[start(r)]) for r in run if start(r) in others and not r.diverged_at]
    if not both:
        return None
    by_batch = [  # of those that all stems have: --val-tokens may differ between them
        statistics.fmean(x - y for x, y in zip(*batch, strict=True))
        for batch in zip(
            zip(*(r.val_losses for r, _ in both), strict=False),
            zip(*(o.val_losses for _, o in both), strict=False),
            strict=False,
        )
    ]
    noise = statistics.stdev(by_batch) / math.sqrt(len(by_batch)) if len(by_batch) > 1 else 0.0
    differences = tuple(r.val_loss - o.val_loss for r, o in both)
    return Pair(run[0].name, against[0].name, differences, noise)


def start(result: Result) -> tuple[int, str | None]:
    """The seed, and the stem that the run branched from: equal for runs that are compared."""
    return result.seed, result.provenance.get("stem")


def pooled_spread(pairs: Iterable[Pair]) -> float | None:
    """The standard deviation over seeds that the pairs with several seeds have in common."""
    several = [pair for pair in pairs if len(pair.differences) > 1]
    freedom = sum(len(pair.differences) - 1 for pair in several)
    if not freedom:
        return None
    return math.sqrt(sum(p.variance * (len(p.differences) - 1) for p in several) / freedom)


def gap(pair: Pair, spread: float | None) -> Gap:
    seeds = len(pair.differences)
    error = None
    if seeds > 1:
        pooled = spread if spread is not None and seeds < OWN_SPREAD else 0.0
        spread = max(pooled, math.sqrt(pair.variance))
    if spread is not None:
        error = math.sqrt(spread**2 / seeds + pair.validation_noise**2)
    return Gap(pair.run, pair.against, seeds, pair.mean, error, pair.validation_noise)


def by_name(results: Iterable[Result]) -> dict[str, list[Result]]:
    """In the order in which the names come; the seeds of a name in order."""
    named: dict[str, list[Result]] = {}
    for result in results:
        named.setdefault(result.name, []).append(result)
    return {name: sorted(runs, key=lambda r: r.seed) for name, runs in named.items()}


def gaps(
    results: Iterable[Result], wanted: Iterable[tuple[str, str]], spread: float | None = None
) -> dict[tuple[str, str], Gap]:
    """The gaps of the pairs of names that are wanted and can be had.

    spread: over seeds, from another comparison, for one whose runs have a seed each.
    """
    named = by_name(results)
    pairs = {
        (run, against): found
        for run, against in wanted
        if run in named and against in named and (found := pair(named[run], named[against]))
    }
    # A pair of a run with itself has no spread; pairs are all against something else.
    own = pooled_spread(found for names, found in pairs.items() if names[0] != names[1])
    return {names: gap(found, own if own is not None else spread) for names, found in pairs.items()}
