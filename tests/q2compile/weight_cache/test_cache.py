# SPDX-License-Identifier: Apache-2.0
"""Cached codes of weights: when they are reused, and when they are computed anew. Never stale."""

import copy
import gc
import io

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.optimizer import _global_optimizer_post_hooks

import q2compile
from q2compile.torch_internals import optimizer_steps
from q2compile.weight_cache.cache import CodesLayout, _made, parts_of

FORM = CodesLayout("nvfp4_46_pow2", torch.float32, False)


@pytest.fixture(autouse=True)
def fresh(fresh_compiler, monkeypatch):
    q2compile.forget_weights()
    monkeypatch.setattr(optimizer_steps, "PAUSE", 0.0)


class Counting:
    """A maker of codes that counts, and whose codes are the weight as it was."""

    def __init__(self):
        self.calls = 0

    def __call__(self, w):
        self.calls += 1
        return [w.detach().clone()]


def is_made_again(w, change, training=False):
    """Whether ``change()`` makes cached codes stale: for calls with a backward pass, or
    for others."""
    q2compile.forget_weights()
    make = Counting()
    with torch.set_grad_enabled(training):
        for _ in range(2):
            (codes,) = parts_of(w, FORM, make)
            assert make.calls == 1 and torch.equal(codes, w)
    change()
    with torch.set_grad_enabled(training):
        (codes,) = parts_of(w, FORM, make)
    again = make.calls == 2
    assert torch.equal(codes, w) or not again
    return again


def weight():
    return nn.Parameter(torch.randn(16, 16))


def under(context, change):
    def run(w):
        with context():
            change(w)

    return run


def replace_data(w):
    w.data = w.data + 1


