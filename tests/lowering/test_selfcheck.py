# SPDX-License-Identifier: Apache-2.0
"""The self-check of Inductor kernels on an unknown GPU, for which the CPU stands in. It runs once,
during another compilation. If it fails, a kernel of ours does the work."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.utils import run_and_get_code

from q2compile.lowering.inductor_kernels import selfcheck
from q2compile.runtime_kernels import check_results, checks, registry
from q2compile.runtime_kernels.ops.table import QuantizerCall, rowwise_call
from q2compile.runtime_kernels.registry import KernelWarning
from q2compile.tools import doctor, kernel_rows
from tests.support.checked_forms import INDUCTOR_CHECKED
from tests.support.emulation.inductor import lower_on_cpu
from tests.support.new_process import forget_checks
from tests.support.warned import texts

pytestmark = pytest.mark.usefixtures("fresh_compiler")

CPU = torch.device("cpu")
SCHEME = "nvfp4_46_pow2"
CALL = rowwise_call(SCHEME)


@pytest.fixture(autouse=True)
def unknown(checked_here, monkeypatch, tmp_path) -> None:
    lower_on_cpu(monkeypatch)
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(selfcheck, "needs_check", lambda device: True)
    monkeypatch.setattr(check_results, "named", lambda device: ("a CPU", 0, 0))


def compiled_code(x: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], str]:
    """The result of `quantized` when it is compiled, and the generated code."""
    with inductor_config.patch(fx_graph_cache=False):
        results, codes = run_and_get_code(torch.compile(quantized), x)
    return results, codes[-1]


@pytest.fixture
def ran(monkeypatch) -> list[tuple]:
    """The self-checks that ran; all of them pass."""
    run: list[tuple] = []
    monkeypatch.setattr(selfcheck, "disagreement", lambda *check: run.append(check))
    return run


def rejection(call: QuantizerCall) -> str | None:
    return checks.rejection(selfcheck.request_of(CPU, call))


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.ops.q2.quantize(x.relu() * 3, scheme=SCHEME, rowwise=True, columnwise=False)


def test_in_the_midst_of_a_compilation(monkeypatch) -> None:
    """In a program that has set a default device. The Inductor kernels are used afterwards."""
    run = []
    disagreement = selfcheck.disagreement

    def noted(*check):
        run.append((check, disagreement(*check)))
        return run[-1][1]

    monkeypatch.setattr(selfcheck, "disagreement", noted)
    x = torch.randn(40, 64)
    with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu"):
        got, code = compiled_code(x)
        want = quantized(x)
    assert all(map(torch.equal, got, want))
    assert "torch.ops.q2.quantize.default(" not in code
    assert [(check[0], check[1].call.variant, found) for check, found in run] == [
        (CPU, CALL.variant, None)
    ]


def test_loops_that_differ_are_not_used(monkeypatch) -> None:
    def compiled(graph, inputs):
        def wrong(*args):
            codes, *others = graph(*args)
            return codes ^ 1, *others

        return wrong

    monkeypatch.setattr(selfcheck, "compile_by_itself", compiled)
    x = torch.randn(40, 64)
    with pytest.warns(
        KernelWarning, match="'inductor' of q2::quantize rowwise on cpu is rejected"
    ) as said:
        got, code = compiled_code(x)
    (message,) = texts(said, KernelWarning)
    assert "codes differ from the reference" in message
    assert "torch.ops.q2.quantize.default(" in code
    assert all(map(torch.equal, got, quantized(x)))
    (noted,) = registry.left_out()
    assert (
        "kernel 'inductor' of q2::quantize rowwise on cpu is rejected: it failed its self-check"
        in noted
    )


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("Triton asserts"),
        NotImplementedError("no such instruction"),
        RuntimeError("ptxas fatal: unknown target"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_whatever_fails_there_is_a_reason_once(monkeypatch, error) -> None:
    tried = []

    def compiled(graph, inputs):
        tried.append(graph)
        raise error

    monkeypatch.setattr(selfcheck, "compile_by_itself", compiled)
    with pytest.warns(KernelWarning, match=str(error)) as said:
        for _ in range(3):
            assert str(error) in (rejection(CALL) or "")
    assert len(tried) == len(texts(said, KernelWarning)) == 1


def test_want_of_memory_is_no_verdict(monkeypatch) -> None:
    answers = [torch.OutOfMemoryError("CUDA out of memory"), None]

    def disagreement(*check):
        if error := answers.pop(0):
            raise error

    monkeypatch.setattr(selfcheck, "disagreement", disagreement)
    with pytest.raises(torch.OutOfMemoryError):
        rejection(CALL)
    assert rejection(CALL) is None


def test_that_loops_agree_is_known_to_the_next_process(monkeypatch, ran) -> None:
    """On a GPU of the same name, with the same torch, Triton and sources."""
    for times in (1, 1, 2, 3):
        forget_checks()
        if times == 2:
            monkeypatch.setattr(check_results, "versions", lambda: ("99.0", "99.0"))
        if times == 3:
            monkeypatch.setattr(check_results, "named", lambda device: ("another", 0, 0))
        assert rejection(CALL) is None
        assert len(ran) == times
    assert rejection(rowwise_call("nvfp4_46")) is None
    assert len(ran) == 4


def test_that_they_differ_is_known_to_the_next_process(monkeypatch) -> None:
    run = []
    monkeypatch.setattr(selfcheck, "disagreement", lambda *check: run.append(check) or "differs")
    for _ in range(2):
        forget_checks()
        with pytest.warns(KernelWarning):
            assert rejection(CALL)
        forget_checks()
    assert len(run) == 1


def test_doctor_checks_them_too(monkeypatch, capsys) -> None:
    answers = {"nvfp4_46": "1 of 9 codes differ"}
    monkeypatch.setattr(
        selfcheck, "disagreement", lambda device, form: answers.get(form.call.scheme.name)
    )
    asked = (selfcheck.request_of(CPU, rowwise_call(scheme)) for scheme in INDUCTOR_CHECKED)
    rows = list(map(kernel_rows.row_of, asked))
    with pytest.warns(KernelWarning):
        print(*doctor.kernel_lines(rows, True, True), sep="\n")
    _, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(rows) == len(INDUCTOR_CHECKED)
    assert sum(" passed (" in line for line in lines) == len(lines) - 1
    (line,) = [line for line in lines if "FAULT" in line]
    assert "nvfp4_46 " in line and "FAULT, rejected: it failed its self-check" in line
    assert line.endswith("1 of 9 codes differ")
