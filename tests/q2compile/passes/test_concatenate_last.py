# SPDX-License-Identifier: Apache-2.0
"""Concatenations before a quantizer: masks move to the parts, and one Inductor kernel
writes them."""

from __future__ import annotations

import re

import pytest
import torch
import torch._inductor.ir as ir
import torch._inductor.lowering as inductor_lowering
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from q2compile.graph.nodes import op_counts
from q2compile.passes.post_grad.concatenate_last import concatenate_last_pass
from tests.support import quantizer_calls as calls
from tests.support.emulation.inductor import serve_as_on, triton_kernels
from tests.support.emulation.on_cpu import assert_same_bits
from tests.support.graph_builder import EDEN, q2

T, N = 96, 64
aten = torch.ops.aten


def operands() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    dh, g, u = (torch.randn(T, N, generator=generator).bfloat16() for _ in range(3))
    ends = torch.tensor([30, 90], dtype=torch.int32)
    return dh, g, u, ends, torch.arange(T) >= 90, torch.tensor([11, 12])


def quantized(dy: torch.Tensor, ends: torch.Tensor, seeds: torch.Tensor) -> list[torch.Tensor]:
    groups = {"offs": ends, "padded_offs": q2.padded_ends(ends)}
    return calls.quantized_both(dy, seeds[0], seeds[1], EDEN, "rht128", **groups)


def of_halves(dh: torch.Tensor, g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The gradient of SwiGLU, of gate and up in one."""
    return torch.cat([aten.silu_backward(dh * u, g), dh * torch.nn.functional.silu(g)], 1)


def masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """masked_fill, decomposed."""
    return torch.where(mask, torch.zeros((), dtype=x.dtype), x)


def swiglu(dh, g, u, ends, tail, seeds):
    return quantized(masked(of_halves(dh, g, u), tail[:, None]), ends, seeds)


def of_each_column(dh, g, u, ends, tail, seeds):
    return quantized(masked(of_halves(dh, g, u), torch.arange(2 * N) > 3), ends, seeds)


def read_twice(dh, g, u, ends, tail, seeds):
    both = of_halves(dh, g, u)
    return (*quantized(masked(both, tail[:, None]), ends, seeds), both)


def read_by_others(dh, g, u, ends, tail, seeds):
    dy = masked(of_halves(dh, g, u), tail[:, None])
    return (*quantized(dy, ends, seeds), dy + 1)


def under_a_view(dh, g, u, ends, tail, seeds):
    dh, g, u = (x.view(2, T // 2, N) for x in (dh, g, u))
    both = torch.cat([dh * u, dh * g], -1)
    return quantized(
        torch.where(tail.view(2, -1, 1), both, dh.new_ones(())).view(T, 2 * N), ends, seeds
    )


def traced(function) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*operands())


def result(gm: fx.GraphModule) -> list[torch.Tensor]:
    gm.graph.lint()
    gm.recompile()
    return gm(*operands())


@pytest.mark.parametrize("function", [swiglu, under_a_view])
def test_a_mask_goes_to_the_parts(function) -> None:
    gm = traced(function)
    before, counts = result(gm), op_counts(gm.graph)
    assert concatenate_last_pass(gm.graph) == 1
    assert_same_bits(result(gm), before)
    (cat,) = gm.graph.find_nodes(op="call_function", target=aten.cat.default)
    assert all(part.target is aten.where.self for part in cat.args[0])
    assert cat.meta["val"].shape[-1] == 2 * N
    after = op_counts(gm.graph)
    assert after["aten.where.self"] == 1 + counts["aten.where.self"]
    assert after["aten.cat.default"] == 1 and concatenate_last_pass(gm.graph) == 0


@pytest.mark.parametrize("function", [of_each_column, read_twice, read_by_others])
def test_what_is_left(function) -> None:
    assert concatenate_last_pass(traced(function).graph) == 0


def dense(dh, g, u, ends, tail, seeds):
    return q2.quantize(
        of_halves(dh, g, u),
        scheme=EDEN,
        transform="rht128",
        rowwise=True,
        columnwise=True,
        rowwise_seed=seeds[0],
        columnwise_seed=seeds[1],
    )


def of_nothing_in_common(dh, g, u, ends, tail, seeds):
    return quantized(torch.cat([dh * 2, torch.sin(u)], 1), ends, seeds)


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """On a GPU Inductor computes a concatenation in one kernel over its result, and does not store
    parts that have an exponential."""
    own = inductor_lowering.pointwise_cat
    patch.setitem(inductor_lowering.lowerings, aten.cat.default, own)
    patch.setattr(ir, "is_cpu", lambda device: False)
    serve_as_on(patch, 90)


def loads_and_stores(kernel: str) -> tuple[int, int]:
    return kernel.count("tl.load("), kernel.count("tl.store(")


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("function", "expected"),
    [(swiglu, (3, 2)), (dense, (3, 2)), (of_nothing_in_common, (2, 1))],
)
def test_one_loop_writes_all_parts(function, expected, monkeypatch) -> None:
    """From three loads; Inductor's own has five, and both of two exponentials an element."""
    as_on_a_gpu(monkeypatch)
    if function is swiglu:
        function = lambda *args: quantized(of_halves(*args[:3]), args[3], args[5])  # noqa: E731
    kernels = triton_kernels(monkeypatch, 90, function, *operands())
    (kernel,) = (k.source for k in kernels if "triton_poi" in k.name and "ends" not in k.name)
    assert loads_and_stores(kernel) == expected
    if expected == (3, 2):
        assert len(re.findall(r"\bexp\(", kernel)) == 1
