# SPDX-License-Identifier: Apache-2.0
"""The option ``seed``: random bits from a counter of q2compile's own."""

import json

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import q2compile
from q2compile.errors import ConfigError
from q2compile.runtime_kernels.ops.seed import COUNTERS, counter

pytestmark = pytest.mark.usefixtures("fresh_compiler")
STEPS = 3


@pytest.fixture(autouse=True)
def no_counters():
    COUNTERS.clear()


class Net(nn.Module):
    """dropout: of the hidden layer. checkpointed: both linears are recomputed in the backward."""

    def __init__(self, dropout: float = 0.0, checkpointed: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.dropout, self.checkpointed = dropout, checkpointed

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.up(x), self.dropout)
        return self.down(x.relu())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


def trained(
    steps: int = STEPS, model: nn.Module | None = None, inner: str = "eager", **options
) -> list[torch.Tensor]:
    """Gradients of every step, in a process whose generator begins at 0."""
    torch.manual_seed(0)
    model = model or Net()
    options["inner"] = inner
    compiled = torch.compile(model, backend="quartet2", options=options)
    torch.manual_seed(1)
    return steps_of(compiled, model, steps)


def steps_of(compiled, model: nn.Module, steps: int) -> list[torch.Tensor]:
    x = torch.linspace(-2, 2, 128 * 64).view(128, 64)
    gradients = []
    for _ in range(steps):
        model.zero_grad()
        compiled(x).square().sum().backward()
        gradients += [p.grad.clone() for p in model.parameters()]
    return gradients


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, a, b))


@pytest.mark.parametrize("recipe", ["quartet2", "tetrajet2"])
def test_the_default_generator_is_left_alone(recipe):
    trained(recipe=recipe, seed=7)
    after = torch.rand(4)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(4))


def test_dropout_draws_what_it_draws_in_a_bf16_run():
    states = {}
    for name, options in {"seed": {"seed": 7}, "none": {}, "bf16": {"recipe": "bf16"}}.items():
        torch._dynamo.reset()
        trained(model=Net(dropout=0.5), **options)
        states[name] = torch.get_rng_state()
    assert torch.equal(states["seed"], states["bf16"])
    assert not torch.equal(states["none"], states["bf16"])


@pytest.mark.parametrize("recipe", ["quartet2", "tetrajet2"])
def test_a_seed_gives_the_same_bits_again_and_another_gives_others(recipe):
    runs = []
    for key in (7, 7, 8):
        torch._dynamo.reset()
        COUNTERS.clear()
        runs.append(trained(recipe=recipe, seed=key))
    first, again, other = runs
    assert equal(first, again)
    weights = slice(0, None, 2)
    assert not any(map(torch.equal, first[weights], other[weights]))
    size = len(first) // STEPS
    assert not torch.equal(first[0], first[size]), "each step draws new bits"


@pytest.mark.parametrize("how", [{"inner": "inductor"}, {"disable_passes": ["merge_seeds"]}])
def test_bits_do_not_depend_on_how_a_graph_is_compiled(how):
    one = trained(seed=7)
    torch._dynamo.reset()
    COUNTERS.clear()
    for a, b in zip(one, trained(seed=7, **how), strict=True):
        assert (a - b).norm() < 1e-3 * a.norm()  # sums in another order; other bits differ by 5%


def test_a_resumed_run_goes_on_with_the_bits_that_would_have_come():
    through = trained(4, seed=7, inner="inductor")
    torch._dynamo.reset()
    COUNTERS.clear()
    torch.manual_seed(0)
    model = Net()
    compiled = torch.compile(model, backend="quartet2", options={"seed": 7})
    first = steps_of(compiled, model, 2)
    state = q2compile.get_rng_state()
    assert state == {"cpu": {7: 6}}  # 2 steps of two wgrads and one dgrad
    COUNTERS.clear()
    q2compile.set_rng_state(state)
    assert equal(first + steps_of(compiled, model, 2), through)


def test_the_state_of_a_counter_is_one_tensor_for_good():
    """CUDA graphs have its address."""
    before = counter(7, torch.device("cpu"))
    q2compile.set_rng_state({"cpu": {7: 5}})
    assert counter(7, torch.device("cpu")) is before
    assert before == 5
    q2compile.set_rng_state({})
    assert before == 0


