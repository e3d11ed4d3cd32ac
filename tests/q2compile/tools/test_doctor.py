# SPDX-License-Identifier: Apache-2.0
"""`q2compile doctor`: the state of each kernel, by its name, in lines and in JSON."""

import importlib.metadata
import json
import tempfile

import pytest
import torch

from q2compile.runtime_kernels import check_results, checks, selfcheck
from q2compile.runtime_kernels.cuda import known_bad
from q2compile.runtime_kernels.kernel_states import Result, disable, rejected
from q2compile.tools import cli, doctor, kernel_rows
from tests.support import faulty_checks
from tests.support.checked_forms import checked_of, form
from tests.support.warned import texts

ON_CPU = torch.device("cpu")


def test_doctor_lists_what_fails_and_goes_on(monkeypatch, tmp_path, capsys):
    """Each state by its name; what is asked raises nothing."""
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "ran").mkdir()
    disable(["gemm.unwanted"], "option disable_kernels")
    hows = {"good": "right", "wrong": "wrong", "starved": "memory", "unwanted": "right"}
    asked = [faulty_checks.request(how, tmp_path / "ran", name) for name, how in hows.items()]
    rows = [
        kernel_rows.KernelRow("gemm", request.check[1], "gemm", "nvfp4", requests=[request])
        for request in asked
    ]
    monkeypatch.setattr(checks, "begin", lambda request: None)
    monkeypatch.setattr(checks.CHECKER, "run", lambda request: None)
    print(*doctor.kernel_lines(rows, True, True), sep="\n")
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 5
    for line in (
        " passed (",
        "FAULT, rejected: it failed its self-check on this GPU: 1 of 9 codes differ from the ref",
        "FAULT, rejected: OutOfMemoryError: CUDA out of memory\n",
        "disabled: by option disable_kernels\n",
    ):
        assert out.count(line) == 1
    states = {row.kernel: row.as_line()["state"] for row in rows}
    assert states == {
        "good": "passed",
        "wrong": "rejected",
        "starved": "rejected",
        "unwanted": "disabled",
    }


@pytest.mark.parametrize(
    ("states", "first", "lines"),
    [
        (["passed", "passed", "unsupported"], "all 2 kernels passed their checks in ", 1),
        (["passed", "rejected"], "FAULT: 1 kernels failed their checks", 1),
        (["serves", "serves"], "2 kernels serve this machine; they were not checked", 0),
        ([], "no kernel serves this machine", 0),
    ],
)
def test_doctor_begins_with_the_result(monkeypatch, capsys, states, first, lines):
    rows = [
        kernel_rows.KernelRow("gemm", f"k{i}", "gemm", "nvfp4", s) for i, s in enumerate(states)
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "device_rows", lambda device: rows)
    monkeypatch.setattr(doctor, "checked_rows", lambda rows, check, announce: rows)
    for more, count in ([], lines), (["--verbose"], len(states)):
        assert cli.main(["doctor", *more]) == ("rejected" in states)
        printed = capsys.readouterr().out
        assert printed.startswith(f"result    {first}")
        assert ("1 are unsupported" in printed) == ("unsupported" in states)
        assert printed.count("\n    k") == count


def test_doctor_without_checks_runs_none(gpu, monkeypatch, capsys):
    gpu((12, 0))
    monkeypatch.setattr(selfcheck, "disagreement", lambda *what: 1 / 0)
    asked = [form(of, scheme) for of, scheme in checked_of("quantize")[:3]]
    device = torch.device("cuda", 0)
    rows = [kernel_rows.row_of(selfcheck.request_of("cuda", device, each)) for each in asked]
    print(*doctor.kernel_lines(rows, False, True), sep="\n")
    assert capsys.readouterr().out.count("serves this device") == 3
    assert {row.state for row in rows} == {"serves"}


