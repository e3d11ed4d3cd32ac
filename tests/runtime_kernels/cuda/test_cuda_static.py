# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels without a GPU: they compile for every architecture, their machine code has the
instructions it should have and no spills, and the registry has each where it serves."""

from __future__ import annotations

import dataclasses
import os
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch

from q2compile.recipes.published import RECIPES
from q2compile.recipes.resolve import resolve
from q2compile.runtime_kernels.choice import kernels
from q2compile.runtime_kernels.cuda.jit import limits, nvrtc
from q2compile.runtime_kernels.cuda.jit.launch import Launch
from q2compile.runtime_kernels.cuda.quantize import quantizers
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import (
    ROUNDED,
    batched_launch,
    not_served,
    shared_memory,
)
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, get_scheme
from q2compile.runtime_kernels.registry import select
from q2compile.tools import cli
from tests.support import disassemble, machine_code, quantizer_calls
from tests.support.machine_code import (
    AMPERE,
    BF16,
    BLACKWELL,
    BOTH,
    CASES,
    COL,
    EDEN,
    FP32,
    HOT,
    NVFP4,
    OTHERS,
    ROW,
    SEVERAL,
    SR,
    align,
    regressions,
    rotate,
)

KERNELS = {**HOT, **OTHERS}

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings", exc_type=ImportError)


def disassembled(launch: Launch, architecture: str) -> disassemble.Code:
    try:
        return machine_code.disassembled(launch, architecture)
    except FileNotFoundError as error:
        pytest.skip(str(error))


def counts(name: str, architecture: str) -> machine_code.Counts:
    try:
        return machine_code.counts(name, architecture)
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", autouse=True)
def cache(request, tmp_path_factory) -> None:
    """A cache of this module's own, so that it compiles what it tests, once. Kernels whose sources
    changed since their counts were recorded are compiled at once, as far as tests want them, which
    may be a few only (`make test-internals`)."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(os.cpu_count()) as pool:
        patch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path_factory.mktemp("cubins")))
        asked = [getattr(item, "callspec", None) for item in request.session.items]
        names = {spec.params.get("name") for spec in asked if spec}
        wanted = [c for c in CASES if c[0] in names and not machine_code.unchanged(c[0])]
        list(pool.map(lambda case: nvrtc.cubin(KERNELS[case[0]].variant, case[1]), wanted))
        yield


def test_every_architecture_is_compiled_for() -> None:
    assert {architecture for _, architecture in CASES} == set(limits.ARCHITECTURES.values())


ARCHITECTURES = {name: [a for other, a in CASES if other == name] for name, _ in CASES}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_spills_and_instructions_are_those_recorded(name) -> None:
    """Issue slots limit these kernels, so a slower one shows here first. A static_assert in each
    source also holds its parameter struct to the launch's layout. The counts and the tolerance are
    those of tests/support/machine_code.py. On each architecture."""
    assert all(counts(name, architecture) for architecture in ARCHITECTURES[name])
    found = {architecture: regressions(name, architecture) for architecture in ARCHITECTURES[name]}
    assert found == dict.fromkeys(found, {})


@pytest.mark.parametrize(
    "name, architecture",
    [
        ("rht_quantize_row", "sm_90a"),
        ("values requantize", "sm_80"),
        ("quartet2 fprop, several", "sm_120a"),
        ("align mx", "sm_103a"),
        ("by scales swizzled", "sm_100a"),
        ("dequantize bf16", "sm_121a"),
    ],
)
def test_counts_recorded_are_those_of_the_machine_code(name, architecture) -> None:
    """The same NVRTC makes the same code of the same sources on any machine, which is why counts
    are taken from the file. One kernel of each source, each architecture once."""
    try:
        now = machine_code.counted(KERNELS[name], architecture)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    if machine_code.unchanged(name):
        assert now == machine_code.recorded()[name][architecture]
    else:
        assert regressions(name, architecture) == {}


