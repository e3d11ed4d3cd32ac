# SPDX-License-Identifier: Apache-2.0
"""Rows of kernels with their self-checks, of `q2compile doctor` and `q2compile bench`: grouped
launches, and checks that trap, raise or differ."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from q2compile.runtime_kernels.cuda import checks, selfcheck
from q2compile.runtime_kernels.cuda.checked_cases import CASES, FORMS, SWEEP
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.runtime_kernels.cuda.quantize import grouped_check
from q2compile.runtime_kernels.kernel_states import awaited_in, disable
from q2compile.tools import cli, doctor
from q2compile.tools.bench import checks as bench_checks
from q2compile.tools.bench.bench import ON_CPU, Bench
from q2compile.tools.bench.report import Log
from q2compile.tools.kernel_rows import KernelRow, group_rows, sweep_rows
from tests.support.faulty_checks import request

ON_GPU = torch.device("cuda", 0)


# ---- grouped launches ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "capability, lines",
    [
        (
            (9, 0),
            [
                "2 quantize rowwise, nvfp4_46_pow2",
                "2 dequantize, mxfp4_rtn",
                "quantize rowwise+columnwise rotated dbias + 2 requantize columnwise rotated, "
                "nvfp4_ms_eden_pow2@bf16",
                "quantize rowwise+columnwise rotated rows unrotated + split_scales, "
                "nvfp4_pow2 + nvfp4_16x16_pow2",
            ],
        ),
        (
            (10, 0),
            [
                "2 quantize rowwise, nvfp4_46_pow2@32x4x4",
                "quantize rowwise+columnwise rotated + 2 requantize columnwise rotated, "
                "nvfp4_ms_eden_pow2@32x4x4",
                "split_scales, nvfp4_16x16_pow2",
            ],
        ),
    ],
)
def test_grouped_launches_have_rows(gpu, monkeypatch, capability, lines) -> None:
    """One for each group, with the op of its first call, and a check by itself."""
    gpu(capability)
    ran = []
    monkeypatch.setattr(grouped_check, "disagreement", lambda device, group: ran.append(group))
    rows = list(group_rows(ON_GPU))
    assert len(rows) == len({row.name + row.scheme for row in rows}) == 17
    assert {f"{row.of}, {row.scheme}" for row in rows} >= set(lines)
    for row in rows:
        row.ask()
    assert {row.state for row in rows} == {"passed"} and len(set(ran)) == 17


def test_a_group_that_fails_is_a_fault_and_a_disabled_one_is_none(gpu, monkeypatch, capsys) -> None:
    gpu((9, 0))
    said = "3 of 9 codes of call 2 differ from the reference"
    monkeypatch.setattr(grouped_check, "disagreement", lambda device, group: said)
    (row,) = [row for row in group_rows(ON_GPU) if row.of == "2 quantize rowwise"][:1]
    with pytest.warns(RuntimeWarning, match="kernel 'grouped_launch' of q2::quantize on cuda:0"):
        row.ask()
    assert (row.state, row.op, row.kernel) == ("rejected", "quantize", "grouped_launch")
    assert row.reason == f"it failed its self-check on this GPU: {said}"
    disable(["grouped_launch"], "option disable_kernels")
    disabled = next(iter(group_rows(ON_GPU)))
    print(*doctor.kernel_lines([disabled], True, True), sep="\n")
    assert "disabled: by option disable_kernels\n" in capsys.readouterr().out


def test_threads_compile_the_kernels_of_a_group_before_its_check(gpu, monkeypatch) -> None:
    """Those of its calls, once each, and the batched launch, which no call has by itself."""
    gpu((9, 0))
    begun, asked = [], []
    monkeypatch.setattr(nvrtc, "begin", lambda variant, architecture: begun.append(variant))
    monkeypatch.setattr(checks.CHECKER, "submit", lambda request, after: asked.append(len(after)))
    monkeypatch.setattr(selfcheck, "architecture", lambda index: "sm_90a")
    row = next(iter(group_rows(ON_GPU)))
    with checks.answering(checks.Mode(stored=False)), awaited_in({}):
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

    def disagreement(op, name, device, scheme, of):
        ran.append((name, scheme, of[0]))
        wrong = name == "cublaslt_fp4" and of[0][3:] == (3072,)
        return "relative error 1.4e-01, of a result of 3072 x 200" if wrong else None

    monkeypatch.setattr(selfcheck, "disagreement", disagreement)
    rows = list(sweep_rows(ON_GPU))
    with pytest.warns(RuntimeWarning, match="3072 x 200"):
        for row in rows:
            row.ask()
    assert {(row.kernel, row.scheme): row.state for row in rows} == {
        ("scaled_mm", "nvfp4_46_pow2"): "unsupported",
        ("scaled_mm", "mxfp4_rtn"): "unsupported",
        ("cublaslt_fp4", "nvfp4_46_pow2"): "rejected",
        ("cublaslt_fp4", "mxfp4_rtn"): "unsupported",
        ("triton_fp4", "nvfp4_46_pow2"): "passed",
        ("triton_fp4", "mxfp4_rtn"): "passed",
        ("cuda_bf16", "nvfp4_46_pow2"): "passed",
        ("cuda_bf16", "mxfp4_rtn"): "passed",
    }
    of_one = [form for name, scheme, form in ran if (name, scheme) == ("triton_fp4", "mxfp4_rtn")]
    swept = [form[3] for form in of_one if form[3:]]
    assert swept == list(SWEEP) and {15, 17, 64, 129, 1984, 3072, 4096} < set(swept)
    assert {form[:3] for form in of_one} == {(torch.bfloat16, None, True), FORMS[0]}


def test_a_product_of_a_sweep_has_its_rows() -> None:
    form = torch.bfloat16, None, False, 17
    cases = list(CASES["gemm"]("nvfp4_46_pow2", (form,)))
    assert [case.arguments[0].shape for case in cases] == [(17, 384), (17, 384)]
    assert {case.words for case in cases} == {"a result of 17 x 200 in torch.bfloat16"}


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
        asks = [partial(checks.rejection, asked)]
        return KernelRow("gemm", how, "gemm", "nvfp4", asks=asks)

    ends = ("right", "trap", "raises", "wrong", "right too")
    monkeypatch.setattr(bench_checks, "device_rows", lambda device: map(row, ends))
    log = Log(tmp_path / "bench.jsonl", 0.0)
    with pytest.warns(RuntimeWarning):
        found = list(bench_checks.checks(Bench(ON_GPU, ON_CPU, log=log, group="checks")))
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
