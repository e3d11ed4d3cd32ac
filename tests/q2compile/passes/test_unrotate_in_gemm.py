# SPDX-License-Identifier: Apache-2.0
"""The pass that moves QuEST's mask and inverse rotation into the GEMM's epilogue: its golden, its
bits, and the calls that it leaves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from expecttest import TestCase

from q2compile.graph.nodes import op_counts
from q2compile.passes.post_grad.unrotate_in_gemm import unrotate_in_gemm_pass
from q2compile.passes.verify import check_spec
from q2compile.report.graph_text import readable
from q2compile.runtime_kernels.registry import CUDA, CUDA_BF16, REFERENCE, TRITON_FP4
from tests.support.graph_builder import q2, run, traced
from tests.support.serving import serve_by

SCHEME = "mxfp4_rtn34"


@pytest.fixture(autouse=True)
def kernels(monkeypatch) -> dict[str, str]:
    """The kernel that each op would have on a Blackwell."""
    served = {"gemm": TRITON_FP4, "gemm_masked_unrotate": TRITON_FP4}
    by_name = lambda op, args: SimpleNamespace(name=served.get(op, CUDA), launching=None)  # noqa: E731
    serve_by(monkeypatch, by_name)
    return served


def dgrad(dy, codes, *_, bias=None, back=lambda y, mask: q2.masked_unrotate(y, mask, "h32")):
    """dgrad with a second operand of 64 rows: those of dy, repeated. ``codes`` are the mask."""
    seed = q2.seed(dy, 0)
    a = q2.quantize(
        dy, scheme=SCHEME, transform="rht32", rowwise=True, columnwise=False, rowwise_seed=seed
    )
    b = q2.quantize(
        dy.repeat(2, 1)[:64],
        scheme=SCHEME,
        transform="rht32",
        rowwise=True,
        columnwise=False,
        rng_offset=1,
        rowwise_seed=seed,
    )
    y = q2.gemm(*a, *b, bias, SCHEME, SCHEME, torch.bfloat16)
    return back(y, codes[:, :8].contiguous())


class TestGolden(TestCase):
    def test_golden(self) -> None:
        gm, _ = traced(dgrad)
        assert unrotate_in_gemm_pass(gm.graph) == 1
        last = readable(gm).replace("gemm_masked_unrotate_default", "dx").splitlines()[-2:]
        self.assertExpectedInline(
            "\n".join(last).replace(SCHEME, "RTN"),
            """\
dx: bf16[40, 64] = q2.gemm_masked_unrotate(getitem, getitem_1, getitem_2, getitem_3, getitem_4, getitem_5, clone, 'RTN', 'RTN', 'h32', torch.bfloat16)
return dx""",
        )


@pytest.mark.parametrize("tracing_mode", ["fake", "symbolic"])
def test_the_gradient_keeps_its_bits(tracing_mode) -> None:
    gm, inputs = traced(dgrad, tracing_mode)
    before = run(gm, inputs)
    assert unrotate_in_gemm_pass(gm.graph) == 1
    gm.recompile()
    check_spec(gm.graph, "backward", "test")
    assert torch.equal(run(gm, inputs), before) and before.count_nonzero()
    found = op_counts(gm.graph)
    assert found["q2.gemm_masked_unrotate.default"] == 1
    assert not {"q2.gemm.default", "q2.masked_unrotate.default"} & set(found)
    assert unrotate_in_gemm_pass(gm.graph) == 0


def read_by_another(y, mask):
    return q2.masked_unrotate(y, mask, "h32"), y


def of_something_else(y, mask):
    return q2.masked_unrotate(y * 2, mask, "h32")


def of_an_input(dy, codes, *_):
    return q2.masked_unrotate(dy[:, :32].contiguous(), codes[:, :4].contiguous(), "h32")


@pytest.mark.parametrize("back", [read_by_another, of_something_else])
def test_what_another_reads_is_written(back) -> None:
    gm, _ = traced(lambda *inputs: dgrad(*inputs, back=back))
    assert unrotate_in_gemm_pass(gm.graph) == 0


def test_without_a_gemm_there_is_no_epilogue() -> None:
    gm, _ = traced(of_an_input)
    assert unrotate_in_gemm_pass(gm.graph) == 0


def test_a_bias_would_be_rotated() -> None:
    gm, _ = traced(lambda *inputs: dgrad(*inputs, bias=inputs[0].new_ones(64)))
    assert unrotate_in_gemm_pass(gm.graph) == 0


@pytest.mark.parametrize("gemm", [CUDA_BF16, REFERENCE])
def test_other_gemms_have_no_such_epilogue(gemm, kernels) -> None:
    kernels["gemm"] = gemm
    gm, _ = traced(dgrad)
    assert unrotate_in_gemm_pass(gm.graph) == 0


def test_one_that_failed_its_self_check_is_left_out(kernels) -> None:
    kernels["gemm_masked_unrotate"] = REFERENCE
    gm, _ = traced(dgrad)
    assert unrotate_in_gemm_pass(gm.graph) == 0
