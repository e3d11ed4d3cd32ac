# SPDX-License-Identifier: Apache-2.0
"""Random small graphs, policies, shapes and strides (hypothesis). A program that runs without
q2compile also runs with it, and if every policy is bf16 the bits are the same.

    Q2COMPILE_FUZZ=2000 .venv/bin/python -m pytest tests/end_to_end/test_fuzz.py

runs more cases of each.
"""

import os
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.utils import counters

from q2compile.errors import BackendError
from q2compile.recipes.published import RECIPES
from q2compile.torch_internals.aot_autograd import aot_eager_compile
from tests.support.rewritten import rewritten

CASES = int(os.environ.get("Q2COMPILE_FUZZ", "10"))
FUZZ = settings(max_examples=CASES, suppress_health_check=list(HealthCheck))
FUZZ_INDUCTOR = settings(max_examples=max(2, CASES // 20), suppress_health_check=list(HealthCheck))

SIZES = st.sampled_from((1, 2, 15, 16, 17, 24, 32, 48, 63, 64, 80, 129))
DTYPES = st.sampled_from((torch.float32, torch.bfloat16))

# Each step takes the current activation x [..., K] and a draw function, and returns the next one.
# A step that needs a weight asks the program for one, by shape and a way to store it.


def _linear(program, x):
    return F.linear(x, program.weight("nk", x.shape[-1]), program.bias())


def _matmul(program, x):
    return x @ program.weight("kn", x.shape[-1])


def _method(program, x):
    return x.matmul(program.weight("kn", x.shape[-1]))


def _transposed(program, x):
    w = program.weight("nk", x.shape[-1])
    return x @ program.choose((w.t(), w.mT, w.transpose(0, 1), w.transpose(-1, -2)))


def _cast_weight(program, x):
    w = program.weight("nk", x.shape[-1])
    return F.linear(x.to(torch.bfloat16), w.to(torch.bfloat16)).to(x.dtype)


def _addmm(program, x):
    flat = x.reshape(-1, x.shape[-1])
    w = program.weight("kn", x.shape[-1])
    bias = program.choose((torch.zeros((), dtype=x.dtype), program.last_bias))
    return torch.addmm(bias, flat, w).unflatten(0, x.shape[:-1])


def _einsum(program, x):
    w = program.weight("nk", x.shape[-1])
    if x.ndim != 3:
        return torch.einsum("...k,nk->...n", x, w)
    equation = program.choose(("btk,nk->btn", "btk,nk->bnt", "btk,nk->ntb"))
    y = torch.einsum(equation, x, w)
    return {"btn": y, "bnt": y.transpose(1, 2), "ntb": y.permute(2, 1, 0)}[equation[-3:]]


def _left(program, x):
    """w @ xᵀ, transposed back."""
    return (program.weight("nk", x.shape[-1]) @ x.transpose(-2, -1)).transpose(-2, -1)


def _sliced_weight(program, x):
    w = program.weight("nk", x.shape[-1])
    half = max(1, w.shape[0] // 2)
    return F.linear(x, program.choose((w[:half], w[half:], w[::2], w.narrow(0, 0, half))))


def _split_weight(program, x):
    w = program.weight("nk", x.shape[-1])
    a, *rest = w.chunk(2)
    return torch.cat([F.linear(x, a), *(F.linear(x, r) for r in rest)], -1)


def _tied(program, x):
    """One weight there and back."""
    w = program.weight("nk", x.shape[-1])
    return F.linear(x, w) @ w


def _by_keyword(program, x):
    """Spellings whose operands are named, on views that are made by keywords."""
    flat, w = x.reshape(-1, x.shape[-1]), program.weight("nk", x.shape[-1])
    y = program.choose(
        (
            lambda: F.linear(weight=w, input=flat, bias=None),
            lambda: torch.matmul(other=torch.t(input=w), input=flat),
            lambda: torch.mm(input=flat, mat2=torch.transpose(input=w, dim0=-1, dim1=0)),
            lambda: flat.mm(mat2=torch.permute(input=w, dims=(1, 0))),
            lambda: flat.matmul(other=torch.swapaxes(w, axis0=0, axis1=1)),
            lambda: torch.tensordot(a=flat, b=w, dims=([-1], [-1])),
            lambda: torch.einsum(flat, [0, 1], w, [2, 1], [0, 2]),
            lambda: torch.inner(input=flat, other=w),
            lambda: torch.bmm(mat2=w.t()[None], input=flat[None])[0],
        )
    )()
    return y.unflatten(0, x.shape[:-1])


def _broadcast(program, x):
    """Operands that broadcast: a batch with one weight, a contraction over size 1, a bias of
    another shape, a vector."""
    flat, k = x.reshape(-1, x.shape[-1]), x.shape[-1]
    w = program.weight("nk", k)
    rows, n = flat.shape[0], w.shape[0]
    y = program.choose(
        (
            lambda: torch.einsum("bk,nk->bn", flat[:, :1], w),
            lambda: torch.einsum("bk,nk->bn", flat, w[:, :1]),
            lambda: torch.einsum("...k,nk->...n", flat[:1], w).expand(rows, n),
            lambda: (flat[None] @ w.t().expand(3, k, n)).sum(0),
            lambda: torch.matmul(flat.expand(2, rows, k), w.t()[None])[1],
            lambda: torch.addmm(flat[:, :1], flat, w.t(), beta=0.5, alpha=2),
            lambda: torch.addmm(w[:, 0], flat, w.t()),
            lambda: torch.baddbmm(flat[None, :, :1], flat[None], w.t()[None], beta=2)[0],
            lambda: F.linear(flat, w, w[:1, 0]),
            lambda: (flat[0] @ w.t()).expand(rows, n),
            lambda: torch.stack([flat @ w[0], flat.mv(w[-1])], -1),
        )
    )()
    return y.unflatten(0, x.shape[:-1])


def _product_of_activations(program, x):
    return (x @ x.transpose(-2, -1)).softmax(-1) @ x


def _looked_up(program, x):
    table = program.weight("nk", x.shape[-1])
    rows = torch.arange(x.shape[-2]) % table.shape[0]
    return x + table[rows]


def _norm(program, x):
    return F.rms_norm(x, x.shape[-1:])


def _gated(program, x):
    return F.silu(x) * (x.abs() + 1).sqrt()  # at 0, which codes often give, a root has no gradient


def _residual(program, x):
    return x + program.input[..., :1]


def _expanded(program, x):
    return x[..., :1].expand(x.shape)


def _strided(program, x):
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def _every_other(program, x):
    return x[..., ::2] if x.shape[-1] > 1 else x


def _detached(program, x):
    return x + x.detach()


def _double(program, x):
    return x.to(torch.float64).to(x.dtype)


def _by_permutation(program, x):
    """Tokens are sent to experts, and their gradients back, by an argsort in the graph."""
    flat = x.flatten(0, -2)
    order = flat.detach().sum(-1).repeat_interleave(2).argsort(stable=True)
    return (x + flat[order // 2][: flat.shape[0]].view_as(x)) / 2


def _scattered(program, x):
    flat = x.flatten(0, -2)
    rows = torch.arange(flat.shape[0]) // 2
    at = rows[:, None].expand_as(flat)
    added = program.choose(
        (
            lambda: torch.zeros_like(flat).index_add(0, rows, flat),
            lambda: torch.zeros_like(flat).scatter_add(0, at, flat),
            lambda: flat.index_put((rows,), flat, accumulate=True),
            lambda: flat.gather(0, at),
        )
    )()
    return added.view_as(x)


def _concatenated(program, x):
    return program.choose(
        (
            lambda: torch.cat([x, x.sin()], -1)[..., : x.shape[-1]],
            lambda: torch.cat([F.silu(x[..., :1]), x[..., 1:]], -1),
            lambda: torch.cat([x, x * 2], -2)[..., : x.shape[-2], :],
        )
    )()


def _short_sum(program, x):
    """Over 2 to 10 elements, which Inductor may unroll."""
    few = x[..., : program.choose((2, 3, 8, 9, 10))]
    how = program.choose(
        (lambda: few.sum(-1), lambda: few.mean(-1), lambda: few.amax(-1), lambda: few.var(-1))
    )
    return x + (how() if few.shape[-1] > 1 else few.sum(-1))[..., None]


STEPS = (
    [_by_permutation, _scattered, _concatenated, _short_sum]
    + [_linear, _matmul, _method, _transposed, _cast_weight, _addmm, _einsum, _left, _sliced_weight]
    + [
        _split_weight,
        _tied,
        _by_keyword,
        _broadcast,
        _product_of_activations,
        _looked_up,
        _norm,
        _gated,
        _residual,
    ]
    + [_expanded, _strided, _every_other, _detached, _double]
)


class Program(nn.Module):
    """A chain of steps. The first call, eager, makes the weights; later ones use them in order."""

    def __init__(self, steps, choices, widths, dtype, frozen):
        super().__init__()
        self.steps, self.choices, self.widths = steps, choices, widths
        self.dtype, self.frozen = dtype, frozen
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        self.made = False

    def extra_repr(self):
        return f"{[s.__name__ for s in self.steps]}, {self.choices}, {self.widths}, {self.frozen}"

    def forward(self, x):
        self.input, self.next_choice, self.next_weight, self.next_bias = x, 0, 0, 0
        self.last_bias = None
        for step in self.steps:
            x = step(self, x)
        return x

    def choose(self, options):
        self.next_choice += 1
        options = [o for o in options if o is not None]
        return options[self.choices[self.next_choice % len(self.choices)] % len(options)]

    def weight(self, order, k):
        """[N, K] or [K, N], contiguous or not, with N of the program's widths."""
        i, self.next_weight = self.next_weight, self.next_weight + 1
        if not self.made:
            n = self.widths[i % len(self.widths)]
            shape = (n, k) if order == "nk" else (k, n)
            made = torch.randn(shape, dtype=self.dtype) / k**0.5
            if self.choices[i % len(self.choices)] % 3 == 0:  # stored the other way round
                made = made.t().contiguous().t()
            self.weights.append(nn.Parameter(made, requires_grad=i not in self.frozen))
        return self.weights[i]

    def bias(self):
        """One for the last weight, [N, K], or None."""
        i, self.next_bias = self.next_bias, self.next_bias + 1
        if self.choices[i % len(self.choices)] % 2:
            return None
        if not self.made:
            self.biases.append(nn.Parameter(torch.randn(len(self.weights[-1]), dtype=self.dtype)))
        used = sum(1 for j in range(i) if not self.choices[j % len(self.choices)] % 2)
        return self.biases[used]


@st.composite
def programs(draw):
    """A program, an input that it runs on eagerly, and a policy for its weights."""
    steps = draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=5))
    choices = draw(st.lists(st.integers(0, 11), min_size=1, max_size=6))
    widths = draw(st.lists(SIZES, min_size=1, max_size=3))
    dtype, ndim = draw(DTYPES), draw(st.sampled_from((2, 2, 3, 4)))
    shape = [draw(SIZES) for _ in range(2)]
    shape = [draw(st.sampled_from((1, 2, 3))) for _ in range(ndim - 2)] + shape
    torch.manual_seed(draw(st.integers(0, 3)))
    x = torch.randn(shape, dtype=dtype)
    if draw(st.booleans()):
        x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    x.requires_grad_(draw(st.booleans()))
    frozen = draw(st.sets(st.integers(0, 3), max_size=2))
    program = Program(steps, choices, widths, dtype, frozen)
    program(x)
    program.made = True
    recipes = st.sampled_from((*RECIPES, "quartet2"))
    rule = recipes | st.fixed_dictionaries(
        {"recipe": recipes}, optional=dict.fromkeys(("fprop", "dgrad", "wgrad"), st.just("bf16"))
    )
    pattern = st.sampled_from(("*", "weights.0", "weights.[12]", r"re:weights\.\d", "nothing"))
    options = {
        "recipe": draw(recipes),
        "policy": draw(st.dictionaries(pattern, rule, max_size=2)),
        "global_scale": draw(st.sampled_from(("pow2", "exact"))),
    }
    return program, x, options


def run(call, program, x, seed=0):
    """Output and gradients; None for inputs without a gradient."""
    torch.manual_seed(seed)
    program.zero_grad()
    x.grad = None
    y = call(x)
    if y.requires_grad:
        y.float().square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in program.parameters())]


def compiled(program, options, **kwargs):
    torch._dynamo.reset()
    return torch.compile(program, backend="quartet2", options=options, **kwargs)


def assert_never_crashes(case, inner, **kwargs):
    """Shapes, dtypes and which gradients there are, as without q2compile; and finite results."""
    program, x, options = case
    expected = run(program, program, x)
    try:
        got = run(compiled(program, {**options, "inner": inner}, **kwargs), program, x)
    except BackendError as error:
        if not isinstance(error, ValueError):
            raise
        assert "exact" in str(error)  # contradicting options raise with the reason
        return
    except RuntimeError as error:
        # torch 2.12 cannot take the gradient of an expanded result.
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match=re.escape(str(error)[:60])):
            run(torch.compile(program, backend=plain_eager, **kwargs), program, x)
        return
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert a.isfinite().all() or not b.isfinite().all()


