# SPDX-License-Identifier: Apache-2.0
"""No two GEMMs of a graph draw the same random bits. Each has its own seed, and its two operands
draw different bits from it."""

import operator

import pytest
import torch
from torch import fx, nn

from q2compile.graph.nodes import GEMM_OPS, q2_nodes
from q2compile.graph.quantizers import quantizers
from q2compile.passes.post_grad.merge_seeds import merge_seeds_pass
from q2compile.recipes.published import RECIPES
from q2compile.runtime_kernels.kernel_states import assumed_capability
from tests.support.pass_table import replace_pass

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Twins(nn.Module):
    """Two linears of one size: of one x, and with one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x)


def bits_of_gemms(graph: fx.Graph) -> dict[str, set[tuple[fx.Node, int]]]:
    """(seed, rng_offset) of the quantizers of each GEMM's operands."""
    calls = dict(quantizers(graph))
    found = {}
    for gemm in q2_nodes(graph, *GEMM_OPS):
        todo, bits = list(gemm.all_input_nodes), set()
        while todo:
            node = todo.pop()
            if node in calls:
                call = calls[node]
                seeds = [o.seed for o in call.operands if o.seed is not None]
                bits |= {(seed, call.args["rng_offset"]) for seed in seeds}
            elif node.target is operator.getitem:
                todo += node.all_input_nodes
        found[gemm.name] = bits
    return found


@pytest.mark.parametrize("recipe", sorted(RECIPES.keys() - {"bf16"}))
def test_every_gemm_draws_bits_of_its_own(recipe, monkeypatch):
    graphs = []

    def look(graph: fx.Graph) -> int:
        if assumed_capability() is None:  # not the cost model's layer
            graphs.append(bits_of_gemms(graph))
        return merge_seeds_pass(graph)

    replace_pass(monkeypatch, "merge_seeds", look)
    # Passes that share a seed on purpose and draw from other offsets (test_share_rotations).
    shared = ["share_saved_rotations", "share_rotations"]
    options = {"recipe": recipe, "inner": "eager", "disable_passes": shared}
    compiled = torch.compile(Twins(), backend="quartet2", options=options)
    compiled(torch.randn(64, 64, requires_grad=True)).square().sum().backward()
    drawn = [bits for graph in graphs for bits in graph.values() if bits]
    backward = RECIPES[recipe].dgrad, RECIPES[recipe].wgrad  # no fprop draws
    count = sum(2 for gemm in backward if gemm.a.draws or gemm.b.draws)  # of two linears
    assert len(drawn) == count
    seeds = [{seed for seed, _ in bits} for bits in drawn]
    assert [len(of_gemm) for of_gemm in seeds] == [1] * count, (
        "one seed: its operands share their signs"
    )
    assert len(set().union(*seeds)) == count
    assert count > 0 or recipe == "fp8"
