# SPDX-License-Identifier: Apache-2.0
"""`explain` and `compare` leave the model as it was."""

import pytest
import torch
from torch import nn

from q2compile import compare, explain
from q2compile.errors import ConfigError

pytestmark = pytest.mark.usefixtures("fresh_compiler")

EAGER = {"inner": "eager"}


class Net(nn.Module):
    def __init__(self, breaks=False):
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm, self.drop = nn.BatchNorm1d(32), nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("ring", torch.zeros(4, 32))
        self.register_buffer("cache", torch.zeros(1))
        self.breaks = breaks

    def forward(self, x):
        self.steps = self.steps + 1  # replaced
        self.ring[0] = x[0]  # written to
        self.cache = torch.zeros(2)  # grown
        x = self.norm(self.up(x).relu())
        if self.breaks:
            torch._dynamo.graph_break()
        return self.down(self.drop(x))


def state_of(model, x):
    buffers = {n: (b, b.clone()) for n, b in model.named_buffers() if n != "cache"}
    gradients = {n: (p.grad, p.grad.clone()) for n, p in model.named_parameters()}
    flags = {n: m.training for n, m in model.named_modules()}
    versions = {n: p._version for n, p in model.named_parameters()}
    return buffers, gradients, flags, versions, x.clone(), torch.get_rng_state()


def assert_same(was, now):
    for one, other in zip(was[:2], now[:2], strict=True):
        for name, (tensor, value) in one.items():
            assert other[name][0] is tensor, name
            assert torch.equal(other[name][1], value), name
    assert was[2:4] == now[2:4]
    assert torch.equal(was[4], now[4]) and torch.equal(was[5], now[5])


def in_a_function(model):
    def step(x):
        x += 1  # an argument
        return model(x).square().mean()

    return step


def in_a_training_step(model):
    def step(x):
        model.eval()
        model.train()
        model(x).square().mean().backward()

    return step


WAYS = ["model", "compiled model", "function", "training step"]


@pytest.mark.parametrize(
    ("way", "breaks"), [("compare", False), *((w, b) for w in WAYS for b in (False, True))]
)
def test_a_model_is_what_it_was(way, breaks):
    model, x = Net(breaks), torch.randn(16, 32)
    model(x).square().mean().backward()
    model.drop.eval()
    was = state_of(model, x)
    if way == "compare":
        compare(model, [x], loss=lambda y: y.square().mean(), alone=False)
    elif way == "training step":
        model.drop.train()
        was = state_of(model, x)
        explain(in_a_training_step(model), x, options=EAGER)
    else:
        given = {"model": lambda m: m, "function": in_a_function, "compiled model": torch.compile}
        explain(given[way](model), x, options=EAGER)
    assert_same(was, state_of(model, x))
    assert model.cache.shape == (2,)


class Flips(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x):
        self.up.training = False
        raise KeyError("boom")


def test_so_it_is_after_an_error():
    model = Flips()
    with pytest.raises(KeyError, match="boom"):
        explain(model, torch.randn(4, 32), options=EAGER)
    assert model.up.training


def test_compare_of_a_function_says_what_it_takes():
    model = Net()
    for given in (lambda x: model(x), model.forward, 3):
        with pytest.raises(ConfigError, match="for a model; allowed: an nn.Module"):
            compare(given, [torch.randn(4, 32)])