def test_doctor_checks_again_what_is_rejected(monkeypatch, tmp_path, capsys):
    """One kernel was rejected by a passing fault, one is wrong; a large GEMM is on no list."""
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "ran"
    folder.mkdir()
    asked = {how: faulty_checks.request(how, folder, how) for how in ("right", "wrong", "raises")}
    asked["large"] = asked["right"]._replace(check=("gemm", "large", ON_CPU, "first launch"))
    for how, request in asked.items():
        reason = None if how == "raises" else rejected(f"{how} was in the way")
        check_results.store(request, Result(reason))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        doctor,
        "device_rows",
        lambda device: [
            kernel_rows.KernelRow(
                *("gemm", how, "gemm", "nvfp4"),
                requests=[asked[how]],
            )
            for how in ("right", "wrong", "raises")
        ],
    )
    with checks.answering(in_child=False):
        for again, ran in ((0, ["right", "wrong"]), (1, ["right", "wrong", "wrong"])):
            assert cli.main(["doctor", "--recheck", "--verbose"]) == 1
            said = capsys.readouterr().out
            assert faulty_checks.runs(folder) == ran
            assert said.count("recheck ") == (1 if again else 3)
            assert ("kernel 'large' of q2::gemm on cpu (first launch): large was" in said) != again
            assert ("right  nvfp4  passed" in said) != again
            assert "FAULT, rejected: it failed its self-check on this GPU: 1 of 9 codes" in said
    assert check_results.stored(asked["large"]) is None  # checked before its next use


BAD = {
    # cuBLASLt and Triton, the compute capability -> what the lines begin with
    ("130400", "3.7.0", (10, 0)): ["cuBLAS 13.4.0: cublasLtMatmul may ignore the tensor-wide"],
    ("130401", "3.7.0", (10, 0)): [],
    ("130501", "3.7.0", (12, 0)): ["cuBLAS 13.5.1: matmuls fail"],
    ("130501", "3.7.0", (10, 0)): [],
    ("130600", "3.4.0", (12, 0)): ["Triton 3.4.0: tl.dot_scaled multiplies in bf16"],
    ("130600", "3.8.0+git1", (10, 3)): ["Triton 3.8.0: tl.dot_scaled reads an E8M0 scale"],
    ("130400", "3.8.0", (9, 0)): [],  # no fp4 tensor cores
    ("", "", (10, 0)): [],
}


@pytest.mark.parametrize("case", BAD)
def test_versions_that_are_known_to_be_bad(monkeypatch, recwarn, case):
    """Each row names what to install and where that was found."""
    cublas, triton, capability = case

    def version(package):
        if not triton:
            raise importlib.metadata.PackageNotFoundError(package)
        return triton

    monkeypatch.setattr(known_bad, "cublaslt_version", lambda: cublas)
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
    found = known_bad.known_bad(capability)
    assert len(found) == len(BAD[case])
    for line, begins in zip(found, BAD[case], strict=True):
        assert line.startswith(begins) and "(https://" in line and "To install: " in line
    known_bad.warn_of_known_bad.cache_clear()
    for _ in range(2):
        known_bad.warn_of_known_bad(0)
    known_bad.warn_of_known_bad.cache_clear()
    assert texts(recwarn, RuntimeWarning) == [f"q2compile: {line}" for line in found]


def test_doctor_says_that_the_cache_is_temporary(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", "/dev/null/nowhere")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(doctor, "device_rows", lambda device: [])
    cli.main(["doctor", "--no-check"])
    said = capsys.readouterr().out
    assert "cache     is temporary: /dev/null/nowhere can't be written (Not a directory)" in said
    assert f"in {tmp_path}/q2compile-" in said


@pytest.mark.parametrize("state", ["passed", "rejected"])
def test_doctor_prints_json(gpu, monkeypatch, capsys, state):
    """A faulty line sets the exit status."""
    row = kernel_rows.KernelRow(
        "gemm", "good", "gemm", "nvfp4", state, "why" * (state == "rejected"), 7
    )
    gpu((12, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(doctor, "device_rows", lambda device: [row])
    monkeypatch.setattr(doctor, "kernel_lines", lambda rows, check, verbose: ["a line"])
    assert cli.main(["doctor", "--json"]) == (state == "rejected")
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert device["capability"] == "12.0" and device["target"] == "kernels for sm_120f"
    (line,) = device["kernels"]
    assert line == {
        "op": "gemm",
        "kernel": "good",
        "of": "gemm",
        "scheme": "nvfp4",
        "state": state,
        "reason": row.reason,
        "milliseconds": 7,
    }
