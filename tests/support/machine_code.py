# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels whose machine code the tests read, and what it counted: a file for each NVRTC.

    python -m tests.support.machine_code

compiles and disassembles them with the NVRTC of this environment, without a GPU, and writes
`tests/runtime_kernels/cuda/machine_code/nvrtc_VERSION.json`: for each kernel and architecture the
loads and stores of spilled registers, the instructions per element of the loop over tiles (of a
quantizer that computes its operand, which has loops inside that one, the length of all of it), the
conversions to and from FP4, the registers of descriptors, and a hash of the cubin. Run it after a
change of a kernel and for another NVRTC, and read the difference as code: it is the change.

    python -m tests.support.machine_code --check

writes nothing. It names the kernels whose cubins are not those recorded, by their hashes, and exits
with 1 if there are any. After a refactoring there are none.

The file also holds a digest of each kernel's sources without comments, defines and options. While
it is the same, tests take the counts from the file: the same NVRTC makes the same code. Otherwise
they compile and disassemble the kernel, a second for each architecture.
"""

from __future__ import annotations

import hashlib
import json
import os
from argparse import ArgumentParser
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from q2compile.runtime_kernels.cuda.gemm.swizzle import swizzle_launch
from q2compile.runtime_kernels.cuda.jit import limits, nvrtc
from q2compile.runtime_kernels.cuda.jit.launch import Launch
from q2compile.runtime_kernels.cuda.other_ops import (
    dequantize_launch,
    transpose_launch,
    unrotate_launch,
)
from q2compile.runtime_kernels.cuda.quantize.align_scales import align_launch
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import (
    ROUNDED,
    ROUNDED_SWIZZLED,
    SOURCES,
    RotatingKernel,
    batched_launch,
    rotate_launch,
)
from q2compile.runtime_kernels.cuda.quantize.transposable import code_launches, square_launch
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SWIZZLED, get_scheme
from q2compile.runtime_kernels.numerics.transforms import get_transform
from tests.support import disassemble
from tests.support.prologue_expressions import GATED, SWIGLU, fused_launch

# The counts of a kernel for an architecture:
#   spills: loads and stores of local memory
#   instructions: per element, of the loop over tiles (quantizers)
#   loop: instructions of the loop over tiles (quantizers that compute their operand)
#   to_fp4, from_fp4: conversion instructions (Blackwell)
#   descriptors: uniform registers that hold descriptors of memory accesses (sm_90 and later)
#   cubin: hash of all that NVRTC made
Counts = dict[str, Any]
FOLDER = Path(__file__).parents[1] / "runtime_kernels" / "cuda" / "machine_code"
# A count may exceed the recorded one by this. The same NVRTC makes the same code of the same source
# on every machine, so this is room for changes that need no new file: 0.2 of the 9
# instructions per element of the shortest kernel; where there are spills, 2 of 3000 instructions.
INSTRUCTIONS_TOLERANCE, SPILLS_TOLERANCE = 1.02, 2

AMPERE = ("sm_80", "sm_86", "sm_87", "sm_89")  # and Ada, the last
BLACKWELL = [a for a in limits.ARCHITECTURES.values() if a not in (*AMPERE, "sm_90a")]
BF16, FP16, FP32 = (SOURCES[d] for d in (torch.bfloat16, torch.float16, torch.float32))
NVFP4, MXFP4 = SOURCES["nvfp4"], SOURCES["mxfp4"]
ROW, COL, BOTH = (True, False), (False, True), (True, True)
EDEN, SR = "nvfp4_ms_eden_pow2", "nvfp4_sr_pow2"


def rotate(
    source: int,
    transform: str,
    scheme: str,
    directions: tuple,
    amax: bool = False,
    overlaps: bool = False,
    **options,
) -> Launch:
    how = get_transform(transform), get_scheme(scheme), *directions
    return rotate_launch(RotatingKernel(source, *how, **options), amax, overlaps)


def align(scheme: str, interleaved: bool) -> Launch:
    return align_launch(get_scheme(scheme), interleaved)


# The kernels of the backward passes of the recipes.
HOT = {
    "rht_quantize_row": rotate(BF16, "rht128", EDEN, ROW),
    "rht_quantize_col": rotate(BF16, "rht128", EDEN, COL),
    "rht_quantize_both": rotate(BF16, "rht128", EDEN, BOTH),
    "requantize": rotate(NVFP4, "rht128", EDEN, COL),
    "tetrajet2 both": rotate(BF16, "rht128", SR, BOTH),
    "tetrajet2 requantize": rotate(NVFP4, "rht128", SR, COL),
    "nvfp4 dgrad": rotate(BF16, "none", SR, ROW),
    "quartet2 fprop": rotate(BF16, "none", "nvfp4_46_pow2", ROW),
    "nvfp4 wgrad": rotate(BF16, "rht16", SR, COL),
    "nvfp4 wgrad x": rotate(BF16, "rht16", "nvfp4_pow2", COL),
    "nvfp4 both": rotate(BF16, "rht16", SR, BOTH, rotates_rows=False),
    "nvfp4 x both": rotate(BF16, "rht16", "nvfp4_pow2", BOTH, rotates_rows=False),
    "mxfp4 both": rotate(BF16, "rht64", "mxfp4_sr", BOTH),
    "mxfp4 col": rotate(BF16, "rht64", "mxfp4_sr", COL),
    "quartet fprop": rotate(BF16, "h32", "mxfp4_quest", ROW),
    "quartet both": rotate(BF16, "rht32", "mxfp4_rtn34", BOTH),
    "quartet requantize": rotate(MXFP4, "rht32", "mxfp4_rtn34", COL),
    "mxfp4_2d dgrad": rotate(BF16, "none", "mxfp4_rceil_sr", ROW),
    "mxfp4_2d wgrad": rotate(BF16, "h32", "mxfp4_rceil", COL),
    "exact both": rotate(BF16, "rht128", "nvfp4_sr", BOTH),
    "amax both": rotate(BF16, "rht128", "nvfp4_sr", BOTH, amax=True),
    "mxfp4 both swizzled": rotate(BF16, "rht64", "mxfp4_sr" + SWIZZLED, BOTH),
    "quartet both swizzled": rotate(BF16, "rht32", "mxfp4_rtn34" + SWIZZLED, BOTH),
    "exact both swizzled": rotate(BF16, "rht128", "nvfp4_sr" + SWIZZLED, BOTH),
    "exact col swizzled": rotate(BF16, "rht16", "nvfp4_sr" + SWIZZLED, COL),
    "requantize swizzled": rotate(SOURCES["nvfp4" + SWIZZLED], "rht128", EDEN, COL),
    "by scales": rotate(ROUNDED, "rht128", EDEN, COL),
    "by scales swizzled": rotate(ROUNDED_SWIZZLED, "rht128", EDEN, COL),
    "groups both": rotate(BF16, "rht128", EDEN, BOTH, grouped=True),
    "groups col": rotate(BF16, "rht128", EDEN, COL, grouped=True),
    "groups requantize": rotate(NVFP4, "rht128", EDEN, COL, grouped=True),
    "nvfp4 groups col": rotate(BF16, "rht16", SR, COL, grouped=True),
}
OTHERS = {
    "float16": rotate(FP16, "rht64", EDEN, BOTH),
    "float32": rotate(FP32, "rht128", EDEN, BOTH),
    "unaligned": rotate(BF16, "rht128", EDEN, BOTH, vectors=False),
    "no signs": rotate(BF16, "h32", EDEN, BOTH),
    "no rotation": rotate(NVFP4, "none", EDEN, COL),
    "values both": rotate(BF16, "rht128", EDEN + DEQUANTIZED, BOTH),
    "values requantize": rotate(NVFP4, "rht128", EDEN + DEQUANTIZED, COL),
    "values by scales": rotate(ROUNDED, "rht128", EDEN + DEQUANTIZED, COL),
    "values by scales unaligned": rotate(ROUNDED, "rht128", EDEN + DEQUANTIZED, COL, vectors=False),
    "values groups both": rotate(BF16, "rht128", EDEN + DEQUANTIZED, BOTH, grouped=True),
    "values groups requantize": rotate(NVFP4, "rht128", EDEN + DEQUANTIZED, COL, grouped=True),
    "values sr both": rotate(BF16, "rht128", SR + DEQUANTIZED, BOTH),
    "values nvfp4 both": rotate(BF16, "rht16", SR + DEQUANTIZED, BOTH, rotates_rows=False),
    "values sr requantize": rotate(NVFP4, "rht128", SR + DEQUANTIZED, COL),
    "values mx requantize": rotate(MXFP4, "rht32", "mxfp4_rtn34" + DEQUANTIZED, COL),
    "values mx both": rotate(BF16, "rht64", "mxfp4_sr" + DEQUANTIZED, BOTH),
    "align eden": align(EDEN, True),
    "align eden exact": align("nvfp4_ms_eden", False),
    "align sr": align(SR, False),
    "align mx": align("mxfp4_sr", False),
    "align swizzled": align(EDEN + SWIZZLED, True),
    "align swizzled of any rows": align(EDEN + SWIZZLED, False),
    "quartet requantize swizzled": rotate(
        SOURCES["mxfp4" + SWIZZLED], "rht32", "mxfp4_rtn34" + SWIZZLED, COL
    ),
    "finalize eden": align(EDEN + DEQUANTIZED, True),
    "finalize sr": align(SR + DEQUANTIZED, False),
    "dequantize bf16": dequantize_launch(torch.bfloat16, False, True),
    "dequantize part": dequantize_launch(torch.float32, False, False),
    "dequantize mx": dequantize_launch(torch.float16, True, False),
    "swizzle": swizzle_launch(),
    "transpose": transpose_launch(16, True),
    "transpose 32": transpose_launch(32, True),
    "transposable largest": code_launches(torch.bfloat16, True, False, has_amax=False)[0],
    "transposable rows": code_launches(torch.bfloat16, True, False, has_amax=False)[1],
    "transposable both": code_launches(torch.bfloat16, True, True)[0],
    "transposable codes": code_launches(torch.float8_e4m3fn, False, True)[0],
    "transposable groups": code_launches(torch.bfloat16, True, True, grouped=True)[0],
    "transposable codes groups": code_launches(torch.float8_e4m3fn, False, True, grouped=True)[0],
    "transposable squares": square_launch(torch.bfloat16),
    "masked unrotate": unrotate_launch(torch.bfloat16),
    "masked unrotate fp32": unrotate_launch(torch.float32),
}


# The same for several operands, whose structs are chosen from.
SEVERAL = {
    f"{name}, several": batched_launch({**HOT, **OTHERS}[name])
    for name in (
        *("quartet2 fprop", "requantize", "rht_quantize_both", "requantize swizzled"),
        *("tetrajet2 requantize", "nvfp4 dgrad", "nvfp4 wgrad", "nvfp4 wgrad x", "quartet fprop"),
        *("nvfp4 both", "nvfp4 x both"),
        *("quartet requantize", "quartet requantize swizzled", "mxfp4 col", "groups requantize"),
        *("values both", "values requantize", "values groups requantize"),
        *("values sr requantize", "values mx requantize", "by scales", "values by scales"),
    )
}
OTHERS |= SEVERAL

# Which are compiled for which. Values are not written where there are fp4 tensor cores. Below sm_90
# the sources differ in two places, the conversions and the overlap of launches: a sample of the
# kernels, and a smaller one for 8.6 and 8.7, which compile what 8.0 does, and 8.9.
SAMPLE = (
    *("values both", "values requantize", "values sr both", "finalize eden", "rht_quantize_both"),
    *("requantize", "tetrajet2 both", "quartet2 fprop", "exact both", "align sr"),
    *("float32", "dequantize bf16", "transpose", "values groups both", "values groups requantize"),
    "values by scales",
    *("quartet2 fprop, several", "values both, several", "values requantize, several"),
)
CASES = [
    (name, architecture)
    for name, architecture in product([*HOT, *OTHERS], ["sm_90a", *BLACKWELL])
    if not (name.startswith("values") and architecture in BLACKWELL)
    and not (name in SEVERAL and architecture in ("sm_103a", "sm_121a"))
]
CASES += [*product(SAMPLE, ["sm_80"]), *product(SAMPLE[:2], ["sm_86", "sm_87", "sm_89"])]


# ---- dbias ---------------------------------------------------------------------------------------

# Recipe -> scheme, transform, whether that is of rows as well.
DBIAS = {
    "quartet2": (EDEN, "rht128", True),
    "tetrajet2": (SR, "rht128", True),
    "nvfp4": (SR, "rht16", False),
    "mxfp4": ("mxfp4_sr", "rht64", True),
    "quartet": ("mxfp4_rtn34", "rht32", True),
}
DBIAS_CASES = [
    *(("quartet2", architecture) for architecture in ("sm_80", "sm_89", "sm_90a", *BLACKWELL)),
    *[("tetrajet2", "sm_90a"), ("tetrajet2", "sm_120a"), ("nvfp4", "sm_90a"), ("nvfp4", "sm_100a")],
    *[("mxfp4", "sm_100a"), ("mxfp4", "sm_120a"), ("quartet", "sm_90a"), ("quartet", "sm_100a")],
]


def dbias_scheme(recipe: str, architecture: str) -> str:
    """Dequantized operands where GEMMs are emulated, codes on a Blackwell."""
    suffix = "" if recipe == "quartet2" and architecture in BLACKWELL else SWIZZLED
    return DBIAS[recipe][0] + (suffix if architecture in BLACKWELL else DEQUANTIZED)


def dbias(recipe: str, architecture: str) -> Launch:
    _, transform, rotates_rows = DBIAS[recipe]
    spec = get_scheme(dbias_scheme(recipe, architecture))
    how = {"dbias": True, "rotates_rows": rotates_rows}
    kernel = RotatingKernel(BF16, get_transform(transform), spec, True, True, **how)
    return rotate_launch(kernel)


# ---- prologue fusion -----------------------------------------------------------------------------

_BACKWARD = {
    "eden": (EDEN, BOTH),
    "eden dequantized": (EDEN + DEQUANTIZED, BOTH),
    "sr col": (SR, COL),
    "sr dequantized": (SR + DEQUANTIZED, BOTH),
}
FUSED = {
    f"fused {name} {kind}": fused_launch(expression, *_BACKWARD[kind])
    for (name, expression), kind in product((("swiglu", SWIGLU), ("gated", GATED)), _BACKWARD)
}
# On sm_90a all of them, elsewhere those with two results from one read.
FUSED_CASES = [
    (name, architecture)
    for name, architecture in product(FUSED, limits.ARCHITECTURES.values())
    if architecture == "sm_90a" or name == "fused gated eden"
]

# ---- counts --------------------------------------------------------------------------------------


@cache
def disassembled(launch: Launch, architecture: str) -> disassemble.Code:
    """Raises FileNotFoundError without nvdisasm."""
    return disassemble.disassemble(nvrtc.cubin(launch.variant, architecture))


def spills(code: disassemble.Code) -> int:
    """Loads and stores of local memory: spilled registers, and arrays that are indexed."""
    return code.count("LDL") + code.count("STL")


def instructions(code: disassemble.Code) -> float:
    """Per element, of the loop over tiles; a thread has 64 elements in one pass of it."""
    return round(sum(code.hot_loop().values()) / 64, 2)


def cubin_hash(launch: Launch, architecture: str) -> str:
    return hashlib.sha256(nvrtc.cubin(launch.variant, architecture)).hexdigest()[:8]


def loop(code: disassemble.Code) -> int:
    """Instructions of the loop over tiles and of the loops inside it, once each."""
    return max(end + 1 - first for first, end in code.loops)


@cache
def everything() -> dict[tuple[str, str], Launch]:
    """(name, architecture) -> kernel, all that are recorded."""
    kernels = {**HOT, **OTHERS, **FUSED}
    cases = [*CASES, *FUSED_CASES]
    made = {(name, architecture): kernels[name] for name, architecture in cases}
    dbiases = {(f"dbias {case[0]}", case[1]): dbias(*case) for case in DBIAS_CASES}
    return {**made, **dbiases}


def file(version: tuple[int, int]) -> Path:
    major, minor = version
    return FOLDER / f"nvrtc_{major}.{minor}.json"


@cache
def _content(version: tuple[int, int]) -> dict[str, Any]:
    path = file(version)
    if not path.exists():
        raise LookupError(
            f"{path.name}: nothing is recorded for this NVRTC. Run `python -m "
            "tests.support.machine_code`, compare the file with those of other versions, commit it."
        )
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def recorded(version: tuple[int, int] | None = None) -> dict[str, dict[str, Counts]]:
    """Kernel -> architecture -> counts, by the NVRTC of this environment or another one."""
    kernels: dict[str, dict[str, Counts]] = _content(version or nvrtc.version())["kernels"]
    return kernels


@cache
def digests() -> dict[str, str]:
    """Kernel -> hash of all that determines its machine code."""
    found: dict[str, str] = {}
    for (name, architecture), launch in everything().items():
        found[name] = found.get(name, "") + digest(launch.variant, architecture)
    return {name: hashlib.sha256(text.encode()).hexdigest()[:8] for name, text in found.items()}


def digest(variant: nvrtc.KernelVariant, architecture: str) -> str:
    """Hash of all that NVRTC compiles, without comments, and of its options."""
    files = (
        variant.file,
        *(f"include/{path.name}" for path in sorted(nvrtc.HEADERS.glob("*.cuh"))),
    )
    parts = [_without_comments((nvrtc.SOURCES / file).read_text()) for file in files]
    parts += [_without_comments(text) for _, text in variant.headers]
    return hashlib.sha256(
        "\0".join((*parts, *nvrtc.compiler_options(variant, architecture))).encode()
    ).hexdigest()


@cache
def _without_comments(source: str) -> str:
    lines = (line.partition("//")[0].rstrip() for line in source.splitlines())
    return "\n".join(line for line in lines if line)


def unchanged(name: str) -> bool:
    """Whether the counts recorded of a kernel are those of today's sources."""
    return _content(nvrtc.version()).get("digests", {}).get(name) == digests()[name]


