# SPDX-License-Identifier: Apache-2.0
"""recompute_weights="auto": which codes of weights wait for the backward, and why."""

import copy
import pickle
from collections import Counter

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch.utils.checkpoint import checkpoint

import q2compile
from q2compile.compiler.partitioner import Partitioner
from q2compile.graph.quantizers import quantizers
from q2compile.passes.joint import saved_weights
from q2compile.torch_internals.partitioner import PARTITIONER_SLOT, MinCut

WIDTH = 256
FEW, SOME, MANY = 8, 256, 2048  # tokens


@pytest.fixture(autouse=True)
def no_memory_is_too_small(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(saved_weights, "SMALL", 0)


class Stack(nn.Module):
    """Three linears; ``middle`` runs the second."""

    def __init__(self, middle=lambda layer, x: layer(x)):
        super().__init__()
        self.first, self.second, self.third = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)
        )
        self.middle = middle

    def forward(self, x):
        return self.third(torch.tanh(self.middle(self.second, torch.tanh(self.first(x)))))


def again(layer, x):
    return checkpoint(layer, x, use_reentrant=False)


def said(tokens, model=None, **options):
    """The report's note on each weight."""
    x = torch.randn(tokens, WIDTH, requires_grad=True)
    report = q2compile.explain(model or Stack(), x, options={"inner": "eager", **options})
    return {row.module: row.weight for row in report.rows}


def gradients(tokens, **options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(tokens, WIDTH, requires_grad=True)
    compiled = torch.compile(model, backend="quartet2", options={"inner": "eager", **options})
    compiled(x).square().mean().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def kept(weights):
    return [text.partition(":")[0] for text in weights.values()]


def test_few_tokens_all_are_kept_since_the_peak_is_at_the_end():
    """Three gradients of 256 KiB are alive there, and the codes of all weights are 108."""
    weights = said(FEW)
    assert list(weights) == ["first", "second", "third"]
    assert set(weights.values()) == {
        "saved: saving all codes raises the peak of the step by 0.0%, 0.0 MiB"
    }


def test_at_the_peak_all_are_made_again():
    """256 tokens: the peak is between forward and backward, where all codes would be alive."""
    weights = said(SOME)
    assert list(weights) == ["first", "second", "third"]
    expected = "recomputed: saving all codes would raise the peak of the step by 5.6%, 0.1 MiB"
    assert set(weights.values()) == {expected}


def test_many_tokens_all_are_kept_since_it_is_less_than_a_fiftieth():
    weights = said(MANY)
    assert kept(weights) == 3 * ["saved"]
    (text,) = set(weights.values())
    percent = float(text.partition("by ")[2].partition("%")[0])
    assert 1 < percent < 2


def test_what_no_gpu_is_short_of_is_kept(monkeypatch):
    monkeypatch.setattr(saved_weights, "SMALL", 2**20)
    assert kept(said(SOME)) == 3 * ["saved"]


@pytest.mark.parametrize("recipe", ["quartet2", "quartet"])
def test_the_same_bits_whatever_is_kept(recipe):
    """QuEST's mask of w is read by the backward alone. Where all codes are kept: see
    test_joint_passes.py."""
    kept, made_again = (
        gradients(SOME, recompute_weights=v, recipe=recipe) for v in (False, "auto")
    )
    assert all(map(torch.equal, kept, made_again))


class Looking(MinCut):
    """Cuts with the given choices, and also as if nothing were recomputed."""

    def __call__(self, gm, joint_inputs, **kwargs):
        unmarked = copy.deepcopy(gm)
        for node in unmarked.graph.nodes:
            node.meta.pop("recompute", None)
        self.with_all, self.cut = (
            [module.graph for module in super(Looking, self).__call__(one, joint_inputs, **kwargs)]
            for one in (unmarked, gm)
        )
        self.results = kwargs["num_fwd_outputs"]
        return tuple(graph.owning_module for graph in self.cut)

    def saved(self, forward):
        return [node.name for node in forward.output_node().args[0][self.results :]]


def seen(tokens):
    """The partitioner's cut of the stack, after all choices."""
    looking = Looking()
    with inductor_config.patch({PARTITIONER_SLOT: looking}):
        said(tokens)
    return looking


def ops(graph):
    return Counter(str(node.target) for node in graph.nodes if node.op == "call_function")


def test_what_is_kept_is_not_made_again():
    look = seen(SOME)
    forward, backward = look.cut
    taken = [n.name for n in backward.find_nodes(op="placeholder") if "tangents" not in n.name]
    assert look.saved(forward) == taken
    assert len(set(taken)) == len(taken)
    backward.lint()
    made = sum(not call.rotated for _, call in quantizers(backward))
    assert made == 3
    assert sum(name.startswith("primals") for name in taken) == made
    descriptors = forward.output_node().meta["desc"][look.results :]
    assert [one.idx for one in descriptors] == list(range(len(taken)))


def test_where_all_are_kept_the_graphs_are_those_without_marks():
    look = seen(FEW)
    for graph, other in zip(look.cut, look.with_all, strict=True):
        assert ops(graph) == ops(other)
    assert sorted(look.saved(look.cut[0])) == sorted(look.saved(look.with_all[0]))


@pytest.mark.parametrize("middle", [None, again])
def test_dropout_draws_what_it_drew_whatever_is_kept(middle):
    """Dropout's generator state is threaded through both graphs by the partitioner."""
    results, dropout = [], nn.Dropout(0.5)
    for value in ("auto", True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Stack(lambda layer, x: (middle or nn.Module.__call__)(layer, dropout(x)))
        x = torch.randn(FEW, WIDTH, requires_grad=True)
        options = {"inner": "eager", "recompute_weights": value}
        torch.compile(model, backend="quartet2", options=options)(x).square().mean().backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))


