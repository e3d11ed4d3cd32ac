"""The Triton fp4 GEMM without a GPU: cross-compiled for Blackwell, its machine code has the fp4
tensor-core instructions; and run by Triton's interpreter, it reads and writes the right places."""

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

from q2compile.runtime_kernels.cuda.gemm import triton_kernel as gemm  # noqa: E402
from q2compile.runtime_kernels.cuda.gemm.triton_fp4 import (  # noqa: E402
    _DOT_SCALED,
    triton_version,
)
from q2compile.runtime_kernels.cuda.jit import disassemble  # noqa: E402

POINTERS = {
    "a": "*u8",
    "b": "*u8",
    "a_scales": "*fp8e4nv",
    "b_scales": "*fp8e4nv",
    "a_global": "*fp32",
    "b_global": "*fp32",
    "bias": "*bf16",
    "out": "*bf16",
}
SIZES = {"M": "i32", "N": "i32", "half": "i32"}
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
    c for c in ((10, 0), (10, 3), (12, 0), (12, 1)) if triton_version() >= _DOT_SCALED[c]
]


@cache
def compiled(capability, tile, block, biased=True, whole=True):
    """For pointers that are multiples of 16, and so many bytes in a row."""
    constants = {
        "BLOCK": block,
        "BIASED": biased,
        "WHOLE": whole,
        "GROUP": 8,
        "TILE_M": tile.m,
        "TILE_N": tile.n,
        "TILE_K": tile.k,
    }
    exponents = {"a_scales": "*u8", "b_scales": "*u8"} if block == 32 else {}
    signature = {**POINTERS, **exponents, **SIZES, **dict.fromkeys(constants, "constexpr")}
    names = list(signature)
    wide = ("a", "b", "a_scales", "b_scales", "bias", "out", "M", "N", "half")
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in wide}
    major, minor = capability
    return triton.compile(
        ASTSource(gemm._gemm_fp4, signature, constants, attributes),
        GPUTarget("cuda", 10 * major + minor, 32),
        {"num_warps": tile.warps, "num_stages": tile.stages},
    )


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


def test_interpreted() -> None:
    script = Path(__file__).parents[2] / "support" / "emulation" / "triton_gemm.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "160 products agree with the reference" in done.stdout
