# SPDX-License-Identifier: Apache-2.0
"""One call of a CUDA quantizer: what it moves, launches and issues for an element of its operand.

The launches are asked of what launches them (runtime_kernels/cuda/quantize/plan.py). Instructions
were counted in machine code: `instructions.json`, which `examples/benchmarks/instructions.py`
writes.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources

import torch

from q2compile.runtime_kernels.cuda.jit.launch import Launch
from q2compile.runtime_kernels.cuda.quantize import plan
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import SOURCES, batched_launch
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, Scheme, get_scheme
from q2compile.runtime_kernels.numerics.transforms import get_transform

HIGH = 16  # bits of a number in high precision
BF16 = "bf16"
# What sums of columns add to the loop's: an addition each (of two numbers on 10.0), signs, and what
# lanes exchange. tests/runtime_kernels/cuda/test_dbias_static.py counts them.
SUMMING = {"sm_90a": 1.7, "sm_100a": 1.1, "sm_120a": 1.6}
_OF_TILES = Fraction(2 * 32, 128)  # bits an element of the sums, written and read again
_ROOM = 228 * 1024  # any: how much shared memory there is does not change how many are launched


def packed_bits(scheme: str) -> Fraction:
    """Bits of an element: a code and its part of a block scale."""
    spec = get_scheme(scheme)
    return 4 + Fraction(8, spec.block[0] * spec.block[1])


def scales_after(spec: Scheme) -> bool:
    """Whether block scales are rounded in a second kernel, once the global scale is known."""
    return spec.global_scale == "pow2" or spec.rounding == "ms_eden"


def written_bits(scheme: str) -> Fraction:
    """Bits an element that one direction writes, codes or bf16 numbers and a trust mask, and what
    it reads again for its scales."""
    spec = get_scheme(scheme)
    made = (Fraction(HIGH) if spec.dequantized else packed_bits(scheme)) + spec.masked
    return made + scales_after(spec) * Fraction(2 * 32, spec.block[0] * spec.block[1])


@dataclass(frozen=True)
class Quantizer:
    """A call for one operand of a recipe.

    kind: "row", "col", "both" (of a bf16 matrix), "requantize" (of codes in `source`, along cols)
    sums: its columns are summed, too
    """

    kind: str
    scheme: str
    transform: str = "none"
    source: str = BF16
    sums: bool = False

    @property
    def spec(self) -> Scheme:
        return get_scheme(self.scheme)

    @property
    def directions(self) -> int:
        return 2 if self.kind == "both" else 1

    @property
    def read_bits(self) -> Fraction:
        return Fraction(HIGH) if self.source == BF16 else packed_bits(self.source)

    @property
    def bits(self) -> Fraction:
        """An element: read and written by all launches but one for the amax."""
        made = self.directions * written_bits(self.scheme) + self.sums * _OF_TILES
        return self.read_bits + made

    @property
    def amax_bits(self) -> Fraction:
        """Read by a launch of its own, ahead of the others, where the global scale is exact."""
        return self.read_bits * self.spec.takes_amax

    @property
    def launches(self) -> int:
        return len(_launches(self))

    @property
    def several(self) -> Launch | None:
        """What rotates and rounds the operands of several calls, where others have the same."""
        return batched_launch(_launches(self)[0])

    def instructions(self, architecture: str) -> float:
        """An element, in the loop over tiles; 0 where they were not counted: nothing is said of
        what such a kernel issues then.

        Those of an exact global scale are those of its power of two, which differ by less than
        a twentieth; swizzled scales change none.
        """
        spec = self.spec
        scheme = spec.with_form(spec.form if spec.dequantized else "").name
        source = self.source if self.source == BF16 else get_scheme(self.source).format
        for name in (scheme, _pow2(scheme)):
            key = self.kind, name, self.transform, source
            if key in counted() and architecture in counted()[key]:
                return counted()[key][architecture] + self.sums * SUMMING[architecture]
        return 0.0


@functools.cache
def _launches(call: Quantizer) -> tuple[Launch, ...]:
    return plan.launches(
        SOURCES[torch.bfloat16 if call.source == BF16 else get_scheme(call.source).format],
        call.spec,
        get_transform(call.transform),
        (call.kind in ("row", "both"), call.kind != "row"),
        room=_ROOM,
        vectors=True,
        amax_known=False,
        dbias=call.sums,
    )


def _pow2(scheme: str) -> str:
    name, at, ending = scheme.partition(DEQUANTIZED)
    return f"{name}_pow2{at}{ending}"


@functools.cache
def counted() -> dict[tuple[str, str, str, str], dict[str, float]]:
    """(kind, scheme, transform, format of the source) -> architecture -> instructions."""
    text = resources.files(__package__).joinpath("instructions.json").read_text(encoding="utf-8")
    return {
        (row["kind"], row["scheme"], row["transform"], row["source"]): row["instructions"]
        for row in json.loads(text)["counts"]
    }
