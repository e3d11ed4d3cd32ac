# SPDX-License-Identifier: Apache-2.0
"""Every spelling of activation × parameter is found, named, and gives the same values."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from q2compile import explain
from q2compile.capture.find_matmuls import find_matmuls
from q2compile.capture.spellings import Matmul, NotTaken
from tests.support.rewritten import rewritten

K, N = 32, 48


class Spelled(nn.Module):
    """A [N, K] weight ``w``, a [K, N] weight ``v``, biases, and a forward given as a function."""

    def __init__(self, forward):
        super().__init__()
        self.w = nn.Parameter(torch.randn(N, K))
        self.v = nn.Parameter(torch.randn(K, N))
        self.b = nn.Parameter(torch.randn(N))
        self.cube = nn.Parameter(torch.randn(2, K, N))
        self.square = nn.Parameter(torch.randn(N, N))
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


# Products and views by place and by name: test_operand_forms.py.
SPELLINGS = {
    "@ w.t()": lambda m, x: x @ m.w.t(),
    "@ w.mT": lambda m, x: x @ m.w.mT,
    "@ w.T": lambda m, x: x @ m.w.T,
    "@ w.H": lambda m, x: x @ m.w.H,
    "@ w.data.mT": lambda m, x: x @ m.w.data.mT,
    "@ v": lambda m, x: x @ m.v,
    "operator.matmul": lambda m, x: operator.matmul(x, m.v),
    "addmm with a matrix": lambda m, x: torch.addmm(torch.ones(10, N), x.view(-1, K), m.v),
    "w @ xT": lambda m, x: m.w @ x.transpose(-1, -2),
    "cast": lambda m, x: x @ m.v.to(x.dtype),
    "slice": lambda m, x: F.linear(x, m.w[:16]),
    "einsum btk,nk->btn": lambda m, x: torch.einsum("btk,nk->btn", x, m.w),
    "einsum btk,kn->btn": lambda m, x: torch.einsum("btk, kn -> btn", x, m.v),
    "einsum parameter first": lambda m, x: torch.einsum("kn,btk->btn", m.v, x),
    "einsum ...": lambda m, x: torch.einsum("...k,nk->...n", x, m.w),
    "einsum, n in front": lambda m, x: torch.einsum("btk,nk->nbt", x, m.w),
    "einsum, k inside": lambda m, x: torch.einsum("bkt,kn->btn", x.transpose(1, 2), m.v),
    "einsum without an arrow": lambda m, x: torch.einsum("btk,kn", x, m.v),  # gives bnt
    "einsum to heads": lambda m, x: torch.einsum("btk,khd->bhtd", x, m.v.view(K, 3, 16)),
    "einsum to heads of rows": lambda m, x: torch.einsum("...k,hdk->...hd", x, m.w.view(3, 16, K)),
    "einsum to heads inside": lambda m, x: torch.einsum("btk,hkd->hbtd", x, m.v.view(3, K, 16)),
    "einsum from heads": lambda m, x: torch.einsum(
        "bhtd,hdn->btn", x.view(2, 5, 2, 16).transpose(1, 2), m.v.view(2, 16, N)
    ),
    "einsum from heads, parameter first": lambda m, x: torch.einsum(
        "nhd,bthd->nbt", m.w.view(N, 2, 16), x.view(2, 5, 2, 16)
    ),
    "one vector": lambda m, x: F.linear(x[0, 0], m.w, m.b),
    "in a checkpoint": lambda m, x: checkpoint(F.linear, x, m.w, m.b, use_reentrant=False),
}


def test_each_spelling_is_taken_and_computes_the_same():
    for spelling in SPELLINGS:
        torch.manual_seed(0)
        model = Spelled(SPELLINGS[spelling])
        x = torch.randn(2, 5, K)
        y, rows = rewritten(model, x)
        assert [row.taken for row in rows] == [True]
        assert rows[0].module in ("w", "v")
        torch.testing.assert_close(y, model(x))  # fp32 sums in another order


LEFT = {
    "activation × activation": lambda m, x: x @ x.mT,
    "parameter × parameter": lambda m, x: m.w @ m.v,
    "the weight is 3-D, [2, 32, 48], and the activation [5, 32]": lambda m, x: x[0] @ m.cube,
    "the weight is computed": lambda m, x: F.linear(x, m.w * 2),
    "the weight is computed, not a parameter": lambda m, x: x @ (m.v + m.w.mT).relu(),
    "the activation is float64": lambda m, x: x.double() @ m.v.double(),
    "too small": lambda m, x: x @ m.v[:, :8],
    "beta or alpha": lambda m, x: torch.addmm(m.b, x.view(-1, K), m.v, beta=2),
    "out=": lambda m, x: torch.mm(x.view(-1, K), m.v, out=torch.empty(10, N)),
    "einsum 'btk,nk->bt' is not": lambda m, x: torch.einsum("btk,nk->bt", x, m.w),
    "einsum 'btk,nk->n' is not": lambda m, x: torch.einsum("btk,nk->n", x, m.w),
    "an unsupported form": lambda m, x: torch.tensordot(x, m.v, 1),
    "a matmul in an unsupported form": lambda m, x: torch.inner(x, m.w),
    "attention": lambda m, x: F.scaled_dot_product_attention(x, x, x),
    "not of two operands": lambda m, x: torch.einsum("btk,kn,nj->btj", x, m.v, m.w),
    "bilinear": lambda m, x: F.bilinear(x, x.new_ones(2, 5, N), m.cube),
    "a recurrent layer": lambda m, x: torch.rnn_tanh_cell(x[0], x.new_ones(5, N), m.w, m.square),
    "a custom op": lambda m, x: torch.ops.q2_test.times(x, m.cube),
}
WITHOUT_WEIGHT = {"activation × activation", "attention"}


@torch.library.custom_op("q2_test::times", mutates_args=())
def times(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A matmul of somebody else's."""
    return x @ w