CHANGES = {
    "add_": under(torch.no_grad, lambda w: w.add_(1)),
    "inference_mode": under(torch.inference_mode, lambda w: w.copy_(w + 1)),
    "foreach": under(torch.no_grad, lambda w: torch._foreach_add_([w], 1.0)),
    "a view": under(torch.no_grad, lambda w: w[3].zero_()),
    "detach": lambda w: w.detach().mul_(2),
    "init": lambda w: nn.init.ones_(w),
    "data =": replace_data,
    "transposed": lambda w: setattr(w, "data", w.data.t()),
    "dtype": lambda w: setattr(w, "data", w.data.double()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change):
    w = weight()
    assert is_made_again(w, lambda: CHANGES[change](w))


def test_swapped_tensors_are_seen():
    """Trap: torch swaps no tensor that has a weak reference to it."""
    w = weight()
    assert is_made_again(w, lambda: torch.utils.swap_tensors(w, weight()))


def test_loading_a_state_is_seen():
    linear, other = nn.Linear(16, 16), nn.Linear(16, 16)
    assert is_made_again(linear.weight, lambda: linear.load_state_dict(other.state_dict()))
    old = linear.weight
    linear.load_state_dict(nn.Linear(16, 16).state_dict(), assign=True)
    make = Counting()
    parts_of(linear.weight, FORM, make)
    assert linear.weight is not old and make.calls == 1


OPTIMIZERS = {
    f"{cls.__name__} {kind}": (cls, {kind: True} if kind != "plain" else {"foreach": False})
    for cls in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad)
    for kind in ("plain", "foreach", "fused")
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_step_is_seen(name, training):
    """Trap: torch's fused optimizers do not increase the version counter of the parameters they
    change."""
    cls, options = OPTIMIZERS[name]
    w = weight()
    w.grad = torch.randn_like(w)
    optimizer = cls([w], lr=0.1, **options)
    optimizer_steps.look_up_optimizers()
    version, before = w._version, w.detach().clone()
    for _ in range(2):
        assert is_made_again(w, optimizer.step, training)
    assert not torch.equal(before, w)
    if name == "AdamW fused":
        assert w._version == version, "the trap is gone: this test can go, too"


def step_of_fused(w):
    w.grad = torch.ones_like(w)
    return torch.optim.SGD([w], lr=0.1, fused=True)


def test_micro_batches_share_codes(monkeypatch):
    """Codes are used again without another look-up, although the loss of one micro-batch is alive
    in the next one, but not in the first of a step."""
    w = weight()
    optimizer, make = step_of_fused(w), Counting()
    for _ in range(2):  # the second finds the optimizer
        parts_of(w, FORM, make)
    monkeypatch.setattr(optimizer_steps, "PAUSE", float("inf"))
    for calls in range(make.calls, make.calls + 3):
        for _ in range(3):
            assert torch.equal(parts_of(w, FORM, make)[0], w)
            loss = (2 * w).sum()
        assert make.calls == calls
        optimizer.step()
        del loss


def test_an_optimizer_that_comes_later_is_seen():
    """After the first look-up, in place of a deleted optimizer or in addition to one."""
    w, make = weight(), Counting()
    first = step_of_fused(w)
    parts_of(w, FORM, make)
    first.step()
    assert torch.equal(parts_of(w, FORM, make)[0], w)
    second = step_of_fused(w)
    parts_of(w, FORM, make)
    second.step()
    assert torch.equal(parts_of(w, FORM, make)[0], w)
    del first, second
    gc.collect()
    third = step_of_fused(w)
    parts_of(w, FORM, make)
    third.step()
    assert torch.equal(parts_of(w, FORM, make)[0], w)


def test_only_optimizers_that_hold_the_weight_get_a_hook():
    """The hook exists only while the codes are cached."""
    w, other = weight(), weight()
    own, others = step_of_fused(w), step_of_fused(other)
    optimizer_steps.look_up_optimizers()
    parts_of(w, FORM, Counting())
    assert len(own._optimizer_step_post_hooks) == 1
    assert not others._optimizer_step_post_hooks
    assert not _global_optimizer_post_hooks
    q2compile.forget_weights()
    assert not own._optimizer_step_post_hooks


def test_without_a_look_up_codes_are_not_trusted(monkeypatch):
    w, make = weight(), Counting()
    optimizer = step_of_fused(w)
    monkeypatch.setattr(optimizer_steps, "PAUSE", float("inf"))
    optimizer_steps.look_up_optimizers()
    for calls in range(1, 4):
        assert torch.equal(parts_of(w, FORM, make)[0], w) and make.calls == calls
        optimizer.step()


class ThroughData(torch.optim.Optimizer):
    """An old optimizer, or one with master copies; here the copies are of the given weights."""

    def __init__(self, weights):
        self.weights = weights
        super().__init__([torch.nn.Parameter(w.detach().clone()) for w in weights], {})

    def step(self, closure=None):
        for w in self.weights:
            w.data.add_(1)


class Wrapper(torch.optim.Optimizer):
    """A trainer's wrapper: its own __init__ does not run, and its groups are those of another
    optimizer."""

    def __init__(self, inner):
        self.inner = inner

    @property
    def param_groups(self):
        return self.inner.param_groups

    def step(self, closure=None):
        self.inner.step()


class Plain:
    """No torch.optim.Optimizer at all."""

    def __init__(self, weights):
        self.weights = weights

    def step(self):
        for w in self.weights:
            w.data.add_(1)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda w: ThroughData([w]),
        lambda w: Plain([w]),
        lambda w: Wrapper(step_of_fused(w)),
    ],
    ids=["copies", "plain", "wrapped"],
)
def test_optimizers_of_others(make_optimizer):
    """Whether they are found, or codes are made in every call because none is."""
    w, make = weight(), Counting()
    optimizer = make_optimizer(w)
    for _ in range(3):
        parts_of(w, FORM, make)
        with torch.no_grad():  # an evaluation between the training call and the step
            parts_of(w, FORM, make)
        optimizer.step()
        assert torch.equal(parts_of(w, FORM, make)[0], w)


@pytest.mark.parametrize("fused", [True, False])
def test_a_compiled_step_is_seen(fused):
    w = weight()
    w.grad = torch.randn_like(w)
    optimizer = torch.optim.AdamW([w], lr=0.1 if fused else torch.tensor(0.1), fused=fused)
    optimizer_steps.look_up_optimizers()
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(3):
        assert is_made_again(w, step, training=True)


