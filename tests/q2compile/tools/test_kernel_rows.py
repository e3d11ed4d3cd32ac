# SPDX-License-Identifier: Apache-2.0
"""Rows of kernels with their self-checks, of `q2compile doctor` and `q2compile bench`: grouped
launches, and checks that trap, raise or differ."""

from __future__ import annotations

import pytest
import torch

from q2compile.runtime_kernels import checks, selfcheck
from q2compile.runtime_kernels.choice import choose
from q2compile.runtime_kernels.cuda.jit import launch, nvrtc
from q2compile.runtime_kernels.cuda.quantize import grouped_check
from q2compile.runtime_kernels.cuda.quantize.grouped_check import Group
from q2compile.runtime_kernels.kernel_states import awaited_in, disable
from q2compile.runtime_kernels.small_calls import small_calls
from q2compile.tools import cli, doctor, kernel_rows
from q2compile.tools.bench import measurements
from q2compile.tools.bench.bench import ON_CPU, Bench
from q2compile.tools.bench.report import Log
from q2compile.tools.kernel_rows import (
    SWEEP,
    KernelRow,
    checked_rows,
    device_rows,
    row_of,
    sweep_rows,
)
from tests.support.checked_forms import ROWWISE, form
from tests.support.faulty_checks import request
from tests.support.new_process import forget_checks
from tests.support.pretended_gpu import on_gpu

ON_GPU = torch.device("cuda", 0)


# ---- what training asks for ----------------------------------------------------------------------

EDEN = "nvfp4_ms_eden_pow2"
HOPPER = [
    "cuda quantize rowwise, nvfp4_46_pow2, x in torch.bfloat16",
    f"cuda quantize rowwise+columnwise rotated dbias, {EDEN}@bf16, rht128, x in torch.bfloat16",
    f"cuda requantize columnwise rotated grouped, nvfp4_46_pow2, {EDEN}@bf16, rht128",
    "inductor quantize rowwise, nvfp4_16x16_pow2",
    "cuda_bf16, nvfp4_46_pow2, in torch.bfloat16, bias in torch.bfloat16",
    "cuda_bf16, nvfp4_46_pow2@bf16, wgrad, in torch.bfloat16",
    # A batched launch of the forward, and groups of a backward.
    "grouped_launch quantize rowwise, nvfp4_46_pow2, x in torch.bfloat16",
    "grouped_launch quantize rowwise+columnwise rotated + requantize columnwise rotated, "
    f"{EDEN}@bf16, rht128, x in torch.bfloat16 + nvfp4_46_pow2, {EDEN}@bf16, rht128",
    "grouped_launch quantize rowwise+columnwise rotated rows unrotated + split_scales, "
    "nvfp4_pow2, rht16, x in torch.bfloat16 + nvfp4_16x16_pow2",
]
BLACKWELL = [
    "cuda quantize rowwise, nvfp4_46_pow2@32x4x4, x in torch.bfloat16",
    "cublaslt_fp4, nvfp4_46_pow2@32x4x4, in torch.bfloat16, one global scale",
    "triton_fp4, nvfp4_46_pow2, wgrad, in torch.bfloat16",
    "grouped_launch, nvfp4_16x16_pow2",
    "grouped_launch quantize rowwise+columnwise rotated + requantize columnwise rotated, "
    f"{EDEN}@32x4x4, rht128, x in torch.bfloat16 + "
    f"nvfp4_46_pow2@32x4x4, {EDEN}@32x4x4, rht128",
]


@pytest.mark.parametrize("capability, lines", [((9, 0), HOPPER), ((10, 0), BLACKWELL)])
def test_rows_are_what_training_asks_for(gpu, monkeypatch, capability, lines) -> None:
    """Forward and backward, dense and of experts; nothing runs meanwhile."""
    gpu(capability)
    monkeypatch.setattr(kernel_rows, "RECIPES", ("quartet2", "nvfp4", "bf16"))
    monkeypatch.setattr(checks, "run_here", lambda request: 1 / 0)
    rows = device_rows(ON_GPU)
    found = {f"{row.name}, {row.scheme}" for row in rows}
    assert found >= set(lines) and {row.state for row in rows} == {"serves"}
    assert len({row.requests[0].check for row in rows}) == len(rows) > 30


