# SPDX-License-Identifier: Apache-2.0
"""Matmuls that are predicted to be slower than in BF16: which are, why, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from q2compile.cost_model.devices import Device
from q2compile.cost_model.ranges import Range, over_bf16

Times = Sequence[Mapping[str, float]]
_SLOWER = 1.05  # times BF16: less is within the error of the predictions


def is_slower(over: Range) -> bool:
    """Return whether a time counts as slower than BF16's. over: that time divided by BF16's."""
    return over.middle > _SLOWER


def slower_text(times: Times, device: Device, *, in_fp4: bool) -> str:
    """The words after "On a B200" in a sentence about slower matmuls. times: what their rows in a
    report predict for the device. in_fp4: whether one of them multiplies in FP4."""
    host, gpu = (
        sum(of.get(f"{where}_microseconds", 0.0) for of in times) for where in ("host", "gpu")
    )
    if host > gpu:
        why = "the GPU waits for the host to launch their kernels"
        instead = 'torch.compile with options={"mode": "reduce-overhead"} makes launches cheap'
    elif device.emulates and in_fp4:
        why = "it has no FP4 tensor cores"
        instead = 'options={"recipe": "fp8"} is faster than BF16 there, this one is for studies'
    else:
        why = "the layers are too small to gain, which is fine for studying the loss"
        instead = 'options={"policy": {"*": "auto"}} leaves in BF16 what is slower'
    return (
        f"the quantized matmuls are predicted to take {over_bf16(times).text()} times as long as "
        f"in BF16, because {why}; {instead}"
    )
