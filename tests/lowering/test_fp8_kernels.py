# SPDX-License-Identifier: Apache-2.0
"""Inductor kernels of scheme fp8: the bits of the reference, contiguous results, and FP8 GEMMs in
the code of a training step."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from q2compile.lowering.inductor_kernels import fp8
from tests.lowering.test_lowering import assert_same_bits
from tests.support.emulation.inductor import emulate, lower_on_cpu, serve_as_on

q2 = torch.ops.q2
NO_SCALES = torch.empty((0, 0), dtype=torch.float8_e4m3fn)


def both(x: torch.Tensor) -> list[torch.Tensor]:
    half = x / 2  # something to fuse with
    return q2.quantize(half, scheme="fp8", rowwise=True, columnwise=True, amax=q2.amax(half))


def back(codes: torch.Tensor, scale: torch.Tensor, columns: int) -> list[torch.Tensor]:
    none = NO_SCALES.to(codes.device)
    value = q2.dequantize(codes, none, scale, "fp8", columns, torch.bfloat16)
    value = torch.where(value.isnan(), 7.0, value)  # payloads of NaN may differ
    return [value, q2.transpose(codes, none, "fp8", columns)[0]]


def matrix(rows: int, columns: int) -> torch.Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[3], x[5, 2], x[7, 1], x[9, 4], x[11] = 0, -0.0, torch.inf, torch.nan, 1e-6
    return x


def assert_compiled_gives_the_same(device: str, rows: int, columns: int) -> None:
    torch._dynamo.reset()
    x = matrix(rows, columns)
    want = both(x)
    got = torch.compile(both)(x.to(device))
    assert_same_bits([t.cpu() for t in got], want)
    args = got[0], got[2]
    want = back(*(t.cpu() for t in args), columns)
    assert_same_bits([t.cpu() for t in torch.compile(back)(*args, columns)], want)


@pytest.mark.parametrize("shape", [(48, 64), (37, 100)])
def test_bits_of_cpp(monkeypatch, shape) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    lower_on_cpu(monkeypatch)
    monkeypatch.setattr(fp8, "converts", lambda device: True)
    assert_compiled_gives_the_same("cpu", *shape)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(48, 64), (37, 100), (1024, 2048)])
def test_bits_of_triton(shape) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton has no e4m3 before compute capability 8.9")
    assert_compiled_gives_the_same("cuda", *shape)


class Layers(nn.Sequential):
    """The second has 50 outputs, which _scaled_mm does not take."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 50, bias=False))


def test_a_training_step_multiplies_codes(monkeypatch) -> None:
    """Three FP8 GEMMs of the first layer in generated code, with exact sums. Of the second, dgrad
    and wgrad; its fprop pads inside the op. No GEMM is left in BF16."""
    serve_as_on(monkeypatch, 90)
    monkeypatch.setattr(fp8, "converts", lambda device: True)
    sources = emulate(monkeypatch, 90)
    torch._dynamo.reset()
    options = {
        "recipe": "fp8",
        "inductor": {"cpu_backend": "triton", "fx_graph_cache": False},
    }
    x = torch.randn(128, 64).bfloat16().requires_grad_()
    torch.compile(Layers().bfloat16(), backend="quartet2", options=options)(x).sum().backward()
    calls = re.findall(
        r"extern_kernels\.(\w+)\((.*)\)|(torch\.ops\.q2\.gemm)\.default\(", "\n".join(sources)
    )
    scaled = [args for name, args, _ in calls if name == "_scaled_mm"]
    assert len(scaled) == 5 and all("use_fast_accum=False" in args for args in scaled)
    assert [op for _, _, op in calls if op] == ["torch.ops.q2.gemm"]
    assert not any(name in ("mm", "addmm") for name, _, _ in calls)
