# SPDX-License-Identifier: Apache-2.0
"""Rows of kernels with their self-checks, of `q2compile doctor` and `q2compile bench`: grouped
launches, and checks that trap, raise or differ."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from q2compile.runtime_kernels.cuda import checks, selfcheck
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.runtime_kernels.cuda.quantize import grouped_check
from q2compile.runtime_kernels.kernel_states import disable
from q2compile.tools import doctor
from q2compile.tools.bench import checks as bench_checks
from q2compile.tools.bench.bench import ON_CPU, Bench
from q2compile.tools.bench.report import Log
from q2compile.tools.kernel_rows import KernelRow, group_rows
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
    monkeypatch.setattr(checks, "begin", lambda request, after: asked.append(len(after)))
    monkeypatch.setattr(selfcheck, "architecture", lambda index: "sm_90a")
    row = next(iter(group_rows(ON_GPU)))
    row.begins[0]()
    files = [(variant.file, dict(variant.defines).get("Q2_BATCH")) for variant in begun]
    assert set(files) == {
        ("rotate_quantize.cu", 0),
        ("rotate_quantize.cu", 4),
        ("align_scales.cu", None),
    }
    assert asked == [len(begun)] and len(begun) == len(set(begun))


# ---- bench ---------------------------------------------------------------------------------------


def test_a_check_that_traps_does_not_hide_those_after_it(monkeypatch, tmp_path) -> None:
    """Each fault is a row of its own, with a traceback if there is one; the others pass."""
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "ran").mkdir()

    def row(how: str) -> KernelRow:
        asked = request(how, tmp_path / "ran", name=how)
        asks = [partial(checks.rejection, asked)]
        return KernelRow(
            "gemm", how, "gemm", "nvfp4", asks=asks, begins=[partial(checks.begin, asked)]
        )

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