def counted(launch: Launch, architecture: str) -> Counts:
    """Compiled and counted now.

    Raises:
        FileNotFoundError: nvdisasm is not installed.
    """
    code = disassembled(launch, architecture)
    assert code.names[-1] == "NOP" and code.count("EXIT")
    found: Counts = {"cubin": cubin_hash(launch, architecture), "spills": spills(code)}
    if launch in FUSED.values():
        found["loop"] = loop(code)
    elif launch.variant.entry == "rotate_quantize":
        found["instructions"] = instructions(code)
    if architecture in BLACKWELL:
        found["to_fp4"] = code.count("F2FP.SATFINITE.E2M1")
        found["from_fp4"] = code.count("F2FP.F16.E2M1.UNPACK_B")
    if architecture not in AMPERE:
        found["descriptors"] = sorted(code.descriptors)
    return found


@cache
def counts(name: str, architecture: str) -> Counts:
    """The counts of today's sources: from the file if it is of them, otherwise counted now."""
    if unchanged(name):
        return recorded()[name][architecture]
    return counted(everything()[name, architecture], architecture)


def regressions(name: str, architecture: str) -> dict[str, float]:
    """Counts that exceed the recorded ones by more than the tolerance; none if all is well."""
    known, now = recorded()[name][architecture], counts(name, architecture)
    most = {
        each: known[each] * INSTRUCTIONS_TOLERANCE
        for each in ("instructions", "loop")
        if each in known
    }
    most["spills"] = known["spills"] + (SPILLS_TOLERANCE if known["spills"] else 0)
    return {each: now[each] for each in most if now[each] > most[each]}


