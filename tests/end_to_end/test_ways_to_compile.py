# SPDX-License-Identifier: Apache-2.0
"""How a model is compiled for training: whole, in one graph or several, per block, with dynamic
shapes, under torch.func and torch.export. Loops around it are in test_training_loops."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from q2compile import explain
from q2compile.recipes.published import RECIPES
from tests.support import forked
from tests.support.small_model import (
    EAGER,
    LINEARS,
    WIDTH,
    Block,
    Model,
    assert_close,
    assert_same,
    batch,
    gradients,
    new_model,
    quantized,
)

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def sites(report, taken=True):
    return [row.module for row in report.rows if row.taken is taken and row.has_parameter]


# ---- graphs -------------------------------------------------------------------------------------


class Unrolled(Model):
    """The blocks called one by one, with a graph break after the first."""

    def forward(self, tokens):
        x = self.layers[0](self.embed(tokens))
        torch._dynamo.graph_break()
        return self.head(self.layers[1](x))


def test_graph_breaks_keep_names_and_gradients():
    torch.manual_seed(0)
    model = Unrolled()
    report = explain(model, batch()[0], options=EAGER)
    assert report.graphs == 2 and sites(report) == LINEARS and sites(report, taken=False) == []
    torch._dynamo.reset()
    options = {"strict": True, "policy": {"layers.1.up": "bf16"}}  # a name after the break
    assert_close(gradients(quantized(model, **options), model), gradients(model, model))


def test_fullgraph_is_one_graph_and_refuses_a_break():
    model = new_model()
    compiled = torch.compile(model, backend="quartet2", options=EAGER, fullgraph=True)
    gradients(compiled, model)
    assert counters["stats"]["unique_graphs"] == 1
    broken = torch.compile(Unrolled(), backend="quartet2", options=EAGER, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        broken(batch()[0])


def test_strict_cannot_speak_when_no_graph_reaches_the_backend():
    """torch does not call a backend for a frame that it skips, so nothing can raise. explain() is
    the way to notice, and from torch 2.13 on fullgraph=True."""

    class Skipped(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(32, 32)

        def forward(self, x):
            for _ in range(2):
                torch._dynamo.graph_break()
            return self.head(x)

    model, x = Skipped(), torch.randn(4, 32)
    y = quantized(model, strict=True)(x)
    assert torch.equal(y, model(x))  # in silence
    report = explain(model, x, options=EAGER)
    assert (report.graphs, [r.module for r in report.rows]) == (0, ["head"])
    if torch.__version__ >= "2.13":
        with pytest.raises(RuntimeError, match="fullgraph=True"):
            torch.compile(model, backend="quartet2", options=EAGER, fullgraph=True)(x)


def test_per_block_compile():
    """One graph for the two equal blocks, absolute names, gradients of the right layers."""
    model = new_model()
    for block in model.layers:
        block.compile(backend="quartet2", options={**EAGER, "policy": {"layers.*": "quartet2"}})
    grads = gradients(model, model)
    assert counters["stats"]["unique_graphs"] == 1
    plain = Model()
    plain.load_state_dict(model.state_dict(), strict=True)
    assert_close(grads, gradients(plain, plain))
    assert not torch.equal(grads["layers.0.up.weight"], grads["layers.1.up.weight"])


# ---- dynamic shapes -----------------------------------------------------------------------------

SHAPES = ((4, 9), (7, 16), (3, 5), (7, 33), (4, 9))


def compilations(dynamic):
    """Graphs that Dynamo has compiled after each of the shapes, forward and backward."""
    torch._dynamo.reset()
    counters.clear()
    block, options = Block(), {} if dynamic else EAGER
    compiled = torch.compile(block, backend="quartet2", dynamic=dynamic, options=options)
    counted = []
    for shape in SHAPES:
        block.zero_grad()
        compiled(torch.randn(*shape, WIDTH)).square().sum().backward()
        assert all(p.grad.isfinite().all() for p in block.parameters())
        counted.append(counters["stats"]["unique_graphs"])
    return counted


@pytest.mark.parametrize("dynamic", [True, None])
def test_recompilations_for_changing_batches_and_lengths(dynamic):
    """dynamic=None is torch's default: a size becomes symbolic when it has changed. Inductor's code
    is that for symbolic sizes."""
    assert compilations(dynamic) == ([1] * 5 if dynamic else [1, 2, 2, 2, 2])  # as Inductor alone


def test_dynamic_shapes_with_a_dump_and_a_report(tmp_path):
    """A symbolic size is written by its name."""
    model = new_model()
    compiled = torch.compile(
        model, backend="quartet2", options={**EAGER, "dump": str(tmp_path)}, dynamic=True
    )
    grads = gradients(compiled, model)
    assert_close(grads, gradients(model, model))
    report = (tmp_path / "report.txt").read_text()
    assert "s" in report.splitlines()[2].split()[1] and "×64×32" in report


@pytest.mark.parametrize("recipe", sorted({*RECIPES} - {"bf16"}))
def test_a_batch_without_rows(recipe):
    """The last one of an uneven split: no number to rotate, and gradients that are zero."""
    linear = nn.Linear(64, 96)
    x = torch.zeros(0, 64, requires_grad=True)
    compiled = quantized(linear, recipe=recipe, strict=True)
    compiled(x).sum().backward()
    assert x.grad.shape == x.shape
    for p in linear.parameters():
        assert torch.equal(p.grad, torch.zeros_like(p))


# ---- torch.func and torch.export ----------------------------------------------------------------


def test_functional_call_of_a_compiled_model_is_quantized():
    """Tensors in place of parameters are taken for them, by the same names."""
    model, (tokens, _) = new_model(), batch()
    compiled = quantized(model, strict=True, policy={"layers.0.up": "bf16"})
    given = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    torch.manual_seed(1)
    y = torch.func.functional_call(
        compiled, {f"_orig_mod.{n}": p for n, p in given.items()}, tokens
    )
    y.square().mean().backward()
    torch.manual_seed(1)
    torch._dynamo.reset()
    own = quantized(model, policy={"layers.0.up": "bf16"})(tokens)
    own.square().mean().backward()
    assert torch.equal(y, own)
    assert_same(
        {n: p.grad for n, p in given.items()}, {n: p.grad for n, p in model.named_parameters()}
    )


def test_functional_call_inside_the_compiled_function_says_why_not():
    """Parameters that are arguments look like any other tensors, so they count as activations."""
    model, tokens = new_model(), batch()[0]

    def forward(parameters, tokens):
        return torch.func.functional_call(model, parameters, (tokens,))

    given = {n: p.detach() for n, p in model.named_parameters()}
    report = explain(forward, given, tokens, options=EAGER)
    assert {row.why for row in report.rows} == {
        "the weight is an input of the graph, not an nn.Parameter"
    }
    y = quantized(forward)(given, tokens)
    torch.testing.assert_close(y, model(tokens))


TRANSFORMS = {
    "vmap": lambda model: torch.func.vmap(model),
    "grad": lambda model: torch.func.grad(lambda x: model(x).sum()),
    "jvp": lambda model: lambda x: torch.func.jvp(model, (x,), (x,))[1],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_inside_torch_func_matmuls_are_left_and_strict_refuses(name):
    """The transforms need rules that q2's ops don't have; the result is the plain model's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    x = torch.randn(4, 32)
    function = TRANSFORMS[name](model)
    report = explain(function, x, options=EAGER)
    own = [row for row in report.rows if row.has_parameter]
    assert own and {row.taken for row in own} == {False}
    assert all(row.why.startswith("inside torch.func") for row in own)
    torch.testing.assert_close(quantized(function)(x), function(x))
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=r"strict: 2 matmul.*inside torch\.func"):
        quantized(function, strict=True)(x)


