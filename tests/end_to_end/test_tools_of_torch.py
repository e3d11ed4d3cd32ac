# SPDX-License-Identifier: Apache-2.0
"""Things of torch used together with the backend: jagged tensors, Inductor's freezing and its
nan_asserts, export, compile in compile, anomaly mode."""

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config as inductor_config

from q2compile import explain
from q2compile.errors import ConfigError, NotTakenError

WIDTH = 64
INNER = pytest.mark.parametrize("inner", ["eager", "inductor"])


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def compiled(model, fullgraph=False, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend="quartet2", fullgraph=fullgraph, options=options)


def cosine(a, b):
    return F.cosine_similarity(a.detach().flatten(), b.detach().flatten(), 0)


# ---- jagged nested tensors


def jagged(*lengths):
    rows = [torch.randn(n, WIDTH) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)


@INNER
def test_jagged_tensors_are_their_rows(inner):
    """The bits are those of the same rows as a matrix; also with other lengths."""
    model = Mlp()
    call = compiled(model, inner=inner)
    plain = torch.compile(model, backend="quartet2", dynamic=True, options={"inner": inner})
    for lengths in ((5, 9, 18), (7, 3, 20)):
        x = jagged(*lengths)
        torch.manual_seed(1)
        model.zero_grad()
        y = call(x)
        assert y.is_nested and [len(t) for t in y.unbind()] == list(lengths)
        y.values().square().mean().backward()
        got = [y.values().detach(), x.grad.values(), *(p.grad for p in model.parameters())]
        rows = x.detach().values().requires_grad_()
        torch.manual_seed(1)
        model.zero_grad()
        y = plain(rows)
        y.square().mean().backward()
        expected = [y.detach(), rows.grad, *(p.grad for p in model.parameters())]
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # gelu, fused or not


class Forms(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.w, self.form = nn.Parameter(torch.randn(WIDTH, WIDTH)), form

    def forward(self, x):
        return self.form(x, self.w)


def test_a_product_of_a_jagged_tensor():
    (row,) = explain(Forms(lambda x, w: x @ w), jagged(5, 9), options={"inner": "eager"}).rows
    assert (row.module, row.taken) == ("w", True)


# ---- Inductor's own options


@pytest.mark.parametrize("cache_weights", [False, True])
def test_freezing_keeps_names_and_numbers(cache_weights):
    """Under it weights are constants of the graph, and their codes are, too."""
    model, x = nn.Sequential(Mlp(), Mlp()).eval(), torch.randn(WIDTH, WIDTH)
    options = {"policy": {"1.up": "bf16"}, "cache_weights": cache_weights, "strict": True}
    with torch.no_grad():
        usual = compiled(model, **options)(x)
        with inductor_config.patch(freezing=True):
            frozen = compiled(model, **options)(x)
            rows = explain(model, x, options={**options, "inner": "eager"}).rows
        torch.testing.assert_close(frozen, usual)
        if not cache_weights:  # the setting as an option
            assert torch.equal(compiled(model, inductor={"freezing": True}, **options)(x), frozen)
    assert {row.module: row.taken for row in rows} == {
        "0.up": True,
        "0.down": True,
        "1.up": False,
        "1.down": True,
    }


def test_nan_asserts_see_what_they_should():
    """Scales are float8, for which torch has no isinf; they have no infinity, but NaN."""
    model, x = Mlp(), torch.randn(WIDTH, WIDTH)
    call = compiled(model, inductor={"nan_asserts": True})
    call(x).sum().backward()  # the backward is given scales
    with torch.no_grad():
        model.up.weight[3, 3] = torch.inf
    with pytest.raises(AssertionError):
        call(x)
    x[3, 3] = torch.nan
    with pytest.raises(AssertionError):
        compiled(Mlp(), inductor={"nan_asserts": True})(x)


# ---- other ways of torch to call a model


def test_an_exported_program_keeps_its_names():
    model, x = Mlp(), torch.randn(WIDTH, WIDTH)
    module = torch.export.export(model, (x,)).module()
    rows = explain(module, x, options={"inner": "eager", "policy": {"up": "bf16"}}).rows
    assert [(row.module, row.taken) for row in rows] == [("up", False), ("down", True)]


AHEAD_OF_TIME = pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "enable_aot_compile"), reason="a torch without aot_compile"
)


def ahead_of_time(model, x, **options):
    def run(model, x):
        return model(x)

    with torch._dynamo.config.patch(enable_aot_compile=True):  # torch 2.11 reads it in both calls
        compiled = torch.compile(run, backend="quartet2", fullgraph=True, options=options)
        return compiled.aot_compile(((model, x), {}))


@AHEAD_OF_TIME
@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 saves what Inductor made alone")
def test_compiled_ahead_of_time(tmp_path):
    """For ``aot_compile`` Dynamo erases the sources of the graph's inputs before it calls a
    backend."""
    model, x = Mlp(), torch.randn(WIDTH, WIDTH)
    call = ahead_of_time(model, x, policy={"up": "bf16"}, dump=str(tmp_path), strict=True)
    rows = json.loads((tmp_path / "report.json").read_text())
    assert [(row["module"], row["taken"]) for row in rows] == [("up", False), ("down", True)]
    call.save_compiled_function(str(tmp_path / "compiled"))
    with open(tmp_path / "compiled", "rb") as file:
        loaded = torch.compiler.load_compiled_function(file)
    assert torch.equal(loaded(model, x), call(model, x))
    assert 0.98 < cosine(loaded(model, x), model(x)) < 0.9999


