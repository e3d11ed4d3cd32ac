# SPDX-License-Identifier: Apache-2.0
"""Decides whether Inductor generates a quantizer as a part of the kernel that computes its operand,
or a CUDA kernel reads the operand from memory.

A generated kernel moves fewer bytes, and has more instructions per element: two threads share a
block of 16, and both compute its scales. So it depends on the instructions that a GPU issues while
it moves a byte (INSTRUCTIONS_A_BYTE). In that unit, with P instructions and R bytes per element of
the operand's expression, G and C instructions of the generated and the CUDA quantizer, and W bytes
written, of an operand of 2 bytes:

    fused      max((P + G) / i, R + W)
    unfused    max(P / i, R + 2) + max(C / i, 2 + W)

Behind an RMSNorm the ratio is .97 on a B200 and .41 on an RTX 5090. Behind silu(g) * u, whose 21
instructions are Inductor's, it is 1.20 on a B200. On an H200 it is .85, and .92 behind
silu(g) * u, where the fused kernel takes 2.24 copies of the tensor, and two kernels take 2.68.
"""

from __future__ import annotations

from typing import NamedTuple

from q2compile.runtime_kernels.numerics.schemes import SWIZZLED, Scheme

# By major compute capability; where no other is known, the GPU to whom bytes are cheapest.
INSTRUCTIONS_A_BYTE = {8: 8.0, 9: 5.9, 10: 3.3, 12: 22.0}
# G by architecture (torch 2.13, Triton 3.6). tests/lowering/test_lowering.py counts them.
GENERATED_INSTRUCTIONS = {
    "nvfp4": {"sm_90a": 18.8, "sm_100a": 8.6, "sm_120a": 9.7},
    "nvfp4_46": {"sm_90a": 31.8, "sm_100a": 18.5, "sm_120a": 21.7},
    "nvfp4_search": {"sm_90a": 85.2, "sm_100a": 36.4, "sm_120a": 42.6},
}
_ARCHITECTURES = {9: "sm_90a", 10: "sm_100a", 12: "sm_120a"}
# C, of the recipes' quantizer of x. tests/lowering/test_fusion_gain.py compares it with what
# is counted.
CUDA_INSTRUCTIONS = {"nvfp4_46": {"sm_90a": 21.1, "sm_100a": 12.0, "sm_120a": 14.7}}
_OPERAND, _WRITTEN = 2.0, 0.81  # bytes; codes, and raw scales written and read
_MARGIN = 1.05  # for errors of the rule
# INSTRUCTIONS_A_BYTE at both ends of what is known, the shares of issue slots and of the bandwidth
# that a kernel reaches (q2compile/cost_model/devices.py), over their middle.
ENDS = (0.85, 1.17)


class ComputedOperand(NamedTuple):
    """The expression that computes an operand, per element: by default, the end of an RMSNorm."""

    instructions: float = 6.0
    bytes_read: float = 2.0


def why_not(scheme: Scheme, computed: ComputedOperand, capability: int) -> str | None:
    """None when the generated kernel is expected to take no more than two kernels, otherwise the
    reason in words. capability: the major compute capability of the GPU."""
    if expected(scheme, computed, capability) <= _MARGIN:
        return None
    ends = sorted(f"{expected(scheme, computed, capability, end):.2f}" for end in ENDS)
    times = "-".join(dict.fromkeys(ends))
    return (
        f"fused into {computed.instructions:.0f} instructions on {computed.bytes_read:.1f} bytes "
        f"per element it is expected to take {times} times as long as two kernels"
    )


def expected(
    scheme: Scheme, computed: ComputedOperand, capability: int, share: float = 1.0
) -> float:
    """The time of the generated kernel over that of two kernels; 0 where nothing is counted.
    share: of INSTRUCTIONS_A_BYTE."""
    name = scheme.name.removesuffix(SWIZZLED).removesuffix("_pow2")
    architecture = _ARCHITECTURES.get(capability)
    if name not in CUDA_INSTRUCTIONS or architecture is None:
        return 0.0
    generated = GENERATED_INSTRUCTIONS[name][architecture]
    rate, (made, read) = share * INSTRUCTIONS_A_BYTE[capability], computed
    fused = max((made + generated) / rate, read + _WRITTEN)
    unfused = max(made / rate, read + _OPERAND)
    unfused += max(CUDA_INSTRUCTIONS[name][architecture] / rate, _OPERAND + _WRITTEN)
    return fused / unfused