@pytest.mark.parametrize("recipe", ["quartet2", "nvfp4"])
def test_checkpointed_layers(recipe):
    """Recomputed operands draw the same bits in forward and backward: the gradient's error is that
    of a run without checkpoints."""
    errors = []
    exact = trained(1, recipe="bf16")
    for checkpointed in (False, True):
        torch._dynamo.reset()
        got = trained(1, model=Net(checkpointed=checkpointed), recipe=recipe, seed=7)
        errors.append(((got[0] - exact[0]).norm() / exact[0].norm()).item())
    assert errors[1] == pytest.approx(errors[0], rel=0.3)  # of 8192 elements, each of own bits


def test_explain_and_compare_draw_nothing():
    model, options = Net(), {"seed": 7, "inner": "eager"}
    x = torch.randn(128, 64)
    torch.compile(model, backend="quartet2", options=options)(x).sum().backward()
    before = q2compile.get_rng_state()
    q2compile.explain(model, x, options=options)
    assert q2compile.get_rng_state() == before


def test_other_threads_may_run_while_a_backward_is_compiled(monkeypatch):
    """FX marks the whole process while it traces, and outside of Dynamo's compilation, where a
    backward is compiled, what Dynamo compiled raises an error in every thread then."""
    model, traces, trace = Net(), [], torch.fx.Tracer.trace
    compiled = torch.compile(model, backend="quartet2", options={"seed": 7, "inner": "eager"})
    loss = compiled(torch.randn(128, 64)).sum()

    def noted(tracer, *args, **kwargs):
        traces.append(tracer)
        return trace(tracer, *args, **kwargs)

    monkeypatch.setattr(torch.fx.Tracer, "trace", noted)
    loss.backward()
    assert not traces and model.up.weight.grad.isfinite().all()


@pytest.mark.parametrize("value", [True, 1.5, "7", 2**64, -(2**63) - 1])
def test_what_is_no_seed_is_refused(value):
    with pytest.raises(ConfigError, match="seed: got .*; allowed: an int of 64 bits"):
        q2compile.Config(seed=value)


@pytest.mark.parametrize(
    "state",
    [3, {"cpu": 3}, {"nowhere": {7: 1}}, {"meta": {7: 1}}, {0: {7: 1}}]
    + [{"cpu": {key: 1}} for key in ("x", 1.5, True, 2**64, -(2**63) - 1)]
    + [{"cpu": {7: count}} for count in (2**70, 2**63, -1, 1.5, 1.0, True, None)]
    + [{"cpu": {8: 1, 7: 2**70}}, {"cpu": {8: 1}, "meta": {7: 1}}],
)
def test_what_is_no_state_is_refused_and_changes_nothing(state):
    q2compile.set_rng_state({"cpu": {7: 5}})
    with pytest.raises(ConfigError, match="set_rng_state"):
        q2compile.set_rng_state(state)
    assert q2compile.get_rng_state() == {"cpu": {7: 5}}


def test_a_state_comes_back_as_it_was():
    """JSON makes texts of keys."""
    state = {"cpu": {7: 2**63 - 1, -1: 0, 2**64 - 1: 3}}
    q2compile.set_rng_state(json.loads(json.dumps(state)))
    assert q2compile.get_rng_state() == state


def test_a_state_that_was_set_in_inference_mode_is_counted_on_in_training():
    with torch.inference_mode():
        q2compile.set_rng_state({"cpu": {7: 5}})
    trained(1, seed=7)
    assert q2compile.get_rng_state() == {"cpu": {7: 8}}  # two wgrads and one dgrad


def test_a_model_without_memory_has_no_state():
    x = torch.randn(128, 64, device="meta")
    q2compile.explain(Net().to("meta"), x, options={"seed": 7})
    assert q2compile.get_rng_state() == {}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_cuda_graphs_count_on(mode):
    """Replays draw new bits, and those of a run without CUDA graphs."""
    runs = []
    for how in (None, mode):
        torch._dynamo.reset()
        q2compile.set_rng_state({})
        torch.manual_seed(0)
        model = Net().cuda()
        compiled = torch.compile(model, backend="quartet2", options={"seed": 7, "mode": how})
        x = torch.linspace(-2, 2, 128 * 64, device="cuda").view(128, 64)
        gradients = []
        for _ in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            model.zero_grad()
            compiled(x).square().sum().backward()
            gradients += [p.grad.clone() for p in model.parameters()]
        runs.append(gradients)
    assert equal(*runs)
    assert q2compile.get_rng_state() == {"cuda:0": {7: 18}}