@AHEAD_OF_TIME
@pytest.mark.parametrize(
    ("option", "value"),
    [("inner", "eager"), ("cache_weights", True), ("telemetry", {"every": 1})],
)
def test_what_can_not_be_saved_ahead_of_time(option, value):
    """torch requires the object that Inductor returned, and its own error would name an internal
    class."""
    with pytest.raises(ConfigError, match=f"{option}.* can't be used with aot_compile"):
        ahead_of_time(Mlp(), torch.randn(WIDTH, WIDTH), **{option: value})


@AHEAD_OF_TIME
def test_strict_ahead_of_time_looks_at_once():
    """The graph holds the whole call: nothing more will come."""
    from torch._dynamo.aot_compile import ModelInput

    model = Mlp()
    model.unused = nn.Linear(WIDTH, WIDTH)
    call = compiled(model, strict=True, fullgraph=True)
    with (
        torch._dynamo.config.patch(enable_aot_compile=True),
        pytest.raises(NotTakenError, match="1 linear.s. never reached the backend: unused"),
    ):
        call._aot_compile([ModelInput((torch.randn(WIDTH, WIDTH),), {}, [])])


@pytest.mark.parametrize("outside", ["quartet2", "inductor"])
def test_compile_in_compile(outside):
    """As always in torch, the outermost call decides."""
    model, x = nn.Sequential(Mlp(), nn.Linear(WIDTH, WIDTH)), torch.randn(WIDTH, WIDTH)
    expected = model(x)
    model[0] = torch.compile(model[0], backend="quartet2")
    options = {"options": {"inner": "eager"}} if outside == "quartet2" else {}
    torch._dynamo.reset()
    with torch.autograd.detect_anomaly(check_nan=True):
        y = torch.compile(model, backend=outside, fullgraph=True, **options)(x)
        y.square().mean().backward()
    quantized = cosine(y, expected) < 0.9999
    assert quantized == (outside == "quartet2")
    assert all(p.grad is not None for p in model.parameters())


def test_a_loss_times_zero():
    """Models keep unused layers in DDP's gradients by this. Inductor turns the layer's gradient
    into a constant, and in mxfp4 the partitioner then moved its seed into the forward."""
    model, x = Mlp(), torch.randn(WIDTH, WIDTH)
    compiled_loss = compiled(
        lambda x: x.sum() + 0 * model(x).sum(), inner="inductor", recipe="mxfp4", strict=True
    )
    compiled_loss(x).backward()
    for p in model.parameters():
        assert torch.equal(p.grad, torch.zeros_like(p))


def test_a_norm_of_a_matrix():
    """torch decomposes it into a sum over None. A norm of an activation or a weight is large
    compared with the error of the quantized product: 10% of an output of 0.6, over a norm of 22."""
    model, x = Mlp(), torch.randn(8, WIDTH)

    def normed(x):
        return model(x) / torch.linalg.vector_norm(x) + model.up.weight.norm()

    torch.testing.assert_close(compiled(normed, inner="eager")(x), normed(x), rtol=0.01, atol=0.01)


def test_a_compiled_step_of_an_optimizer():
    """Muon's products are of gradients. It iterates in bf16, and a step is 0.1 long."""
    models = [Mlp() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, around in zip(
        models, (lambda step: step, partial(compiled, inner="eager")), strict=True
    ):
        model(torch.ones(8, WIDTH)).sum().backward()
        weights = [p for p in model.parameters() if p.ndim == 2]
        around(torch.optim.Muon(weights, lr=0.1).step)()
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0.01)


def test_a_model_without_numbers():
    """On the meta device, which has no autocast either: a report of a model that is too large to
    build."""
    with torch.device("meta"):
        model, x = Mlp(), torch.randn(WIDTH, WIDTH)
    with torch.autocast("cpu"):
        y = compiled(model, inner="eager")(x)
    y.sum().backward()
    assert (y.shape, model.up.weight.grad.shape) == (x.shape, model.up.weight.shape)
    rows = explain(model, x, options={"inner": "eager"}).rows
    assert [(row.module, row.taken) for row in rows] == [("up", True), ("down", True)]


def test_bytes_saved_without_numbers():
    """Inductor would fold the constant, and with it every meta tensor that a graph returns."""

    class WithConstant(Mlp):
        def forward(self, x):
            return super().forward(x) * torch.ones(WIDTH, device=x.device)

    saved = {}
    for device in ("cpu", "meta"):
        torch._dynamo.reset()
        with torch.device(device):
            rows = explain(WithConstant(), torch.randn(WIDTH, WIDTH)).rows
        saved[device] = [(row.saved_bytes, row.saved_elements) for row in rows]
    elements = WIDTH * WIDTH
    assert saved["meta"] == saved["cpu"]
    assert saved["cpu"][0] == (elements // 2 + elements // 16 + 4, elements)


def test_second_derivatives_are_refused():
    """As always under AOTAutograd. No saved tensor depends on x, so with unused inputs allowed, as
    in vhp without strict, the result is zero. Inductor alone raises, too."""
    model, x = Mlp(), torch.randn(WIDTH, WIDTH, requires_grad=True)
    loss = compiled(lambda x: model(x).square().sum(), inner="eager")
    (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
    # Up to torch 2.12 a gradient whose backward saved nothing that needs one is a constant.
    with pytest.raises(RuntimeError, match="double backward|does not require grad"):
        first.sum().backward()
    with pytest.raises(RuntimeError, match="independent"):
        torch.autograd.functional.vhp(loss, x.detach(), torch.ones_like(x), strict=True)
