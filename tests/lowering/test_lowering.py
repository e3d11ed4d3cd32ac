# SPDX-License-Identifier: Apache-2.0
"""The quantizer as Inductor kernels: the reference's bits, one kernel with its producer, and the
instructions that a GPU would run."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import rms_norm, silu

import q2compile
from q2compile import lowering
from q2compile.lowering.inductor_kernels.fusion_gain import GENERATED_INSTRUCTIONS, ComputedOperand
from q2compile.report import kernel_choice
from q2compile.runtime_kernels.choice import InGraph, choose
from q2compile.runtime_kernels.kernel_states import assumed_gpu
from q2compile.runtime_kernels.numerics.schemes import SCHEMES, SWIZZLED, get_scheme
from q2compile.runtime_kernels.ops.table import rowwise_call
from q2compile.runtime_kernels.registry import CUDA, INDUCTOR
from q2compile.torch_internals.private_names import FakeTensorMode
from tests.support import quantizer_calls as calls
from tests.support.emulation.inductor import lower_on_cpu, triton_kernels
from tests.support.nonfinite import VALUES, assert_same, with_bad

FOUR_SIX = "nvfp4_46_pow2"


def quantize(x: torch.Tensor, scheme: str = FOUR_SIX) -> tuple[torch.Tensor, ...]:
    amax = torch.ops.q2.amax(x) if get_scheme(scheme).takes_amax else None
    return torch.ops.q2.quantize(x, scheme=scheme, rowwise=True, columnwise=False, amax=amax)


def silu_mul_quantize(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return quantize(silu(gate) * up)


def add_rmsnorm_quantize(residual, x, weight):
    residual = residual + x
    return residual, *quantize(rms_norm(residual, (residual.shape[1],), weight, 1e-6))


def matrix(rows: int, columns: int) -> torch.Tensor:
    """Rows of every magnitude, zeros, blocks of subnormals, an outlier."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[3] *= 1e-6
    x[5] = 0
    x[7, :16] = 0
    x[9, 3] = 1e4
    x[11] *= 1e30
    x[13] *= 1e-38
    x[15, 3:9] = 1e-39
    return x


def assert_same_bits(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.stride() == b.stride() or not a.numel()  # which may have any strides
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(
    ("scheme", "shape"),
    [
        ("nvfp4_search", (64, 256)),
        ("nvfp4_pow2", (37, 100)),
        ("nvfp4", (37, 100)),
        ("nvfp4_16x16_46_pow2", (37, 100)),
        ("nvfp4_16x16", (64, 256)),
        (FOUR_SIX + SWIZZLED, (137, 100)),
        ("nvfp4_46" + SWIZZLED, (137, 100)),
    ],
)
def test_the_reference_s_bits(scheme, shape, monkeypatch) -> None:
    """Each rounding, each kind of scales and blocks, whole and ragged; by vectors see below."""
    check_the_reference_s_bits(scheme, shape, monkeypatch)


@pytest.mark.usefixtures("vectors")
def test_the_reference_s_bits_by_vectors(monkeypatch) -> None:
    """The scale search. tests/end_to_end/test_nonfinite.py compiles 4/6 with vectors."""
    check_the_reference_s_bits("nvfp4_search", (64, 256), monkeypatch)


def check_the_reference_s_bits(scheme, shape, monkeypatch) -> None:
    lower_on_cpu(monkeypatch)
    x = matrix(*shape)
    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False, cpp_wrapper=False):
        compiled = torch.compile(lambda x: quantize(x, scheme))
        got, (code,) = run_and_get_code(compiled, x)
    assert "torch.ops.q2.quantize.default(" not in code
    assert_same_bits(got, quantize(x, scheme))
    for value in VALUES:  # the same graph
        bad = with_bad(x, value) if shape[0] > 40 else x.clone()
        bad[2, 2] = bad[2, 99] = value
        assert_same(compiled(bad), quantize(bad, scheme), scheme)


