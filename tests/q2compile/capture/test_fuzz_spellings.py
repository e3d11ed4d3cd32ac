# SPDX-License-Identifier: Apache-2.0
"""Every spelling with every number and form of operands: a node that can't be read is left alone,
and one that torch can run is read."""

import random

import pytest
import torch
from torch import fx, nn

from q2compile.capture import spellings
from q2compile.capture.find_matmuls import UNREAD
from q2compile.capture.module_names import Names
from q2compile.config import Config, resolved_policy
from q2compile.errors import NotTakenError
from q2compile.report.model_coverage import Coverage
from q2compile.rewrite.rewrite_graph import rewrite
from tests.support.rewritten import BF16

pytestmark = pytest.mark.filterwarnings("ignore")

# Functions that random arguments crash, or that need a GPU.
SKIPPED = ("_scaled_grouped_mm", "_transformer_encoder_layer_fwd", "_native_multi_head_attention")
TARGETS = {
    f"{name}: {getattr(target, '__name__', target)}": (target, arguments)
    for name, targets, arguments, _ in spellings._TABLE
    for target in targets
    if not any(skipped in str(target) for skipped in SKIPPED)
}

CONFIG = Config()


class Graph:
    """A graph of one call, whose values are known as Dynamo knows them."""

    def __init__(self):
        self.root, self.graph, self.inputs = nn.Module(), fx.Graph(), []

    def activation(self, *shape, dtype=torch.float32):
        value = torch.randint(0, 2, shape) if dtype == torch.int64 else torch.randn(shape)
        node = self.graph.placeholder(f"x{len(self.inputs)}")
        self.inputs.append(value)
        return self.seen(node, value)

    def parameter(self, *shape):
        name = f"w{len(self.root._parameters)}"
        self.root.register_parameter(name, nn.Parameter(torch.randn(shape)))
        return self.seen(self.graph.get_attr(name), self.root._parameters[name])

    def call(self, target, args, kwargs):
        """Whether torch can run it; the node is there in either case."""
        kind = "call_method" if isinstance(target, str) else "call_function"
        node = self.graph.create_node(kind, target, args, kwargs)
        values, named = fx.map_arg((args, kwargs), lambda n: n.meta["example_value"])
        try:
            run = getattr(values[0], target) if isinstance(target, str) else target
            value = run(*values[isinstance(target, str) :], **named)
        except Exception:
            self.graph.output(None)
            return node, False
        self.seen(node, value)
        self.graph.output(node)
        return node, isinstance(value, torch.Tensor)

    def seen(self, node, value):
        node.meta["example_value"] = value
        return node

    def module(self):
        return fx.GraphModule(self.root, self.graph)


FORMS = ["x", "x", "x", "w", "w", "w", "w.t()", "w * 2", "w[i]", "ids", "number", "None", "list"]


def operand(graph, draw, ndim):
    """Something that a user may write in an operand's place; square matrices fit one another."""
    made = draw.choice(FORMS if draw.random() < 0.5 else FORMS[:8])
    shape = draw.choice([(32,), (32, 32), (2, 32, 32), (2, 2, 32, 32)])
    if draw.random() < 0.85:
        shape = (2, 32, 32)[3 - ndim :]
    if made == "x":
        return graph.activation(*shape)
    if made == "ids":
        return graph.activation(2, dtype=torch.int64)
    if made in ("number", "None"):
        return 2 if made == "number" else None
    if made == "list":
        return [operand(graph, draw, ndim) for _ in range(draw.randint(0, 2))]
    w = graph.parameter(*shape)
    value = w.meta["example_value"]
    if made == "w.t()":
        return graph.seen(graph.graph.call_method("transpose", (w, -1, 0)), value.transpose(-1, 0))
    if made == "w * 2":
        return graph.seen(graph.graph.call_function(torch.mul, (w, 2)), value * 2)
    if made == "w[i]":
        i = graph.activation(2, dtype=torch.int64)
        looked_up = torch.index_select(value, 0, graph.inputs[-1])
        return graph.seen(graph.graph.call_function(torch.index_select, (w, 0, i)), looked_up)
    return w


