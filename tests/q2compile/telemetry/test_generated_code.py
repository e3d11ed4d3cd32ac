# SPDX-License-Identifier: Apache-2.0
"""On a GPU Inductor fuses quantizers with the producer of their operand, and rounds at the end of a
kernel. Recording changes no bits because all kernels of the graph stay. These tests read the code
for an H200, generated without one (tests/support/emulation/inductor.py)."""

from __future__ import annotations

import re

import pytest
import torch
import torch._inductor.config as inductor_config

from q2compile import telemetry
from tests.q2compile.telemetry.training import WIDTH, forget_all, new_model
from tests.support.emulation.inductor import INDUCTOR_OPTIONS, emulate, lower_on_cpu, serve_as_on

pytestmark = pytest.mark.usefixtures("fresh_compiler")
HOPPER = 90


def graphs_of(monkeypatch, options: dict) -> dict[str, list[list[str]]]:
    """Kind of graph -> the Triton kernels of each that was compiled for two training steps."""
    with monkeypatch.context() as patch, inductor_config.patch(INDUCTOR_OPTIONS):
        sources = emulate(patch, HOPPER)
        serve_as_on(patch, HOPPER)
        torch._dynamo.reset()
        model = new_model(blocks=1, dtype=torch.bfloat16)
        step = torch.compile(model, backend="quartet2", options=options)
        for _ in range(2):
            step(torch.zeros(256, WIDTH, dtype=torch.bfloat16)).sum().backward()
            telemetry.step()
    graphs: dict[str, list[list[str]]] = {"forward": [], "backward": []}
    for source in sources:
        kind = "backward" if "tangents_" in source else "forward"
        graphs[kind].append(kernels(source))
    return graphs


def kernels(source: str) -> list[str]:
    """Tile, arguments and body of each kernel, without names of ops and places."""
    found = re.findall(r"async_compile\.triton\('(\w+)', '''\n(.*?)'''", source, re.S)
    neutral = re.compile(r"'(kernel_name|backend_hash)': '\w+'")
    return sorted(neutral.sub("", code.replace(name, "kernel")) for name, code in found)


def test_all_kernels_stay(monkeypatch, tmp_path):
    plain = graphs_of(monkeypatch, {})
    forget_all()  # the steps of those graphs
    option = {"telemetry": {"every": 100, "to": str(tmp_path)}}
    recorded = graphs_of(monkeypatch, option)
    forget_all()
    for kind, (wanted,) in plain.items():
        recording, idle = recorded[kind]  # in the order in which they are compiled
        assert wanted and idle == wanted, kind
        assert [k for k in wanted if k not in recording] == [], kind
    fused = [k for k in plain["forward"][0] if k.count("tl.store") > 1]
    assert fused, "no quantizer was fused: this shows nothing"


def test_the_loops_of_a_recorded_quantizer(monkeypatch):
    """The codes are the reference's bits, and the statistics are those of the same x."""
    lower_on_cpu(monkeypatch)
    x = torch.randn(64, 256).bfloat16()

    def recorded(x):
        how = {"scheme": "nvfp4_46_pow2", "rowwise": True, "columnwise": False}
        return torch.ops.q2.quantize(x.relu(), **how, recorded=True)

    torch._dynamo.reset()
    with inductor_config.patch(force_disable_caches=True):
        *own, statistics = torch.compile(recorded)(x)
    *wanted, measured = recorded(x)
    for a, b in zip(own, wanted, strict=True):
        assert torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
    assert torch.equal(statistics, measured)
