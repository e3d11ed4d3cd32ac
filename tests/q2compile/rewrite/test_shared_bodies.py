# SPDX-License-Identifier: Apache-2.0
"""A body that several calls share is rewritten for each call, and shared again where the results
agree."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from q2compile import explain
from q2compile.capture.module_names import Names
from q2compile.config import Config, resolved_policy
from q2compile.failures.stage_error import FaultWarning
from q2compile.rewrite.rewrite_graph import rewrite
from q2compile.torch_internals.dynamo import called_graphs
from tests.support.pass_table import replace_pass
from tests.support.rewritten import rewritten

WIDTH = 64
EAGER = {"inner": "eager"}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return F.gelu(self.up(x))


class Twice(nn.Module):
    """A region that calls another one twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    @torch.compiler.nested_compile_region
    def inner(self, layer, x):
        return F.gelu(layer(x))

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return self.inner(self.second, self.inner(self.first, x))


class Stack(nn.Module):
    def __init__(self, layer=Layer, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def batch():
    return torch.randn(WIDTH, WIDTH, requires_grad=True)


def bodies(model, **options):
    """The texts of the bodies that the rewritten graph calls, and which of them each call calls."""
    seen = {}

    def backend(gm: fx.GraphModule, example_inputs):
        rewrite(gm, Config(**options), Names.of_graph(gm))
        calls = gm.graph.find_nodes(
            op="call_function", target=torch.ops.higher_order.invoke_subgraph
        )
        for node in calls:
            body = gm.get_submodule(node.args[0].target)
            ops = [
                str(n.args[3])
                for g in called_graphs(body)
                for n in g.graph.nodes
                if n.target is torch.ops.q2.linear.default
            ]
            seen.setdefault("bodies", []).append((id(body), node.args[1], ops))
        return gm

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(batch())
    return seen["bodies"]


def test_calls_that_agree_share_one_body():
    found = bodies(Stack())
    assert len(found) == 4
    assert len({body for body, _, _ in found}) == len({name for _, name, _ in found}) == 1
    assert found[0][2] == ["nvfp4_46_pow2 @ nvfp4_46_pow2"]


def test_calls_that_differ_have_bodies_of_their_own():
    policy = {"layers.1.*": "bf16", "layers.3.*": "nvfp4"}
    found = bodies(Stack(), policy=policy)
    first, second, third, fourth = (body for body, _, _ in found)
    assert first == third and len({first, second, fourth}) == 3
    assert [(body == first) == (name == found[0][1]) for body, name, _ in found] == [True] * 4
    assert [len(ops) for _, _, ops in found] == [1, 0, 1, 1]
    assert found[3][2] != found[0][2]


@pytest.mark.parametrize("policy", [{}, {"*.1.up": "bf16", "layers.2.*": "nvfp4"}])
def test_each_call_has_its_row_and_its_recipe(policy):
    report = explain(Stack(), batch(), options={**EAGER, "policy": policy, "strict": True})
    resolved = resolved_policy(Config(policy=policy))
    assert [row.module for row in report.rows] == [f"layers.{i}.up" for i in range(4)]
    for row in report.rows:
        recipe, _ = resolved.resolve(row.module)
        assert (row.taken, row.recipe) == (recipe.quantizes, recipe.name)
        assert row.taken == bool(row.saved_bytes)
    if not policy:
        # Codes and scales of x, 4.5 bits per element, and a global scale. Codes of w are
        # recomputed, since a body is a part of the model and its inputs are not known to be
        # parameters.
        bytes_saved = WIDTH * WIDTH * 9 // 16 + 4
        assert all(row.weight.startswith("recomputed: ") for row in report.rows)
        assert [row.saved_bytes for row in report.rows] == [bytes_saved] * 4


def run(model, x, **options):
    torch._dynamo.reset()
    torch.manual_seed(1)
    model.zero_grad()
    y = torch.compile(model, backend="quartet2", options=options)(x)
    y.square().mean().backward()
    return [y.detach(), *(p.grad for p in model.parameters())]


class PlainLayer(Layer):
    """The same layer, without a region."""

    def forward(self, x):
        return F.gelu(self.up(x))


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_only_the_layer_that_the_policy_names_is_quantized(inner):
    """The results are those of the same layers without regions, of which one is quantized: the
    forward up to fp32 rounding (gelu in one kernel or in two), the gradients up to their random
    bits."""
    model, plain, x = Stack(layers=3), Stack(PlainLayer, layers=3), batch()
    plain.load_state_dict(model.state_dict())
    options = {"inner": inner, "policy": {"*": "bf16", "layers.1.*": "quartet2"}}
    ours, theirs = run(model, x, **options), run(plain, x, **options)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        assert F.cosine_similarity(mine.flatten(), other.flatten(), 0) > 0.97
    torch.testing.assert_close(
        ours[5:], theirs[5:], rtol=1e-5, atol=1e-6
    )  # after it: no random bits


def test_a_region_in_a_region():
    policy = {"layers.2.second": "bf16"}
    model, x = Stack(Twice), batch()
    y, rows = rewritten(model, x, policy=policy)
    names = [f"layers.{i}.{name}" for i in range(4) for name in ("first", "second")]
    assert [row.module for row in rows] == names
    assert [row.taken for row in rows] == [name != "layers.2.second" for name in names]
    torch.testing.assert_close(y, model(x))
    found = bodies(model, policy=policy)
    assert len({body for body, _, _ in found}) == 2
    # If both calls agree, one body with one linear serves both. Otherwise one body keeps its
    # linear.
    assert [len(ops) for _, _, ops in found] == [1, 1, 1, 1]


def test_dynamos_own_shared_bodies():
    """use_graph_deduplication makes bodies of equal parts, whose inputs have no example values."""

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in "123")

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model, x = Plain(), batch()
    with torch._dynamo.config.patch(use_graph_deduplication=True):
        y, rows = rewritten(model, x, policy={"layers.1.*": "bf16"})
    assert [(row.module, row.taken) for row in rows] == [
        ("layers.0.0", True),
        ("layers.1.0", False),
        ("layers.2.0", True),
    ]
    torch.testing.assert_close(y, model(x))


def test_a_graph_left_to_inductor_has_its_own_bodies_back(monkeypatch):
    """AOTAutograd caches its result for a body under the name in the call."""

    def broken(graph):
        raise RuntimeError("broken")

    replace_pass(monkeypatch, "merge_seeds", broken)
    model, x = Stack(), batch()
    with pytest.warns(FaultWarning):
        y = run(model, x, inner="eager", on_error="bf16")[0]
    torch.testing.assert_close(y, model(x))


def test_a_dump_names_all_layers_of_a_body(tmp_path, fresh_compiler):
    run(Stack(), batch(), inner="eager", dump=str(tmp_path))
    text = (tmp_path / "graph_0" / "1_rewritten.txt").read_text()
    assert "# layers.0.up, layers.1.up and 2 more\n" in text
    before = (tmp_path / "graph_0" / "3_backward.txt").read_text()
    after = (tmp_path / "graph_0" / "4_after_passes_backward.txt").read_text()
    assert before.count("q2.seed(") == 2 and "_both(" not in before
    assert "q2.seed(" not in after and after.count("rowwise=True, columnwise=True") == 1