def test_rows_of_a_cpu(monkeypatch) -> None:
    """Each of its kernels, whose checks run in this process."""
    monkeypatch.setattr(kernel_rows, "RECIPES", ("quartet2",))
    rows = device_rows(torch.device("cpu"))
    assert {row.op for row in rows} == {"quantize", "requantize", "gemm"}
    assert {row.kernel for row in rows} == {"cpp"}
    assert {row.state for row in checked_rows(rows, True, lambda row: None)} == {"passed"}


def test_a_group_that_fails_is_a_fault_and_a_disabled_one_is_none(gpu, monkeypatch, capsys) -> None:
    gpu((9, 0))
    group = Group((form(ROWWISE, "nvfp4_46_pow2"),) * 2)
    row = row_of(grouped_check.request_of(group, ON_GPU))
    said = "3 of 9 codes of call 2 differ from the reference"
    monkeypatch.setattr(grouped_check, "disagreement", lambda device, group: said)
    with pytest.warns(RuntimeWarning, match="kernel 'grouped_launch' of q2::quantize on cuda:0"):
        row.ask()
    assert (row.state, row.op, row.kernel) == ("rejected", "quantize", "grouped_launch")
    assert row.reason == f"it failed its self-check on this GPU: {said}"
    disable(["grouped_launch"], "option disable_kernels")
    disabled = row_of(row.requests[0])
    print(*doctor.kernel_lines([disabled], True, True), sep="\n")
    assert "disabled: by option disable_kernels\n" in capsys.readouterr().out


def test_a_rejected_or_disabled_group_is_not_chosen(gpu, monkeypatch) -> None:
    """Its calls are launched one by one."""
    gpu((9, 0))
    calls = tuple(("quantize", *on_gpu(ROWWISE, scheme)) for scheme in ("nvfp4_46", "nvfp4_46"))
    asked = grouped_check.GROUP, (calls, (), 0)
    monkeypatch.setattr(grouped_check, "disagreement", lambda device, group: None)
    assert choose(*asked).name == "grouped_launch"
    forget_checks()
    monkeypatch.setattr(grouped_check, "disagreement", lambda device, group: "2 codes differ")
    with pytest.warns(RuntimeWarning, match="kernel 'grouped_launch' of q2::quantize on cuda:0"):
        found = choose(*asked)
    assert found.name == "reference" and "2 codes differ" in found.why_not["grouped_launch"]
    forget_checks()
    disable(["grouped_launch"], "option disable_kernels")
    assert choose(*asked).why_not == {"grouped_launch": "disabled by option disable_kernels"}


def test_threads_compile_the_kernels_of_a_group_before_its_check(gpu, monkeypatch) -> None:
    """Those of its calls, once each, and the batched launch, which no call has by itself."""
    gpu((9, 0))
    begun, asked = [], []
    monkeypatch.setattr(nvrtc, "begin", lambda variant, architecture: begun.append(variant))
    monkeypatch.setattr(checks.CHECKER, "begin", lambda request, after: asked.append(len(after)))
    monkeypatch.setattr(launch, "architecture", lambda index: "sm_90a")
    row = row_of(grouped_check.request_of(Group((form(ROWWISE, "nvfp4_46_pow2"),) * 2), ON_GPU))
    with checks.answering(stored=False), awaited_in({}):
        row.ask()
    files = [(variant.file, dict(variant.defines).get("Q2_BATCH")) for variant in begun]
    assert set(files) == {
        ("rotate_quantize.cu", 0),
        ("rotate_quantize.cu", 4),
        ("align_scales.cu", None),
    }
    assert asked == [len(begun)] and len(begun) == len(set(begun))