def test_a_changed_kernel_is_counted_anew(monkeypatch) -> None:
    """Defines, headers and the architecture change its digest; comments do not."""
    name, architecture = "align mx", "sm_90a"
    variant = KERNELS[name].variant
    others = {
        machine_code.digest(dataclasses.replace(variant, **change), architecture)
        for change in (
            {},
            {"defines": (*variant.defines, ("Q2_CHANGED", 1))},
            {"headers": (("more.cuh", "int x;\n"),)},
            {"headers": (("more.cuh", "// an int\nint x;  // is it\n"),)},
        )
    }
    assert len(others) == 3 and machine_code.digest(variant, "sm_80") not in others
    changed = {**machine_code.digests(), name: "changed"}
    everything = {**machine_code.everything(), (name, architecture): KERNELS["transpose"]}
    monkeypatch.setattr(machine_code, "digests", lambda: changed)
    monkeypatch.setattr(machine_code, "everything", lambda: everything)
    machine_code.counts.cache_clear()
    found = counts(name, architecture)
    machine_code.counts.cache_clear()
    assert found == machine_code.counted(KERNELS["transpose"], architecture)
    assert found != machine_code.counted(KERNELS[name], architecture)


def test_a_cubin_that_is_not_the_recorded_one_is_named(monkeypatch) -> None:
    """`python -m tests.support.machine_code --check` compares all of them."""
    same, other = ("transpose", "sm_90a"), ("swizzle", "sm_90a")
    kernels = {same: KERNELS["transpose"], other: align(SR, False)}
    monkeypatch.setattr(machine_code, "everything", lambda: kernels)
    assert machine_code.differing() == [other]


def test_what_is_recorded_is_what_is_compiled() -> None:
    """`python -m tests.support.machine_code` writes the file."""
    found = {(name, each) for name, own in machine_code.recorded().items() for each in own}
    assert found == set(machine_code.everything())


def test_descriptors_are_register_pairs() -> None:
    """A descriptor is 64 bits, so its first register is even. NVRTC 13.0 once encoded an odd one,
    for copies with an L2 cache hint: an illegal instruction on an H200 that nothing here had
    shown. (Before sm_90 there are none.)
    """
    for name, architecture in CASES:
        if architecture not in AMPERE:
            descriptors = counts(name, architecture)["descriptors"]
            odd = [register for register in descriptors if register % 2]
            assert descriptors and not odd, (name, architecture)


def test_blackwell_converts_to_fp4_in_hardware() -> None:
    """64 elements a thread and direction, two of them an instruction; MS-EDEN looks at what became
    of them, and 4/6 at what becomes of them under two scales, of which it keeps one. Codes that are
    requantized are expanded first."""
    for name in [name for name in HOT if name != "amax both"]:
        for architecture in BLACKWELL:
            check_conversions(name, counts(name, architecture))


def check_conversions(name: str, found: machine_code.Counts) -> None:
    directions = 2 if "both" in name else 1
    if name == "quartet2 fprop":  # a few of them on two paths
        assert 2 * 32 <= found["to_fp4"] <= 2 * 32 + 8
        assert 2 * 32 <= found["from_fp4"] <= 2 * 32 + 8
        return
    assert 0 <= found["to_fp4"] - 32 * directions <= 2
    looks = not any(
        recipe in name for recipe in ("tetrajet2", "nvfp4", "mxfp4", "quartet", "exact")
    )
    # A few of them are on two paths, stored or not.
    looked_at = 32 * directions * looks + 32 * ("requantize" in name)
    assert 0 <= found["from_fp4"] - looked_at <= 4 * (looked_at > 0)


def test_hopper_has_no_fp4_and_uses_fp8() -> None:
    code = disassembled(HOT["rht_quantize_row"], "sm_90a")
    assert code.count("F2FP.SATFINITE.E2M1") == 0
    assert code.count("F2FP.SATFINITE.E4M3") == 64  # 64 magnitudes and 64 signs, two at a time


@pytest.mark.parametrize("architecture", ["compute_80", "compute_90", "compute_100", "compute_120"])
def test_ptx_has_no_instructions_of_one_architecture_alone(architecture) -> None:
    """The driver compiles it for any later one."""
    first = architecture == "compute_80"
    for name in ("quartet2 fprop", "align sr", *(["rht_quantize_both"] if first else ())):
        ptx = nvrtc.cubin(KERNELS[name].variant, architecture).rstrip(b"\0").decode()
        assert f".target sm_{architecture.removeprefix('compute_')}\n" in ptx
        assert "e2m1" not in ptx and ".entry " in ptx
        assert architecture != "compute_80" or "e4m3" not in ptx