def test_the_hook_costs_a_compiled_step_no_graph_break():
    """There is no compilation after the first one with the hook."""

    def counted(hooked):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        w, make = weight(), Counting()
        w.grad = torch.randn_like(w)
        optimizer = torch.optim.AdamW([w], lr=torch.tensor(0.1))
        if hooked:
            optimizer_steps.look_up_optimizers()
            parts_of(w, FORM, make)
        step = torch.compile(lambda: optimizer.step(), backend="eager")
        for _ in range(2):
            step()
        with torch.compiler.set_stance("fail_on_recompile"):
            for _ in range(3):
                parts_of(w, FORM, make)
                step()
        return sum(torch._dynamo.utils.counters["graph_break"].values())

    assert counted(True) == counted(False)


def test_a_frozen_weight_is_not_made_again_by_the_steps_of_others():
    frozen, adapter = weight().requires_grad_(False), weight()
    adapter.grad = torch.ones_like(adapter)
    optimizer = torch.optim.AdamW([frozen, adapter], lr=0.1, fused=True)
    optimizer_steps.look_up_optimizers()
    assert not is_made_again(frozen, optimizer.step, training=True)
    thawed = torch.optim.SGD([frozen, adapter], lr=0.1, fused=True)
    frozen.grad = torch.ones_like(frozen)
    optimizer_steps.look_up_optimizers()
    assert is_made_again(frozen, thawed.step)


UNCHANGED = {
    "read": lambda w: w.sum(),
    "gradient": lambda w: (w * 2).sum().backward(),
    "frozen": lambda w: w.requires_grad_(False),
    "zero_grad": lambda w: setattr(w, "grad", None),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_what_is_no_change(name):
    w = weight()
    assert not is_made_again(w, lambda: UNCHANGED[name](w))


def from_a_vector(w):
    vector = parameters_to_vector([w]).detach()
    vector_to_parameters(vector, [w])

    def change():
        vector.add_(1)
        vector_to_parameters(vector, [w])

    return change


def out_of_a_buffer(w):
    """The weights of an optimizer with flat memory."""
    buffer = torch.randn(2 * w.numel())
    w.data = buffer[: w.numel()].view_as(w)
    return lambda: buffer.add_(1)


def by_another_name(alias_of):
    def of(w):
        alias = alias_of(w)
        return lambda: alias.__iadd__(1)

    return of


def in_another_process(w):
    """Nobody has to write, for its writes would not be seen."""
    w.share_memory_()
    return lambda: w.data.add_(1)


# holder of a weight's memory -> a change of the weight through it, which torch does not notice
OTHER_HOLDERS = {
    "vector_to_parameters": from_a_vector,
    "flat buffer": out_of_a_buffer,
    "numpy": by_another_name(lambda w: w.detach().numpy()),
    "dlpack": by_another_name(lambda w: torch.from_dlpack(w.detach())),
    "data": by_another_name(lambda w: w.data[3:5]),
    "process": in_another_process,
}


@pytest.mark.parametrize("holder", OTHER_HOLDERS)
def test_codes_of_memory_that_others_hold_are_never_kept(holder):
    w, make = weight().requires_grad_(False), Counting()
    parts_of(w, FORM, make)
    change = OTHER_HOLDERS[holder](w)
    for calls in (2, 3):
        before = w.detach().clone()
        change()
        assert torch.equal(parts_of(w, FORM, make)[0], w) and not torch.equal(w, before)
        assert make.calls == calls and len(_made) == 0
    del change
    if holder != "process":
        parts_of(w, FORM, make)
        parts_of(w, FORM, make)
        assert make.calls == 4, "kept again once the others are gone"


def test_a_write_behind_autograds_back_needs_forget_weights():
    """The one thing that is not seen, as the docstring says."""
    w = weight()
    assert not is_made_again(w, lambda: w.data.add_(1))
    q2compile.forget_weights()
    make = Counting()
    assert torch.equal(parts_of(w, FORM, make)[0], w) and make.calls == 1


def test_a_weight_that_dies_takes_its_codes_along():
    w = weight()
    parts_of(w, FORM, Counting())
    assert len(_made) == 1
    del w
    gc.collect()
    assert len(_made) == 0


def test_memory_that_is_used_again_is_not_the_same_weight():
    """A new storage at the address of a freed one, with the version counter as it was."""
    w = weight()
    make = Counting()
    parts_of(w, FORM, make)
    for _ in range(4):
        w.data = torch.randn(16, 16)
        gc.collect()
        assert torch.equal(parts_of(w, FORM, make)[0], w)


def to_another(w):
    """As trainers that swap blocks do: the buffer of one frozen layer gets the next layer."""
    other, buffer = weight(), w.data
    w.data, other.data = other.data.clone(), buffer.copy_(other.data)
    return other


def to_a_later_one(w):
    """A copy of the tensor holds what a weight's attributes are, and not which weight it is."""
    buffer, later = w.data.neg_(), copy.copy(w)
    w.data, later.data = torch.empty(0), buffer
    return later


def test_memory_that_is_handed_to_another_weight():
    """Trap: the version counters of both may have one value."""
    for hand_over in (to_another, to_a_later_one):
        w, make = weight(), Counting()
        with torch.no_grad():
            parts_of(w, FORM, make)
            other = hand_over(w)
            assert (other._version, other.data_ptr()) == (w._version, next(iter(_made)).data_ptr())
            for _ in range(2):
                assert torch.equal(parts_of(other, FORM, make)[0], other)
        assert make.calls == 2, "and kept for the other"


def test_a_weight_in_the_place_of_one_that_died():
    """Trap: Python gives it the id of the other."""
    w, make, ids = weight(), Counting(), set()
    for calls in range(1, 9):
        ids.add(id(w))
        with torch.no_grad():
            assert torch.equal(parts_of(w, FORM, make)[0], w) and make.calls == calls
        buffer = w.data
        del w
        buffer.neg_()
        w = nn.Parameter(torch.empty(0))
        w.data = buffer
        del buffer
    assert len(ids) < 8


def test_a_cached_weight_can_be_saved_and_loaded():
    w, file = weight(), io.BytesIO()
    parts_of(w, FORM, Counting())
    torch.save(w, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), w)