times.register_fake(lambda x, w: x @ w)


@torch.library.custom_op("q2_test::look_up", mutates_args=())
def look_up(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """An op that takes a weight and no activation."""
    return table[tokens]


look_up.register_fake(lambda tokens, table: table.new_empty(*tokens.shape, table.shape[1]))


def test_what_is_not_taken_has_its_reason():
    for why in LEFT:
        y, rows = rewritten(
            Spelled(LEFT[why]).requires_grad_("out" not in why), torch.randn(2, 5, K)
        )
        assert [row.taken for row in rows] == [False]
        assert why in rows[0].why
        assert rows[0].has_parameter == (why not in WITHOUT_WEIGHT)  # strict refuses those with


def test_a_parametrized_weight_has_its_modules_name():
    layer = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(K, N)))
    _, (row,) = rewritten(layer, torch.randn(2, 5, K))
    assert (row.module, row.wanted) == ("0", True)
    assert row.why == "the weight is computed, not a parameter or a view of one"


def test_a_custom_op_that_looks_up_is_no_matmul():
    _, rows = rewritten(Spelled(lambda m, x: torch.ops.q2_test.look_up(x, m.w)), torch.arange(4))
    assert rows == []


def test_the_trap_of_the_alpha_of_addmm():
    """torch.addmm's third and fourth positional names differ from matmul's; alpha scales the
    product.
    """
    model = Spelled(lambda m, x: torch.addmm(m.b, x.view(-1, K), m.v, alpha=3))
    _, rows = rewritten(model, torch.randn(2, 5, K))
    assert "alpha" in rows[0].why