def test_before_sm_89_there_is_no_fp8_either() -> None:
    """Nor, before sm_90, a launch that begins before the one ahead of it has ended."""
    code = disassembled(HOT["rht_quantize_row"], "sm_80")
    assert code.count("F2FP.SATFINITE") == code.count("ACQBULK") == code.count("PREEXIT") == 0
    code = disassembled(HOT["rht_quantize_row"], "sm_89")
    assert code.count("F2FP.SATFINITE.E4M3") == 64 and code.count("PREEXIT") == 0
    assert disassembled(HOT["rht_quantize_row"], "sm_90a").count("PREEXIT") == 1


SMALL, LARGE = 100 * 1024, 228 * 1024  # bytes of shared memory of a multiprocessor
# Source, transform, scheme, directions; stages and thread blocks at once in LARGE, and in SMALL.
OCCUPANCY = {
    "row": ((BF16, "rht128", EDEN, ROW), (2, 2), (1, 2)),
    "col": ((BF16, "rht128", EDEN, COL), (2, 4), (1, 4)),
    "both": ((BF16, "rht128", EDEN, BOTH), (2, 2), (1, 2)),
    "requantize": ((NVFP4, "rht128", EDEN, COL), (2, 4), (1, 4)),
    "fprop": ((BF16, "none", "nvfp4_46_pow2", ROW), (2, 2), (1, 2)),
    "wgrad": ((BF16, "rht16", SR, COL), (2, 3), (1, 3)),
    "mxfp4 both": ((BF16, "rht64", "mxfp4_sr", BOTH), (2, 2), (1, 2)),
    # One tile of fp32 is as large as two of 16 bits, and dequantized operands are staged.
    "float32 row": ((FP32, "rht128", EDEN, ROW), (1, 2), (1, 1)),
    "float32 col": ((FP32, "rht128", EDEN, COL), (1, 4), (1, 2)),
    "values both": ((BF16, "rht128", EDEN + DEQUANTIZED, BOTH), (2, 2), (2, 1)),
    "values col": ((NVFP4, "rht128", EDEN + DEQUANTIZED, COL), (2, 4), (2, 2)),
    "by scales": ((ROUNDED, "rht128", EDEN, COL), (2, 4), (1, 4)),
    "values by scales": ((ROUNDED, "rht128", EDEN + DEQUANTIZED, COL), (2, 4), (1, 2)),
}


SPILLS_NOTHING = ("row", "both", "requantize", "fprop", "wgrad")


@pytest.mark.parametrize(
    "name, room",
    [
        *product(OCCUPANCY, [SMALL]),
        *product(("both", "col", "float32 col", "values both"), [LARGE]),
    ],
)
def test_thread_blocks_at_once(name, room) -> None:
    """By registers and shared memory, as ptxas reports them: 64 Ki registers, allocated by 8 per
    thread. CUDA reserves 1 KiB of shared memory for each thread block. One tile at a time spills
    nothing."""
    kind, large, small = OCCUPANCY[name]
    stages, blocks = small if room == SMALL else large
    launch = rotate(*kind, room=room)
    values = get_scheme(kind[2]).dequantized
    architecture = "sm_90a" if room == LARGE else "sm_89" if values else "sm_120a"
    _, log = nvrtc.compile_variant(launch.variant, architecture, ("--ptxas-options=-v",))
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    static = int(re.search(r"(\d+) bytes smem", log)[1])
    if room == SMALL and name in SPILLS_NOTHING:
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
    assert dict(launch.variant.defines)["Q2_STAGES"] == stages
    assert launch.shared <= 99 * 1024 - static, "what a thread block may have on 8.6"
    by_registers = 64 * 1024 // (-(-registers // 8) * 8 * launch.threads)
    by_shared = room // (launch.shared + static + 1024)
    wanted = dict(launch.variant.defines)["Q2_BLOCKS_PER_SM"]
    assert min(wanted, by_registers, by_shared) == blocks


