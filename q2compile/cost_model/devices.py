# SPDX-License-Identifier: Apache-2.0
"""GPUs by their data sheets, the share of the peaks that kernels reach, and the cost of a call on
the host.

Measured figures come from `examples/benchmarks/results`, from one H200 in November 2026. After new
rows, update them here. `examples/benchmarks/predicted.py` shows the errors of the resulting
predictions. No Blackwell has been measured. The rates of its GEMMs are published ones (the table
below); all other shares are assumed to be an H200's.

An uncertain constant is a `Range`; its middle was fitted, or is halfway between its sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from q2compile.cost_model.ranges import Range

# The share of the bandwidth that a kernel reaches: a copy of 256 MiB 0.88 (kernels.json,
# 2026-11-26), quantizers that read and write the most 0.75 to 0.91.
MEMORY_SHARE = Range(0.78, 0.88)
# transpose.cu, relative to other kernels: its loads and stores are pieces of 8 rows.
TRANSPOSE_REACH = 0.65
# The share of the issue slots that a quantizer's loop over tiles fills. With random bits it is
# lower, since 64-bit products take two slots and have a longer latency. The middle was fitted to
# the rows of kernels.json (2026-11-26), at both shapes; the ends hold for most of them. pipes.json
# (2026-11-29, one H200): medians .686 and .617; .573 to .792 and .528 to .674 from the 10th to the
# 90th percentile.
ISSUE_SHARE, ISSUE_SHARE_OF_RANDOM_BITS = Range(0.62, 0.76), Range(0.57, 0.69)
# The share of its cycles to which the fullest pipe of a quantizer is filled at least: assumed. By
# ncu (pipes.json) an H200's is at 0.63, ALU, beside 0.57 of the issue slots; the packed arithmetic
# of 10.x would fill 0.72 to 0.84. So the pipe holds nothing up, or it stops at this share. The
# counters are 1.03 (FMA; .85 to 1.34) and 1.15 times (ALU; .99 to 1.46) what the counted
# instructions of the loop derive.
PIPE_SHARE = Range(0.65, 1.0)
# The constant time of a launch: from the end of one kernel's work to the start of the next one's,
# with its ramp and its tail. Half of the part of calls of two launches in kernels.json that does
# not grow with the tensor (5 to 8.5 us for half of them).
LAUNCH_SECONDS = Range(2.5e-6, 4.3e-6)

# Seconds of the host. The middle is an H200's; hosts differ by half.
_HOSTS = Range(0.75, 1.25)
HOST_LAUNCH = 5.47e-6 * _HOSTS  # kernels.json, host_launch: one launch of ours
HOST_TORCH = 7.86e-6 * _HOSTS  # kernels.json, host_copy: an op of torch's, its launch included
HOST_CALL = 10.98e-6 * _HOSTS  # steps.json, host_us_per_call: a call of two launches, generated
HOST_DISPATCHED = 16.49e-6 * _HOSTS  # kernels.json, host_dequantize: an op, by the dispatcher


@dataclass(frozen=True)
class Rate:
    """The GEMMs of one format on one GPU.

    peak: dense FLOP/s with fp32 accumulation, by data sheet
    share: of the peak that a large GEMM reaches; above 1 if a card runs above its listed clock
    source: of the share
    """

    peak: float
    share: Range
    source: str

    @property
    def reached(self) -> Range:
        """FLOP/s of a large GEMM."""
        return self.peak * self.share


@dataclass(frozen=True, eq=False)
class Device:
    """A GPU: rates of its GEMMs, bytes/s, and instructions/s over all lanes.

    name: words that its name in torch contains
    column: its key in reports
    capability: major compute capability
    architecture: whose machine code is counted (`quantizers`)
    gemms: "bf16", "fp8", "grouped fp8" and, where there are fp4 tensor cores, "fp4"
    """

    name: str
    column: str
    capability: int
    architecture: str
    gemms: dict[str, Rate]
    bandwidth: float
    issue: float

    @property
    def emulates(self) -> bool:
        """Whether fp4 GEMMs are BF16 GEMMs of the dequantized operands."""
        return "fp4" not in self.gemms


# FP8 over BF16. Measured on one H100 (torch 2.11, _scaled_mm with exact sums, 2026-11-28):
# 8192 x 4096 x 4096 takes .601 of BF16's time, N = 14336 .579, K = 14336 .576. Published of
# Blackwells: 1860 TFLOP/s by _scaled_mm on a B200 at 4096 (github.com/pytorch/helion/pull/2756,
# 2026-06-11), where BF16 reaches 1380; 1.94 times on an RTX 5090 (vllm/pull/34424, 2026-02).
_FP8_OVER_BF16, _FP8_OVER_BF16_BLACKWELL = Range(1.66, 1.74), Range(1.35, 1.95)
# Grouped, on one H200 (torch 2.11, _scaled_grouped_mm with fast accumulation, 2026-11-29). GEMMs of
# 64 experts of 1024 rows, 2048 x 1536 and 768 x 2048, take .75 of grouped_mm's time in BF16 (1.99
# and 2.66 ms), uneven groups .77, 256 rows .85, 4096 rows .73.
_GROUPED_FP8_OVER_BF16 = Range(1.18, 1.37)


def _gemms(bf16: Rate, fp4: Rate | None = None) -> dict[str, Rate]:
    """The table of a device. FP8 GEMMs have twice the peak of BF16's on all of them; they are
    fastest against BF16's where those are slow."""
    over = _FP8_OVER_BF16_BLACKWELL if fp4 else _FP8_OVER_BF16
    made = {"bf16": bf16}
    for kind, times in (("fp8", over), ("grouped fp8", _GROUPED_FP8_OVER_BF16)):
        share = bf16.share.reversed * times * 0.5
        made[kind] = Rate(2 * bf16.peak, share, f"BF16's, times {times.text()}")
    return made | ({"fp4": fp4} if fp4 else {})


