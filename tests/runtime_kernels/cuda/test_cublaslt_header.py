# SPDX-License-Identifier: Apache-2.0
"""The constants and structs of the ctypes code that calls cuBLASLt, and those of its stand-in on a
CPU, against the cublasLt.h of an installed nvidia-cublas."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from q2compile.runtime_kernels.cuda.gemm import cublaslt
from tests.support.cublaslt import SOURCE

DESC, PREFERENCE, SCALE = (
    "CUBLASLT_MATMUL_DESC_",
    "CUBLASLT_MATMUL_PREF_",
    "CUBLASLT_MATMUL_MATRIX_",
)
CONFIG, STATUS = "CUBLASLT_ALGO_CONFIG_", "CUBLAS_STATUS_"
CONSTANTS = {
    "CUBLAS_COMPUTE_32F": cublaslt._COMPUTE_32F,
    "CUBLAS_OP_T": cublaslt._TRANSPOSE,
    "CUBLASLT_POINTER_MODE_DEVICE": cublaslt._POINTERS_ON_DEVICE,
    "CUBLASLT_EPILOGUE_BIAS": cublaslt._EPILOGUE_BIAS,
    DESC + "POINTER_MODE": cublaslt._POINTER_MODE,
    DESC + "TRANSA": cublaslt._TRANSA,
    DESC + "EPILOGUE": cublaslt._EPILOGUE,
    DESC + "BIAS_POINTER": cublaslt._BIAS_POINTER,
    DESC + "BIAS_DATA_TYPE": cublaslt._BIAS_TYPE,
    DESC + "A_SCALE_POINTER": cublaslt._A_SCALE,
    DESC + "B_SCALE_POINTER": cublaslt._B_SCALE,
    DESC + "A_SCALE_MODE": cublaslt._A_SCALE_MODE,
    DESC + "B_SCALE_MODE": cublaslt._B_SCALE_MODE,
    PREFERENCE + "MAX_WORKSPACE_BYTES": cublaslt._WORKSPACE_BYTES,
    **{
        f"{PREFERENCE}MIN_ALIGNMENT_{name}_BYTES": number
        for name, number in zip("ABCD", cublaslt._ALIGNMENTS, strict=True)
    },
    SCALE + "SCALE_SCALAR_32F": cublaslt.SCALES_ARE_ONE_FP32,
    SCALE + "SCALE_VEC16_UE4M3": cublaslt.SCALES_OF_16,
    "CUDA_R_32F": cublaslt._TYPES[torch.float32],
    "CUDA_R_16F": cublaslt._TYPES[torch.float16],
    "CUDA_R_16BF": cublaslt._TYPES[torch.bfloat16],
    "CUDA_R_8F_E4M3": cublaslt.E4M3,
    "CUDA_R_4F_E2M1": cublaslt.E2M1,
    **{STATUS + name: number for number, name in cublaslt._STATUS.items()},
}
# The fields of Algorithm, in order.
ATTRIBUTES = ("ID", "TILE_ID", "SPLITK_NUM", "REDUCTION_SCHEME", "CTA_SWIZZLING", "CUSTOM_OPTION")
ATTRIBUTES += ("STAGES_ID", "INNER_SHAPE_ID", "CLUSTER_SHAPE_ID")
CONSTANTS |= {CONFIG + name: number for number, name in enumerate(ATTRIBUTES)}
FIELDS = {
    "algorithm": "algo",
    "workspace": "workspaceSize",
    "state": "state",
    "waves": "wavesCount",
    "reserved": "reserved",
}
RESULT = "cublasLtMatmulHeuristicResult_t"
# Headers of other packages that cublas_api.h includes, and no constant or struct above needs.
STUBS = {
    "driver_types.h": "typedef void* cudaStream_t;",
    "cuComplex.h": "typedef struct { float x, y; } cuComplex;"
    "typedef struct { double x, y; } cuDoubleComplex;",
    "cuda_fp16.h": "typedef short __half;",
    "cuda_bf16.h": "",
}


def constants_of_the_fake() -> dict[str, int]:
    return {name: int(n) for name, n in re.findall(r"\b(CU\w+) = (\d+)", SOURCE.read_text())}


@pytest.fixture(scope="module")
def header(tmp_path_factory) -> dict[str, int]:
    """Values by cublasLt.h of all names, and of "sizeof" and the fields of its result struct."""
    folders = [f for path in sys.path for f in Path(path).glob("nvidia/*/include")]
    if not any((folder / "cublasLt.h").exists() for folder in folders):
        pytest.skip("needs cublasLt.h: pip install nvidia-cublas nvidia-cuda-runtime")
    here = tmp_path_factory.mktemp("header")
    for name, text in STUBS.items():
        (here / name).write_text(text)
    names = {name: name for name in {*CONSTANTS, *constants_of_the_fake()}}
    names |= {f"offset of {f}": f"offsetof({RESULT}, {f})" for f in FIELDS.values()}
    names |= {f"size of {f}": f"sizeof((({RESULT}*)0)->{f})" for f in FIELDS.values()}
    names["sizeof"] = f"sizeof({RESULT})"
    prints = "".join(f'printf("{n}=%lld\\n", (long long)({v}));\n' for n, v in names.items())
    source = f"#include <cublasLt.h>\n#include <stdio.h>\nint main() {{\n{prints}}}\n"
    (here / "main.c").write_text(source)
    includes = [f"-I{folder}" for folder in (here, *folders)]
    subprocess.run(["gcc", *includes, "main.c", "-o", "main"], cwd=here, check=True)
    done = subprocess.run([here / "main"], capture_output=True, text=True, check=True)
    return {name: int(n) for name, n in (line.split("=") for line in done.stdout.splitlines())}


def test_constants(header) -> None:
    assert {name: header[name] for name in CONSTANTS} == CONSTANTS


def test_the_struct_of_results(header) -> None:
    struct = cublaslt._Heuristic
    assert ctypes.sizeof(struct) == header["sizeof"]
    for ours, theirs in FIELDS.items():
        field = getattr(struct, ours)
        assert (field.offset, field.size) == (
            header[f"offset of {theirs}"],
            header[f"size of {theirs}"],
        )


def test_constants_of_the_fake(header) -> None:
    found = constants_of_the_fake()
    assert len(found) > 25 and {name: header[name] for name in found} == found


def test_every_constant_of_the_ctypes_code_is_compared() -> None:
    """By value, for those that are numbers of cuBLAS and not of this project."""
    own = {"_MOST_WORKSPACE", "_ASKED", "_MOST_PLANS"}
    numbers = {
        name: value
        for name, value in vars(cublaslt).items()
        if name.isupper() and type(value) is int and name not in own | {"ALIGNMENT"}
    }
    assert len(numbers) >= 17 and set(numbers.values()) <= set(CONSTANTS.values())
    assert len(ATTRIBUTES) == len(cublaslt.Algorithm._fields)
    assert list(FIELDS) == [name for name, _ in cublaslt._Heuristic._fields_]
