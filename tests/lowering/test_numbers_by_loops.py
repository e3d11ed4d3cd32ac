"""The bf16 numbers of an emulated GEMM's operand, written by the loops that quantise it: the bits
that its codes stand for, by one kernel, and only where such a GEMM reads them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch.nn.functional import rms_norm, silu

from q2compile import lowering
from q2compile.lowering import gemm_operands, launches
from q2compile.runtime_kernels.cuda.jit.launch import Launch, LaunchError
from q2compile.runtime_kernels.cuda.site import Site, Together
from q2compile.runtime_kernels.registry import KernelWarning
from tests.support.emulation.inductor import (
    INDUCTOR_OPTIONS,
    emulate,
    lower_on_cpu,
    serve_as_on,
    triton_kernels,
)
from tests.support.emulation.on_cpu import launches_on_cpu

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
q2 = torch.ops.q2
FOUR_SIX, RTN = "nvfp4_46_pow2", "nvfp4_pow2"


@pytest.fixture
def sources(monkeypatch) -> Iterator[list[str]]:
    """Loops are C++, which a CPU runs; what is launched for an H200 runs in the emulation. The
    sources of the graphs that are compiled."""
    calls = {site: site._call for site in (Site, Together)}
    lower_on_cpu(monkeypatch)
    serve_as_on(monkeypatch, 90)
    for site, call in calls.items():
        monkeypatch.setattr(site, "_call", call)
    launches_on_cpu(monkeypatch, "sm_90a")
    found: list[str] = []
    save = "torch._inductor.graph.GraphLowering.save_output_code"
    monkeypatch.setattr(save, staticmethod(found.append))
    with inductor_config.patch(force_disable_caches=True, cpp_wrapper=False):
        torch._dynamo.reset()
        yield found


def rows(count: int, columns: int) -> torch.Tensor:
    """Of every magnitude, so that some scales are e4m3 subnormals; zeros, an outlier."""
    x = torch.randn(count, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[3] *= 1e-6
    x[5] = 0
    x[7, :16] = 0
    x[9, 3] = 1e4
    x[11:14] *= torch.tensor([[1e-4], [1e-30], [1e-38]])
    x[15, 3:9] = 1e-39
    return x


def product(x: torch.Tensor, w: torch.Tensor, scheme: str) -> tuple[torch.Tensor, ...]:
    """Codes of what is computed from x, which has something of its own to fuse with, and a GEMM."""
    a = q2.quantize(x * -2.0, None, None, scheme, 0)
    b = q2.quantize(w, None, None, scheme, 0)
    return *a, q2.gemm(*a, *b, None, scheme, scheme, torch.bfloat16)


def assert_same_bits(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def assert_equal(got, want) -> None:
    """But for the sign of zeros, which depends on the order of a sum."""
    assert len(got) == len(want) and all(map(torch.equal, got, want))


def sixes(columns: int) -> torch.Tensor:
    """Times x it is 6 x, exactly."""
    return 6 * torch.eye(columns, dtype=torch.bfloat16)


@pytest.fixture
def numbers(sources, monkeypatch) -> list[torch.Tensor]:
    """Those of x that the first calls of sites leave: ahead of those of w, their last buffers."""
    found, call = [], Together._call

    def recorded(site, given) -> None:
        call(site, given)
        found.append(given[-2].flatten(1).clone())

    monkeypatch.setattr(Together, "_call", recorded)
    return found


@pytest.mark.parametrize(
    "scheme, columns, largest",
    [(FOUR_SIX, 64, 2.0**100), (FOUR_SIX, 100, 1.0), (RTN, 100, 1.0)],
)
def test_the_numbers_of_the_codes(scheme, columns, largest, sources, numbers) -> None:
    """Padding and zeros with their signs among them."""
    x = rows(70, columns)
    x[0] *= largest
    got = torch.compile(product)(x, sixes(columns), scheme)
    *want, y = product(x, sixes(columns), scheme)
    assert_same_bits(got[:3], want)
    padded = 2 * want[0].shape[1]
    assert_same_bits(numbers, [q2.dequantize(*want, scheme, padded, torch.bfloat16)])
    assert torch.equal(got[3], y)
    (source,) = sources
    assert "dequantised=((2, (0, 0), True, True), " in source


def test_some_are_mended(sources, numbers, monkeypatch) -> None:
    """Those of scales that are e4m3 subnormals, and no others."""
    x = rows(70, 64)
    bind = Launch.bind

    def without_the_last(launch, *args):
        bound = bind(launch, *args)
        return (lambda *_: None) if launch.variant.file == "align_scales.cu" else bound

    monkeypatch.setattr(Launch, "bind", without_the_last)
    torch.compile(product)(x, sixes(64), FOUR_SIX)
    want = product(x, sixes(64), FOUR_SIX)
    numbers_of_codes = q2.dequantize(*want[:3], FOUR_SIX, 64, torch.bfloat16)
    differ = (numbers[0] != numbers_of_codes).view(70, 4, 16).any(2)
    small = want[1].float() < 2.0**-6
    assert differ.any() and not (differ & ~small).any()


def test_nan(sources) -> None:
    x = rows(70, 64)
    x[2, 2] = float("nan")
    _, _, unit, y = torch.compile(product)(x, sixes(64), FOUR_SIX)
    assert unit.isnan() and y.isnan().all()


def test_any_number_of_rows(sources) -> None:
    compiled = torch.compile(product, dynamic=True)
    for count in (70, 33, 129):
        x = rows(count, 100)
        assert_equal(compiled(x, sixes(100), FOUR_SIX), product(x, sixes(100), FOUR_SIX))
    (source,) = sources
    assert "), True, " in source and "fixed=False" in source


def test_where_launches_fail(sources, monkeypatch) -> None:
    """Each op by itself then, and numbers of the codes, whatever the loops have written."""

    def failing(launch, *args):
        raise LaunchError("cannot launch: CUDA_ERROR_INVALID_IMAGE")

    monkeypatch.setattr(Launch, "bind", failing)
    x = rows(70, 64)
    with pytest.warns(KernelWarning):
        got = torch.compile(product)(x, sixes(64), FOUR_SIX)
    assert_equal(got, product(x, sixes(64), FOUR_SIX))
    assert "), True, " in sources[0]


def recorded_product(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a = q2.quantize_recorded(x * -2.0, None, None, FOUR_SIX, 0)
    b = q2.quantize(w, None, None, FOUR_SIX, 0)
    return *a, q2.gemm(*a[:3], *b, None, FOUR_SIX, FOUR_SIX, torch.bfloat16)


def test_what_is_recorded(sources) -> None:
    """Its loops are those of the graph without statistics."""
    got = torch.compile(recorded_product)(rows(70, 64), sixes(64))
    assert_equal(got, recorded_product(rows(70, 64), sixes(64)))
    assert "), True, " in sources[0]


def of_experts(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a = q2.quantize(x * -2.0, None, None, FOUR_SIX, 0)
    b = q2.quantize(w, None, None, FOUR_SIX, 0)
    return *a, q2.grouped_gemm(*a, *b, ends, FOUR_SIX, FOUR_SIX, "fprop", torch.bfloat16)


def test_of_experts(sources) -> None:
    """Whose weights lie below each other."""
    args = rows(70, 64), sixes(64).repeat(3, 1), torch.tensor([7, 50, 70], dtype=torch.int32)
    assert_equal(torch.compile(of_experts)(*args), of_experts(*args))
    assert "), True, " in sources[0] and "torch.ops.q2.grouped_mm.default(" in sources[0]


class GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.gate, self.up = (nn.Linear(64, 128, bias=False) for _ in range(2))
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(silu(self.gate(h)) * self.up(h))


def step_of(recipe: str, **options: Any) -> list[torch.Tensor]:
    """y, dx and the gradients of weights."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GatedMlp().bfloat16()
    compiled = torch.compile(model, backend="quartet2", options={"recipe": recipe, **options})
    x = rows(70, 64).requires_grad_()
    torch.manual_seed(1)
    y = compiled(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [y.detach(), *([x.grad] if x.grad is not None else []), *gradients]


def without(monkeypatch: pytest.MonkeyPatch, function: Callable[[], Any]) -> Any:
    """What it returns where numbers are made of codes alone, by launches of their own."""
    with monkeypatch.context() as patch:
        patch.setattr(launches, "_dequantised_of", lambda members: [])
        return function()


@pytest.mark.parametrize("recipe, count", [("quartet2", 2), ("tetrajet2", 2), ("nvfp4", 1)])
def test_a_step(recipe, count, sources, monkeypatch) -> None:
    """Of operands that something computes; the same bits as without. What the forward saves are
    codes. In nvfp4's, wgrad reads one of both before it is rounded, so that it is in memory."""
    want = without(monkeypatch, lambda: step_of(recipe))
    assert not any("), True, " in source for source in sources)
    assert_equal(step_of(recipe), want)
    forward, _ = sources[-2:]
    there = re.findall(r"\(\d+, \(\d+, \d+\), True, ", forward)
    assert len(there) == count and "view.dtype" in forward


def silu_mul(gate, up, w, scheme=FOUR_SIX):
    a = q2.quantize(silu(gate) * up, None, None, scheme, 0)
    b = q2.quantize(w, None, None, scheme, 0)
    return a, q2.gemm(*a, *b, None, scheme, scheme, torch.bfloat16)


def add_rmsnorm(residual, x, weight, w):
    residual = residual + x
    normed = rms_norm(residual, (residual.shape[1],), weight, 1e-6)
    a = q2.quantize(normed, None, None, FOUR_SIX, 0)
    b = q2.quantize(w, None, None, FOUR_SIX, 0)
    return residual, a, q2.gemm(*a, *b, None, FOUR_SIX, FOUR_SIX, torch.bfloat16)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def kernels_of(monkeypatch, function, *args, capability: int = 90) -> list[Any]:
    serve_as_on(monkeypatch, capability)
    return triton_kernels(monkeypatch, capability, function, *args)


@pytest.mark.parametrize("columns", [512, 2064, 100])
def test_one_kernel_writes_codes_worths_and_numbers(columns, monkeypatch, tmp_path) -> None:
    gate, up = zeros(256, columns), zeros(256, columns)
    (kernel,) = kernels_of(monkeypatch, silu_mul, gate, up, zeros(64, columns))
    assert "config={'XBLOCK': 128, 'num_warps': 2}" in kernel.config
    assert kernel.source.count("tl.load") == 2 and kernel.source.count("tl.store") == 3
    code = kernel.compiled(90, tmp_path)
    assert code.count("LDL") == code.count("STL") == 0
    # Numbers leave 16 bytes at a time: 32 of them a thread, and the codes of two blocks
    assert code.names.count("STG.E.128") == 5


def test_one_kernel_behind_a_norm(monkeypatch) -> None:
    residual, x, weight, w = zeros(256, 512), zeros(256, 512), zeros(512), zeros(64, 512)
    norm, kernel = kernels_of(monkeypatch, add_rmsnorm, residual, x, weight, w)
    assert "quantize" not in norm.name
    assert kernel.source.count("tl.store") == 3


def test_blackwell_has_no_use_for_them(monkeypatch) -> None:
    args = zeros(256, 512), zeros(256, 512), zeros(64, 512)
    (kernel,) = kernels_of(monkeypatch, silu_mul, *args, capability=100)
    assert kernel.source.count("tl.store") == 2


def late(x, w):
    """The first GEMM behind the quantiser reads something else."""
    a, other = (q2.quantize(m * 2, None, None, FOUR_SIX, 0) for m in (x, x + 1))
    b = q2.quantize(w, None, None, FOUR_SIX, 0)
    return [q2.gemm(*m, *b, None, FOUR_SIX, FOUR_SIX, torch.bfloat16) for m in (other, a)]


@pytest.mark.parametrize(("small", "stores"), [(2**20, 3 + 3), (0, 2 + 3)])
def test_large_ones_wait_for_the_next_gemm_alone(small, stores, monkeypatch) -> None:
    """Others are made of the codes, where they are read."""
    monkeypatch.setattr(gemm_operands, "_SMALL", small)
    kernels = kernels_of(monkeypatch, late, zeros(256, 512), zeros(64, 512))
    assert sum(kernel.source.count("tl.store") for kernel in kernels) == stores


def test_the_loops_buffer_is_what_the_gemm_reads(monkeypatch) -> None:
    with inductor_config.patch(INDUCTOR_OPTIONS):
        found = emulate(monkeypatch, 90)
        serve_as_on(monkeypatch, 90)
        torch.compile(silu_mul)(zeros(256, 512), zeros(256, 512), zeros(64, 512))
    (source,) = found
    (read,) = re.findall(r"extern_kernels\.mm\(reinterpret_tensor\((\w+),", source)
    (written,) = re.findall(r"triton_\w+\.run\((.*?), stream", source)
    (mended,) = re.findall(r"^ +q2_site_0\((.*)\)", source, re.M)
    assert read in written.split(", ") and read in mended.split(", ")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(70, 64), (517, 1000)])
def test_on_a_gpu(shape) -> None:
    lowering.register()
    x, w = rows(*shape), sixes(shape[1])
    with inductor_config.patch(force_disable_caches=True):
        got = torch.compile(product)(x.cuda(), w.cuda(), FOUR_SIX)
    assert_equal([result.cpu() for result in got], product(x, w, FOUR_SIX))
