# SPDX-License-Identifier: Apache-2.0
"""Machine code of rotating quantizers that compute their operand: it compiles for every
architecture, spills and is as long as was recorded, and takes as many instructions as the rule
reckons with."""

from __future__ import annotations

import functools
import re

import pytest

from q2compile.runtime_kernels.cuda.jit import disassemble
from q2compile.runtime_kernels.cuda.quantize.prologue_source import cuda_source, instructions
from tests.support import machine_code
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
    """machine_code.py records them. The addresses of four rows of loads are what is spilled, where
    a sister without an expression spills already. NVRTC 13.2 spills more."""
    try:
        assert regressions(name, architecture) == {}
    except FileNotFoundError as error:
        pytest.skip(str(error))


# The others compile the same source as one of these, with the same loads.
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_loads(architecture) -> None:
    """A static_assert holds the parameter struct to the launch's layout. Three inputs, of 16 bytes
    a thread: four rows at a time in whole tiles, one at an edge (four in a group's last tile), for
    the first tile and the next. The code that quantizes two operands is there once."""
    code = code_of("fused gated eden", architecture)
    assert code.count("LDG.E.128") == 2 * 3 * (4 + 1)
    if architecture in ("sm_100a", "sm_120a"):
        assert code.count("F2FP.SATFINITE.E2M1") == 64
    for name in ("fused gate and up eden", "fused gate and up eden dequantized"):
        assert code_of(name, architecture).count("LDG.E.128") == 2 * 3 * (4 + 4)


def loops(name: str) -> list[int]:
    """Lengths, the longest first, on sm_90a."""
    return sorted((end + 1 - first for first, end in code_of(name, "sm_90a").loops), reverse=True)


@pytest.mark.parametrize(("dequantized", "most"), [("", 3100), (" dequantized", 3800)])
def test_two_operands_share_the_code_that_quantizes(dequantized, most) -> None:
    """From about 4000 instructions on warps wait for them (KERNEL_LOG.md). A tile's loop has one of
    both operands in it, and is no longer than that of one operand but for what computes du. One of
    gate and up takes no more than a matrix that is read, its mask and signs being the other's."""
    one, (tile, operand, *_) = (loops(f"fused {n} eden{dequantized}") for n in ("swiglu", "gated"))
    assert tile <= one[0] + 8 * 4 * 5 + 50  # du: 3 instructions an element and its store, 32 a time
    assert operand <= most
    assert loops(f"fused gate and up eden{dequantized}")[1] <= min(most, 3600)


@pytest.mark.parametrize("name", [n for n in EXPRESSIONS if n != "gate and up"])
def test_instructions_an_element(name) -> None:
    """Counted in the loop over the rows of a whole tile; rounded up by at most 2.5 by the rule, and
    1 more for NVRTC: the one of torch 2.15 makes 40.5 of gelu's 41.6 by 13.0's."""
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
