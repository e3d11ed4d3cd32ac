# SPDX-License-Identifier: Apache-2.0
"""Machine code of rotating quantizers that compute their operand (prologue fusion). For every
architecture it has at most the recorded instructions and spills, and the rule that decides whether
to fuse counts the same instructions as the code has."""

from __future__ import annotations

import functools
import re

import pytest

from q2compile.runtime_kernels.cuda.quantize.prologue_source import cuda_source, instructions
from tests.support import disassemble, machine_code
from tests.support.machine_code import BOTH, EDEN, FUSED, FUSED_CASES, regressions
from tests.support.prologue_expressions import EXPRESSIONS, fused_launch

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings", exc_type=ImportError)


@functools.cache
def code_of(name: str, architecture: str) -> disassemble.Code:
    try:
        return machine_code.disassembled(FUSED[name], architecture)
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("name", "architecture"), FUSED_CASES)
def test_spills_and_length_are_those_recorded(name, architecture) -> None:
    """Compared with the records of machine_code.py. Kernels spill only addresses of their loads,
    where the kernel without an expression spills, too. NVRTC 13.2 spills more."""
    try:
        assert regressions(name, architecture) == {}
    except FileNotFoundError as error:
        pytest.skip(str(error))


# The others compile the same source as one of these, with the same loads: sm_100a that of 12.x.
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a"])
def test_loads(architecture) -> None:
    """Each of three inputs is loaded 16 bytes at a time. In a whole tile a thread loads four rows,
    at an edge one. The code has both cases twice, for the first tile and for the next. Two operands
    share the code that quantizes them."""
    code = code_of("fused gated eden", architecture)
    assert code.count("LDG.E.128") == 2 * 3 * (4 + 1)


@pytest.mark.parametrize("architecture", ["sm_100a", "sm_120a"])
def test_blackwell_converts_to_fp4_in_hardware(architecture) -> None:
    try:
        assert machine_code.counts("fused gated eden", architecture)["to_fp4"] == 64
    except FileNotFoundError as error:
        pytest.skip(str(error))


def loops(name: str) -> list[int]:
    """Lengths, the longest first, on sm_90a."""
    return sorted((end + 1 - first for first, end in code_of(name, "sm_90a").loops), reverse=True)


@pytest.mark.parametrize(("dequantized", "most"), [("", 3100), (" dequantized", 3800)])
def test_two_operands_share_the_code_that_quantizes(dequantized, most) -> None:
    """Warps wait for instructions if a loop has about 4000 or more (KERNEL_LOG.md). With two
    operands, the loop over tiles has an inner loop over the operands. It is as long as the loop of
    one operand, plus the instructions that compute du."""
    one, (tile, operand, *_) = (loops(f"fused {n} eden{dequantized}") for n in ("swiglu", "gated"))
    assert tile <= one[0] + 8 * 4 * 5 + 50  # du: 3 instructions an element and its store, 32 a time
    assert operand <= most


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_instructions_an_element(name) -> None:
    """The rule's count is that of the loop over the rows of a whole tile, and at most 2.5 more. One
    more is allowed for other NVRTCs: that of torch 2.15 compiles gelu to 40.5 instructions an
    element, NVRTC 13.0 to 41.6."""
    made = EXPRESSIONS[name]
    launch = fused_launch(made, EDEN, BOTH)
    code = machine_code.disassembled(launch, "sm_90a")
    ahead = re.search(r"kRowsAhead = (\d+)", cuda_source(made))
    assert ahead
    loops = [
        end + 1 - first
        for first, end in code.loops
        if any(n.startswith("STS.128") for n in code.names[first : end + 1])
        and code.names[first : end + 1].count("BAR.SYNC.DEFER_BLOCKING") == 0
        and sum(n.startswith("BRA") for n in code.names[first : end + 1]) == 1
    ]
    counted = max(loops) / made.piece / int(ahead.group(1))
    assert counted <= instructions(made) <= counted + 3.5
