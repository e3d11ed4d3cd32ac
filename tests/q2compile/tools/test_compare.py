# SPDX-License-Identifier: Apache-2.0
"""`compare`: each figure against a direct computation of it, and the model left as it was."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import q2compile
from q2compile.recipes.resolve import resolve
from q2compile.tools import cli
from q2compile.tools.compare.measurements import Comparison, ModuleError
from q2compile.tools.given import built
from tests.support.page_data import data_of

pytestmark = pytest.mark.usefixtures("fresh_compiler")

FORWARD = {
    "base": "quartet2",
    "dgrad": "bf16",
    "wgrad": "bf16",
}  # no random bits: runs can be repeated


class Net(nn.Module):
    """up, dropout, down and a norm with buffers; or without it, in a checkpoint."""

    def __init__(self, dropout=0.0, checkpointed=False):
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 32, bias=False)
        self.norm = nn.Identity() if checkpointed else nn.BatchNorm1d(32)
        self.dropout, self.checkpointed = nn.Dropout(dropout), checkpointed

    def run(self, x):
        return self.norm(self.down(self.dropout(F.silu(self.up(x)))))

    def forward(self, x):
        y = checkpoint(self.run, x, use_reentrant=False) if self.checkpointed else self.run(x)
        return F.softplus(3 * y).mean()


def net(**how):
    torch.manual_seed(0)
    return Net(**how)


def batches(n=1):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(128, 64, generator=generator) for _ in range(n)]


def relative(q, g):
    return float(((q - g).double().norm() / g.double().norm()).detach())


def gradients(model, x, recipe, backend="quartet2"):
    torch._dynamo.reset()
    model.zero_grad()
    options = {"inner": "eager", "recipe": recipe}
    torch.compile(model, backend=backend, options=options)(x).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_each_gemms_error_is_that_of_the_op_on_the_operands_of_the_run_in_bf16():
    model, (x,) = net(), batches()
    found = {m.module: m for m in q2compile.compare(model, [x], "nvfp4").modules}["down"]
    h = F.silu(model.up(x)).detach().requires_grad_()
    w = model.down.weight
    torch.manual_seed(7)
    y = torch.ops.q2.linear(h, w, None, *resolve("nvfp4").texts(), 1)
    exact = F.linear(h, w)
    assert found.fprop == pytest.approx(relative(y, exact), rel=1e-5)
    (dy,) = torch.autograd.grad(F.softplus(3 * model.norm(exact)).mean(), exact)
    dx, dw = torch.autograd.grad(y, (h, w), dy)
    # compare drew other random bits; the errors of so many elements agree to a few %.
    assert found.dgrad == pytest.approx(relative(dx, dy @ w), rel=0.1)
    assert found.wgrad == pytest.approx(relative(dw, dy.t() @ h), rel=0.1)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_gradients_errors_are_those_of_the_backend(checkpointed):
    model, (x,) = net(checkpointed=checkpointed), batches()
    comparison = q2compile.compare(model, [x], FORWARD)
    exact = gradients(model, x, "bf16")
    assert comparison.gradients["all"] == [
        pytest.approx(relative(gradients(model, x, FORWARD), exact), rel=1e-5)
    ]
    assert comparison.gradients["fprop"] == comparison.gradients["all"]
    assert comparison.gradients["dgrad"] == comparison.gradients["wgrad"] == [0.0]
    up = {m.module: m for m in comparison.modules}["up"]
    policy = {"base": "quartet2", "dgrad": "bf16", "wgrad": "bf16"}
    torch._dynamo.reset()
    model.zero_grad()
    options = {"inner": "eager", "policy": {"*": "bf16", "up": policy}}
    torch.compile(model, backend="quartet2", options=options)(x).backward()
    alone = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert up.effect == pytest.approx(relative(alone, exact), rel=1e-5)
    assert up.dgrad is None and up.wgrad is None


def test_dropout_draws_the_same_in_every_run():
    """mxfp4 leaves the forward alone: without its backward GEMMs nothing is left to differ. And
    nvfp4 draws a seed in the forward, between two dropouts."""
    model = net(dropout=0.5)
    comparison = q2compile.compare(model, batches(2), "mxfp4")
    assert comparison.gradients["fprop"] == [0.0, 0.0]
    assert comparison.losses["mxfp4"] == comparison.losses["bf16"]
    comparison = q2compile.compare(net(dropout=0.5), batches(), {"base": "nvfp4", "fprop": "bf16"})
    assert comparison.losses["bf16"] == comparison.losses["nvfp4 with bf16 fprop"]


def test_the_model_is_afterwards_what_it_was():
    model, data = net(dropout=0.5), batches(3)
    model(data[0]).backward()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    grads = [p.grad.clone() for p in model.parameters()]
    random = torch.get_rng_state()
    q2compile.compare(
        model, data, "nvfp4", optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1)
    )
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


def test_with_an_optimizer_both_losses_are_those_of_training():
    model, data = net(), batches(3)
    comparison = q2compile.compare(
        model, data, FORWARD, alone=False, optimizer=lambda p: torch.optim.SGD(p, 0.1)
    )
    for name, recipe in (("bf16", "bf16"), ("quartet2 with bf16 dgrad and bf16 wgrad", FORWARD)):
        torch._dynamo.reset()
        own = net()
        steps = torch.optim.SGD(own.parameters(), 0.1)
        compiled = torch.compile(
            own, backend="quartet2", options={"inner": "eager", "recipe": recipe}
        )
        losses = []
        for x in data:
            loss = compiled(x)
            loss.backward()
            steps.step()
            steps.zero_grad()
            losses.append(float(loss.detach()))
        # AOTAutograd's backward of the norm sums in another order.
        assert comparison.losses[name] == pytest.approx(losses, rel=1e-5)
    assert all(m.effect is None for m in comparison.modules)


def test_a_module_that_does_nothing_to_the_gradient_comes_last():
    """Only dgrad of `up` is quantized, and the gradient of the batch is not needed."""
    policy = {"up": {"fprop": "bf16", "wgrad": "bf16"}}
    comparison = q2compile.compare(net(), batches(), options={"policy": policy})
    worst, best = comparison.ranked
    assert (worst.module, best.module) == ("down", "up")
    assert best.effect == 0.0 and comparison.share(best) == 0.0 and comparison.share(worst) == 1.0
    assert worst.effect == pytest.approx(comparison.sum_of_effects)
    assert comparison.chosen(0.9) == [worst]


def module(name, effect, flops, microseconds=1.0, bf16=3.0):
    return ModuleError(
        *(name, "8×8×8", 0.1, 0.1, 0.1, 0.1, effect, flops),
        {"b200": microseconds, "rtx5090": microseconds},
        {"b200": bf16, "rtx5090": bf16},
    )


@pytest.mark.parametrize(
    ("budget", "of", "kept"),
    [
        (0, "flops", []),
        (0.1, "flops", ["c"]),  # b is worse and does not fit
        (0.6, "flops", ["b"]),  # then c no longer fits
        (0.7, "flops", ["b", "c"]),
        (1, "flops", ["a", "b", "c"]),
        (0.0001, "time", ["c"]),  # in bf16 c is not slower
        (0.67, "time", ["b", "c"]),  # b rises by 2 of 3
    ],
)
def test_the_policy_keeps_the_worst_within_the_budget(budget, of, kept):
    modules = [module("a", 0.1, 30), module("b", 0.3, 60), module("c", 0.2, 10, bf16=0.5)]
    comparison = Comparison("nvfp4", "nvfp4", {"x": "bf16"}, modules=modules)
    assert comparison.policy(budget, of) == dict.fromkeys(kept, "bf16")
    assert comparison.options(budget, of) == {
        "recipe": "nvfp4",
        "policy": {"x": "bf16", **dict.fromkeys(kept, "bf16")},
    }
    assert comparison.share(modules[1]) == pytest.approx(9 / 14)
    assert [m.module for m in comparison.ranked] == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("budget", "of", "policy"),
    [
        (0.2, "flops", {"b": "fp8"}),  # a third of 60: most error for the least
        (0.6, "flops", {"b": "fp8", "a": "bf16"}),  # more than b in bf16, for the same
        (0.5, "flops", {"b": "fp8", "a": "fp8"}),
        (1, "flops", {"b": "bf16", "a": "bf16"}),
        (0.2, "time", {"b": "fp8"}),  # rises by .4 of 2
    ],
)
def test_fp8_is_chosen_by_the_error_that_it_removes_for_its_cost(budget, of, policy):
    modules = [module("a", 0.1, 40), module("b", 0.3, 60)]
    for one, effect in zip(modules, (0.02, 0.03), strict=True):
        one.fp8_effect = effect
        one.fp8_microseconds = {"b200": 1.4, "rtx5090": 1.4}
    comparison = Comparison("nvfp4", "nvfp4", {}, modules=modules)
    assert comparison.policy(budget, of) == policy
    assert list(comparison.policy(budget, of)) == list(policy)


def test_the_effect_in_fp8_is_that_of_the_backend():
    model, (x,) = net(), batches()
    down = {m.module: m for m in q2compile.compare(model, [x], FORWARD).modules}["down"]
    exact = gradients(model, x, "bf16")
    torch._dynamo.reset()
    model.zero_grad()
    options = {"inner": "eager", "policy": {"*": "bf16", "down": "fp8"}}
    torch.compile(model, backend="quartet2", options=options)(x).backward()
    alone = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert down.fp8_effect == pytest.approx(relative(alone, exact), rel=1e-5)
    assert down.fp8_effect < down.effect / 3
    assert down.fp8_microseconds["b200"] > 0


def test_a_module_whose_effect_is_nan_is_the_worst_and_names_are_no_globs():
    modules = [module("a", 0.1, 30), module("layers[0]*", math.nan, 10)]
    comparison = Comparison("nvfp4", "nvfp4", {}, modules=modules)
    (pattern,) = comparison.policy(0.25)
    assert pattern == r"re:layers\[0\]\*"
    q2compile.Config(policy=comparison.policy(0.25))


@pytest.mark.parametrize("budget", [-0.1, 1.5, True, "0.1", math.nan])
def test_a_budget_is_a_share(budget):
    with pytest.raises(ValueError, match="budget: got .*from 0 to 1"):
        Comparison("nvfp4", "nvfp4", {}).policy(budget)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="there is no batch"):
        q2compile.compare(net(), [])
    with pytest.raises(ValueError, match="loss=, a function of the model's output"):
        q2compile.compare(nn.Linear(64, 32), batches())
    with pytest.raises(ValueError, match="no matmul of this model is quantized. up: recipe: bf16"):
        q2compile.compare(net(), batches(), "bf16")


SCRIPT = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Linear(64, 48), [torch.randn(32, 64)], lambda y: y.square().mean()

def wrong():
    return 3
"""


