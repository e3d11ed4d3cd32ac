# SPDX-License-Identifier: Apache-2.0
"""One call of a CUDA quantizer: bytes, launches and instructions per element of its operand.

The launches come from runtime_kernels/cuda/quantize/plan.py. Instructions were counted in machine
code: `instructions.json`, which `examples/benchmarks/predicted.py --count` writes."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources
from typing import Any

import torch

from q2compile.cost_model.ranges import Range
from q2compile.cost_model.rates import ISSUED, PIPES, lanes
from q2compile.runtime_kernels.cuda.jit.launch import Launch
from q2compile.runtime_kernels.cuda.quantize import plan
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import (
    SOURCES,
    RotatingKernel,
    batched_launch,
)
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, Scheme, get_scheme
from q2compile.runtime_kernels.numerics.transforms import get_transform

HIGH = 16  # bits of an element in high precision
BF16 = "bf16"
ROWS_UNROTATED = "both, rows unrotated"
# Instructions per element that dbias adds to the loop: an addition, signs before 10.0, and
# exchanges between lanes, also those that kernels without dbias save in chunks of 128 (tile.cuh,
# kSwaps). tests/runtime_kernels/cuda/test_dbias_static.py counts them.
DBIAS_INSTRUCTIONS = {"sm_90a": 3.7, "sm_100a": 1.4, "sm_120a": 1.8}
_PARTIAL_SUM_BITS = Fraction(2 * 32, 128)  # bits per element of partial sums, written and read
_ROOM = 228 * 1024  # any value: shared memory does not change the number of launches


def packed_bits(scheme: str) -> Fraction:
    """Bits of an element: a code and its part of a block scale."""
    spec = get_scheme(scheme)
    if spec.is_tensorwise:
        return Fraction(8)
    return 4 + Fraction(8, spec.block[0] * spec.block[1])


def scales_after(spec: Scheme) -> bool:
    """Whether block scales are rounded in a second kernel, once the global scale is known."""
    return spec.global_scale == "pow2" or spec.rounding == "ms_eden"


def written_bits(scheme: str) -> Fraction:
    """Bits per element of one rowwise or columnwise operand: written codes, or bf16, and trust
    mask; raw scales, written and read."""
    spec = get_scheme(scheme)
    made = (Fraction(HIGH) if spec.dequantized else packed_bits(scheme)) + spec.masked
    return made + scales_after(spec) * Fraction(2 * 32, spec.block[0] * spec.block[1])


@dataclass(frozen=True)
class Quantizer:
    """A call for one operand of a recipe.

    kind: "row", "col", "both", ROWS_UNROTATED (of a bf16 matrix), "requantize" (of codes in
        `source`, columnwise)
    dbias: it also sums its columns
    """

    kind: str
    scheme: str
    transform: str = "none"
    source: str = BF16
    dbias: bool = False

    @property
    def spec(self) -> Scheme:
        return get_scheme(self.scheme)

    @property
    def directions(self) -> int:
        return 2 if self.kind in ("both", ROWS_UNROTATED) else 1

    @property
    def read_bits(self) -> Fraction:
        return Fraction(HIGH) if self.source == BF16 else packed_bits(self.source)

    @property
    def bits(self) -> Fraction:
        """Bits per element read and written by all launches except the amax pre-pass."""
        made = self.directions * written_bits(self.scheme) + self.dbias * _PARTIAL_SUM_BITS
        return self.read_bits + made

    @property
    def amax_bits(self) -> Fraction:
        """Bits per element that the amax pre-pass reads, for an exact global scale."""
        return self.read_bits * self.spec.takes_amax

    @property
    def launches(self) -> int:
        return len(_launches(self))

    @property
    def batched(self) -> Launch | None:
        """The batched launch that rotates and rounds the operands of calls that share it."""
        return batched_launch(_launches(self)[0])

    def instructions(self, architecture: str) -> float:
        """Instructions per element, in the loop over tiles; 0 if they were not counted: issue time
        is then left out.

        Schemes with an exact global scale use the counts of their power-of-two variant, which
        differ by less than a twentieth. Swizzled scales change nothing."""
        found = self._counted("instructions", architecture)
        return found and found + self.dbias * DBIAS_INSTRUCTIONS[architecture]

    def pipe_cycles(self, architecture: str) -> dict[str, Range]:
        """Cycles per element of each pipe; {} if they were not counted. dbias adds to the FMA
        pipe."""
        cycles: dict[str, Range] = {}
        for pipe, counted_ in zip(PIPES, self._counted("pipes", architecture) or (), strict=False):
            found = counted_ + self.dbias * DBIAS_INSTRUCTIONS[architecture] * (pipe is PIPES[0])
            each, _ = lanes(pipe.measured, architecture)
            more = ISSUED * found / each
            cycles[pipe.name] = cycles.get(pipe.name, Range(0.0, 0.0)) + more
        return cycles

    def _counted(self, what: str, architecture: str) -> Any:
        spec = self.spec
        scheme = spec.with_form(spec.form if spec.dequantized else "").name
        source = self.source if self.source == BF16 else get_scheme(self.source).format
        keys = ((self.kind, name, self.transform, source) for name in (scheme, _pow2(scheme)))
        rows = (counted()[key][what] for key in keys if key in counted())
        return next(rows, {}).get(architecture, 0.0)


@functools.cache
def _launches(call: Quantizer) -> tuple[Launch, ...]:
    kernel = RotatingKernel(
        SOURCES[torch.bfloat16 if call.source == BF16 else get_scheme(call.source).format],
        get_transform(call.transform),
        call.spec,
        rowwise=call.kind == "row" or call.directions == 2,
        columnwise=call.kind != "row",
        room=_ROOM,
        dbias=call.dbias,
        rotates_rows=call.kind != ROWS_UNROTATED,
    )
    return plan.launches(kernel)


def _pow2(scheme: str) -> str:
    name, at, suffix = scheme.partition(DEQUANTIZED)
    return f"{name}_pow2{at}{suffix}"


@functools.cache
def counted() -> dict[tuple[str, str, str, str], dict[str, dict[str, Any]]]:
    """(kind, scheme, transform, format of the source) -> "instructions" and "pipes", by
    architecture."""
    text = resources.files(__package__).joinpath("instructions.json").read_text(encoding="utf-8")
    return {
        (row["kind"], row["scheme"], row["transform"], row["source"]): row
        for row in json.loads(text)["counts"]
    }
