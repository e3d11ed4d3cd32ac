# SPDX-License-Identifier: Apache-2.0
"""The error of each scheme on N(0,1)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from q2compile.runtime_kernels.numerics.schemes import SCHEMES, Scheme
from q2compile.tools.paper_tables import paper
from q2compile.tools.quantize import quantize

OCTAVE = 8  # tensor scales within an octave, for schemes whose scales are powers of two


@dataclass(frozen=True)
class SchemeRow:
    """One scheme. error: relative quadratic error; bits: -log2(error)/2; alignment: <x, Q(x)> over
    <x, x>, which is 1 for an unbiased scheme; stored_bits: codes and scales, per element."""

    scheme: str
    error: float
    bits: float
    alignment: float
    stored_bits: float
    paper_error: float | None
    paper_bits: float | None
    floor_bits: float | None

    @property
    def difference(self) -> float | None:
        """The error relative to the paper's."""
        return None if self.paper_error is None else self.error / self.paper_error - 1


@dataclass(frozen=True)
class RequantizedRow:
    """The op requantize against quantizing the transposed dequantized tensor with the same seed.

    bits: of the one's difference from the other; infinite where they are equal. They are for a
    source whose global scale is a power of two. Any other is applied after the block scales are cut
    to 4 bits, so other codes are as good: the errors, against the source, say how good.
    """

    source: str
    scheme: str
    bits: float
    floor_bits: float
    error: float
    error_of_long_way: float


def effective_bits(error: float) -> float:
    """-log2(error) / 2: each bit halves the amplitude of the error. Infinite without error."""
    return -math.log2(error) / 2 if error else math.inf


def measure_schemes(size: int, device: str, seed: int = 0) -> list[SchemeRow]:
    """A row for every scheme, from `size` x `size` samples of N(0,1).

    The papers' figures are of the exact global scale; a scheme's "_pow2" twin is set beside the
    same ones. MXFP4's errors depend on where the tensor's scale falls between powers of two: its
    rows average one octave, log-uniformly.
    """
    return [_row(scheme, size, device, seed) for scheme in SCHEMES.values()]


def measure_requantized(size: int, device: str, seed: int = 0) -> list[RequantizedRow]:
    """A row for each kind of global scale of quartet2's x, [size, size] of N(0,1)."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(size, size, generator=generator, device=device)
    rows = []
    for kind in ("", "_pow2"):
        source, scheme = f"nvfp4_46{kind}", f"nvfp4_ms_eden{kind}"
        q = quantize(x, source)
        signs = torch.tensor(seed, device=device)
        parts = torch.ops.q2.requantize(
            *(q.codes, q.scales, q.global_scale),
            source_scheme=source,
            scheme=scheme,
            transform="rht128",
            rows=size,
            columnwise_seed=signs,
        )
        values = q.dequantize()
        long_way = quantize(values, scheme, transform="rht128", transpose=True, seed=signs)
        ours = replace(long_way, codes=parts[0], scales=parts[1], global_scale=parts[2])
        difference, _ = _error_and_alignment(long_way.dequantize(), ours.dequantize())
        errors = (_error_and_alignment(values, t.dequantize())[0] for t in (ours, long_way))
        floor = paper.REQUANTIZED_FLOOR
        rows.append(RequantizedRow(source, scheme, effective_bits(difference), floor, *errors))
    return rows


def _row(scheme: Scheme, size: int, device: str, seed: int) -> SchemeRow:
    octave = OCTAVE if scheme.format == "mxfp4" else 1
    generator = torch.Generator(device).manual_seed(seed)
    error = alignment = stored = 0.0
    for i in range(octave):
        x = torch.randn(size // octave, size, generator=generator, device=device)
        x *= 2 ** ((i + 0.5) / octave)
        q = quantize(x, scheme.name, seed=seed + i)
        one, other = _error_and_alignment(x, q.dequantize())
        error, alignment = error + one / octave, alignment + other / octave
        stored = (q.nbytes - q.global_scale.nbytes) * 8 / x.numel()
    published = scheme.name.removesuffix("_pow2")
    return SchemeRow(
        scheme.name,
        error,
        effective_bits(error),
        alignment,
        stored,
        paper.ERRORS[published] * 1e-3 if published in paper.ERRORS else None,
        paper.BITS.get(published),
        paper.SCHEME_FLOORS.get(published),
    )


def _error_and_alignment(x: Tensor, estimate: Tensor) -> tuple[float, float]:
    norm = x.square().sum(dtype=torch.float64)
    error = (estimate - x).square().sum(dtype=torch.float64) / norm
    alignment = (estimate * x).sum(dtype=torch.float64) / norm
    return error.item(), alignment.item()