def test_the_command_writes_the_table_and_options_that_can_be_used(tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.py").write_text(SCRIPT)
    out = tmp_path / "out"
    where = f"{tmp_path / 'mine.py'}:build"
    assert cli.main(["compare", where, "--budget", "1", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "1 of 1 modules leave quartet2, for 100% of the flops; they account for 100%" in said
    (module,) = json.loads((out / "compare.json").read_text())["modules"]
    assert module["share"] == 1.0 and module["shape"] == "32×48×64"
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setenv("Q2COMPILE_CONFIG", str(out / "options.json"))
    assert set(q2compile.Config.from_options({}).policy.values()) == {"bf16"}


LAYERS = """
import torch
import torch.nn.functional as F
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))

def build():
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer(), nn.Linear(64, 32))
    return model, [torch.randn(32, 64)], lambda y: y.square().mean()
"""


def test_one_policy_follows_from_a_comparison(tmp_path, monkeypatch, capsys):
    """The page of its folder offers what options.json has, after the rules in force; and layers
    that share a graph take it."""
    (tmp_path / "layers.py").write_text(LAYERS)
    (tmp_path / "given.json").write_text('{"policy": {"2": {"wgrad": "bf16"}, "0.up": "nvfp4"}}')
    monkeypatch.setenv("Q2COMPILE_CONFIG", str(tmp_path / "given.json"))
    where = f"{tmp_path / 'layers.py'}:build"
    assert cli.main(["compare", where, "--budget", "0.55", "--out", str(tmp_path / "out")]) == 0
    assert cli.main(["report", str(tmp_path / "out")]) == 0
    policy = json.loads((tmp_path / "out" / "options.json").read_text())["policy"]
    assert list(policy) == ["0.up", "2", "*.up", "*.down"]
    assert list(policy.values())[1:] == ["bf16", "fp8", "fp8"]
    data = data_of((tmp_path / "out" / "report.html").read_text())
    (written,) = [f["policy"] for f in data["findings"] if f["policy"]]
    # The order is the page's own: its rules for one layer may overlap, those of a comparison don't.
    assert json.loads(f"{{{written}}}")["policy"] == policy
    assert data["headline"].startswith("All 5 matmuls with a weight run in NVFP4")
    monkeypatch.delenv("Q2COMPILE_CONFIG")
    model, (x,), _ = built(where)
    policy = {pattern: rule for pattern, rule in policy.items() if pattern != "0.up"}
    for layer in model[:2]:
        layer.compile(backend="quartet2", options={"inner": "eager", "policy": policy})
    model(x).sum().backward()


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("mine.py", "allowed: FILE.py:FUNCTION"),
        ("none.py:build", "none.py': No such file"),
        ("mine.py:bild", "has no function 'bild'; it has build, wrong"),
        ("mine.py:wrong", "returned 3; allowed: (model, batches)"),
        ("no.such:build", "No module named 'no'"),
    ],
)
def test_the_command_says_in_a_line_what_it_cannot_use(where, said, tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compare", where]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_the_command_refuses_a_budget_before_it_measures(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def build():\n    raise AssertionError\n")
    assert cli.main(["compare", f"{tmp_path / 'mine.py'}:build", "--budget", "2"]) == 2
    said = "q2compile compare: budget: got 2.0; allowed: a share, from 0 to 1\n"
    assert capsys.readouterr() == ("", said)


def test_the_command_says_once_who_refuses_and_that_nothing_fits(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(SCRIPT)
    where, out = f"{tmp_path / 'mine.py'}:build", str(tmp_path)
    assert cli.main(["compare", where, "--recipe", "bf16", "--out", out]) == 2
    assert capsys.readouterr().err.startswith("q2compile compare: no matmul of this model")
    assert cli.main(["compare", where, "--out", out]) == 0
    printed = capsys.readouterr().out
    assert "\nno module fits into 10% of the flops:\n" in printed
    assert ": 100% of the gradient's squared error; --budget 1 is enough for bf16\n" in printed
    assert cli.main(["compare", where, "--out", out, "--budget", "1"]) == 0
    assert "is enough" not in capsys.readouterr().out


def test_a_model_that_is_compiled_already_is_measured_and_explained_all_the_same():
    model, data = net(), batches()
    model.compile(backend="quartet2", options={"inner": "eager", "recipe": "bf16"})
    model(data[0])
    compiled = model._compiled_call_impl
    assert [m.module for m in q2compile.compare(model, data, FORWARD, alone=False).modules]
    rows = q2compile.explain(model, data[0], options={"inner": "eager"}).to_json()
    assert [row["module"] for row in rows if row["taken"]] == ["up", "down"]
    assert model._compiled_call_impl is compiled