def test_a_symbolic_size_counts_as_it_was_traced():
    for tokens, expected in ((FEW, 3), (SOME, 0)):
        torch._dynamo.reset()
        x = torch.randn(tokens, WIDTH, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        report = q2compile.explain(Stack(), x, options={"inner": "eager"})
        assert not any(isinstance(row.shape[0], int) for row in report.rows)
        assert sum(row.weight.startswith("saved") for row in report.rows) == expected


def test_a_graph_of_a_part_of_the_model_is_compared_with_its_gradients():
    """The first and the third linear have a graph each. 8 tokens: each saves less than its
    gradient. 256: it saves more, and the codes are more than a fiftieth of that."""

    def outside(layer, x):
        torch._dynamo.graph_break()
        return layer(x)

    for tokens, expected in (
        (FEW, "saved: saving all codes raises the peak of this part of the step by 0.0%, 0.0 MiB"),
        (
            SOME,
            "recomputed: saving all codes would raise the peak of this part of the step by 3.4%",
        ),
    ):
        weights = said(tokens, Stack(outside))
        assert weights["first"].startswith(expected), weights


def test_checkpoints_say_what_is_kept():
    weights = said(SOME, Stack(again))
    assert kept(weights) == ["saved", "recomputed", "saved"]
    assert all(
        text.endswith(": activation checkpointing decides what is saved")
        for text in weights.values()
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"recompute_weights": True}, "recomputed: recompute_weights=True"),
        ({"recompute_weights": False}, "saved: recompute_weights=False"),
        ({"keep_packed": True}, "saved: keep_packed=True"),
        ({"disable_passes": ["recompute_weights"]}, "saved: disable_passes"),
        ({"recipe": "bf16"}, ""),
        ({"recipe": "mxfp4"}, ""),
    ],
)
def test_another_option_has_the_word(options, text):
    assert set(said(256, **options).values()) == {text}


def test_the_table_says_what_is_made_again():
    x = torch.randn(SOME, WIDTH, requires_grad=True)
    assert str(q2compile.explain(Stack(), x, options={"inner": "eager"})).count("w recomputed") == 3


class Counting(MinCut):
    """A partitioner of the user's."""

    def __init__(self):
        self.cuts = 0

    def __call__(self, gm, joint_inputs, **kwargs):
        self.cuts += 1
        return super().__call__(gm, joint_inputs, **kwargs)


@pytest.mark.parametrize("middle", [again, None])
def test_a_partitioner_of_the_users_cuts(middle):
    """It is called once, also if weights are saved; either setting may name it."""
    one, other = Counting(), Counting()
    model = Stack(middle) if middle else Stack()
    with inductor_config.patch({PARTITIONER_SLOT: one}):
        said(FEW, model)
    torch._dynamo.reset()
    options = {"inductor": {PARTITIONER_SLOT: other}}
    torch.compile(model, backend="quartet2", options=options)(torch.randn(FEW, WIDTH))
    assert (one.cuts, other.cuts) == (1, 1)


def test_what_torchs_caches_know_of_it():
    one, other = Partitioner(MinCut(), 3), Partitioner(MinCut(), 4)
    assert pickle.dumps(one) == pickle.dumps(Partitioner(MinCut(), 3)) != pickle.dumps(other)
    assert pickle.loads(pickle.dumps(one)) == one.uuid()

    class Unknown(MinCut):
        def uuid(self):
            return None

    with pytest.raises(TypeError, match="without a uuid"):
        pickle.dumps(Partitioner(Unknown(), 3))