def test_dynamic_rows_do_not_recompile(monkeypatch) -> None:
    lower_on_cpu(monkeypatch)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    with inductor_config.patch(fx_graph_cache=False):
        compiled = torch.compile(silu_mul_quantize, backend=counter, dynamic=True)
        generator = torch.Generator().manual_seed(0)
        for rows in (16, 40, 23):
            gate, up = (torch.randn(rows, 64, generator=generator).bfloat16() for _ in range(2))
            codes, scales, unit = compiled(gate, up)
            # The fused producer is not rounded to bf16 in between: compare with its fp32.
            want = quantize(silu(gate.float()) * up.float())
            differing = (codes != want[0]).float().mean()
            # silu of Inductor and of torch differ in the last bits of fp32
            assert differing < 1e-3 and unit == want[2]
    assert counter.frame_count == 1


IN_GRAPH = InGraph(ComputedOperand())


def test_what_is_lowered() -> None:
    """On CUDA: NVFP4 and FP8, to nearest, of rows that are not rotated; if there is a CUDA kernel,
    only where they are fused with something. On a CPU nothing is lowered."""

    def chosen(name: str, *how: Any, device: str = "cuda", graph: Any = IN_GRAPH) -> Any:
        with assumed_gpu((9, 0)), FakeTensorMode():
            x, seed = torch.empty(32, 64, device=device), torch.empty((), device=device)
            call = calls.one(x, seed, name, *how) if how else rowwise_call(name, x)
            if call.scheme.takes_amax:
                call = call.replace(amax=seed)
            return choose("quantize", call.positional, graph)

    lowered = {name for name in SCHEMES if chosen(name).name == INDUCTOR}
    nearest = {n for n, s in SCHEMES.items() if s.rounding == "rtn" and s.format != "mxfp4"}
    cuda = {name for name in nearest if chosen(name, graph=None).name == CUDA}
    assert lowered == nearest
    assert {n for n in lowered if chosen(n, graph=InGraph()).name == INDUCTOR} == lowered - cuda
    assert {"nvfp4_46_pow2", "fp8"} <= cuda
    assert "none would be faster" in chosen("mxfp4_rceil").why_not[INDUCTOR]
    assert "where nothing is fused" in chosen("fp8", graph=InGraph()).why_not[INDUCTOR]
    assert "does not round to nearest" in chosen("nvfp4_sr", "none", False).why_not[INDUCTOR]
    for how in (("rht16", False), ("none", True)):
        assert "neither rotate nor transpose" in chosen("nvfp4", *how).why_not[INDUCTOR]
    assert "on cpu" in chosen("nvfp4", device="cpu").why_not[INDUCTOR]
    assert INDUCTOR not in chosen("nvfp4", graph=None).why_not


@pytest.fixture
def sources() -> tuple[torch.Tensor, ...]:
    return torch.zeros(256, 512).bfloat16(), torch.zeros(256, 512).bfloat16(), torch.ones(512)


def test_kernels_of_silu_mul_quantize(monkeypatch, sources) -> None:
    """One kernel for all that sees whole tensors; the scales are one call after it."""
    (kernel,) = triton_kernels(monkeypatch, 90, silu_mul_quantize, *sources[:2])
    assert kernel.name.endswith("fused_mul_quantize_silu_0")
    assert "config={'XBLOCK': 128, 'num_warps': 2}" in kernel.config
    # bf16 in, codes and raw scales out: nothing else touches memory
    assert kernel.source.count("tl.load") == 2 and kernel.source.count("tl.store") == 2


def test_kernels_of_add_rmsnorm_quantize(monkeypatch, sources) -> None:
    """The reduction over a row is one, everything after it the other."""
    residual, x, weight = sources
    norm, kernel = triton_kernels(
        monkeypatch, 90, add_rmsnorm_quantize, residual, x, weight.bfloat16()
    )
    assert "pow" in norm.name and "quantize" not in norm.name
    assert "quantize" in kernel.name and kernel.source.count("tl.store") == 2