def _lanes(multiprocessors: int, gigahertz: float) -> float:
    return multiprocessors * 128 * gigahertz * 1e9


# Published rates. B200, N = 6144, K = 4096: BF16 1.36 to 1.42 PFLOP/s for 4096 to 16384 rows, and
# NVFP4 with quantized operands 3.65 to 3.90 by CUTLASS (2025-07-08); BF16 1.51 (2025-06).
_VLLM_B200 = "github.com/vllm-project/vllm/pull/20646, 19566"
# A GPU of 10.3, NVFP4 by CUTLASS and CuTe DSL: 4.55 to 5.23 PFLOP/s for 2048 to 8192 rows
# (2026-05-10). What limits it there is not the peak, so a B200 may reach the same.
_VLLM_SM103 = "github.com/vllm-project/vllm/pull/42235"
# Triton's NVFP4 and torch's BF16, 4096 rows, ten shapes from 4096 x 4096 to 28672 x 8192: 758 to
# 874 TFLOP/s and 185 to 235; at 8192 x 8192 872 and 214 (2026-03).
_VLLM_5090 = "github.com/vllm-project/vllm/pull/38338"
# CUTLASS's NVFP4 on an RTX PRO 6000 at 8192: 1629 TFLOP/s (2026-05-25).
_CUTLASS = "github.com/NVIDIA/cutlass/pull/3272"
# torch.matmul in BF16 at 8192: RTX 5090 175 to 236 TFLOP/s (issues 96, 124, 200), RTX 5080 103
# (104), RTX PRO 6000 350 and 417 (160, 161); 2025-12 to 2026-09.
_TORCH_DATA = "github.com/zzc0721/torch-performance-test-data"
_AS_B200, _AS_5090 = "assumed as on a B200", "assumed as on an RTX 5090"
_BF16_B200, _FP4_B200 = Range(0.605, 0.67), Range(0.405, 0.58)
_FP4_B300 = Range(0.34, 0.43)  # at least measured; at most what was a B200's in 2025
_FP4_5090 = Range(0.45, 0.81)  # at most the share of an RTX PRO 6000

# Machine code of 10.3 counts as 10.0's does: within 0.3% in all 35 quantizers (2026-11-29).
# Peaks: data sheets of HGX B200 and B300 (one of eight GPUs), GB200 and GB300 NVL72 (one of 72),
# DGX Spark; RTX Blackwell and RTX Blackwell PRO architecture white papers.
B200 = Device(
    "B200",
    "b200",
    10,
    "sm_100a",
    _gemms(Rate(2.25e15, _BF16_B200, _VLLM_B200), Rate(9.0e15, _FP4_B200, f"{_VLLM_B200}, 42235")),
    8.0e12,
    _lanes(148, 1.85),
)
RTX_5090 = Device(
    "RTX 5090",
    "rtx5090",
    12,
    "sm_120a",
    _gemms(
        Rate(2.095e14, Range(0.88, 1.13), f"{_VLLM_5090}, {_TORCH_DATA}"),
        Rate(1.676e15, _FP4_5090, f"{_VLLM_5090}, {_CUTLASS}"),
    ),
    1.792e12,
    _lanes(170, 2.41),
)
# H200 SXM: at 1.95 GHz under load. BF16 was measured at the limit of its power (2026-11-26): 0.73
# for a linear, 0.71 to 0.77 for other products (KERNEL_LOG.md).
H200 = Device(
    "H200",
    "h200",
    9,
    "sm_90a",
    _gemms(Rate(9.895e14, Range(0.69, 0.77), "examples/benchmarks/results/models.json")),
    4.8e12,
    _lanes(132, 1.95),
)
# H100 SXM: the chip of an H200 with other memory. With 500 W it reached 585 TFLOP/s (2024-04).
H100 = Device(
    "H100",
    "h100",
    9,
    "sm_90a",
    _gemms(Rate(9.895e14, Range(0.59, 0.77), "github.com/pytorch/FBGEMM/pull/2546, an H200's")),
    3.35e12,
    _lanes(132, 1.95),
)
# The columns of reports.
DEVICES = (B200, RTX_5090)
DATA_SHEETS = (
    H100,
    H200,
    *DEVICES,
    Device(
        "GB200",
        "gb200",
        10,
        "sm_100a",
        _gemms(Rate(2.5e15, _BF16_B200, _AS_B200), Rate(1.0e16, _FP4_B200, _AS_B200)),
        8.0e12,
        _lanes(152, 1.85),
    ),
    Device(
        "B300",
        "b300",
        10,
        "sm_100a",
        _gemms(Rate(2.25e15, _BF16_B200, _AS_B200), Rate(1.35e16, _FP4_B300, _VLLM_SM103)),
        8.0e12,
        _lanes(148, 1.85),
    ),
    Device(
        "GB300",
        "gb300",
        10,
        "sm_100a",
        _gemms(Rate(2.5e15, _BF16_B200, _AS_B200), Rate(1.5e16, _FP4_B300, _VLLM_SM103)),
        8.0e12,
        _lanes(152, 1.85),
    ),
    Device(
        "RTX PRO 6000",
        "rtxpro6000",
        12,
        "sm_120a",
        _gemms(
            Rate(5.038e14, Range(0.69, 0.83), _TORCH_DATA),
            Rate(2.015e15, _FP4_5090, f"{_AS_5090}, {_CUTLASS}"),
        ),
        1.792e12,
        _lanes(188, 2.617),
    ),
    Device(
        "RTX 5080",
        "rtx5080",
        12,
        "sm_120a",
        _gemms(
            Rate(1.126e14, Range(0.77, 1.05), _TORCH_DATA),
            Rate(9.004e14, _FP4_5090, _AS_5090),
        ),
        0.96e12,
        _lanes(84, 2.617),
    ),
    # 1 PFLOP/s FP4 with sparsity. No rate of its BF16 GEMMs was found.
    Device(
        "GB10",
        "gb10",
        12,
        "sm_120a",
        _gemms(Rate(1.25e14, Range(0.6, 1.0), "assumed"), Rate(5.0e14, _FP4_5090, _AS_5090)),
        0.273e12,
        _lanes(48, 2.42),
    ),
)
# Words in the name of a GPU with other rates than the one of the same number.
_VARIANTS = {"Laptop", "Max-Q", "PCIe", "NVL", "MIG", "D", "DD"}


