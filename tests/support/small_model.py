# SPDX-License-Identifier: Apache-2.0
"""A language model small enough for tests of training loops, and comparisons of such loops."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

EAGER = {"inner": "eager"}
WIDTH, VOCABULARY = 32, 48


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64, bias=False), nn.Linear(64, WIDTH)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Mlp(nn.Module):
    """x + down(silu(up(x))) of x [T, 64], all of it checkpointed on request."""

    def __init__(self, checkpointed=False, bias=True):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, bias=bias), nn.Linear(128, 64, bias=False)
        self.checkpointed = checkpointed

    def forward(self, x):
        if self.checkpointed:
            return checkpoint(self.run, x, use_reentrant=False)
        return self.run(x)

    def run(self, x):
        return x + self.down(F.silu(self.up(x)))


class Model(nn.Module):
    """A language model of two blocks that look at one token; ``around`` wraps the call of each."""

    def __init__(self, around=lambda block, x: block(x)):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.around = around

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.layers:
            x = self.around(block, x)
        return self.head(x)


LINEARS = [f"layers.{i}.{name}" for i in range(2) for name in ("up", "down")] + ["head"]


def new_model(around=None, seed=0):
    torch.manual_seed(seed)
    return Model(around) if around else Model()


def batch(i=0, rows=4, length=9):
    """Tokens, and what follows them: the same permutation in every batch, so it can be learnt."""
    generator = torch.Generator().manual_seed(i)
    tokens = torch.randint(VOCABULARY, (rows, length), generator=generator)
    return tokens, (7 * tokens + 3) % VOCABULARY


def loss_of(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def gradients(compiled, model, inputs=None, seed=1):
    """The gradients of one backward, in fp32, by name."""
    torch.manual_seed(seed)
    model.zero_grad()
    loss_of(compiled, *(inputs or batch())).backward()
    return {name: p.grad.float().clone() for name, p in model.named_parameters()}


def quantized(model, **options):
    return torch.compile(model, backend="quartet2", options={**EAGER, **options})


def results_of(model, x):
    """The output and all gradients of a forward and backward, compiled anew, with one seed."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    y = quantized(model)(x)
    y.square().sum().backward()
    results = [y.detach(), *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    return results


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def assert_close(one, other, cosine=0.85):
    """One draw of an MS-EDEN GEMM has cosine 0.99. Through these layers it stays above 0.9, and
    above 0.85 for the gradient of a norm's weight, which sums few elements."""
    for name, value in one.items():
        assert F.cosine_similarity(value.flatten(), other[name].flatten(), 0) > cosine, name