def check(graph, node, runs):
    """The rewritten graph computes the same. q2compile can read every call that torch runs."""
    gm = graph.module()
    before = gm(*graph.inputs) if runs else None
    rows = rewrite(gm, CONFIG, Names())
    gm.graph.lint()
    if not runs:
        return rows
    what = node.format_node()
    assert not any(row.why.startswith(UNREAD) for row in rows), (what, [r.why for r in rows])
    for other in gm.graph.nodes:
        if str(other.target).startswith("q2."):
            other.args = (*other.args[:-4], *BF16, other.args[-1])
    gm.recompile()
    after = gm(*graph.inputs)
    # Sums of up to 32 * 32 products in fp32, in another order.
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-3, msg=lambda m: f"{what}: {m}")
    return rows


def test_every_spelling_with_any_operands():
    for name in TARGETS:
        target, arguments = TARGETS[name]
        draw, ran = random.Random(name), 0
        least = 2 if getattr(target, "__module__", "") == "_operator" else isinstance(target, str)
        for _ in range(40):
            graph, ndim = Graph(), draw.choice([1, 2, 2, 3])
            count = len(arguments) if draw.random() < 0.6 and arguments else draw.randint(0, 4)
            operands = [operand(graph, draw, ndim) for _ in range(max(count, least))]
            if least and not isinstance(operands[0], fx.Node):
                operands[0] = graph.activation(2, 32, 32)  # a method is one of a tensor
            positional = max(least, draw.choice([len(operands), draw.randint(0, len(operands))]))
            keys = [*arguments[positional:], "input", "other", "weight", "mat2", "out_dtype"]
            kwargs = dict(zip(keys, operands[positional:], strict=False))
            node, runs = graph.call(target, tuple(operands[:positional]), kwargs)
            check(graph, node, runs)
            ran += runs
        assert ran >= (8 if spellings._SPELLINGS[target][0] in ("linear", "matmul") else 0)


def equation(draw):
    """(text, subscripts of the operands): one to three, with ellipses, diagonals and spaces."""
    letters = draw.sample("abcdXY", 4)
    subscripts = []
    for _ in range(draw.choice([1, 2, 2, 2, 2, 3])):
        own = draw.sample(letters, draw.randint(1, 3))
        own += [draw.choice(own)] * (draw.random() < 0.1)
        if draw.random() < 0.2:
            own.insert(draw.randint(0, len(own)), "...")
        subscripts.append("".join(own))
    text = ("," if draw.random() < 0.7 else " , ").join(subscripts)
    if draw.random() < 0.8:
        used = sorted({c for s in subscripts for c in s if c.isalpha()})
        out = draw.sample(used, draw.randint(0, len(used)))
        out += ["..."] * any("..." in s for s in subscripts)
        draw.shuffle(out)
        text += "->" + "".join(out)
    return text, subscripts


@pytest.mark.parametrize("seed", range(6))
def test_every_einsum(seed):
    draw, ran = random.Random(seed), 0
    for _ in range(100):
        graph, (text, subscripts) = Graph(), equation(draw)
        sizes = {c: draw.choice([16, 32]) for c in "abcdXY"}
        operands = []
        for s in subscripts:
            front, dots, back = s.partition("...")
            middle = [2] * draw.randint(0, 2) if dots else []
            shape = [*(sizes[c] for c in front), *middle, *(sizes[c] for c in back)]
            make = graph.parameter if draw.random() < 0.4 else graph.activation
            operands.append(make(*shape))
        if draw.random() < 0.1:
            operands = [operands]
        target = draw.choice([torch.einsum, torch.einsum, torch.ops.aten.einsum])
        if target is torch.ops.aten.einsum and not isinstance(operands[0], list):
            operands = [operands]
        node, runs = graph.call(target, (text, *operands), {})
        rows = check(graph, node, runs)
        assert runs or "..." in text or max(map(len, subscripts)) > 3, text
        if len(subscripts) == 1:
            assert rows == [], text  # a permutation or a sum
        ran += runs
    assert ran > 50


