# SPDX-License-Identifier: Apache-2.0
"""Training on an unknown GPU, and with an old NVRTC, ends with the right numbers. One line names
what runs instead. Generated code is that for such a GPU, and its launches run in the emulation.

Faults of kernels: tests/runtime_kernels/cuda/test_checks.py, test_first_launch.py and
test_what_runs_is_checked.py."""

from __future__ import annotations

import functools
import shutil
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn

from q2compile.runtime_kernels.cuda import emulated
from q2compile.runtime_kernels.cuda.call_site import CallSite
from q2compile.runtime_kernels.cuda.gemm import triton_fp4
from q2compile.runtime_kernels.cuda.jit import limits, nvrtc
from tests.support.emulation.inductor import INDUCTOR_OPTIONS, emulate, serve_as_on
from tests.support.emulation.on_cpu import launches_on_cpu, matrix
from tests.support.pretended_gpu import forget

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
ENQUEUE = CallSite.enqueue


def pretend(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], version: tuple[int, int]
) -> list[str]:
    """A GPU of this compute capability, and this NVRTC. Returns what the log says of it."""
    emulate(monkeypatch, 10 * capability[0] + capability[1])
    serve_as_on(monkeypatch, 10 * capability[0] + capability[1])
    monkeypatch.setattr(CallSite, "enqueue", ENQUEUE)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "a GPU")
    monkeypatch.setattr(nvrtc, "version", lambda: version)
    monkeypatch.setattr(triton_fp4, "triton_version", lambda: (3, 8))
    forget()
    target = limits.targets(capability, version)[0].name
    assert target is not None
    launches_on_cpu(monkeypatch, target)
    said = emulated.of_device(0)
    forget()
    return said


def step(**inductor: Any) -> list[torch.Tensor]:
    """y, dx and dw of a linear."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)
    x = matrix(100, 256).requires_grad_()
    torch.manual_seed(1)
    with inductor_config.patch({"force_disable_caches": True, **inductor}):
        y = torch.compile(layer, backend="quartet2")(x)
        y.float().square().sum().backward()
    return [y.detach(), x.grad, layer.weight.grad]


@functools.cache
def wanted() -> list[torch.Tensor]:
    """Compute the results on this machine, once for all tests."""
    return step()


@pytest.mark.parametrize(
    "capability, version, said",
    [
        (
            *((13, 0), (13, 0)),
            "quantizers on a GPU (13.0) are compiled for compute_120: compute capability 13.0 is "
            "not known here",
        ),
        (
            *((10, 3), (12, 8)),
            "quantizers on a GPU (10.3) round to FP4 by arithmetic: NVRTC 12.8 has no target for "
            "compute capability 10.3, NVRTC 12.9 has",
        ),
    ],
)
def test_an_unknown_gpu_and_an_old_nvrtc(monkeypatch, capability, version, said) -> None:
    want = wanted()
    assert [text for text in pretend(monkeypatch, capability, version) if "quant" in text] == [said]
    got = step(**INDUCTOR_OPTIONS)
    assert len(got) == len(want) and all(map(torch.equal, got, want))