def test_what_is_made_in_inference_mode_can_be_saved_for_backward():
    w = weight()
    with torch.inference_mode():
        (codes,) = parts_of(w, FORM, Counting())
    assert not codes.is_inference()


def test_tensors_whose_changes_cannot_be_seen_are_not_cached():
    with torch.inference_mode():
        inference = torch.randn(16, 16)  # has no version counter
    with FakeTensorMode():
        fake = torch.randn(16, 16)

    class Subclass(torch.Tensor):
        pass

    for w in (inference, fake, torch.randn(16, 16).as_subclass(Subclass)):
        make = Counting()
        parts_of(w, FORM, make)
        parts_of(w, FORM, make)
        assert make.calls == 2 and len(_made) == 0


def test_codes_keep_their_addresses_for_cuda_graphs():
    """Through steps, and for memory that others hold, whose codes are made in every call."""
    w, make = weight(), Counting()
    with torch.no_grad():
        addresses = set()
        for calls in range(1, 4):
            for _ in range(2):
                (codes,) = parts_of(w, FORM, make, in_place=True)
                addresses.add(codes.data_ptr())
                assert torch.equal(codes, w) and make.calls == calls
            w.add_(1)
        view = w.data[2:]
        for calls in (4, 5):
            view.add_(1)
            (codes,) = parts_of(w, FORM, make, in_place=True)
            addresses.add(codes.data_ptr())
            assert torch.equal(codes, w) and make.calls == calls
        assert len(addresses) == 1
        del view
        w.data = w.data.t()
        assert torch.equal(parts_of(w, FORM, make, in_place=True)[0], w)