def test_torch_func_around_a_compiled_model_is_torchs_own_eager():
    """torch runs the function of a transform without compiling it, with any backend."""
    model = nn.Sequential(nn.Linear(32, 32))
    compiled, x = quantized(model), torch.randn(4, 32)
    torch.testing.assert_close(torch.func.vmap(compiled)(x), model(x))
    assert counters["stats"]["unique_graphs"] == 0


@pytest.mark.parametrize("way", ["torch.compile", "Module.compile"])
def test_export_takes_the_plain_model(way):
    """torch.export uses no backend, so the exported model has the precision of its tensors."""
    model, tokens = new_model(), batch()[0]
    if way == "torch.compile":
        compiled = quantized(model)
    else:
        compiled = model
        model.compile(backend="quartet2", options=EAGER)
    compiled(tokens)
    exported = torch.export.export(compiled, (tokens,))
    assert "q2" not in str(exported.graph)
    torch.testing.assert_close(exported.module()(tokens), model.forward(tokens))


def test_threads_that_compile_at_once_after_a_lookup():
    """Without the lookup torch's registry fails in some of them (guide limits.md)."""
    code = """
import threading, torch
torch._dynamo.lookup_backend("quartet2")
errors = []
def work():
    try:
        torch.compile(torch.nn.Linear(32, 32), backend="quartet2")
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not errors, errors
"""
    done = forked.run(code)
    assert done.returncode == 0, done.stderr
