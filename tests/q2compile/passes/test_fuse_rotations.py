# SPDX-License-Identifier: Apache-2.0
"""Which quantizers may compute their operand, and where the outcome of each is noted."""

from __future__ import annotations

import json
import operator
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn

from q2compile.compiler import post_grad_passes
from q2compile.config import Config
from q2compile.errors import ConfigError
from q2compile.graph.node_meta import MAY_FUSE, PAIR, READS_THE_SAME
from q2compile.lowering.prologue import fusion_rule
from q2compile.passes.post_grad import fuse_rotations
from q2compile.passes.post_grad.fuse_rotations import fuse_rotations_pass, fusion_notes
from q2compile.runtime_kernels.cuda.quantize import fused
from tests.support import quantizer_calls as calls
from tests.support.emulation.inductor import INDUCTOR_OPTIONS, emulate, serve_as_on
from tests.support.graph_builder import EDEN, SOURCE, Builder

WIDTH = 64


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = (WIDTH, 128), (WIDTH, 128), (128, WIDTH)
        self.gate, self.up, self.down = (
            nn.Linear(*size, bias=False, dtype=torch.bfloat16) for size in sizes
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def step(monkeypatch, dump, **options) -> list[str]:
    """The sources of a step's graphs on an H200; nothing of ours is run, and Triton's are stubs."""
    sources = emulate(monkeypatch, 90)
    serve_as_on(monkeypatch, 90)
    torch._dynamo.reset()
    options = {"dump": str(dump), **options}
    with inductor_config.patch(INDUCTOR_OPTIONS):
        model = torch.compile(SwiGLU(), backend="quartet2", options=options)
        x = torch.zeros(256, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        model(x).sum().backward()
    return sources


def kernels(source: str) -> tuple[int, int, int]:
    """Calls of Triton's, of sites that read their operand, of sites that compute it."""
    body = source[source.index("def call(") :]
    return body.count(".run("), body.count("q2_site_"), body.count("q2_fused_")


@pytest.mark.usefixtures("fresh_compiler")
def test_kernels_of_a_swiglu_before_and_after(monkeypatch, tmp_path) -> None:
    """In the backward, the producer of dg and du and the two quantizers of them become one kernel,
    which computes both operands. The remaining Triton kernel sums dx."""
    monkeypatch.setattr(fusion_rule, "why_not", lambda *args: None)
    with monkeypatch.context() as patch:
        _, before = step(patch, tmp_path / "before")
    with monkeypatch.context() as patch:
        _, after = step(patch, tmp_path / "after", fuse_rotations=True)
    # The three gradients, each with its weight and with a requantized input.
    assert kernels(before) == (2, 3, 0)
    assert kernels(after) == (1, 3, 1)
    (passes,) = (tmp_path / "after").glob("**/passes.json")
    records = [r for r in json.loads(passes.read_text()) if r["name"] == "fuse_rotations"]
    assert [(r["graph"], r["matches"]) for r in records] == [("forward", 0), ("backward", 3)]
    told = [text.partition(": ")[2] for text in records[1]["details"]]
    assert [t.partition(" with")[0] for t in told] == [
        "not fused: the operand is in memory already",
        "fused",
        "fused",
    ]
    assert "silu_backward" in told[2]


def test_the_rule_decides(monkeypatch, tmp_path) -> None:
    """On an H200, whose issue slots MS-EDEN fills, fusing pays for dg and du of a SwiGLU as a pair,
    but not for each alone: Inductor's kernel computes both from one read."""
    step(monkeypatch, tmp_path / "one", fuse_rotations=True)
    assert sum(": fused with" in text for text in notes_of(tmp_path / "one")) == 2
    monkeypatch.setattr(fused, "has_room_for_two", lambda *args: False)
    step(monkeypatch, tmp_path / "two", fuse_rotations=True)
    told = notes_of(tmp_path / "two")
    assert len(told) == 4 and not any(": fused with" in text for text in told)
    assert sum(": not in one kernel: " in text for text in told) == 1
    assert sum("are expected to take" in text for text in told) == 2


def notes_of(dump: Path) -> list[str]:
    (passes,) = dump.glob("**/passes.json")
    return [text for r in json.loads(passes.read_text()) for text in r.get("details", [])]


def test_operands_of_one_read_are_known_to_the_first() -> None:
    build = Builder()
    seed = build.placeholder("seed", dtype=torch.int64)
    dh, g, u = (build.placeholder(name, 128, 128) for name in ("dh", "g", "u"))
    du = build.call(torch.ops.aten.mul.Tensor, dh, g)
    first = build.call(calls.both(du, seed, seed, EDEN, "rht128", 0))
    codes = build.call(operator.getitem, first, 0)
    cut = build.call(torch.ops.aten.mul.Tensor, dh, u)
    dg = build.call(torch.ops.aten.mul.Tensor, cut, g)
    second = build.call(calls.both(dg, seed, seed, EDEN, "rht128", 5))
    build.done(codes, second)
    assert fuse_rotations_pass(build.graph) == 2
    order = [n for n in build.graph.nodes if n.op == "call_function"]
    assert order == [du, cut, dg, first, codes, second]
    assert first.meta[PAIR] == second.meta[PAIR]
    assert first.meta[READS_THE_SAME] and second.meta[READS_THE_SAME]


def test_quantizers_with_no_source_in_common_are_not_compared(monkeypatch) -> None:
    """Each layer of a model has sources of its own; all read one small table."""
    build = Builder()
    seed = build.placeholder("seed", dtype=torch.int64)
    table = build.placeholder("table", 1, 128)
    made = []
    for i in range(8):
        dh, g = (build.placeholder(f"{name}{i}", 128, 128) for name in ("dh", "g"))
        for x in (build.call(torch.ops.aten.mul.Tensor, dh, g), g):
            if i == 0:
                x = build.call(torch.ops.aten.mul.Tensor, x, table)
            made.append(build.call(calls.both(x, seed, seed, EDEN, "rht128", 0)))
    build.done(*made)
    compared = []
    mostly_in = fuse_rotations.mostly_in
    monkeypatch.setattr(
        fuse_rotations, "mostly_in", lambda *two: compared.append(two) or mostly_in(*two)
    )
    assert fuse_rotations_pass(build.graph) == 16
    assert len(compared) <= 4 * 8  # not 16 * 15 / 2
    assert [node.meta[PAIR] for node in made] == [i - i % 2 for i in range(16)]


def test_an_operand_that_waits_for_a_product_stays() -> None:
    """The second operand is computed from a matrix product that comes after the first quantizer."""
    build = Builder()
    seed = build.placeholder("seed", dtype=torch.int64)
    dh, g = (build.placeholder(name, 128, 128) for name in ("dh", "g"))
    first = build.call(calls.both(dh, seed, seed, EDEN, "rht128", 0))
    product = build.call(torch.ops.aten.mm.default, dh, g)
    both = build.call(torch.ops.aten.add.Tensor, product, dh)
    second = build.call(calls.both(both, seed, seed, EDEN, "rht128", 0))
    build.done(first, second)
    fuse_rotations_pass(build.graph)
    assert PAIR not in first.meta and PAIR not in second.meta
    assert [n for n in build.graph.nodes if n.op == "call_function"][0] is first


def test_marks_every_rotating_quantizer_and_no_other() -> None:
    build = Builder()
    x, seed = build.placeholder("x", 128, 128), build.placeholder("seed", dtype=torch.int64)
    first = build.call(calls.one(x, seed, EDEN, "rht128", False, 0))
    other = build.call(calls.plain(x, None, None, SOURCE, 0))
    build.done(first, other)
    assert fuse_rotations_pass(build.graph) == 1
    (marked,) = (n for n in build.graph.nodes if MAY_FUSE in n.meta)
    assert marked is first and fusion_notes(build.graph) is first.meta[MAY_FUSE]


def test_only_with_the_option_and_with_inductor() -> None:
    assert Config().fuse_rotations == "auto" == Config(inner="eager").fuse_rotations
    with pytest.raises(ConfigError, match="fuse_rotations: got 1; allowed: 'auto', True, False"):
        Config(fuse_rotations=1)
    with pytest.raises(ConfigError, match="choose one"):
        Config(fuse_rotations=True, inner="eager")


@pytest.mark.parametrize(
    ("option", "device", "capability", "fuses"),
    [
        ({}, "cuda", (9, 0), True),
        ({"telemetry": {"every": 10}}, "cuda", (9, 0), False),
        ({}, "cuda", (10, 0), False),
        ({}, "cpu", (9, 0), False),
        ({"fuse_rotations": True}, "cuda", (10, 0), True),
        ({"fuse_rotations": False}, "cuda", (9, 0), False),
    ],
)
def test_where_it_runs_by_itself(option, device, capability, fuses, monkeypatch) -> None:
    """ "auto": on the GPUs on which it was measured."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda of=None: capability)
    monkeypatch.setattr(post_grad_passes, "device_of", lambda node: torch.device(device))
    build = Builder()
    x, seed = build.placeholder("x", 128, 128), build.placeholder("seed", dtype=torch.int64)
    build.done(build.call(calls.one(x, seed, EDEN, "rht128", False, 0)))
    passes = post_grad_passes.PostGradPasses(Config(**option))
    passes.run(build.graph, "backward")
    assert fuses == any(record.name == "fuse_rotations" for record in passes.records)
