# SPDX-License-Identifier: Apache-2.0
"""Training loops around an unmodified model: what they may do between steps, and which results must
not change. test_ways_to_compile.py has the ways to compile the model."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from q2compile import explain
from tests.support.small_model import (
    EAGER,
    assert_close,
    assert_same,
    batch,
    gradients,
    loss_of,
    new_model,
    quantized,
)

pytestmark = pytest.mark.usefixtures("fresh_compiler")


# ---- precisions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32 masters, bf16 autocast", "pure bf16"])
def test_a_model_learns_as_with_bf16(precision):
    """12 steps of AdamW. BF16 gets from ln(48) = 3.9 to 1; NVFP4 stays within 0.1 nats of it."""
    autocast = torch.autocast("cpu", torch.bfloat16, enabled="autocast" in precision)
    losses = {}
    for recipe in ("bf16", "quartet2"):
        torch._dynamo.reset()
        model = new_model()
        if precision == "pure bf16":
            model.bfloat16()
        compiled = quantized(model, recipe=recipe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for i in range(12):
            with autocast:
                loss = loss_of(compiled, *batch(i))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        dtypes = {t.dtype for s in optimizer.state.values() for n, t in s.items() if n != "step"}
        assert dtypes == {p.dtype for p in model.parameters()}
        losses[recipe] = loss.item()
    assert losses["bf16"] < 1.5
    assert abs(losses["quartet2"] - losses["bf16"]) < 0.1, losses


def scaled_step(compiled, model, scaler, dtype):
    """One step with a loss scale; the gradients that the optimizer sees."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    model.zero_grad()
    with torch.autocast("cpu", dtype):
        loss = loss_of(compiled, *batch())
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    scaler.step(optimizer)
    scaler.update()
    return grads


BF16_BACKWARD = {"fprop": "nvfp4", "dgrad": "bf16", "wgrad": "bf16"}


