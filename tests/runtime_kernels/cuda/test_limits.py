# SPDX-License-Identifier: Apache-2.0
"""The kernels and targets of each GPU: known ones, later ones of a known family, unknown ones, with
old and new NVRTC and Triton. Emulation is reported once, with the reason."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from q2compile.report.report import RunReport
from q2compile.report.row import Row
from q2compile.runtime_kernels import checks, choice, kernel_states, registry, selfcheck
from q2compile.runtime_kernels.cuda import emulated
from q2compile.runtime_kernels.cuda.gemm import triton_fp4
from q2compile.runtime_kernels.cuda.jit import launch, limits, nvrtc
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import RotatingKernel, rotate_launch
from q2compile.runtime_kernels.kernel_states import (
    KNOWN,
    KernelWarning,
    Noted,
    Result,
    awaited_in,
    disable,
    rejected,
)
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.numerics.transforms import get_transform
from tests.support import disassemble
from tests.support.checked_forms import BOTH, checked_of, op_of
from tests.support.new_process import forget_checks
from tests.support.pretended_gpu import forget, on_gpu

CUDA_12_8, CUDA_12_9, CUDA_13 = (12, 8), (12, 9), (13, 0)
TARGETS = [
    # Later GPUs of a family use the family's target.
    *[((10, 0), v, "sm_100f") for v in (CUDA_12_9, CUDA_13)],
    *[((10, 3), v, "sm_100f") for v in (CUDA_12_9, CUDA_13)],
    *[((10, 7), v, "sm_100f") for v in (CUDA_12_9, CUDA_13)],
    *[(c, CUDA_13, "sm_120f") for c in ((12, 0), (12, 1), (12, 2), (12, 9))],
    ((11, 0), CUDA_13, "sm_110f"),
    # An NVRTC without families: the GPU's own target, else PTX without fp4 conversions.
    *[((10, 0), CUDA_12_8, "sm_100a"), ((12, 0), CUDA_12_8, "sm_120a")],
    *[((10, 3), CUDA_12_8, "compute_100"), ((12, 1), CUDA_12_8, "compute_120")],
    *[((11, 0), CUDA_12_9, "compute_100"), ((10, 0), (12, 6), "compute_90")],
    # GPUs without fp4 tensor cores, and unknown ones.
    *[((7, 5), CUDA_13, None), ((8, 8), CUDA_13, "compute_80"), ((9, 1), CUDA_13, "compute_90")],
    *[((9, 0), v, "sm_90a") for v in (CUDA_12_8, CUDA_13)],
    *[((10, 1), CUDA_13, "compute_100"), ((13, 0), CUDA_13, "compute_120")],
]


def test_what_is_compiled_for_each() -> None:
    for capability, version, target in TARGETS:
        found = limits.targets(capability, version)[0]
        assert found.name == target
        own = target is not None and not target.startswith("compute_")
        assert (found.why is None) == own


def test_ptx_only_where_the_driver_reads_it() -> None:
    """A driver reads no PTX of a later NVRTC. Machine code of one generation runs on its later
    GPUs."""
    newer = (13, 2)
    assert limits.targets((8, 8), newer, CUDA_13)[0].name == "sm_80"
    assert limits.targets((8, 8), newer, newer)[0].name == "compute_80"
    assert limits.targets((10, 1), newer, CUDA_13)[0].name == "sm_100"
    found = limits.targets((13, 0), newer, CUDA_13)[0]
    assert found.name is None
    assert found.why == (
        "compute capability 13.0 is not known here, and a driver of CUDA 13.0 reads no newer PTX"
    )
    assert limits.targets((12, 0), newer, CUDA_13)[0].name == "sm_120f"  # which is machine code
    why = limits.targets((10, 3), CUDA_12_8)[0].why
    assert why == "NVRTC 12.8 has no target for compute capability 10.3, NVRTC 12.9 has"


REFUSED = {
    # The GPU, what its driver does not load: what is compiled then.
    "a driver that refused sm_120 code on a GB10": ((12, 1), ["sm_120f"], "sm_121a"),
    "no code of the family's": ((10, 0), ["sm_100f", "sm_100a"], "compute_100"),
    "no PTX either": ((12, 0), ["sm_120f", "sm_120a", "compute_120"], "sm_120"),
    "nothing": ((10, 0), ["sm_100f", "sm_100a", "compute_100", "sm_100"], None),
    "nothing is refused": ((12, 0), [], "sm_120f"),
}


@pytest.mark.parametrize("error", [200, 209, 222])
@pytest.mark.parametrize("case", REFUSED)
def test_the_next_target_is_tried_where_the_driver_loads_none(
    gpu, monkeypatch, caplog, case, error
) -> None:
    """By loading the smallest kernel. One line says it, and the kernels serve."""
    capability, refused, target = REFUSED[case]
    gpu(capability)
    driver = SimpleNamespace(
        cuModuleLoadData=lambda code: (error * (code.decode() in refused), code),
        cuModuleUnload=lambda module: None,
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(launch, "driver_cuda", lambda: CUDA_13)
    monkeypatch.setattr(nvrtc, "cubin", lambda variant, architecture: architecture.encode())
    monkeypatch.setattr(selfcheck, "disagreement", lambda *what: None)
    forget()
    args = on_gpu(BOTH, "nvfp4_ms_eden_pow2")
    if target is None:
        with pytest.warns(RuntimeWarning, match="the driver loads no code for sm_100 "):
            assert registry.choose("quantize", args).name == "reference"
        return
    assert registry.choose("quantize", args).name == "cuda"
    assert launch.architecture(0) == target
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(said) == len(refused)
    for name, line in zip(refused, said, strict=True):
        assert f"cuda:0: the driver loads no code for {name} (error {error})" in line
    by_arithmetic = not dict(nvrtc.conversions(target))["Q2_HW_FP4"]
    lines = [text for text in emulated.of_device(0) if "by arithmetic" in text]
    assert len(lines) == by_arithmetic
    assert all("the driver loads no code for" in text for text in lines)


@pytest.mark.parametrize(
    "triton, capability, why",
    [
        *[((3, 6), c, None) for c in ((10, 0), (10, 3), (12, 0))],
        *[((3, 6), (12, 1), "from Triton 3.8 on"), ((3, 8), (12, 1), None)],
        *[((3, 6), (11, 0), "from Triton 3.7 on"), ((3, 7), (11, 0), None)],
        *[((3, 7), (10, 7), "from Triton 3.8 on"), ((3, 9), (10, 7), None)],
        *[(None, (10, 0), "not installed"), ((3, 9), (9, 0), "begin with compute capability 10.0")],
        ((3, 9), (13, 0), "13.0 is not known to have fp4 tensor cores"),
    ],
)
def test_where_triton_multiplies_codes(triton, capability, why) -> None:
    found = limits.why_no_dot_scaled(capability, triton)
    assert found is None if why is None else why in found


@pytest.mark.parametrize("capability", [(10, 7), (11, 0), (12, 2)])
def test_later_gpus_of_a_family_have_all_kernels_after_their_checks(gpu, monkeypatch, capability):
    gpu(capability)
    monkeypatch.setattr(selfcheck, "disagreement", lambda *what: None)
    monkeypatch.setattr(triton_fp4, "triton_version", lambda: (3, 8))
    for of, scheme in checked_of():
        served = registry.choose(op_of(of), on_gpu(of, scheme)).name
        want = {"gemm": "cublaslt_fp4" if scheme.startswith("nvfp4") else "triton_fp4"}
        want |= dict.fromkeys(("gemm_masked_unrotate", "grouped_gemm"), "triton_fp4")
        assert served == want.get(of, "cuda"), (of, scheme)
    assert emulated.of_device(0) == []


@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (11, 0), (12, 0), (12, 1), (10, 7)])
@pytest.mark.parametrize("version", [CUDA_12_8, CUDA_12_9, CUDA_13])
def test_no_gpu_of_a_family_is_left_with_references(gpu, monkeypatch, capability, version):
    """NVRTC 12.8 has two targets of them; the quantizers of other GPUs round by arithmetic."""
    gpu(capability)
    monkeypatch.setattr(nvrtc, "version", lambda: version)
    forget()
    monkeypatch.setattr(selfcheck, "disagreement", lambda *what: None)
    args = on_gpu(BOTH, "nvfp4_ms_eden_pow2")
    assert registry.choose("quantize", args).name == "cuda"
    own = dict(nvrtc.conversions(launch.architecture(0)))["Q2_HW_FP4"]
    said = [text for text in emulated.of_device(0) if "by arithmetic: NVRTC" in text]
    assert len(said) == (not own)


@pytest.mark.parametrize("family", sorted(limits.FAMILIES))
def test_code_for_a_family_has_its_instructions(family) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", exc_type=ImportError)
    target = limits.FAMILIES[family]
    if nvrtc.version() < target.nvrtc:
        pytest.skip(f"NVRTC {nvrtc.version()} has no {target.target}")
    scheme, transform = get_scheme("nvfp4_ms_eden_pow2"), get_transform("rht128")
    variant = rotate_launch(RotatingKernel(0, transform, scheme, True, False)).variant
    try:
        codes = [
            disassemble.disassemble(nvrtc.compile_variant(variant, name)[0])
            for name in (target.target, target.target[:-1] + "a")
        ]
    except FileNotFoundError as error:
        pytest.skip(str(error))
    counts = [code.count("F2FP.SATFINITE.E2M1") for code in codes]
    assert counts[0] == counts[1] > 0


# ---- what is said -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "capability, said",
    [
        (
            (9, 0),
            [
                "NVFP4 and grouped GEMMs on {} (9.0) are emulated in BF16: fp4 tensor cores begin",
                "MXFP4 GEMMs on {} (9.0) multiply E4M3 elements on FP8 tensor cores",
            ],
        ),
        ((8, 6), ["FP4 GEMMs on {} (8.6) are emulated in BF16: fp4 tensor cores begin with"]),
        ((7, 5), ["quantizers on {} (7.5) are Inductor's kernels or torch", "FP4 GEMMs on {}"]),
        ((13, 0), ["quantizers on {} (13.0) are compiled for compute_120: ", "FP4 GEMMs on {}"]),
        (
            (12, 1),
            ["MXFP4 and grouped GEMMs on {} (12.1) are emulated in BF16: tl.dot_scaled"],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:q2compile. none of its CUDA kernels")
def test_what_is_emulated_is_said_with_the_reason(gpu, monkeypatch, capability, said) -> None:
    gpu(capability)
    monkeypatch.setattr(triton_fp4, "triton_version", lambda: (3, 6))
    found = emulated.of_device(0)
    assert len(found) == len(said)
    for text, begin in zip(found, said, strict=True):
        assert text.startswith(begin.format("a GPU that is not there"))


def test_a_disabled_kernel_is_a_reason(gpu, monkeypatch) -> None:
    gpu((12, 0))
    monkeypatch.setattr(triton_fp4, "triton_version", lambda: None)
    disable(["cublaslt_fp4"], "option disable_kernels")
    (text,) = emulated.of_device(0)
    assert "cublaslt_fp4: disabled by option disable_kernels; triton_fp4: Triton is not" in text


def test_what_a_check_found_is_a_reason_and_asking_begins_none(gpu, monkeypatch) -> None:
    gpu((12, 0))
    monkeypatch.setattr(triton_fp4, "triton_version", lambda: (3, 8))
    for name in ("begin", "run_here"):
        monkeypatch.setattr(checks, name, lambda request: pytest.fail(str(request)))
    assert emulated.of_device(0) == []
    asked = Noted()
    with awaited_in(asked):
        registry.choose("gemm", on_gpu("gemm", "mxfp4_rtn"))
    for check in asked:
        KNOWN.checks[check] = Result(rejected("it failed its self-check"))
    with pytest.warns(KernelWarning, match="'triton_fp4' of q2::gemm on cuda:0 is rejected"):
        (text,) = emulated.of_device(0)
    assert text.startswith("MXFP4 and grouped GEMMs on a GPU that is not there (12.0) are emulated")
    assert text.endswith("in BF16: rejected: it failed its self-check")


def test_reports_of_a_gpu_say_it(gpu, monkeypatch) -> None:
    """Two equal GPUs are reported once; a CPU is not reported."""
    gpu((9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert RunReport().notes == []
    assert len(emulated.emulations()) == 2 and "emulated in BF16" in emulated.emulations()[0]
    monkeypatch.setattr(RunReport, "rows", [Row("up", (), device="cuda")])
    assert RunReport().notes == emulated.emulations()


def test_a_reference_that_serves_a_gpu_is_said_once_with_the_reasons(monkeypatch, caplog) -> None:
    """At its first call, in the log and in reports; not where a rejection was said already."""
    reference = registry.kernels("grouped_mm")[-1]
    of_cuda = [
        registry.Kernel("grouped_mm", name, "cuda", pytest.fail, lambda *args, w=why: w)
        for name, why in (("cuda", "it is of bfloat16,\nnot of float16"), ("own", "no fp4"))
    ]
    for module in (choice, registry):
        monkeypatch.setattr(module, "device_of", lambda args: torch.device("cuda", 0))
    monkeypatch.setitem(registry.KERNELS, "grouped_mm", [*of_cuda, reference])
    candidates = registry.KERNELS["grouped_mm"]
    usual = emulated.emulations()

    def run(args):
        KNOWN.choices.clear()
        return registry.run_chosen(registry.choose("grouped_mm", args), args)

    args = torch.ones(4, 8), torch.ones(2, 8, 8), torch.tensor([2, 4], dtype=torch.int32)
    want = reference.function(*args)
    with caplog.at_level("INFO", logger="q2compile"):
        for _ in range(2):
            assert torch.equal(run(args), want)
    said = (
        "q2::grouped_mm on cuda:0 runs as its torch reference: cuda: it is of bfloat16, not of "
        "float16; own: no fp4"
    )
    assert [r.getMessage() for r in caplog.records] == [f"q2compile: {said}"]
    assert emulated.emulations() == [*usual, said]
    forget_checks()
    recorded = registry.bound(
        "quantize",
        (torch.ones(16, 32), "nvfp4_46_pow2", "none"),
        {"rowwise": True, "recorded": True},
    )
    registry._say_why_reference(registry.choose("quantize", recorded), recorded)
    assert emulated.emulations() == usual
    for state in (rejected("it trapped"), kernel_states.Reason("by him", kernel_states.DISABLED)):
        candidates[0] = dataclasses.replace(of_cuda[0], unsupported=lambda *args, w=state: w)
        run(args)
    assert emulated.emulations() == usual
