# SPDX-License-Identifier: Apache-2.0
"""The Triton fp4 GEMMs, plain and grouped, without a GPU: cross-compiled for Blackwell, their
machine code has the fp4 tensor-core instructions; and run by Triton's interpreter, they read and
write the right places."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from q2compile.runtime_kernels.cuda.gemm import triton_grouped_kernel as grouped  # noqa: E402
from q2compile.runtime_kernels.cuda.gemm import triton_kernel as gemm  # noqa: E402
from q2compile.runtime_kernels.cuda.gemm.triton_fp4 import (  # noqa: E402
    triton_version,
)
from q2compile.runtime_kernels.cuda.jit import limits  # noqa: E402
from q2compile.runtime_kernels.numerics.transforms import get_transform  # noqa: E402
from tests.support import disassemble  # noqa: E402

POINTERS = {
    "a": "*u8",
    "b": "*u8",
    "a_scales": "*fp8e4nv",
    "b_scales": "*fp8e4nv",
    "a_global": "*fp32",
    "b_global": "*fp32",
    "bias": "*bf16",
    "mask": "*u32",
    "offs": "*i32",
    "out": "*bf16",
}
# tcgen05.mma with block scales, and mma.sync with them, in registers.
INSTRUCTIONS = {
    (10, 16): "UTCOMMA",
    (10, 32): "UTCOMMA",
    (12, 16): "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X",
    (12, 32): "OMMA.SF.16864.F32.E2M1.E2M1.E8",
}
# Bytes of shared memory that a thread block may have.
SHARED = {10: 227 * 1024, 12: 99 * 1024}
CAPABILITIES = [
    c for c in ((10, 0), (10, 3), (12, 0), (12, 1)) if triton_version() >= limits.DOT_SCALED[c]
]


def cross_compiled(function, capability, tile, block, constants, sizes, wide):
    """For pointers and the sizes in `wide` that are multiples of 16."""
    constants = {
        "BLOCK": block,
        "TILE_M": tile.m,
        "TILE_N": tile.n,
        "TILE_K": tile.k,
        **constants,
    }
    exponents = {"a_scales": "*u8", "b_scales": "*u8"} if block == 32 else {}
    types = {**POINTERS, **exponents, **dict.fromkeys(sizes, "i32")}
    types |= dict.fromkeys(constants, "constexpr")
    names = function.arg_names
    narrow = ("a_global", "b_global")
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if (name in POINTERS and name not in narrow) or name in wide
    }
    major, minor = capability
    return triton.compile(
        ASTSource(function, {name: types[name] for name in names}, constants, attributes),
        GPUTarget("cuda", 10 * major + minor, 32),
        {"num_warps": tile.warps, "num_stages": tile.stages},
    )


@cache
def compiled(capability, tile, block, biased=True, whole=True, norm=None):
    """For so many bytes in a row, too. norm: of a rotation back."""
    constants = {"BIASED": biased, "WHOLE": whole, "NORM": norm}
    sizes = ("M", "N", "half")
    return cross_compiled(gemm._gemm_fp4, capability, tile, block, constants, sizes, sizes)


@cache
def compiled_grouped(capability, tile, block, by, height=1, whole=True):
    """by: rows_in_groups or contraction_in_groups; for rows of scales that are multiples of 16."""
    constants, sizes = {"A_HEIGHT": 1, "B_HEIGHT": height}, ["M", "N", "blocks"]
    if by == "rows_in_groups":
        constants |= {"ALIGNED": 16, "WHOLE": whole, "ENTRIES": 128}
        sizes += ["b_blocks", "groups", "b_rows", "b_along"]
    wide = {*sizes} - {"groups"}
    function = getattr(grouped, by)
    return cross_compiled(function, capability, tile, block, constants, sizes, wide)


# All tiles of each generation, and the large one of the chip that is like it.
CASES = [
    (capability, tile, block)
    for capability in CAPABILITIES
    for tile in gemm._TILES[capability[0]]
    for block in (16, 32)
    if capability[1] == 0 or (tile is gemm._TILES[capability[0]][0] and block == 16)
]


@pytest.mark.parametrize("capability, tile, block", CASES)
def test_cross_compiled(capability, tile, block) -> None:
    """Tensor cores multiply codes as they are, with nothing spilt; codes come in copies of 16
    bytes that run ahead of the products, and fit into shared memory."""
    kernel = compiled(capability, tile, block)
    code = disassemble.disassemble(kernel.asm["cubin"])
    assert code.count(INSTRUCTIONS[capability[0], block])
    assert code.count("LDL") == code.count("STL") == 0
    assert 2 * (tile.m + tile.n) * tile.k // 2 < kernel.metadata.shared <= SHARED[capability[0]]
    widths = Counter(
        re.findall(r"cp\.async\.c[ag]\.shared\.global .*?, 0x(\w+)", kernel.asm["ptx"])
    )
    a_thread = (tile.m + tile.n) * tile.k // 2 // 16 // (32 * tile.warps)
    assert widths["10"] >= a_thread * (tile.stages - 1)
    assert sum(n for width, n in widths.items() if width != "10") <= 3 * tile.stages, "scales alone"


# Each tile of a generation, and each format of scales: the epilogue knows the tile alone.
EPILOGUES = [
    ((major, 0), tile, block)
    for major in {c[0] for c in CAPABILITIES}
    for tile, block in zip(gemm._TILES[major], (16, 32), strict=True)
]


@pytest.mark.parametrize("capability, tile, block", EPILOGUES)
def test_cross_compiled_with_a_rotation_back(capability, tile, block) -> None:
    """The same loop, and an epilogue without spills: words of the mask are read, not bytes; the
    product is rounded to bf16 before the rotation; every butterfly is an addition or subtraction
    for each element; and on 10.x, where a thread has whole chunks, nothing goes between threads.
    """
    norm = get_transform("h32").norm
    plain, kernel = (compiled(capability, tile, block, False, True, n) for n in (None, norm))
    code = disassemble.disassemble(kernel.asm["cubin"])
    loop = INSTRUCTIONS[capability[0], block]
    assert code.count(loop) == disassemble.disassemble(plain.asm["cubin"]).count(loop) > 0
    assert code.count("LDL") == code.count("STL") == 0
    assert kernel.metadata.shared <= plain.metadata.shared
    ptx = kernel.asm["ptx"]
    own = tile.m * tile.n // (32 * tile.warps)  # of the result, a thread
    # A few are done twice, where two that go together are wanted in two places.
    added = sum(1 + bool(two) for two in re.findall(r"\b(?:add|sub)\.f32(x2)?", ptx))
    assert 5 * own <= added <= 5.2 * own
    assert len(re.findall(r"cvt\.rn\.bf16\.f32", ptx)) == own
    assert len(re.findall(r"cvt\.rn\.bf16x2\.f32", ptx)) == own // 2
    by_bytes = re.compile(r"ld\.global\S*\.(?:b8|b16)")
    assert len(by_bytes.findall(ptx)) == len(by_bytes.findall(plain.asm["ptx"]))
    if capability[0] == 10:
        assert code.count("SHFL") == 0


@pytest.mark.parametrize("block", [16, 32])
def test_scales_of_128_rows_go_to_tensor_memory_as_they_are(block) -> None:
    large, small = gemm._TILES[10]
    ptx = compiled((10, 0), small, block).asm["ptx"]
    assert ptx.count("tcgen05.cp") and not re.search(r"tcgen05\.st\S*\.x(8|16)\.b32", ptx)
    assert compiled((10, 0), large, block).asm["ptx"].count("tcgen05.cp")


@pytest.mark.parametrize("major", gemm._TILES)
def test_a_contraction_that_ends_within_a_tile(major) -> None:
    kernel = compiled((major, 0), gemm._TILES[major][0], 16, biased=False, whole=False)
    code = disassemble.disassemble(kernel.asm["cubin"])
    assert code.count(INSTRUCTIONS[major, 16]) and code.count("LDL") == 0
    assert kernel.metadata.shared <= SHARED[major]


@pytest.mark.parametrize("major, multiprocessors", [(10, 148), (12, 170), (12, 48)])
def test_which_tile(major, multiprocessors) -> None:
    large, small = gemm._TILES[major]
    for m, n in ((8192, 4096), (4096, 14336), (16384, 128256)):
        assert gemm.choose_tile(major, m, n, multiprocessors) == large
    for m, n in ((1, 4096), (130, 1024), (512, 512)):
        assert gemm.choose_tile(major, m, n, multiprocessors) == small
    area = multiprocessors * large.m * large.n
    assert gemm.choose_tile(major, 128, area // 128, multiprocessors) == large
    assert gemm.choose_tile(major, 128, area // 128 - large.n, multiprocessors) == small


# Each tile and format of scales for groups of rows; each tile once where groups are contracted.
GROUPED = [(*case, "rows_in_groups") for case in CASES if case[0][1] == 0]
GROUPED += [(*case, "contraction_in_groups") for case in EPILOGUES]


@pytest.mark.parametrize("capability, tile, block, by", GROUPED)
def test_grouped_cross_compiled(capability, tile, block, by) -> None:
    """As above. Scales are plain, 4 to 16 of them adjacent, and are also copied ahead, so nothing
    in the loop waits for memory. (12.x reads e8m0 scales, 4 per row, without shared memory.)"""
    kernel = compiled_grouped(capability, tile, block, by)
    code = disassemble.disassemble(kernel.asm["cubin"])
    assert code.count(INSTRUCTIONS[capability[0], block])
    assert code.count("LDL") == code.count("STL") == 0
    assert kernel.metadata.shared <= SHARED[capability[0]]
    ptx = kernel.asm["ptx"]
    copies = Counter(re.findall(r"cp\.async\.c[ag]\.shared\.global .*?, 0x(\w+)", ptx))
    a_thread = (tile.m + tile.n) * tile.k // 2 // 16 // (32 * tile.warps)
    assert copies["10"] >= a_thread * (tile.stages - 1)
    scales = (tile.m + tile.n) * tile.k // block
    rest = sum(int(width, 16) * n for width, n in copies.items()) - 16 * a_thread * tile.stages
    if (capability[0], block) != (12, 32):
        assert 32 * tile.warps * rest >= scales * tile.stages
        assert not re.search(r"ld\.global\S*\.(b8|b16|u8|u16)", ptx)


@pytest.mark.parametrize("major", gemm._TILES)
@pytest.mark.parametrize("height, whole", [(16, True), (1, False)])
def test_grouped_of_square_blocks_and_ends_within_a_tile(major, height, whole) -> None:
    kernel = compiled_grouped(
        (major, 0), gemm._TILES[major][0], 16, "rows_in_groups", height, whole
    )
    code = disassemble.disassemble(kernel.asm["cubin"])
    assert code.count(INSTRUCTIONS[major, 16]) and code.count("LDL") == 0
    assert kernel.metadata.shared <= SHARED[major]


def test_interpreted() -> None:
    root, environment = Path(__file__).parents[3], {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.support.emulation.triton_gemm"]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("20 products", "13 products, rotated back,", "22 grouped products"):
        assert f"{said} agree with the reference" in done.stdout