@pytest.mark.parametrize("batch_first", [True, False])
def test_multi_head_attention_is_taken_apart(batch_first):
    """Trap: nn.MultiheadAttention is one opaque node in Dynamo's graph."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(K, 4, 64, dropout=0.0, batch_first=batch_first)
    x = torch.randn(2, 5, K)
    y, rows = rewritten(layer, x)
    taken = [row.module for row in rows if row.taken]
    assert taken == ["self_attn.in_proj", "self_attn.out_proj", "linear1", "linear2"]
    torch.testing.assert_close(y, layer(x))


@pytest.mark.parametrize(
    ("mask", "norm_first", "activation"),
    [
        ("none", False, "relu"),
        ("causal", True, "gelu"),
        ("padding", False, "gelu"),
        ("both", True, "relu"),
    ],
)
def test_the_fused_encoder_layer_is_taken_apart(mask, norm_first, activation):
    """Trap: under no_grad in eval mode, nn.TransformerEncoderLayer is one opaque node."""
    layer = nn.TransformerEncoderLayer(
        K, 4, 64, activation=activation, batch_first=True, norm_first=norm_first
    ).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)  # norms and biases that are not 1 and 0
    masks = {}
    if mask in ("causal", "both"):
        masks["src_mask"] = torch.ones(5, 5, dtype=torch.bool).triu(1)
    if mask in ("padding", "both"):
        masks["src_key_padding_mask"] = torch.arange(5).expand(2, 5) > torch.tensor([[4], [2]])
    x = torch.randn(2, 5, K)
    layer.requires_grad_(False)
    with torch.no_grad():
        y, rows = rewritten(lambda x: layer(x, **masks), x)
        own = layer(x, **masks)
    assert [row.taken for row in rows if row.has_parameter] == [True] * 4
    torch.testing.assert_close(y, own)


def test_a_checkpointed_region_is_entered():
    """Trap: a checkpointed region is a child GraphModule whose placeholders are not the
    parameters.
    """

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(K, N), nn.SiLU(), nn.Linear(N, K))

        def forward(self, x):
            return checkpoint(self.mlp, x, use_reentrant=False) + x

    y, rows = rewritten(Block(), torch.randn(2, 5, K))
    assert [(r.module, r.taken) for r in rows] == [("mlp.0", True), ("mlp.2", True)]


def test_inside_a_custom_autograd_function_is_left():
    """Its backward is handwritten, so rewriting the forward would not change the gradients."""

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, dy):
            x, w = ctx.saved_tensors
            return dy @ w.mT, x.flatten(0, 1).mT @ dy.flatten(0, 1)

    _, rows = rewritten(Spelled(lambda m, x: Times.apply(x, m.v)), torch.randn(2, 5, K))
    assert {row.taken for row in rows} == {False}
    assert any("autograd.Function" in row.why for row in rows)


def test_find_matmuls_gives_the_shape():
    found = []

    def backend(gm, example_inputs):
        found.extend(find_matmuls(gm))
        return gm

    torch.compile(Spelled(lambda m, x: (x @ m.v) @ x.new_ones(N, 4)), backend=backend)(
        torch.randn(2, 5, K)
    )
    first, second = found
    assert isinstance(first, Matmul) and first.shape == (10, N, K)
    assert isinstance(second, NotTaken) and second.why == "activation × activation"


def test_hugging_faces_conv1d():
    """GPT-2's layers: addmm on a weight stored [K, N]."""
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    model = nn.Sequential(pytorch_utils.Conv1D(N, K))
    report = explain(model, torch.randn(2, 5, K), options={"inner": "eager"})
    (row,) = report.rows
    assert (row.module, row.taken, row.shape) == ("0", True, (10, N, K))


def test_rows_looked_up_in_a_parameter_are_an_activation():
    """``table[tokens] @ w``: an embedding by hand. A slice is still the parameter."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.w = nn.Parameter(torch.randn(64, K)), nn.Parameter(torch.randn(K, N))

        def forward(self, tokens):
            return self.table[tokens] @ self.w + (self.table[:16] @ self.w).sum()

    model, tokens = Model(), torch.arange(20)
    y, rows = rewritten(model, tokens)
    torch.testing.assert_close(y, model(tokens))
    assert [(row.module, row.taken) for row in rows] == [("w", True), ("w", False)]
    assert rows[1].why == "parameter × parameter: no activation to quantize"