# ---- sweep ---------------------------------------------------------------------------------------


def test_a_sweep_finds_a_fault_at_one_count_of_rows(gpu, monkeypatch) -> None:
    """Rows that FlashInfer left zero in a product of 3072 rows (its issue 3398)."""
    gpu((10, 0))
    ran = []

    def disagreement(name, device, form):
        ran.append((name, form))
        wrong = name == "cublaslt_fp4" and form.rows == 3072
        return "relative error 1.4e-01, of a result of 3072 rows" if wrong else None

    monkeypatch.setattr(selfcheck, "disagreement", disagreement)
    asked = {"cublaslt_fp4": "nvfp4_46_pow2", "triton_fp4": "mxfp4_rtn"}
    of = [
        row_of(selfcheck.request_of(name, ON_GPU, form("gemm", scheme)))
        for name, scheme in asked.items()
    ]
    others = [row_of(selfcheck.request_of("cuda", ON_GPU, form(ROWWISE, "nvfp4_46")))]
    monkeypatch.setattr(kernel_rows, "device_rows", lambda device: others + of)
    rows = list(sweep_rows(ON_GPU))
    with pytest.warns(RuntimeWarning, match="3072 rows"):
        for row in rows:
            row.ask()
    states = {row.kernel: row.state for row in rows}
    assert states == {"cublaslt_fp4": "rejected", "triton_fp4": "passed"}
    swept = [form.rows for name, form in ran if name == "triton_fp4"]
    assert swept == [None, *SWEEP] and {15, 17, 64, 129, 1984, 3072, 4096} < set(swept)


def test_a_product_of_a_sweep_has_its_rows() -> None:
    asked = form("gemm", "nvfp4_46_pow2")._replace(rows=17)
    cases = list(small_calls(asked))
    assert [case.args[0].shape for case in cases] == [(17, 384)]
    assert {case.words for case in cases} == {"a result in torch.bfloat16 of 17 rows"}


def test_a_sweep_needs_a_gpu(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["doctor", "--sweep"]) == 2
    assert "--sweep checks GEMMs of a GPU; torch finds none" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_sweep_of_this_gpu_finds_nothing(capsys) -> None:
    assert cli.main(["doctor", "--sweep", "--verbose"]) == 0
    assert capsys.readouterr().out.count("passed (") >= 2  # cuda_bf16 serves every GPU


# ---- bench ---------------------------------------------------------------------------------------


def test_a_check_that_traps_does_not_hide_those_after_it(monkeypatch, tmp_path) -> None:
    """Each fault is a row of its own, with a traceback if there is one; the others pass."""
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "ran").mkdir()

    def row(how: str) -> KernelRow:
        asked = request(how, tmp_path / "ran", name=how)
        return KernelRow("gemm", how, "gemm", "nvfp4", requests=[asked])

    ends = ("right", "trap", "raises", "wrong", "right too")
    monkeypatch.setattr(measurements, "device_rows", lambda device: map(row, ends))
    log = Log(tmp_path / "bench.jsonl", 0.0)
    with pytest.warns(RuntimeWarning):
        found = list(measurements.checks(Bench(ON_GPU, ON_CPU, log=log, group="checks")))
    checks.CHECKER.end_child()  # its results are in a folder that ends with this test
    assert [(r.kernel, r.status, r.why.partition(": ")[0]) for r in found] == [
        ("right", "passed", ""),
        ("trap", "fault", "the process that ran its self-check was ended by SIGILL, twice"),
        ("raises", "fault", "it failed"),
        ("wrong", "fault", "it failed its self-check on this GPU"),
        ("right too", "passed", ""),
    ]
    assert 'raise AssertionError("no scaled dot on sm_121")' in "".join(found[2].more["traceback"])
    assert ["traceback" in r.more for r in found] == [False, False, True, False, False]
    lines = (tmp_path / "bench.jsonl").read_text().splitlines()
    assert [line.count('"name": "' + how) for line, how in zip(lines, ends, strict=True)] == [1] * 5
