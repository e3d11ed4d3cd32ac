# SPDX-License-Identifier: Apache-2.0
"""Inductor kernels of scheme fp8: the bits of the reference, contiguous results, and FP8 GEMMs in
the code of a training step."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from q2compile.lowering.inductor_kernels import rows
from tests.lowering.test_lowering import assert_same_bits
from tests.support.emulation.inductor import emulate, lower_on_cpu, serve_as_on

q2 = torch.ops.q2
NO_SCALES = torch.empty((0, 0), dtype=torch.float8_e4m3fn)


def quantized(x: torch.Tensor, columnwise: bool = False) -> list[torch.Tensor]:
    half = x / 2  # something to fuse with
    return q2.quantize(half, scheme="fp8", rowwise=True, columnwise=columnwise, amax=q2.amax(half))


def back(codes: torch.Tensor, scale: torch.Tensor, columns: int) -> list[torch.Tensor]:
    none = NO_SCALES.to(codes.device)
    value = q2.dequantize(codes, none, scale, "fp8", columns, torch.bfloat16)
    value = torch.where(value.isnan(), 7.0, value)  # payloads of NaN may differ
    return [value, q2.transpose(codes, none, "fp8", columns)[0]]


def matrix(rows: int, columns: int) -> torch.Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[3], x[5, 2], x[7, 1], x[9, 4], x[11] = 0, -0.0, torch.inf, torch.nan, 1e-6
    return x


def assert_compiled_gives_the_same(device: str, rows: int, columns: int, both: bool) -> None:
    torch._dynamo.reset()
    x = matrix(rows, columns)
    want = quantized(x, both)
    got = torch.compile(quantized)(x.to(device), both)
    assert_same_bits([t.cpu() for t in got], want)
    args = got[0], got[2]
    want = back(*(t.cpu() for t in args), columns)
    assert_same_bits([t.cpu() for t in torch.compile(back)(*args, columns)], want)


@pytest.mark.parametrize("shape", [(48, 64), (37, 100)])
def test_bits_of_cpp(monkeypatch, shape) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    lower_on_cpu(monkeypatch)
    monkeypatch.setattr(rows, "why_no_conversion", lambda device: None)
    assert_compiled_gives_the_same("cpu", *shape, both=False)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(48, 64), (37, 100), (1024, 2048)])
def test_bits_of_triton(shape) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton has no e4m3 before compute capability 8.9")
    assert_compiled_gives_the_same("cuda", *shape, both=False)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(48, 64), (37, 100), (1024, 2048)])
def test_bits_of_cuda_in_generated_code(shape) -> None:
    assert_compiled_gives_the_same("cuda", *shape, both=True)


class Layers(nn.Sequential):
    """The second has 50 outputs, which _scaled_mm does not take."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 50, bias=False))


def gemms_of_a_step(monkeypatch, recipe: str) -> tuple[list[str], list[str], str]:
    """The arguments of the _scaled_mm of a training step in generated code, the names of its other
    GEMMs, and all of the code."""
    serve_as_on(monkeypatch, 90)
    monkeypatch.setattr(rows, "why_no_conversion", lambda device: None)
    sources = emulate(monkeypatch, 90)
    torch._dynamo.reset()
    options = {"recipe": recipe, "inductor": {"cpu_backend": "triton", "fx_graph_cache": False}}
    x = torch.randn(128, 64).bfloat16().requires_grad_()
    torch.compile(Layers().bfloat16(), backend="quartet2", options=options)(x).sum().backward()
    code = "\n".join(sources)
    calls = re.findall(
        r"extern_kernels\.(_scaled_mm|mm|addmm)\((.*)\)|(torch\.ops\.q2\.gemm)\.default\(", code
    )
    scaled = [args for name, args, _ in calls if name == "_scaled_mm"]
    assert all("use_fast_accum=False" in args for args in scaled)
    return scaled, [op or name for name, _, op in calls if name != "_scaled_mm"], code


def test_a_training_step_multiplies_codes(monkeypatch) -> None:
    """Three FP8 GEMMs of the first layer in generated code, with exact sums. Of the second, dgrad
    and wgrad; its fprop pads inside the op. No GEMM is left in BF16."""
    scaled, others, _ = gemms_of_a_step(monkeypatch, "fp8")
    assert len(scaled) == 5 and others == ["torch.ops.q2.gemm"]


@pytest.mark.parametrize(
    "recipe, scaled, others, elements",
    [
        ("mxfp4_2d", 5, ["torch.ops.q2.gemm"], 10),
        ("quartet", 5, ["torch.ops.q2.gemm"], 10),
        ("mxfp4", 4, ["addmm", "mm"], 8),
    ],
)
def test_a_step_in_mxfp4_multiplies_its_codes_in_e4m3(
    monkeypatch, recipe, scaled, others, elements
) -> None:
    """As on a GPU with fp8 and no fp4 tensor cores. Quantizers write codes; each operand is made
    e4m3 once. mxfp4 has its fprop in BF16."""
    found, left, code = gemms_of_a_step(monkeypatch, recipe)
    assert (len(found), left) == (scaled, others)
    assert len(re.findall(r"q2_Call\('to_e4m3'", code)) == elements
    assert "@bf16" not in code and "dequantize" not in code