def _write(only: str) -> None:
    launches = {key: launch for key, launch in everything().items() if only in key[0]}
    found = _of_each(counted, launches)
    # Counts of the others stay, with the digests of the sources that they are of.
    others = {name for name, _ in everything() if only not in name}
    kernels = {name: recorded()[name] for name in others}
    known = _content(nvrtc.version()).get("digests", {}) if others else {}
    made_of = {**digests(), **{name: known.get(name, "") for name in others}}
    for (name, architecture), each in found.items():
        kernels.setdefault(name, {})[architecture] = each
    names = dict.fromkeys(name for name, _ in everything())
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(kernels[name])}" for name in names)
    FOLDER.mkdir(exist_ok=True)
    header = {"command": "python -m tests.support.machine_code", "digests": made_of}
    head = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in header.items())
    path = file(nvrtc.version())
    path.write_text(f'{{\n{head},\n "kernels": {{\n{lines}\n }}\n}}\n')
    print(f"{path}: {len(launches)} kernels")


def differing(only: str = "") -> list[tuple[str, str]]:
    """(name, architecture) of the kernels whose cubins, made now, are not those recorded. only:
    those with this in their names."""
    launches = {key: launch for key, launch in everything().items() if only in key[0]}
    made = _of_each(cubin_hash, launches)
    return [key for key in made if made[key] != recorded()[key[0]][key[1]]["cubin"]]


def _of_each(
    function: Callable[[Launch, str], Any], launches: dict[tuple[str, str], Launch]
) -> dict[tuple[str, str], Any]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(
            zip(launches, pool.map(lambda k: function(launches[k], k[1]), launches), strict=True)
        )


def main() -> int:
    parser = ArgumentParser(description="Writes the counts of this NVRTC.")
    parser.add_argument("--check", action="store_true", help="compare hashes, write nothing")
    parser.add_argument(
        "--only", default="", help="of kernels with this in their names; others stay"
    )
    arguments = parser.parse_args()
    if not arguments.check:
        _write(arguments.only)
        return 0
    found = differing(arguments.only)
    for name, architecture in found:
        print(f"{architecture} {name}")
    print(f"{len(found)} cubins are not those recorded")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
