"""GPUs by their data sheets, what share of that kernels were measured to reach, and what a call
costs the host.

The measured figures come from `examples/benchmarks/results`, of one H200. After new rows set them
anew. `examples/benchmarks/predicted.py` shows the errors of the predictions that follow. No
Blackwell has been measured: its shares are assumed to be the same, except for its GEMMs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Of the bandwidth that a kernel reaches. A copy of 256 MiB reaches 0.88 (kernels.json).
MEMORY_SHARE = 0.83
# Of what other kernels reach of it, transpose.cu: its loads and stores are pieces of 8 rows.
TURNING_REACH = 0.65
# Of the issue slots that the loop over tiles of a quantizer fills: with coins less, since 64-bit
# products take two slots and their results are waited for. What leaves the least error over the
# rows of kernels.json, at both shapes.
ISSUE_SHARE, ISSUE_SHARE_OF_COINS = 0.69, 0.58
# What is constant in a launch: from the end of one kernel's work to the start of the next one's,
# its ramp and its tail. Half of what calls of two launches in kernels.json take beyond what grows
# with the tensor (7 to 9 us).
LAUNCH_SECONDS = 3.4e-6

# Of the host, seconds (an H200's; hosts differ by half).
HOST_LAUNCH = 5.47e-6  # kernels.json, host_launch: one launch of ours
HOST_TORCH = 7.86e-6  # kernels.json, host_copy: an op of torch's, its launch included
HOST_CALL = 10.98e-6  # steps.json, host_us_per_call: a call of two launches in generated code
HOST_DISPATCHED = 16.49e-6  # kernels.json, host_dequantize: an op of one launch by the dispatcher


@dataclass(frozen=True, eq=False)
class Device:
    """A GPU by its data sheet: dense FLOP/s, bytes/s, and instructions a second over all lanes.

    flops: of "bf16" and, where there are fp4 tensor cores, of "fp4".
    gemm_share: of those that a large GEMM reaches.
    architecture: whose machine code is counted (`quantizers`).
    """

    name: str
    column: str
    capability: int
    architecture: str
    flops: dict[str, float]
    gemm_share: dict[str, float]
    bandwidth: float
    issue: float

    @property
    def emulates(self) -> bool:
        """Whether fp4 products are bf16 products of the same numbers."""
        return "fp4" not in self.flops


# The share of the FP4 peak is set by the largest layers of the Quartet II authors, 4.2 times as
# fast as BF16 on an RTX 5090, up to 2.5 times on a B200: it predicts the first a sixth too high,
# the second a sixth too low.
_ASSUMED = {"bf16": 0.8, "fp4": 0.54}
DEVICES = (
    # HGX B200 (NVIDIA data sheet, one of eight GPUs): 9 and 2.25 PFLOP/s dense, 8 TB/s; 148 SMs.
    Device(
        "B200",
        "b200",
        10,
        "sm_100a",
        {"fp4": 9.0e15, "bf16": 2.25e15},
        _ASSUMED,
        8.0e12,
        148 * 128 * 1.85e9,
    ),
    # RTX 5090 (NVIDIA RTX Blackwell white paper): 1676 and 209.5 TFLOP/s dense with fp32
    # accumulation, 1.792 TB/s; 170 SMs.
    Device(
        "RTX 5090",
        "rtx5090",
        12,
        "sm_120a",
        {"fp4": 1.676e15, "bf16": 2.095e14},
        _ASSUMED,
        1.792e12,
        170 * 128 * 2.41e9,
    ),
)
# H200 SXM (NVIDIA data sheet): 989.5 TFLOP/s dense, 4.8 TB/s; 132 SMs, at 1.95 GHz under load. The
# share of its GEMMs is that of BF16 in models.json, at the limit of its power.
H200 = Device(
    "H200", "h200", 9, "sm_90a", {"bf16": 9.895e14}, {"bf16": 0.73}, 4.8e12, 132 * 128 * 1.95e9
)
DATA_SHEETS = (H200, *DEVICES)
ASSUMPTIONS = (
    "predicted by data sheet, not measured: "
    + "; ".join(
        f"{d.name} {d.flops['fp4'] / 1e12:.0f} TFLOP/s FP4, {d.flops['bf16'] / 1e12:.4g} BF16, "
        f"{d.bandwidth / 1e12:.4g} TB/s"
        for d in DEVICES
    )
    + f"; a GEMM reaches {_ASSUMED['fp4']:.0%} of that in FP4 and {_ASSUMED['bf16']:.0%} in "
    f"BF16, a quantizer {MEMORY_SHARE:.0%} of the bandwidth or {ISSUE_SHARE:.0%} of the issue "
    f"slots ({ISSUE_SHARE_OF_COINS:.0%} with coins); {LAUNCH_SECONDS * 1e6:.0f} us a launch; "
    f"forward quantizers fused; of the host {HOST_CALL * 1e6:.0f} us a call of two launches, where "
    "that is longer"
)


def deciding_device() -> Device:
    """The device whose times decide under "auto": the Blackwell present, or else a B200."""
    if torch.cuda.is_available():
        major, _ = torch.cuda.get_device_capability()
        for device in DEVICES:
            if device.capability == major:
                return device
    return DEVICES[0]


def data_sheet(name: str) -> Device | None:
    """That of a GPU by its name as torch has it, "NVIDIA H200"; None if there is none."""
    words = name.split()
    for device in DATA_SHEETS:
        if all(word in words for word in device.name.split()):
            return device
    return None