@pytest.mark.parametrize(
    ("recipe", "inner"),
    [("quartet2", "inductor"), ("mxfp4_2d", "eager"), (BF16_BACKWARD, "eager")],
)
def test_autocast_around_a_backward_changes_no_bit(recipe, inner):
    """Its forward ran outside. fp16 would overflow here, as it does where torch runs a backward
    without a compiler."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64))
    compiled, x = quantized(model, recipe=recipe, inner=inner), torch.randn(64, 64)
    grads = []
    for dtype in (None, torch.float16, torch.bfloat16):
        model.zero_grad()
        loss = (300 * compiled(x)).square().sum()
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss.backward()
        grads.append([p.grad for p in model.parameters()])
    for others in grads[1:]:
        assert all(map(torch.equal, others, grads[0]))


def test_a_layer_without_autocast_in_a_model_with_it():
    """Its backward computes in fp32, too."""
    model, x = nn.Linear(64, 64), torch.randn(64, 64)

    def layer(x):
        with torch.autocast("cpu", enabled=False):
            return model(x)

    compiled = quantized(layer, recipe=BF16_BACKWARD, inner="eager")
    grads = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = compiled(x).square().sum()
        loss.backward()
        grads.append(model.weight.grad)
    assert torch.equal(*grads)


def test_a_loss_scale_by_a_power_of_two_changes_no_bit_in_bf16():
    """Codes and scales are the same, and global scales are powers of two, so they carry it."""
    model = new_model()
    compiled = quantized(model)
    plain = torch.amp.GradScaler("cpu", enabled=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    state = copy.deepcopy(model.state_dict())
    without = scaled_step(compiled, model, plain, torch.bfloat16)
    model.load_state_dict(state)
    assert_same(scaled_step(compiled, model, scaler, torch.bfloat16), without)


def test_fp16_autocast_with_a_scaler():
    """fp16 is taken: quantizers read it as fp32. A scale that overflows it gives Inf gradients, as
    it does without q2compile: the step is skipped, the scale halved, and the next ones are right.
    """
    model = new_model()
    compiled, state = quantized(model), copy.deepcopy(model.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=1000)
    for _ in range(20):
        grads = scaled_step(compiled, model, scaler, torch.float16)
        if all(g.isfinite().all() for g in grads.values()):
            break
        assert_same(model.state_dict(), state)  # the step was skipped
    assert scaler.get_scale() < 2.0**24
    model.load_state_dict(state)
    report = explain_under_autocast(model, torch.float16)
    assert [(r.taken, r.dtype) for r in report.rows] == [(True, "float16")] * 5
    assert_close(grads, gradients(model, model))


def explain_under_autocast(model, dtype):
    with torch.autocast("cpu", dtype):
        return explain(model, batch()[0], options=EAGER)


# ---- what a loop does around a step -------------------------------------------------------------


def test_accumulated_gradients_are_the_sum_of_the_micro_batches():
    """Bit for bit, and each micro-batch draws its own random bits."""
    model = new_model()
    compiled = quantized(model)
    torch.manual_seed(1)
    alone = []
    for i in (0, 1, 1):
        model.zero_grad()
        loss_of(compiled, *batch(i)).backward()
        alone.append({n: p.grad.clone() for n, p in model.named_parameters()})
    torch.manual_seed(1)
    model.zero_grad()
    for i in (0, 1):
        loss_of(compiled, *batch(i)).backward()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, alone[0][name] + alone[1][name])
    assert not torch.equal(alone[1]["head.weight"], alone[2]["head.weight"])


def test_evaluation_between_steps_changes_nothing():
    """no_grad, inference_mode and eval() draw no random bits and touch no gradient. They are graphs
    of their own, as many as Inductor has."""
    model, tokens = new_model(), batch()[0]
    compiled = quantized(model)
    never = gradients(compiled, model)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    with torch.no_grad():
        y = compiled(tokens)
    model.eval()
    with torch.inference_mode():
        assert torch.equal(compiled(tokens), y)
    model.train()
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(gradients(compiled, model), never)
    ours = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()
    own = torch.compile(model, backend="aot_eager")
    gradients(own, model)
    with torch.no_grad():
        own(tokens)
    model.eval()
    with torch.inference_mode():
        own(tokens)
    model.train()
    gradients(own, model)
    assert ours == counters["stats"]["unique_graphs"]


SAVED = (torch.ops.q2.quantize.default, torch.ops.q2.gemm.default)


def save_some(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS = {
    # How a block is called -> how many of fprop's quantizers and GEMMs the backward repeats. The
    # last GEMM of a block is in no gradient. Two blocks of two linears have 8 operands and 2 GEMMs.
    "non-reentrant": (partial(checkpoint, use_reentrant=False), (8, 2)),
    "reentrant": (partial(checkpoint, use_reentrant=True), (8, 2)),
    "selective": (
        partial(
            checkpoint,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, save_some),
        ),
        (0, 0),
    ),
}


@pytest.fixture(scope="module")
def of_the_plain_loop():
    model = new_model()
    torch._dynamo.reset()
    return gradients(quantized(model), model)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpointing_gives_the_bits_of_the_plain_loop(kind, of_the_plain_loop, tmp_path):
    around, again = CHECKPOINTS[kind]
    torch._dynamo.reset()
    model = new_model(around)
    options = {"dump": str(tmp_path), "keep_packed": False}
    assert_same(gradients(quantized(model, **options), model), of_the_plain_loop)
    text = (tmp_path / "graph_0" / "3_backward.txt").read_text()
    forward_gemm = "'nvfp4_46_pow2', 'nvfp4_46_pow2'"
    quantizers = [line for line in text.splitlines() if " = q2.quantize(" in line]
    of_forward = sum("transform=" not in line for line in quantizers)
    assert (of_forward, text.count(forward_gemm)) == again


def test_checkpointing_around_compiled_blocks():
    """The checkpoint is outside the compiled code, and runs the compiled forward twice."""
    found = []
    for around in (
        None,
        *(partial(checkpoint, use_reentrant=reentrant) for reentrant in (True, False)),
    ):
        model = new_model(around)
        for block in model.layers:
            block.compile(backend="quartet2", options=EAGER)
        found.append(gradients(model, model))
    for checkpointed in found[1:]:
        assert_same(checkpointed, found[0])


def test_compiled_autograd_gives_the_bits_of_the_plain_loop():
    """This backend also traces and compiles the backward, as a graph of its own."""
    model = new_model()
    compiled = quantized(model)
    expected = gradients(compiled, model)
    options = {**EAGER, "strict": True, "policy": {"*": "quartet2"}}
    backward = torch.compile(backend="quartet2", options=options)
    with torch._dynamo.compiled_autograd._enable(backward):
        assert_same(gradients(compiled, model), expected)


def test_compiled_autograd_of_a_whole_training_step():
    model, inputs = new_model(), batch()

    @torch.compile(backend="quartet2", options=EAGER)
    def train(tokens, targets):
        loss = loss_of(model, tokens, targets)
        loss.backward()
        return loss

    with torch._dynamo.config.patch(compiled_autograd=True):
        train(*inputs)
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    assert_close(grads, gradients(model, model))
    assert not torch.equal(grads["head.weight"], gradients(model, model)["head.weight"])


def test_deterministic_algorithms():
    """q2compile needs no nondeterministic algorithm. The same seed gives the same bits."""
    torch.use_deterministic_algorithms(True)
    try:
        model = new_model()
        compiled = torch.compile(model, backend="quartet2")
        assert_same(*(gradients(compiled, model) for _ in range(2)))
    finally:
        torch.use_deterministic_algorithms(False)


# ---- what is saved ------------------------------------------------------------------------------


def trained(steps, model, optimizer, first=0):
    for i in range(first, first + steps):
        loss_of(model, *batch(i)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_states_are_those_of_the_plain_model(tmp_path):
    """Names, shapes, dtypes and values: nothing of q2compile is in a checkpoint of the model or of
    the optimizer, and the plain model loads it strictly."""
    model = new_model()
    keys = [(n, v.shape, v.dtype) for n, v in model.state_dict().items()]
    before = copy.deepcopy(model.state_dict())
    model.compile(backend="quartet2", options=EAGER)
    model(batch()[0])
    assert_same(model.state_dict(), before)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trained(3, model, optimizer)
    assert [(n, v.shape, v.dtype) for n, v in model.state_dict().items()] == keys
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "checkpoint.pt")
    states = torch.load(tmp_path / "checkpoint.pt", weights_only=True)  # nothing but tensors
    plain = new_model(seed=9)
    plain.load_state_dict(states[0], strict=True)
    assert_same(plain.state_dict(), model.state_dict())
    own = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    own.load_state_dict(states[1])
    trained(1, plain, own, first=3)
    fresh = new_model(seed=9)
    optimizer_of_fresh = torch.optim.AdamW(fresh.parameters(), lr=1e-3)
    trained(1, fresh, optimizer_of_fresh)
    for mine, plains in zip(own.state.values(), optimizer_of_fresh.state.values(), strict=True):
        assert {n: (v.shape, v.dtype) for n, v in mine.items()} == {
            n: (v.shape, v.dtype) for n, v in plains.items()
        }


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path):
    """The random bits come from torch's default generator, so its state is all there is to save.
    The second half runs on new objects, compiled afresh, under Inductor."""

    def new_run(seed):
        torch._dynamo.reset()
        model = new_model(seed=seed)
        model.compile(backend="quartet2")
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = new_run(0)
    trained(2, model, optimizer)
    torch.save(
        (model.state_dict(), optimizer.state_dict(), torch.get_rng_state()), tmp_path / "last.pt"
    )
    trained(2, model, optimizer, first=2)
    resumed, its_optimizer = new_run(5)
    weights, moments, generator = torch.load(tmp_path / "last.pt")
    resumed.load_state_dict(weights)
    its_optimizer.load_state_dict(moments)
    torch.set_rng_state(generator)
    trained(2, resumed, its_optimizer, first=2)
    assert_same(resumed.state_dict(), model.state_dict())
