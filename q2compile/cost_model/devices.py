"""GPUs by their data sheets, and what is assumed of how much of that a kernel reaches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Of the dense peak that a large GEMM reaches. With half in FP4 the largest layers come out where
# the Quartet II authors report them: 4.2 times BF16 on an RTX 5090, up to 2.5 times on a B200.
GEMM_SHARE = {"bf16": 0.8, "fp4": 0.5}
MEMORY_SHARE = 0.85  # of the bandwidth that a kernel reaches
ISSUE_SHARE = 0.75  # of the issue slots that the quantisers fill; so on an H200 (KERNEL_LOG.md)
KERNEL_SECONDS = 2e-6  # from the end of one kernel's work to the start of the next one's


@dataclass(frozen=True)
class Device:
    """A GPU by its data sheet: dense FLOP/s, bytes/s, and instructions a second over all lanes.

    instructions: for an element of each rotating op, counted in its machine code
    (``examples/benchmarks/instructions.py``); the other ops are bound by memory before that.
    """

    name: str
    column: str
    capability: int
    flops: dict[str, float]
    bandwidth: float
    issue: float
    instructions: dict[str, float]


DEVICES = (
    # HGX B200 (NVIDIA data sheet, one of eight GPUs): 9 and 2.25 PFLOP/s dense, 8 TB/s; 148 SMs.
    Device(
        "B200",
        "b200",
        10,
        {"fp4": 9.0e15, "bf16": 2.25e15},
        8.0e12,
        148 * 128 * 1.85e9,
        {"rht_quantize": 16.0, "rht_quantize_both": 30.0, "requantize": 19.0},
    ),
    # RTX 5090 (NVIDIA RTX Blackwell white paper): 1676 and 209.5 TFLOP/s dense with fp32
    # accumulation, 1.792 TB/s; 170 SMs.
    Device(
        "RTX 5090",
        "rtx5090",
        12,
        {"fp4": 1.676e15, "bf16": 2.095e14},
        1.792e12,
        170 * 128 * 2.41e9,
        {"rht_quantize": 21.5, "rht_quantize_both": 41.0, "requantize": 25.0},
    ),
)
ASSUMPTIONS = (
    "predicted by data sheet, not measured: "
    + "; ".join(
        f"{d.name} {d.flops['fp4'] / 1e12:.0f} TFLOP/s FP4, {d.flops['bf16'] / 1e12:.4g} BF16, "
        f"{d.bandwidth / 1e12:.4g} TB/s"
        for d in DEVICES
    )
    + f"; a GEMM reaches {GEMM_SHARE['fp4']:.0%} of that in FP4 and {GEMM_SHARE['bf16']:.0%} in "
    f"BF16, a quantiser {MEMORY_SHARE:.0%} of the bandwidth or {ISSUE_SHARE:.0%} of the issue "
    f"slots; {KERNEL_SECONDS * 1e6:.0f} us between kernels; forward quantisers fused"
)


def deciding_device() -> Device:
    """The device whose times decide under "auto": the Blackwell present, or else a B200."""
    if torch.cuda.is_available():
        major, _ = torch.cuda.get_device_capability()
        for device in DEVICES:
            if device.capability == major:
                return device
    return DEVICES[0]
