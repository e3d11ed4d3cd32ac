# SPDX-License-Identifier: Apache-2.0
"""The first large launch of a GEMM: a mark on disk while it runs, and results of grouped GEMMs."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from q2compile.runtime_kernels import check_results, registry, selfcheck
from q2compile.runtime_kernels.cuda.gemm import first_launch
from q2compile.runtime_kernels.cuda.gemm.first_launch import WrongError
from q2compile.runtime_kernels.cuda.jit import launch
from q2compile.runtime_kernels.kernel_states import DeviceLostError
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.gemm import Factor
from q2compile.runtime_kernels.registry import REFERENCE, KernelWarning
from q2compile.runtime_kernels.small_calls import small_calls
from tests.support import forked
from tests.support.checked_forms import CHECKED, form
from tests.support.new_process import forget_checks
from tests.support.small_model import Mlp, results_of
from tests.support.warned import texts

PRODUCTS = "gemm", "gemm_masked_unrotate", "grouped_gemm"
CPU = torch.device("cpu")
ENDS = torch.tensor([0, 70, 70, 300, 520], dtype=torch.int32)  # 30 of 550 rows are in no group
CHUNKS = torch.tensor([128, 128, 384, 512, 512], dtype=torch.int32)  # where they are contracted
SIZES = {  # of a and b; weights of [48, 96] in fprop, of [48, 128] in dgrad
    "fprop": ((550, 96), (5 * 48, 96)),
    "dgrad": ((550, 128), (48, 5 * 128)),
    "wgrad": ((40, 640), (48, 640)),
}
SCHEMES = [
    ("nvfp4_46_pow2", "nvfp4_46_pow2"),
    ("nvfp4_46", "nvfp4_16x16"),
    ("mxfp4_rtn", "mxfp4_rtn34"),
]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path))
    forget_checks()


def request(*which):
    return first_launch.request("grouped_gemm", "triton_fp4", CPU, *which)


# ---- grouped GEMMs -------------------------------------------------------------------------------


def factors(gemm: str, schemes: tuple[str, str]) -> tuple[Factor, Factor, torch.Tensor]:
    found = []
    for size, scheme in zip(SIZES[gemm], schemes, strict=True):
        spec, x = get_scheme(scheme), torch.randn(size)
        amax = x.abs().amax() if spec.takes_amax else None
        made = torch.ops.q2.quantize(x, scheme=scheme, rowwise=True, columnwise=False, amax=amax)
        found.append(Factor(*made, spec))
    return *found, CHUNKS if gemm == "wgrad" else ENDS


def arguments(gemm: str, a: Factor, b: Factor, offs: torch.Tensor, dtype=torch.bfloat16) -> tuple:
    return *a[:3], *b[:3], offs, a.spec.name, b.spec.name, gemm, dtype


def grouped(*what) -> torch.Tensor:
    args = arguments(*what)
    return registry.select("grouped_gemm", args, REFERENCE)(*args)


@pytest.mark.parametrize("gemm", SIZES)
@pytest.mark.parametrize("schemes", SCHEMES)
def test_right_grouped_products_pass(gemm, schemes) -> None:
    a, b, offs = factors(gemm, schemes)
    exact = grouped(gemm, a, b, offs, torch.float32)  # those in bf16 are rounded twice
    for dtype in (torch.float32, torch.bfloat16):
        first_launch.compare(request(dtype), exact.to(dtype), arguments(gemm, a, b, offs))
        assert first_launch.known(request(dtype))


FAULTS = {
    "the last group": lambda out, rows: out[rows[3] : rows[4]].zero_(),
    "a group's neighbor": lambda out, rows: out[rows[2] : rows[3]].copy_(
        out[rows[2] : rows[3]].flip(0)
    ),
    "some columns": lambda out, rows: out[:, 16:32].mul_(1.1),
    "a NaN": lambda out, rows: out[rows[3]].fill_(torch.nan),
}


@pytest.mark.parametrize("gemm", SIZES)
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_grouped_products_are_rejected_for_good(gemm, fault) -> None:
    a, b, offs = factors(gemm, SCHEMES[0])
    out = grouped(gemm, a, b, offs)
    FAULTS[fault](out, [0, 40, 80, 120, 160] if gemm == "wgrad" else offs.tolist())
    with pytest.raises(WrongError, match="its first large result, "):
        first_launch.compare(request(1), out, arguments(gemm, a, b, offs))
    forget_checks()  # as in a new process
    with pytest.raises(WrongError, match="differs from a BF16 GEMM"):
        first_launch.known(request(1))


@pytest.mark.parametrize("gemm", ["fprop", "dgrad"])
def test_rows_of_no_group_are_zero(gemm) -> None:
    a, b, offs = factors(gemm, SCHEMES[0])
    out = grouped(gemm, a, b, offs)
    out[540, 3] = 1e-3
    with pytest.raises(WrongError, match="by inf times"):
        first_launch.compare(request(1), out, arguments(gemm, a, b, offs))


def test_a_gradient_of_a_group_without_rows_is_zero() -> None:
    a, b, offs = factors("wgrad", SCHEMES[0])
    out = grouped("wgrad", a, b, offs)
    assert out[40:80].eq(0).all()
    out[40:80] = 1e-3
    with pytest.raises(WrongError):
        first_launch.compare(request(1), out, arguments("wgrad", a, b, offs))


# ---- marks ---------------------------------------------------------------------------------------


def marks(tmp_path) -> int:
    return len(list(tmp_path.glob("*.checking")))


def test_there_is_a_mark_while_it_runs(tmp_path) -> None:
    """Whatever is raised that leaves the device as it was, nothing stays."""
    with first_launch.marked(request(1)):
        assert marks(tmp_path) == 1
    for error in (torch.OutOfMemoryError("CUDA out of memory"), WrongError(), KeyboardInterrupt()):
        with pytest.raises(type(error)), first_launch.marked(request(1)):
            raise error
    assert marks(tmp_path) == 0 and not first_launch.known(request(1))


def test_the_mark_stays_where_the_device_has_failed(monkeypatch, tmp_path) -> None:
    def lost(error, *of):
        raise DeviceLostError("cuda:0 failed")

    monkeypatch.setattr(first_launch, "kernels_own", lost)
    with pytest.raises(DeviceLostError), first_launch.marked(request(1)):
        raise RuntimeError("CUDA error: an illegal instruction was encountered")
    assert marks(tmp_path) == 1


@pytest.mark.parametrize("how", ["trap", "hang"])
def test_a_large_launch_that_crashed_or_hung_does_not_run_again(
    candidate, fresh_compiler, tmp_path, how
) -> None:
    """Once it may have been a job that somebody killed, and it runs again. After the second time
    the next process trains with the right results, and one warning."""
    program = (
        "import os, signal, time, torch\n"
        "from q2compile.runtime_kernels.cuda.gemm import first_launch\n"
        "what = first_launch.request('gemm', 'large', torch.device('cpu'), 1)\n"
        "assert not first_launch.known(what)\n"
        "with first_launch.marked(what):\n"
        f"    os.kill(os.getpid(), signal.SIGILL) if {how == 'trap'} else None\n"
        "    time.sleep(600)\n"
    )
    ended = signal.SIGILL if how == "trap" else signal.SIGKILL
    asked = first_launch.request("gemm", "large", CPU, 1)
    for _ in range(2):
        process = forked.start(program)
        if how == "hang":  # until somebody ends it
            while not list(tmp_path.glob(f"*.{process.pid}-*.checking")):
                time.sleep(0.02)
            os.kill(process.pid, signal.SIGKILL)
        assert process.wait().returncode == -ended
        assert marks(tmp_path) == 1 and check_results.stored(asked) is None

    model, x = Mlp(), torch.randn(32, 64)

    want, ran = results_of(model, x), []

    def gemm(*args):
        large = 1024, 1024, 1024
        return first_launch.launched("gemm", "large", args, large, (1,), lambda: ran.append(args))

    candidate("gemm", None, "large", function=gemm)
    with pytest.warns(KernelWarning) as caught:
        assert all(map(torch.equal, results_of(model, x), want))
    (said,) = texts(caught, KernelWarning)
    assert "kernel 'large' of q2::gemm on cpu is rejected" in said
    assert "its first large launch did not end in an earlier process" in said
    assert ran == [] and marks(tmp_path) == 0
    assert check_results.stored(asked).reason


@pytest.mark.usefixtures("checked_here")
@pytest.mark.parametrize("fault", [None, "wrong", "dies"])
@pytest.mark.parametrize("schemes", [("nvfp4_46", "nvfp4_46"), ("mxfp4_rtn", "mxfp4_rtn")])
def test_after_a_strike_the_check_s_process_runs_the_product_first(
    candidate, tmp_path, fault, schemes
) -> None:
    """On operands of the same sizes. Checks run here, so that the kernel can be replaced."""
    ran = []

    def gemm(*args):
        def launch() -> torch.Tensor:
            ran.append((args[0], marks(tmp_path)))
            if fault == "dies" and args[0] is not operands[0]:
                raise AssertionError("no such instruction")
            out = registry.kernels("gemm")[-1].function(*args)
            return out * (1.1 if fault == "wrong" else 1)

        large = 1024, 1024, 1024
        return first_launch.launched("gemm", "large", args, large, (1,), launch)

    a, b, _ = factors("fprop", schemes)
    operands = (*a[:3], *b[:3], None, *schemes, torch.bfloat16)
    candidate("gemm", None, "large", function=gemm)
    asked = first_launch.request("gemm", "large", CPU, 1)
    assert check_results.strike(asked, "it hung", time.time()) is None
    forget_checks()
    if fault is None:
        registry.kernels("gemm")[0].function(*operands)
        (other, marked), (own, not_marked) = ran
        assert other.shape == own.shape and own is operands[0] and not torch.equal(other, own)
        assert (marked, not_marked) == (1, 0) and check_results.stored(asked).reason is None
        return
    with pytest.warns(KernelWarning), pytest.raises(WrongError):
        registry.kernels("gemm")[0].function(*operands)
    assert all(codes is not operands[0] for codes, _ in ran)
    assert check_results.stored(asked).reason


# ---- tiles of large products, in the self-check --------------------------------------------------


@pytest.mark.parametrize("op", PRODUCTS)
@pytest.mark.parametrize("scheme", CHECKED["gemm"])
def test_the_tile_of_large_products_is_checked(candidate, monkeypatch, op, scheme) -> None:
    """A kernel that is wrong only where it takes that tile: on one multiprocessor, for a
    contraction of whole tiles. With a bias, say, it has the same loop."""
    monkeypatch.setattr(launch, "all_multiprocessors", lambda index: 148)
    reference = registry.kernels(op)[-1].function
    seen = []

    def broken(*args):
        elements = 2 * args[0].shape[1]
        is_large = launch.multiprocessors(0) == 1
        seen.append((is_large, elements % 256 == 0))
        return reference(*args) * (1.01 if is_large else 1)

    candidate(op, None, function=broken)
    found = selfcheck.disagreement("broken", CPU, form(op, scheme))
    assert found is not None and found.endswith("by the tile of large products")
    other = form(op, scheme, dtype=torch.float32)
    assert selfcheck.disagreement("broken", CPU, other) is None
    assert (True, True) in seen and {whole for large, whole in seen if large} == {True}


@pytest.mark.parametrize("op", PRODUCTS)
def test_right_kernels_agree_on_all_tiles(candidate, op) -> None:
    candidate(op, None, "right", function=registry.kernels(op)[-1].function)
    asked = form(op, "nvfp4_46_pow2")
    assert [case.in_training for case in small_calls(asked)].count(True) == 1
    assert selfcheck.disagreement("right", CPU, asked) is None
