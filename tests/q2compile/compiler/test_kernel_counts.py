# SPDX-License-Identifier: Apache-2.0
"""The effect of each pass on the code that Inductor generates for a GPU: the calls in forward and
backward, without the pass and with it.

The code is that for an H200 (for swizzle_scales a B200), made without one (emulation/inductor.py):
a whole training step is compiled, its Triton kernels are stubs. There a quantizer is an Inductor
kernel where it fuses with the producer of x, and a call of our kernel elsewhere. Kernels that
q2.gemm launches before the product have the name of their .cu file.

That losses and gradients keep their bits is shown elsewhere: of share_operands, merge_seeds and
pair_directions in test_passes.py, of keep_packed and recompute_weights in test_joint_passes.py, of
the two for swizzled scales in test_swizzle_scales.py, of quantize_rows_once in
test_quantize_rows_once.py, of dequantize_operands in test_dequantize_operands.py, of sum_columns,
all bits but those of the order of a sum, in test_sum_columns.py, of cache_weights in
test_weight_cache.py. share_rotations and
share_saved_rotations draw other random bits: test_share_rotations.py. gather_quantizers only moves
calls: test_gather_quantizers.py; group_launches only marks them: test_group_launches.py.
tests/lowering/test_launch_counts.py counts the launches that both save.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from expecttest import TestCase
from torch import nn
from torch.utils.checkpoint import checkpoint

from q2compile.passes import passes_over
from q2compile.runtime_kernels.cuda.calls import Launching
from q2compile.runtime_kernels.cuda.gemm.cuda_bf16 import dequantized
from q2compile.runtime_kernels.cuda.gemm.swizzle import swizzled
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SWIZZLED, get_scheme
from q2compile.runtime_kernels.ops.gemm import Factor
from tests.support.emulation.inductor import INDUCTOR_OPTIONS, emulate, serve_as_on

HOPPER, BLACKWELL = 90, 100
# Kernels that q2.gemm launches there for each operand whose scheme has no such suffix; see the
# second test.
BEFORE_A_GEMM = {HOPPER: ("dequantize.cu", DEQUANTIZED), BLACKWELL: ("swizzle_scales.cu", SWIZZLED)}
WIDTH = 64


class Heads(nn.Module):
    """q and k of one x."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = _linear(), _linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) * self.k(x)


class Behind(Heads):
    """The same behind another linear, so that x needs a gradient and is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(-self.inner(x))


class Mlp(nn.Module):
    """Two linears, recomputed in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = _linear(), _linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.run, x, use_reentrant=False)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