def _described(device: Device) -> str:
    bf16, fp4 = device.gemms["bf16"], device.gemms["fp4"]
    return (
        f"{device.name} {fp4.peak / 1e12:.0f} TFLOP/s FP4 ({fp4.share.text('.0%')} reached), "
        f"{bf16.peak / 1e12:.4g} BF16 ({bf16.share.text('.0%')}), "
        f"{device.bandwidth / 1e12:.4g} TB/s"
    )


ASSUMPTIONS = (
    "predicted, not measured, from data-sheet peaks and the share that published GEMMs reach: "
    + "; ".join(map(_described, DEVICES))
    + f"; a quantizer reaches {MEMORY_SHARE.text('.0%')} of the bandwidth, "
    f"{ISSUE_SHARE.text('.0%')} of the issue slots "
    f"({ISSUE_SHARE_OF_RANDOM_BITS.text('.0%')} with stochastic rounding), or "
    f"{PIPE_SHARE.text('.0%')} of its fullest pipe; {(1e6 * LAUNCH_SECONDS).text('.1f')} us per "
    f"launch; forward quantizers fused; {(1e6 * HOST_CALL).text('.0f')} us of the host per call of "
    "two launches, if that is longer"
)


def deciding_device(*, in_fp4: bool = True) -> Device:
    """The device whose times decide under "auto".

    The GPU that is present, if it runs the formats, which for FP4 are a Blackwell's; if its model
    is unknown, one of its compute capability; else a B200.
    """
    known = present_device()
    if known is not None and not (in_fp4 and known.emulates):
        return known
    if torch.cuda.is_available():
        major, _ = torch.cuda.get_device_capability()
        for device in DEVICES:
            if device.capability == major:
                return device
    return DEVICES[0]


def present_device() -> Device | None:
    """The GPU of this process; None if there is none, or its data sheet is not known."""
    return data_sheet(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def reported_devices() -> tuple[Device, ...]:
    """The devices that a report has predictions for: the GPU of this process, and `DEVICES`."""
    present = present_device()
    return tuple(dict.fromkeys([*([present] if present else []), *DEVICES]))


def shown_devices(predicted: Iterable[Mapping[str, Any]]) -> list[Device]:
    """The two devices that a page shows: the GPU that the model was compiled on beside a B200; or
    `DEVICES`, if that GPU is not known.

    predicted: of each row of a report, its times by `Device.column`, in `reported_devices`' order.
    """
    columns: Iterable[str] = next(filter(None, predicted), [device.column for device in DEVICES])
    by_column = {device.column: device for device in DATA_SHEETS}
    return [by_column[column] for column in columns if column in by_column][:2]


def data_sheet(name: str) -> Device | None:
    """The device of a name in torch, "NVIDIA H200"; None if it is unknown.

    A laptop's GPU and other variants share the number of a desktop's and not its rates: None.
    """
    words = set(name.split())
    if words & _VARIANTS:
        return None
    for device in DATA_SHEETS:
        if words >= set(device.name.split()):
            return device
    return None
