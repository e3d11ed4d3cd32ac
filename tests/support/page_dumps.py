# SPDX-License-Identifier: Apache-2.0
"""Dumps for tests of the report page: a small transformer, and the same with many layers."""

import json
import re

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, VOCABULARY = 32, 48
SCRIPT = "<script>alert(1)</script>"


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.q_proj, self.k_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 64, bias=False), nn.Linear(64, WIDTH)

    def forward(self, x):
        h = self.norm(x)
        x = x + torch.softmax(self.q_proj(h) @ self.k_proj(h).transpose(-2, -1), -1) @ h
        return x + self.down(F.silu(self.up(x)))


class Net(nn.Module):
    """Layers of attention and MLP, a linear with a name that is HTML, a small one and a head."""

    def __init__(self, layers=4):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.add_module(SCRIPT, nn.Linear(WIDTH, WIDTH))
        self.tiny = nn.Linear(WIDTH, 8)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self._modules[SCRIPT](x)  # <script>alert(2)</script>
        return self.head(x) + self.tiny(x).sum()


def dump_of_net(folder, layers=4, **options):
    """Dump a forward and a backward of `Net`, with some code as Inductor would write it."""
    torch.manual_seed(0)
    policy = {"head": "bf16", "*.down": {"dgrad": "bf16"}}
    options = {"inner": "eager", "policy": policy, "dump": str(folder), **options}
    model = torch.compile(Net(layers), backend="quartet2", options=options)
    model(torch.arange(24).view(2, 12)).sum().backward()
    code = ["import torch", *[f"# line {i}" for i in range(400)]]
    code[300] = (
        "# Topologically Sorted Source Nodes: [x, linear_default_2], Original ATen: [q2.gemm]"
    )
    (folder / "graph_0" / "5_output_code_forward.py").write_text("\n".join(code) + "\n")
    return folder


def with_more_layers(source, folder, times):
    """A dump with ``times`` as many layers as ``source``: its rows and texts, repeated and
    renumbered."""
    graph = folder / "graph_0"
    graph.mkdir(parents=True)
    rows = json.loads((source / "report.json").read_text())
    layers = 1 + max(int(n) for row in rows for n in re.findall(r"layers\.(\d+)", row["module"]))

    def moved(text, i):
        text = re.sub(r"layers\.(\d+)", lambda n: f"layers.{int(n[1]) + i * layers}", text)
        return re.sub(r"\b([a-z]\w*_)(\d+)\b", lambda n: f"{n[1]}{int(n[2]) + 1000 * i}", text)

    inside = [row for row in rows if "layers." in row["module"] + row["scope"]]
    more = [json.loads(moved(json.dumps(inside), i)) for i in range(1, times)]
    (folder / "report.json").write_text(json.dumps([*rows, *sum(more, [])]))
    (folder / "report.txt").write_text("")
    for file in (source / "graph_0").iterdir():
        text = file.read_text()
        if file.suffix == ".txt":
            text = "".join(moved(text, i) for i in range(times))
        (graph / file.name).write_text(text)
    return folder
