# SPDX-License-Identifier: Apache-2.0
"""Kernels that a user disables, by the option and by the environment: others run in their place."""

import pytest
import torch

from q2compile.compiler.post_grad_passes import PostGradPasses
from q2compile.config import Config
from q2compile.report.report import RunReport
from q2compile.runtime_kernels import registry, selfcheck
from q2compile.runtime_kernels.kernel_states import DISABLED, VARIABLE, NotServedError, disable
from q2compile.runtime_kernels.registry import KernelWarning
from tests.support.checked_forms import arguments_of
from tests.support.pretended_gpu import on_gpu
from tests.support.small_model import Mlp, quantized
from tests.support.warned import texts

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def step(model, compiled, x):
    torch.manual_seed(1)
    y = compiled(x)
    y.square().sum().backward()
    results = [y.detach(), *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    return results


@pytest.mark.parametrize("names", [["broken"], ["gemm.broken"]])
@pytest.mark.parametrize("by", ["option", "environment"])
def test_a_disabled_kernel_serves_nothing(candidate, monkeypatch, names, by, recwarn):
    """Training has the results of the next kernel, without a warning; reports name who
    disabled it."""
    model, x = Mlp(), torch.randn(32, 64)
    want = step(model, quantized(model), x)
    torch._dynamo.reset()
    calls = candidate("gemm", RuntimeError("it runs"))
    if by == "environment":
        monkeypatch.setenv(VARIABLE, f" {names[0]},")
        compiled = quantized(model)
    else:
        compiled = quantized(model, disable_kernels=names)
    assert all(map(torch.equal, step(model, compiled, x), want))
    assert calls == [] and not texts(recwarn, KernelWarning)
    who = VARIABLE if by == "environment" else "option disable_kernels"
    assert RunReport().notes == [f"kernel {names[0]!r} is disabled by {who}"]
    with pytest.raises(NotServedError, match=f"disabled by {who}") as said:
        registry.select("gemm", arguments_of("gemm", "nvfp4_46_pow2"), "broken")
    assert said.value.state == DISABLED


def test_names_of_no_kernel_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="'cublaslt_fp'; did you mean 'cublaslt_fp4'"):
        Config(disable_kernels=["cublaslt_fp"])
    with pytest.raises(ValueError, match="'quantise.cuda'; did you mean 'quantize.cuda'"):
        Config(disable_kernels=("quantise.cuda",))
    with pytest.raises(ValueError, match="disable_kernels: got 'cuda'; allowed: a list"):
        Config(disable_kernels="cuda")
    with pytest.raises(ValueError, match="'reference'"):
        Config(disable_kernels=["reference"])
    monkeypatch.setenv(VARIABLE, "triton")
    with pytest.raises(ValueError, match=f"{VARIABLE} 'triton'; did you mean 'triton_fp4'"):
        quantized(Mlp())(torch.randn(32, 64))


def test_a_graph_compiled_with_other_kernels_is_not_taken_from_the_cache():
    runner = PostGradPasses(Config())
    before = runner.uuid()
    disable(["cublaslt_fp4"], "option disable_kernels")
    assert runner.uuid() != before


@pytest.mark.parametrize("disabled, served", [([], "cublaslt_fp4"), (["cublaslt_fp4"], "triton")])
def test_another_kernel_runs_in_the_place_of_a_disabled_one(gpu, monkeypatch, disabled, served):
    gpu((12, 0))
    monkeypatch.setattr(selfcheck, "disagreement", lambda *what: None)
    disable(disabled, VARIABLE)
    assert registry.choose("gemm", on_gpu("gemm", "nvfp4_46_pow2")).name.startswith(served)