def test_einsum_of_one_operand_is_no_matmul():
    """diffusers' DiT writes its unpatchify like this."""
    graph = Graph()
    x = graph.activation(1, 4, 4, 2, 2, 8)
    assert check(graph, *graph.call(torch.einsum, ("nhwpqc->nchpwq", x), {})) == []


def test_lists_of_subscripts():
    graph = Graph()
    x, w = graph.activation(32, 32), graph.parameter(32, 32)
    (row,) = check(graph, *graph.call(torch.einsum, (x, [0, 1], w, [2, 1], [0, 2]), {}))
    assert row.why == "einsum that is not of two operands with an equation"


# ---- a fault of ours ----------------------------------------------------------------------------


def fails(*args, **kwargs):
    raise KeyError("boom")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)
        self.mix = nn.Parameter(torch.randn(32, 32))

    def forward(self, x):
        return self.down(torch.einsum("ij,kj->ik", self.up(x), self.mix))


FAULTS = {
    "einsum_spellings": ("q2compile.capture.einsum_spellings.permuted", ["mix"]),
    "the table": ("q2compile.capture.call.Call.taken", ["up", "mix", "down"]),
    "decide": ("q2compile.rewrite.rewrite_graph.with_prediction", ["up", "mix", "down"]),
    "replace": ("q2compile.rewrite.replace.with_views", ["up", "mix", "down"]),
    "routers": ("q2compile.rewrite.rewrite_graph.is_router", ["up", "mix", "down"]),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("fresh_compiler")
def test_one_node_that_can_not_be_read_is_left_alone(fault, monkeypatch, caplog):
    """The other nodes are rewritten. A report, a warning and strict mention the one that failed,
    with any on_error."""
    from q2compile import explain

    where, left = FAULTS[fault]
    monkeypatch.setattr(where, fails)
    model, x, why = Net(), torch.randn(16, 32), f"{UNREAD}: KeyError: 'boom'"
    for options in ({}, {"on_error": "bf16"}):
        torch._dynamo.reset()
        report = explain(model, x, options={"inner": "eager", **options})
        rows = {row.module: (row.taken, row.why) for row in report.rows}
        expected = {
            name: (name not in left, why * (name in left)) for name in ("up", "mix", "down")
        }
        assert rows == expected
        assert caplog.text.count("stays in bf16: it could not be read") == len(left)
        caplog.clear()
    torch._dynamo.reset()
    with pytest.raises(NotTakenError, match=f"{left[0]}: {UNREAD}"):
        explain(model, x, options={"inner": "eager", "strict": True})


@pytest.mark.usefixtures("fresh_compiler")
def test_attention_that_can_not_be_taken_apart_is_left_alone(monkeypatch):
    from q2compile import explain

    monkeypatch.setattr("q2compile.capture.inline_attention.make_fx", fails)
    model, x = (
        nn.ModuleList([nn.MultiheadAttention(32, 2), nn.Linear(32, 32)]),
        torch.randn(8, 2, 32),
    )

    def forward(x):
        return model[1](model[0](x, x, x, need_weights=False)[0])

    rows = {row.module: row.why for row in explain(forward, x, options={"inner": "eager"}).rows}
    assert rows == {"0.in_proj": f"{UNREAD}: KeyError: 'boom'", "1": ""}


# ---- the nearest pattern ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "pattern", "nearest"),
    [
        ("x[0]", "layer.x[0]", r"re:layer\.x\[0\]"),
        ("weights[a]", "weights(a)", r"re:.*weights\[a\]"),
        ("experts:b", "experts_b", "re:.*experts:b"),
        ("down_proj", "downproj", "*.down_proj"),
    ],
)
def test_did_you_mean_names_patterns_that_match(key, pattern, nearest):
    model = nn.Module()
    model.layer = nn.Module()
    model.layer.register_parameter(key, nn.Parameter(torch.randn(32, 32)))
    coverage = Coverage(model, Config(policy={pattern: "bf16"}))
    assert coverage.notes()[0].endswith(f"(did you mean {nearest!r}?)")
    assert resolved_policy(Config(policy={nearest: "bf16"})).unmatched([f"layer.{key}"]) == []
