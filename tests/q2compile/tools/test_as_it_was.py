# SPDX-License-Identifier: Apache-2.0
"""`explain`, `compare` and `export` leave the model as it was."""

import copy

import pytest
import torch
from torch import nn

from q2compile import compare, explain, export
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
    buffers = {n: (b, b.clone()) for n, b in model.named_buffers()}
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


class Cache:
    """A cache of keys that is no module."""

    def __init__(self):
        self.keys, self.calls = [], 0


class Changing(nn.Module):
    """Its forward changes all that a module may hold but parameters."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.extra = nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32)
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("grown", torch.zeros(1, 32))
        self.register_buffer("resized", torch.zeros(1))
        self.register_buffer("swapped", torch.zeros(2))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.register_buffer("deleted", torch.ones(3))
        self.register_buffer("later", None)
        self.calls, self.cache, self.seen = 0, Cache(), {"rows": []}
        self.plain = torch.zeros(2)

    @torch.compiler.disable
    def change(self, x):
        self.norm.train()(x)
        self.mean.mul_(0.5).add_(x.mean(0))  # of a graph that requires a gradient
        self.grown = torch.cat([self.grown, x[:1].detach()])
        self.resized.resize_(4).fill_(1)
        self.swapped.data = torch.ones(5)
        self.hidden += 1
        self.plain += 1
        if "deleted" in self._buffers:
            del self.deleted
        self.later = torch.ones(2)
        self.register_buffer("new", torch.ones(2), persistent=False)
        if self.calls == 0:  # lazily, once
            self.lazy = nn.Linear(32, 32)
            self.scale = nn.Parameter(torch.ones(32))
        self.calls += 1
        self.cache.calls += 1
        self.cache.keys.append(x.detach())
        self.seen["rows"].append(len(x))
        self.extra.weight.requires_grad_(False)
        torch.rand(3)

    def forward(self, x):
        x = self.up(x)
        self.change(x)
        return x


def held_by(model):
    state = {n: t.detach().clone() for n, t in model.state_dict().items()}
    buffers = {n: (id(b), b.requires_grad, b.tolist()) for n, b in model.named_buffers()}
    attributes = (model.calls, model.plain.tolist(), copy.deepcopy(model.seen))
    attributes += (model.cache.calls, len(model.cache.keys), list(vars(model)))
    flags = {n: (m.training, list(m._buffers)) for n, m in model.named_modules()}
    parameters = {n: (id(p), p.requires_grad, id(p.grad)) for n, p in model.named_parameters()}
    return state, (buffers, attributes, flags, parameters, torch.get_rng_state().tolist())


@pytest.mark.parametrize("way", ["explain", "function", "export"])
def test_all_that_a_forward_changes_is_restored(way, tmp_path):
    """An export also writes the tensors of before."""
    model, x = Changing(), torch.randn(4, 32)
    model.up.weight.grad = torch.ones(32, 32)
    model.norm.eval()
    state, was = held_by(model)
    if way == "export":
        from safetensors.torch import load_file

        done = export(
            model,
            tmp_path / "out",
            format="safetensors",
            options={},
            example_inputs=x,
            autocast=torch.bfloat16,
        )
        written = load_file(tmp_path / "out" / "model.safetensors")
        assert list(done.layers) == ["up.weight"]
        rest = {n: t for n, t in written.items() if not n.startswith("up.weight")}
        assert rest.keys() == state.keys() - {"up.weight"}
        assert all(torch.equal(t, state[n]) for n, t in rest.items())
    else:
        explain(model if way == "explain" else lambda x: model(x), x, options=EAGER)
    now, same = held_by(model)
    assert same == was
    assert now.keys() == state.keys() and all(torch.equal(t, state[n]) for n, t in now.items())
    copy.deepcopy(model)
    model(x)
    assert model.calls == 1 and model.grown.shape == (2, 32)
