# SPDX-License-Identifier: Apache-2.0
"""Which of cuBLASLt's algorithms a large product runs: the fastest, by a libcublasLt for a CPU that
lists three (tests/support/cublaslt) and a clock that the test sets."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from q2compile.runtime_kernels import check_results
from q2compile.runtime_kernels.cuda.gemm import cublaslt, cublaslt_fp4, fastest, first_launch
from q2compile.runtime_kernels.cuda.gemm.cublaslt import GemmKind, Plan
from tests.support.cublaslt import serve
from tests.support.new_process import forget_checks

SCHEME = "nvfp4_46_pow2"
M, N, K = 24, 48, 64
PRODUCT = GemmKind(None, M, N, K, torch.bfloat16, None)


@pytest.fixture(autouse=True)
def library(monkeypatch, tmp_path) -> ctypes.CDLL:
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(first_launch, "FLOPS", 1)
    forget_checks()
    yield serve(monkeypatch)
    cublaslt.PLANS.clear()
    forget_checks()


@pytest.fixture
def clock(monkeypatch) -> Callable[..., list[int]]:
    """Sets the milliseconds of algorithms 1 to 3. Returns a list of those that are timed."""

    def set_times(*times: float) -> list[int]:
        timed: list[int] = []

        def milliseconds(call: Any) -> float:
            call()
            timed.append(call.func.__self__.algorithm.id)
            return times[timed[-1] - 1]

        monkeypatch.setattr(fastest, "milliseconds", milliseconds)
        return timed

    return set_times


def operand(rows: int, zeros: bool = False) -> list[torch.Tensor]:
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)) * (not zeros)
    return torch.ops.q2.quantize(x, scheme=SCHEME, rowwise=True, columnwise=False, amax=None)


def multiply(rows: int = M, zeros: bool = False) -> None:
    """A product by the library, compared with the reference."""
    args = (*operand(rows, zeros), *operand(N), None, SCHEME, SCHEME, torch.bfloat16)
    got, want = cublaslt_fp4.gemm_fp4(*args), torch.ops.q2.gemm(*args)
    # Both round once, from sums in different orders: a unit in the last place.
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=1e-4)


def running(rows: int = M) -> int:
    return cublaslt.planned(PRODUCT._replace(rows=rows)).algorithm.id


def test_the_fastest_runs_in_this_process_and_the_next(clock) -> None:
    timed = clock(1.0, 0.5, 0.9)
    multiply()
    assert running() == 2 and timed == [1, 2, 3] * 3
    for _ in range(2):
        multiply()
        assert running() == 2 and len(timed) == 9
        cublaslt.PLANS.clear()
    multiply(M + 1)  # of the same class
    assert running(M + 1) == 2 and len(timed) == 9
    multiply(2 * M)
    assert len(timed) == 18


def test_the_first_stays_unless_another_is_clearly_faster(clock) -> None:
    clock(1.0, 0.98, 2.0)
    multiply()
    assert running() == 1 and cublaslt.planned(PRODUCT).is_chosen


def test_deterministic_algorithms_are_the_first(clock) -> None:
    timed = clock(1.0, 0.5, 0.9)
    torch.use_deterministic_algorithms(True)
    try:
        multiply()
    finally:
        torch.use_deterministic_algorithms(False)
    assert running() == 1 and timed == []


def test_nothing_is_timed_in_a_capture_or_for_small_products(clock, library, monkeypatch) -> None:
    timed = clock(1.0, 0.5, 0.9)
    monkeypatch.setattr(first_launch, "FLOPS", 2**30)
    multiply()
    monkeypatch.setattr(first_launch, "FLOPS", 1)
    library.fake_capture(1)
    fastest.choose_algorithm(PRODUCT, torch.device("cpu"), ())
    library.fake_capture(0)
    assert running() == 1 and timed == []
    multiply()
    assert running() == 2


def test_a_product_of_zeros_chooses_nothing(clock) -> None:
    timed = clock(1.0, 0.5, 0.9)
    multiply(zeros=True)
    assert running() == 1 and timed == []
    multiply()
    assert running() == 2


@pytest.mark.parametrize("fault", ["wrong", "refused"])
def test_an_algorithm_that_fails_is_not_chosen(clock, monkeypatch, fault) -> None:
    timed, own = clock(1.0, 0.5, 0.9), Plan.run

    def run(plan: Plan, a: Any, b: Any, alpha: Any, bias: Any, out: torch.Tensor) -> None:
        if plan.algorithm.id == 2 and fault == "refused":
            raise cublaslt.LaunchError("NOT_SUPPORTED")
        own(plan, a, b, alpha, bias, out)
        if plan.algorithm.id == 2:
            out[3:5] = 0

    monkeypatch.setattr(Plan, "run", run)
    multiply()
    assert running() == 3 and 2 not in timed


def test_a_class_in_which_a_process_ended_runs_the_first(clock, monkeypatch, caplog) -> None:
    timed = clock(1.0, 0.5, 0.9)
    began = {"choice of an algorithm": 1.0}
    monkeypatch.setattr(check_results, "take_unended", lambda asked: began.get(asked.check[4]))
    multiply()
    assert running() == 1 and timed == []
    assert "a process ended in kernel 'cublaslt_fp4' of q2::gemm" in caplog.text


def test_an_algorithm_that_was_asked_for_stays(clock) -> None:
    """`q2compile bench` times each of them."""
    timed = clock(1.0, 0.5, 0.9)
    cublaslt.plan(PRODUCT, cublaslt.planned(PRODUCT).algorithms[2])
    multiply()
    assert running() == 3 and timed == []