@pytest.mark.parametrize(
    "name, architecture",
    [*product(("both", "requantize", "fprop", "wgrad"), ["sm_120a"]), ("both", "sm_89")],
)
def test_batched_launches_of_one_tile_at_a_time_spill_nothing(name, architecture) -> None:
    launch = batched_launch(rotate(*OCCUPANCY[name][0], room=SMALL))
    code = disassembled(launch, architecture)
    assert code.count("LDL") == code.count("STL") == 0


@pytest.mark.parametrize("capability", limits.ARCHITECTURES)
def test_shared_memory_by_capability(capability, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
    shared_memory.cache_clear()
    small = capability in ((8, 6), (8, 9)) or capability[0] == 12
    assert shared_memory(0) == 1024 * (100 if small else 228 if capability >= (9, 0) else 164)
    shared_memory.cache_clear()


@pytest.mark.gpu
def test_shared_memory_of_this_gpu() -> None:
    by_capability = 1024 * limits.SHARED_KIB.get(torch.cuda.get_device_capability(), 100)
    assert shared_memory(0) == by_capability


def test_sm_100_works_on_pairs() -> None:
    assert disassembled(HOT["rht_quantize_row"], "sm_100a").count("FFMA2")


def test_a_struct_that_is_chosen_costs_few_instructions() -> None:
    """Up to 4.5% of an element's (quartet's requantize, .65 of 14.7 on sm_100a; the others up to
    3.5%, 4% with NVRTC 13.2), which plan.py weighs against a launch."""
    for name in SEVERAL:
        most = 1.045
        for architecture in ("sm_90a",) if "values" in name else ("sm_90a", "sm_100a", "sm_120a"):
            one, batched = (
                counts(each, architecture)["instructions"]
                for each in (name.partition(",")[0], name)
            )
            assert batched <= most * one


# --- which kernel runs ----------------------------------------------------------------------------


def test_the_registry_has_them_before_the_reference() -> None:
    for op in ("quantize", "requantize", "dequantize"):
        assert {k.name for k in kernels(op)} == {"cuda", "cpp", "reference"}
        assert kernels(op)[-1].name == "reference"
    for op in ("masked_unrotate", "split_scales", "signs", "to_e4m3"):
        assert [k.name for k in kernels(op)] == ["cuda", "reference"]
    names = ["scaled_mm", "cublaslt_fp4", "triton_fp4", "cuda_bf16", "reference"]
    assert [k.name for k in kernels("gemm") if k.device_type != "cpu"] == names


def test_an_explicit_request_never_falls_back() -> None:
    x, seed = torch.randn(16, 16), torch.tensor(1)
    call = quantizer_calls.one(x, seed, "nvfp4_ms_eden_pow2", "rht128", False)
    with pytest.raises(ValueError, match="runs on cuda, the operands are on cpu"):
        select("quantize", call.positional, "cuda")


def test_every_quantizer_of_a_recipe_has_a_kernel() -> None:
    """Except 16x16 blocks and fp8, which have an Inductor kernel or the reference."""
    for recipe in RECIPES:
        for kind in ("pow2", "exact"):
            resolved = resolve(recipe, kind)
            for gemm_ in filter(None, (resolved.fprop, resolved.dgrad, resolved.wgrad)):
                for operand in (gemm_.a, gemm_.b):
                    spec = get_scheme(operand.scheme)
                    why = not_served(spec.name, operand.transform, masked=spec.masked)
                    assert (why is None) == (spec.block[0] == 1 and spec.has_block_scales)


@pytest.mark.parametrize(
    "scheme, reason",
    [
        ("nvfp4_sr_46", "draws random bits"),
        ("mxfp4_quest", "trust mask"),
        ("nvfp4_16x16", "codes of plain matrices"),
    ],
)
def test_other_roundings_are_left_to_other_kernels(scheme, reason) -> None:
    why = quantizers.why_not(quantizer_calls.one(None, None, scheme, "rht128", False))
    assert why is not None and reason in why


# --- doctor ---------------------------------------------------------------------------------------


def test_doctor_without_a_gpu(capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["doctor", "--verbose"]) == 0
    report = capsys.readouterr().out
    assert f"torch {torch.__version__}" in report and "NVRTC" not in report
    assert "  quantize\n" in report and "cpp quantize rowwise" in report
    assert "rejected" not in report and "FAULT" not in report
