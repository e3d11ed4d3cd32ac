# SPDX-License-Identifier: Apache-2.0
"""`q2compile doctor`: the state of each kernel, by its name, in lines and in JSON."""

import dataclasses
import functools
import json

import pytest
import torch

from q2compile.runtime_kernels import registry
from q2compile.runtime_kernels.cuda import checked_cases, selfcheck
from q2compile.runtime_kernels.kernel_states import disable, rejected
from q2compile.tools import cli, doctor, kernel_rows
from tests.support.pretended_gpu import on_gpu

ON_CPU = torch.device("cpu")


def test_doctor_lists_what_fails_and_goes_on(candidate, capsys):
    """Each state by its name; what a kernel is asked raises nothing."""

    def raises(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    said = "it failed its self-check on this GPU:\n1 of 9 codes differ"
    candidate("gemm", None, "good")
    candidate("gemm", None, "wrong", unsupported=lambda *args: rejected(said))
    candidate("gemm", None, "starved", unsupported=raises)
    candidate("gemm", None, "elsewhere", unsupported=lambda *args: "it wants a newer GPU")
    candidate("gemm", None, "unwanted")
    disable(["gemm.unwanted"], "option disable_kernels")
    cpu, schemes = torch.device("cpu"), checked_cases.CHECKED["gemm"]
    rows = [
        kernel_rows.kernel_row(kernel, cpu, "gemm", scheme)
        for kernel in registry.kernels("gemm")[:5]
        for scheme in schemes
    ]
    for row in rows:
        row.begins = []
    print(*doctor.kernel_lines(rows, True, True), sep="\n")
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 5 * len(schemes) + 1
    for line in (
        " passed (",
        "FAULT, rejected: it failed its self-check on this GPU: 1 of 9 codes differ\n",
        "FAULT, rejected: OutOfMemoryError: CUDA out of memory\n",
        "unsupported: it wants a newer GPU\n",
        "disabled: by option disable_kernels\n",
    ):
        assert out.count(line) == len(schemes)
    states = {row.kernel: row.as_line()["state"] for row in rows}
    assert states == {
        "good": "passed",
        "wrong": "rejected",
        "starved": "rejected",
        "elsewhere": "unsupported",
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
    rows = [
        dataclasses.replace(row, asks=[functools.partial(quantizer.why_not, *on_gpu(of, scheme))])
        for quantizer in registry.kernels("quantize")[:1]
        for of, scheme in list(checked_cases.checked_of("quantize"))[:3]
        for row in [kernel_rows.kernel_row(quantizer, ON_CPU, of, scheme)]
    ]
    print(*doctor.kernel_lines(rows, False, True), sep="\n")
    assert capsys.readouterr().out.count("serves this device") == 3
    assert {row.state for row in rows} == {"serves"}


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
