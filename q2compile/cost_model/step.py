# SPDX-License-Identifier: Apache-2.0
"""One step of a linear layer as the cost model prices it, and its seconds on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from q2compile.cost_model.devices import (
    HOST_CALL,
    HOST_DISPATCHED,
    HOST_LAUNCH,
    HOST_TORCH,
    ISSUE_SHARE,
    ISSUE_SHARE_OF_RANDOM_BITS,
    LAUNCH_SECONDS,
    MEMORY_SHARE,
    PIPE_SHARE,
    Device,
)
from q2compile.cost_model.quantizers import HIGH, Quantizer
from q2compile.cost_model.ranges import Range, longest

FUSED, CALL, TORCH, DISPATCHED = "fused", "call", "torch", "dispatched"


@dataclass(frozen=True)
class Step:
    """A call: one kernel, or a few that belong to one op.

    what         the name of a GEMM, or words
    bits         moved bits, at the share ``reach`` of the bandwidth that others reach
    bits_before  moved by a launch of its own ahead of the others
    flops        at the rate of ``kind``
    elements     that ``quantizer`` works on
    fused        instructions per element that are added to the producer of x, by architecture
    shared_by    how many matmuls share the result
    by           who launches, for the time of the host: FUSED into another kernel (with launches
                 behind it), a CALL of ours in generated code, TORCH, or an op that is DISPATCHED
    """

    what: str
    bits: Any
    flops: Any = 0
    kind: str = "bf16"
    quantizer: Quantizer | None = None
    elements: Any = 0
    bits_before: Any = 0
    launches: int = 1
    by: str = CALL
    shared_by: int = 1
    reach: float = 1.0
    fused: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, device: Device) -> Range:
        """Seconds of the GPU.

        Not known are the ranges of `devices`, and how many of the added instructions are issued
        while the producer of x, which reads and writes as much as x has, waits for memory: at the
        low end all that fit in that time, at the high end none."""
        bandwidth = 8 * device.bandwidth * MEMORY_SHARE
        product = float(self.flops) / device.gemms[self.kind].reached
        times: list[Range | float] = [
            product.reversed if self.kind == "bf16" else product,
            float(self.bits) / (bandwidth * self.reach),
        ]
        if self.quantizer is not None:
            draws = self.quantizer.spec.rounding == "sr"
            share = ISSUE_SHARE_OF_RANDOM_BITS if draws else ISSUE_SHARE
            issued = self.elements * self.quantizer.instructions(device.architecture)
            times.append(issued / (device.issue * share))
            for cycles in self.quantizer.pipe_cycles(device.architecture).values():
                times.append(cycles * (self.elements / (device.issue * PIPE_SHARE)))
        if self.fused:
            issued = self.elements * self.fused[device.architecture]
            hidden = 2.0 * HIGH * self.elements / bandwidth
            times.append(issued / (device.issue * ISSUE_SHARE) + Range(-hidden.low, 0.0))
        own = longest(*times) + float(self.bits_before) / bandwidth
        return (own + self.launches * LAUNCH_SECONDS) / self.shared_by

    @property
    def host_seconds(self) -> Range:
        """Seconds of the host, without CUDA graphs."""
        more = self.launches - 1
        of_call = HOST_CALL + (self.launches - 2) * HOST_LAUNCH
        each = {
            FUSED: of_call * bool(self.launches),
            CALL: of_call * bool(self.launches),
            TORCH: self.launches * HOST_TORCH,
            DISPATCHED: HOST_DISPATCHED + more * HOST_LAUNCH,
        }
        return each[self.by] / self.shared_by
