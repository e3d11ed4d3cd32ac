# SPDX-License-Identifier: Apache-2.0
"""Graphs inside graphs train: branches, loops, checkpoints in branches. Names do not show which of
these graphs are backwards."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as map_op
from torch.utils.checkpoint import checkpoint

WIDTH = 64


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def branch(self, layer):
        return lambda x: layer(x)

    def forward(self, x):
        x = self.first(x)
        return torch.cond(x.sum() > 1e6, self.branch(self.left), self.branch(self.right), (x,))


class CheckpointedBranches(Branches):
    def branch(self, layer):
        return lambda x: checkpoint(layer, x, use_reentrant=False)


class NestedBranches(Branches):
    def branch(self, layer):
        def inner(x):
            return torch.cond(x.sum() > 0, self.left, self.right, (x,))

        return inner if layer is self.right else super().branch(layer)


class Loop(nn.Module):
    """layer(layer(...)) as a while_loop, or over the rows of x as a map."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        def step(i, x):
            return i + 1, torch.tanh(self.layer(x))

        return while_loop(lambda i, x: i < 3, step, (torch.zeros((), dtype=torch.int64), x))[1]


class Map(Loop):
    def forward(self, x):
        return map_op(lambda row: self.layer(row).relu(), x.view(2, -1, WIDTH)).flatten(0, 1)


MODELS = {m.__name__: m for m in (Branches, CheckpointedBranches, NestedBranches, Loop, Map)}


def gradients(model, x, backend, **options):
    """Output and gradients. With fullgraph, because a graph break would leave the loop
    to Python."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    model.zero_grad()
    x.grad = None
    y = torch.compile(model, backend=backend, fullgraph=True, **options)(x)
    y.square().mean().backward()
    return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "inner"),
    [*((name, "eager") for name in MODELS), ("Loop", "inductor")],
)
def test_it_trains(name, inner):
    """One draw of an MS-EDEN GEMM has a cosine of 0.99 with the exact product; three in a row stay
    over 0.95."""
    model, x = MODELS[name](), torch.randn(WIDTH, WIDTH, requires_grad=True)
    expected = gradients(model, x, "aot_eager")
    got = gradients(model, x, "quartet2", options={"inner": inner, "strict": True})
    for key, value in expected.items():
        cosine = F.cosine_similarity(got[key].flatten(), value.flatten(), 0)
        assert cosine > 0.95 or value.norm() == got[key].norm() == 0, key
        assert value.norm() == 0 or not torch.equal(got[key], value), key


@pytest.mark.parametrize("recipe", ["nvfp4", "quartet", "quartet2"])
def test_a_recipe_in_a_branch(recipe):
    """Bit by bit as outside of one: nvfp4 draws signs in its forward, quartet saves masks, quartet2
    draws seeds in the backward alone."""
    model, x = Branches(), torch.randn(WIDTH, WIDTH, requires_grad=True)
    options = {"inner": "eager", "recipe": recipe}
    got = gradients(model, x, "quartet2", options=options)
    without = gradients(nn.Sequential(model.first, model.right), x, "quartet2", options=options)
    for key, value in without.items():
        assert torch.equal(got[key.replace("0.", "first.").replace("1.", "right.")], value), key


def test_passes_run_over_inner_graphs(tmp_path, fresh_compiler):
    """No seed is left for a kernel to draw, in the branches either; and the dump shows the branches
    as they came and as they left."""
    model, x = Branches(), torch.randn(80, WIDTH, requires_grad=True)
    gradients(model, x, "quartet2", options={"dump": str(tmp_path)})
    before = (tmp_path / "graph_0" / "3_backward.txt").read_text()
    after = (tmp_path / "graph_0" / "4_after_passes_backward.txt").read_text()
    assert before.count("q2.seed(") == 6  # dgrad's and wgrad's, of three linears
    assert "q2.seed(" not in after
    pairs = [line for line in after.splitlines() if "rowwise=True, columnwise=True" in line]
    assert len(pairs) == 3


def test_scan_without_a_backward():
    """Inductor of torch 2.13 can't differentiate a scan: "might be aliasing the input"."""

    class Scan(Loop):
        def forward(self, x):
            def step(carry, row):
                carry = torch.tanh(self.layer(carry) + row)
                return carry, carry + 1

            return scan(step, x[0] * 2, x)[1]

    model, x = Scan(), torch.randn(2, 32, WIDTH)
    torch._dynamo.reset()
    with torch.no_grad():
        y = torch.compile(model, backend="quartet2", fullgraph=True, options={"inner": "eager"})(x)
        assert 0.99 < F.cosine_similarity(y.flatten(), model(x).flatten(), 0) < 0.9999999