def test_max_autotune_searches(monkeypatch, sources) -> None:
    with inductor_config.patch(max_autotune_pointwise=True):
        (kernel,) = triton_kernels(monkeypatch, 90, silu_mul_quantize, *sources[:2])
    assert "config=" not in kernel.config and "size_hints" in kernel.config


def test_gathered_rows_are_one_kernel(monkeypatch, tmp_path) -> None:
    """Inductor may give these rows of 32 blocks a dimension of their own, as torch 2.13's does; the
    tile has 128 blocks all the same."""

    def gathered(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return quantize((2 * x)[rows])

    x, rows = torch.zeros(2048, 512).bfloat16(), torch.zeros(16384, dtype=torch.int64)
    kernel = triton_kernels(monkeypatch, 90, gathered, x, rows)[-1]
    sizes = [int(size) for size in re.findall(r"'[XYZ]BLOCK': (\d+)", kernel.config)]
    assert sizes in ([32, 4], [128]) and kernel.source.count("tl.store") == 2
    code = kernel.compiled(90, tmp_path)
    assert code.count("LDL") == code.count("STL") == 0


@pytest.mark.parametrize("capability", [90, 100, 120])
def test_machine_code(capability, monkeypatch, sources, tmp_path) -> None:
    """No spills; 16-byte loads; Blackwell's conversion where there is one."""
    (kernel,) = triton_kernels(monkeypatch, capability, silu_mul_quantize, *sources[:2])
    code = kernel.compiled(capability, tmp_path)
    assert code.count("LDL") == code.count("STL") == 0
    loads = [name for name in code.names if name.startswith("LDG")]
    assert len(loads) == 8 and all(name.endswith("128") for name in loads)  # 2 x 32 elements
    # By both candidates of 4/6, and once more by the chosen one; two elements each.
    assert code.count("F2FP.SATFINITE.E2M1") == (48 if capability >= 100 else 0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "scheme", [FOUR_SIX, "nvfp4_pow2", "nvfp4_46", "nvfp4", "nvfp4_16x16_pow2"]
)
@pytest.mark.parametrize("shape", [(64, 256), (517, 1000), (4096, 4096)])
def test_on_a_gpu(scheme, shape) -> None:
    lowering.register()
    x = matrix(*shape)
    torch._dynamo.reset()
    # relu leaves positive elements exact, and gives the quantizer a producer to fuse with
    compiled = torch.compile(lambda x: quantize(x.relu(), scheme))
    assert_same_bits([t.cpu() for t in compiled(x.cuda())], quantize(x.relu(), scheme))


def test_the_report_names_the_loops(monkeypatch) -> None:
    lower_on_cpu(monkeypatch)
    kernel_choice.kernels_used.cache_clear()
    report = q2compile.explain(torch.nn.Linear(64, 64).bfloat16(), torch.zeros(32, 64).bfloat16())
    (row,) = report.to_json()
    assert row["kernels"]["fprop"] == "quantize rowwise: inductor, gemm: cpp"
    kernel_choice.kernels_used.cache_clear()


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13"),
    reason="the counts are of the code that torch 2.13 and Triton 3.6 generate",
)
@pytest.mark.parametrize("scheme", GENERATED_INSTRUCTIONS)
def test_instructions_of_the_generated_quantizers(scheme, monkeypatch, tmp_path) -> None:
    """A thread has 32 elements. The cost model has these counts; they are rounded, and ptxas may
    schedule a little differently. Triton 3.9 needs 20% fewer for the search."""
    x = torch.zeros(8192, 4096).bfloat16()
    for architecture, known in GENERATED_INSTRUCTIONS[scheme].items():
        capability = int(architecture[3:-1])
        with monkeypatch.context() as patch:
            (kernel, *_) = triton_kernels(patch, capability, partial(_rowwise, f"{scheme}_pow2"), x)
        code = kernel.compiled(capability, tmp_path)
        found = sum(name != "NOP" for name in code.names) / 32
        assert found == pytest.approx(known, rel=0.05)


def _rowwise(scheme: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.ops.q2.quantize(x, scheme=scheme, rowwise=True, columnwise=False)