class Biased(nn.Module):
    """Two linears with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = _linear(bias=True), _linear(bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


class Routed(nn.Module):
    """Each row goes to two experts of four."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _linear()
        self.up = nn.Parameter(torch.zeros(4, WIDTH, WIDTH, dtype=torch.bfloat16))
        self.register_buffer("ids", torch.arange(4).repeat(2 * WIDTH, 1)[:, ::2].flatten())
        self.register_buffer("offs", torch.tensor([WIDTH, 2 * WIDTH, 3 * WIDTH, 4 * WIDTH]).int())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x).flatten(0, 1)[self.ids.argsort() // 2]
        return torch._grouped_mm(x, self.up.mT, offs=self.offs)


def _linear(bias: bool = False) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=bias, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Row:
    """A pass, a program that it changes, and the backend's options without the pass and with it.
    where: post-grad, joint, or option. cse: whether AOTAutograd merges equal nodes before the
    partitioner. Since torch 2.15 it does not merge nodes of which the backward needs only one, so
    counts for passes over equal operands must not depend on it."""

    where: str
    name: str
    without: dict[str, Any]
    with_: dict[str, Any]
    model: type[nn.Module] = Behind
    training: bool = True
    capability: int = HOPPER
    cse: bool = True


def _pass(name: str, recipe: str = "quartet2", **program: Any) -> Row:
    """A pass of the post-grad list, after those ahead of it in the list alone, and ahead of the one
    that groups launches."""
    names = [row.name for row in passes_over("post_grad") if row.name != "group_launches"]
    at = names.index(name)
    of = {} if recipe == "quartet2" else {"recipe": recipe}
    without, with_ = ({**of, **_left_out(names[i:])} for i in (at, at + 1))
    return Row("post-grad", name, without, with_, **program)


def _joint_pass(name: str, recipe: str, **program: Any) -> Row:
    """A joint pass that a recipe asks for, among all the others. The two passes for random bits in
    the forward (nvfp4) only work together."""
    return Row(
        "joint", name, {"recipe": recipe, **_left_out([name])}, {"recipe": recipe}, **program
    )


def _option(name: str, **program: Any) -> Row:
    return Row("option", name, {name: False}, {name: True}, **program)


def _left_out(names: list[str]) -> dict[str, Any]:
    return {"disable_passes": tuple(names)}


ROWS = [
    _pass("quantize_rows_once", model=Routed, training=False),
    _pass("share_operands", model=Heads, training=False),
    _pass("merge_seeds"),
    _pass("pair_directions"),
    _pass("share_rotations"),
    _pass("swizzle_scales", capability=BLACKWELL),
    _pass("dequantize_operands"),
    _pass("unrotate_in_gemm", "quartet", capability=BLACKWELL),
    _pass("sum_columns", model=Biased),
    _joint_pass("share_operands", "nvfp4", cse=False),
    _joint_pass("quantize_rows_once", "quartet2", model=Routed),
    _joint_pass("share_saved_rotations", "nvfp4"),
    _joint_pass("swizzle_saved_scales", "quartet2", capability=BLACKWELL),
    _option("keep_packed", model=Mlp),
    _option("recompute_weights"),
    _option("cache_weights"),
]


def test_every_pass_has_a_row() -> None:
    """cache_weights is not a pass over a graph, but acts like one. fuse_rotations adds nothing to a
    graph (test_fuse_rotations.py counts the lowered kernels), anchor_seeds changes none without a
    gradient that is a constant (test_joint_passes.py), tabulate none without a rotary embedding
    (test_tabulate.py), gather_scattered and recompute_mask none without experts
    (test_gather_scattered.py, test_recompute_mask.py), quantize_shards none without a collective,
    own_seeds none without the option seed (test_quantize_shards.py, test_seed.py),
    amax_in_quantizer none on a CPU (test_amax_in_quantizer.py)."""
    elsewhere = ["gather_quantizers", "tabulate", "fuse_rotations"]
    elsewhere += ["group_launches", "amax_in_quantizer"]
    elsewhere += [
        "anchor_seeds",
        "gather_scattered",
        "recompute_mask",
        "quantize_shards",
        "own_seeds",
    ]
    passes = [row.name for row in passes_over("post_grad") if row.name not in elsewhere]
    joint = [row.name for row in passes_over("joint") if row.name not in elsewhere]
    assert [row.name for row in ROWS] == [*passes, *joint, "cache_weights"]


Graphs = dict[str, Counter[str]]
_CALL = re.compile(
    r"= torch\.ops\.(\w+\.\w+)\.\w+\(|\b(triton_)\w+\.run\(|\bextern_kernels\.(\w+)\("
    r"|^ +(q2_site_\d+)\(",
    re.M,
)
_SITE = re.compile(r"^(q2_site_\d+) = (.*)$", re.M)  # one or several q2_Call('op', ...)
_GEMM = re.compile(r"= torch\.ops\.q2\.gemm\.default\(.*'(\S+)', '(\S+)', ")


def calls(source: str, capability: int) -> Counter[str]:
    """The launches of a graph's generated code, by name: ops, the sum of Triton kernels, torch's
    GEMMs. And its inputs: in backward the tensors that were saved, and the gradients."""
    body = source[source.index("def call(") :]
    ops = {
        site: [f"q2.{op}" for op in re.findall(r"q2_Call\('(\w+)'", made)]
        for site, made in _SITE.findall(source)
    }
    found: Counter[str] = Counter()
    for op, triton, extern, site in _CALL.findall(body):
        found.update(ops[site] if site else ["triton" if triton else op or extern])
    del found["aten.view"]  # no kernel
    inputs = re.search(r"^ +(.*) = args$", body, re.M)
    assert inputs
    found["inputs"] = len([name for name in inputs[1].split(", ") if name])
    schemes = [scheme for pair in _GEMM.findall(body) for scheme in pair]
    kernel, as_wanted = BEFORE_A_GEMM[capability]
    found[kernel] = sum(not scheme.endswith(as_wanted) for scheme in schemes)
    return found


def test_what_a_gemm_launches_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []

    def noted(launching: Launching, *args: Any) -> None:
        launches.extend(launch.variant.file for launch in launching.launches_of([args]))

    monkeypatch.setattr(Launching, "__call__", noted)
    codes, scales = torch.zeros(128, 32).byte(), torch.zeros(128, 4).to(torch.float8_e4m3fn)
    scheme = "nvfp4_ms_eden_pow2"
    for name in (scheme, scheme + SWIZZLED):
        swizzled(Factor(codes, scales, None, get_scheme(name)))
    for name in (scheme, scheme + DEQUANTIZED):
        dequantized(Factor(codes, scales, None, get_scheme(name)), False)
    assert launches == ["swizzle_scales.cu", "dequantize.cu"]


@cache
def graphs_of(
    options: tuple[tuple[str, Any], ...],
    model: type[nn.Module],
    training: bool,
    capability: int,
    cse: bool,
) -> Graphs:
    """The calls of each graph: forward, backward, and graphs that only quantize weights."""
    with (
        pytest.MonkeyPatch.context() as patch,
        inductor_config.patch(INDUCTOR_OPTIONS),
        functorch_config.patch(cse=cse),
    ):
        sources = emulate(patch, capability)
        serve_as_on(patch, capability)
        torch._dynamo.reset()
        x = torch.zeros(2, WIDTH, WIDTH, dtype=torch.bfloat16)
        step = torch.compile(model(), backend="quartet2", options=dict(options))
        with torch.set_grad_enabled(training):
            y = step(x)
        if training:
            y.sum().backward()
    graphs: Graphs = {}
    for source in sources:
        kind = "backward" if "tangents_" in source else "weights" if graphs else "forward"
        graphs[kind] = graphs.get(kind, Counter()) + calls(source, capability)
    return graphs


def line(before: Counter[str], after: Counter[str]) -> str:
    """Counts by name, changed ones first. A name and its count stay on one line."""
    names = sorted({*before, *after}, key=lambda name: (before[name] == after[name], name))
    return ", ".join(
        f"{name}~{before[name]}" + (f"~->~{after[name]}" if before[name] != after[name] else "")
        for name in names
    )


def table(*where: str) -> str:
    lines = []
    for row in (row for row in ROWS if row.where in where):
        program = (row.model, row.training, row.capability, row.cse)
        before, after = (graphs_of(tuple(o.items()), *program) for o in (row.without, row.with_))
        lines += ["", f"{row.name} ({row.where})"]
        for graph in after:
            text = line(before.get(graph, Counter()), after[graph])
            lines += textwrap.wrap(
                text, 98, initial_indent=f"  {graph:10}", subsequent_indent=" " * 12
            )
    return "\n".join(lines[1:]).replace("~", " ")


class TestKernelCounts(TestCase):
    def test_of_each_post_grad_pass(self) -> None:
        self.assertExpectedInline(
            table("post-grad"),
            """\
quantize_rows_once (post-grad)
  forward   q2.quantize 3 -> 4, q2.split_scales 1 -> 0, inputs 5, mm 1, q2.dequantize 4,
            q2.grouped_mm 1, triton 2

share_operands (post-grad)
  forward   q2.dequantize 4 -> 3, q2.quantize 4 -> 3, inputs 3, mm 2, triton 1

merge_seeds (post-grad)
  forward   inputs 4, mm 3, q2.dequantize 5, q2.quantize 4, q2.split_scales 1, triton 2
  backward  aten.randint 0 -> 1, q2.seed 5 -> 0, inputs 15, mm 5, q2.dequantize 10, q2.quantize 5,
            q2.requantize 5, triton 2

pair_directions (post-grad)
  forward   inputs 4, mm 3, q2.dequantize 5, q2.quantize 4, q2.split_scales 1, triton 2
  backward  q2.quantize 5 -> 3, aten.randint 1, inputs 15, mm 5, q2.dequantize 10,
            q2.requantize 5, triton 2

share_rotations (post-grad)
  forward   inputs 4, mm 3, q2.dequantize 5, q2.quantize 4, q2.split_scales 1, triton 2
  backward  q2.dequantize 10 -> 9, q2.requantize 5 -> 4, aten.randint 1, inputs 15, mm 5,
            q2.quantize 3, triton 2

swizzle_scales (post-grad)
  forward   inputs 4, q2.gemm 3, q2.quantize 4, q2.split_scales 1, triton 2
  backward  swizzle_scales.cu 10 -> 0, aten.randint 1, inputs 15, q2.gemm 5, q2.quantize 3,
            q2.requantize 4, triton 2

dequantize_operands (post-grad)
  forward   inputs 4, mm 3, q2.dequantize 5, q2.quantize 4, q2.split_scales 1, triton 2
  backward  q2.dequantize 9 -> 0, aten.randint 1, inputs 15, mm 5, q2.quantize 3, q2.requantize 4,
            triton 2

unrotate_in_gemm (post-grad)
  forward   inputs 4, q2.gemm 3, q2.quantize 5, triton 2
  backward  q2.gemm 5 -> 0, q2.gemm_masked_unrotate 0 -> 5, q2.masked_unrotate 5 -> 0,
            aten.randint 1, inputs 19, q2.quantize 3, q2.requantize 4, triton 2

sum_columns (post-grad)
  forward   addmm 2, inputs 5, q2.dequantize 4, q2.quantize 3, q2.split_scales 1, triton 1
  backward  triton 3 -> 1, aten.randint 1, inputs 11, mm 3, q2.quantize 2, q2.requantize 3""",
        )

    def test_of_each_joint_pass_and_option(self) -> None:
        self.assertExpectedInline(
            table("joint", "option"),
            """\
share_operands (joint)
  forward   q2.dequantize 6 -> 5, q2.quantize 3 -> 2, aten.randint 1, inputs 4, mm 3,
            q2.split_scales 3, triton 8
  backward  inputs 21 -> 17, q2.dequantize 5 -> 4, aten.randint 1, mm 5, q2.quantize 3,
            q2.transpose 2, triton 2

quantize_rows_once (joint)
  forward   q2.quantize 3 -> 4, q2.split_scales 1 -> 0, triton 3 -> 2, inputs 5, mm 1,
            q2.dequantize 4, q2.grouped_mm 1
  backward  triton 3 -> 7, aten.randint 1, inputs 12, mm 1, q2.grouped_mm 2, q2.padded_ends 1,
            q2.quantize 2, q2.requantize 3

share_saved_rotations (joint)
  forward   q2.quantize 3 -> 2, aten.randint 1, inputs 4, mm 3, q2.dequantize 5,
            q2.split_scales 3, triton 8
  backward  inputs 21 -> 17, q2.dequantize 5 -> 4, aten.randint 1, mm 5, q2.quantize 3,
            q2.transpose 2, triton 2

swizzle_saved_scales (joint)
  forward   swizzle_scales.cu 5 -> 0, inputs 4, q2.gemm 3, q2.quantize 4, q2.split_scales 1,
            triton 2
  backward  aten.randint 1, inputs 15, q2.gemm 5, q2.quantize 3, q2.requantize 4, triton 2

keep_packed (option)
  forward   inputs 3, mm 2, q2.dequantize 4, q2.quantize 3, q2.split_scales 1, triton 1
  backward  inputs 4 -> 13, q2.quantize 5 -> 2, q2.split_scales 1 -> 0, aten.randint 1, mm 4,
            q2.dequantize 2, q2.requantize 3, triton 1

recompute_weights (option)
  forward   inputs 4, mm 3, q2.dequantize 5, q2.quantize 4, q2.split_scales 1, triton 2
  backward  inputs 15 -> 11, q2.quantize 3 -> 5, aten.randint 1, mm 5, q2.requantize 4, triton 2

cache_weights (option)
  forward   inputs 4 -> 13, q2.quantize 4 -> 1, mm 3, q2.dequantize 5, q2.split_scales 1, triton 2
  weights   inputs 0 -> 1, q2.quantize 0 -> 1
  backward  aten.randint 1, inputs 15, mm 5, q2.quantize 3, q2.requantize 4, triton 2""",
        )