def plain_eager(gm, inputs):
    """AOTAutograd as inner="eager" runs it, without q2compile."""
    return aot_eager_compile(gm, inputs, lambda graph: None)


@FUZZ_INDUCTOR
@given(programs())
def test_with_every_policy_bf16_no_bit_changes(case):
    program, x, options = case
    bf16 = {"recipe": "bf16", "policy": dict.fromkeys(options["policy"], "bf16")}
    got = run(compiled(program, bf16), program, x)
    torch._dynamo.reset()
    own = run(torch.compile(program), program, x)
    for a, b in zip(got, own, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


@FUZZ
@given(programs())
def test_a_rewritten_graph_runs_where_the_original_does(case):
    assert_never_crashes(case, "eager")


@FUZZ
@given(programs())
def test_dynamic_shapes(case):
    assert_never_crashes(case, "eager", dynamic=True)


@FUZZ_INDUCTOR
@given(programs())
def test_under_inductor(case):
    assert_never_crashes(case, "inductor")


def test_the_programs_have_matmuls_to_take():
    """The fuzz would prove nothing if Dynamo skipped the programs."""
    torch.manual_seed(0)
    no_matmul = (_by_permutation, _scattered, _concatenated, _short_sum)
    steps = [s for s in STEPS if s not in (_every_other, _broadcast, *no_matmul)]
    program = Program(steps, [0, 1, 2], [32, 64], torch.float32, set())
    x = torch.randn(2, 24, 32)
    program(x)
    program.made = True
    counters.clear()
    _, rows = rewritten(program, x)
    assert counters["stats"]["unique_graphs"] == 1
    assert sum(row.taken for row in rows) == sum(row.has_parameter for row in rows) > 8
