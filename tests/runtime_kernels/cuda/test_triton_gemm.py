"""The Triton fp4 GEMM without a GPU: cross-compiled for Blackwell, its machine code has the fp4
tensor-core instructions; and run by Triton's interpreter, it reads and writes the right places."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from q2compile.runtime_kernels.cuda.gemm import triton_kernel as gemm  # noqa: E402
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
SIZES = {"M": "i32", "N": "i32", "K": "i32"}
CONSTANTS = {
    "BLOCK": 16,
    "A_ROWS": 1,
    "B_ROWS": 1,
    "BIASED": False,
    "TILE": gemm.TILE,
    "GROUP": 8,
}


@pytest.mark.parametrize(
    "capability, warps, instruction",
    [(100, 4, "UTCOMMA.4X"), (103, 4, "UTCOMMA"), (120, 8, "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X")],
)
def test_cross_compiled(capability, warps, instruction) -> None:
    signature = {**POINTERS, **SIZES, **dict.fromkeys(CONSTANTS, "constexpr")}
    aligned = {(i,): [["tt.divisibility", 16]] for i in (0, 1, 2, 3, 7, 8, 9, 10)}
    source = ASTSource(gemm._gemm_fp4, signature, CONSTANTS, aligned)
    kernel = triton.compile(source, GPUTarget("cuda", capability, 32), {"num_warps": warps})
    code = disassemble.disassemble(kernel.asm["cubin"])
    assert code.count(instruction)
    assert code.count("LDL") == code.count("STL") == 0


def test_interpreted() -> None:
    script = Path(__file__).parents[2] / "support" / "emulation" / "triton_gemm.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 products agree with the reference" in done.stdout
