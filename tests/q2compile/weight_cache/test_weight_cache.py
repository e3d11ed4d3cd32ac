# SPDX-License-Identifier: Apache-2.0
"""Models whose weights' codes are made once: never stale, and the same bits as without."""

import contextlib
import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import compile_fx

import q2compile
from q2compile.runtime_kernels.ops.seed import COUNTERS
from q2compile.torch_internals import optimizer_steps
from q2compile.weight_cache import graph_inputs
from q2compile.weight_cache.cache import CodesLayout, parts_of
from tests.q2compile.weight_cache.test_cache import FORM, Counting
from tests.support.small_model import Mlp, quantized


@pytest.fixture(autouse=True)
def fresh(fresh_compiler, monkeypatch):
    q2compile.forget_weights()
    monkeypatch.setattr(optimizer_steps, "PAUSE", 0.0)


@contextlib.contextmanager
def counted():
    """How often codes are made by compiled models."""
    making = Counting()
    plain = parts_of

    def counting(w, form, make, *adapters, **how):
        def counted_make(w):
            making.calls += 1
            return make(w)

        return plain(w, form, counted_make, *adapters, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_inputs, "parts_of", counting)
        yield making


def train(model, cache, steps=2, micro_batches=2, device="cpu", **options):
    """Losses and final weights of a training with accumulated gradients, bf16 autocast."""
    torch._dynamo.reset()
    compiled = quantized(model, cache_weights=cache, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    torch.manual_seed(5)
    for _ in range(steps):
        for _ in range(micro_batches):
            x = torch.randn(32, 64, device=device)
            with torch.autocast(device, torch.bfloat16):
                loss = (compiled(x) - x).float().square().mean()
            loss.backward()
            losses.append(loss.detach().clone())
            for p in model.parameters():
                if p.grad is not None:  # or the next replay of a CUDA graph would overwrite it
                    p.grad = p.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach().clone() for p in model.parameters()]


def models(make):
    """Two equal ones."""
    built = []
    for _ in range(2):
        torch.manual_seed(0)
        built.append(make())
    return built


@pytest.mark.parametrize(
    ("recipe", "checkpointed"),
    [("quartet2", True), ("quartet", False)],
)
def test_once_a_step_and_the_same_bits(recipe, checkpointed):
    """Two steps of two micro-batches and a fused optimizer: each of four weights is quantized
    twice, instead of four times, or eight with the repeats of checkpointed regions."""
    plain, cached = models(lambda: nn.Sequential(Mlp(checkpointed), Mlp(checkpointed)))
    losses, weights = train(plain, False, recipe=recipe)
    with counted() as making:
        cached_losses, cached_weights = train(cached, True, recipe=recipe)
    assert all(map(torch.equal, losses, cached_losses))
    assert all(map(torch.equal, weights, cached_weights))
    assert making.calls == 4 * 2


@pytest.mark.parametrize(
    ("recipe", "checkpointed"),
    [("nvfp4", False), ("nvfp4", True), ("mxfp4_2d", False), ("fp8", False)],
)
def test_codes_that_a_dgrad_reuses_are_transposed_once(recipe, checkpointed, tmp_path):
    """The backward has no transpose of w, and losses and weights keep their bits."""
    plain, cached = models(lambda: nn.Sequential(Mlp(), Mlp(checkpointed)))
    trained = train(plain, False, recipe=recipe)
    with counted() as making:
        again = train(cached, True, recipe=recipe, dump=str(tmp_path))
    assert making.calls == 4 * 2
    for before, after in zip(trained, again, strict=True):
        assert all(map(torch.equal, before, after))
    graphs = [path.read_text() for path in tmp_path.glob("graph_0/4_after_passes_*.txt")]
    of_x = 4 * (recipe == "fp8")  # wgrad reuses the codes of x
    assert len(graphs) == 2 and sum(text.count("q2.transpose(") for text in graphs) == of_x


def test_under_inductor_too():
    plain, cached = models(lambda: nn.Sequential(Mlp()))
    losses, _ = train(plain, False, inner="inductor")
    with counted() as making:
        cached_losses, _ = train(cached, True, inner="inductor")
    # Inductor compiles the cast and the quantization of a weight into one kernel, here or in the
    # graph.
    assert all(map(torch.equal, losses, cached_losses))
    assert making.calls == 2 * 2


def test_in_inference_once_until_something_changes(tmp_path):
    model, x = Mlp(), torch.randn(8, 64)
    compiled = quantized(model, cache_weights=True, dump=str(tmp_path))
    with counted() as making, torch.no_grad():
        first = [compiled(x) for _ in range(3)][-1]
        assert making.calls == 2
        model.up.weight.mul_(2)
        assert not torch.equal(compiled(x), first) and making.calls == 3
        model.load_state_dict(Mlp().state_dict())
        changed = compiled(x)
        assert making.calls == 5
    torch._dynamo.reset()
    with torch.no_grad():
        plain = quantized(model)(x)
    assert torch.equal(changed, plain)
    forward = (tmp_path / "graph_0" / "4_after_passes_forward.txt").read_text()
    assert forward.count("q2.quantize(") == 2  # x of up and of down
    assert ", [weight_codes, " in (tmp_path / "graph_0" / "1_rewritten.txt").read_text()


def test_training_and_evaluation_share_what_is_made():
    model, x = Mlp(), torch.randn(8, 64)
    compiled = quantized(model, cache_weights=True)
    with counted() as making:
        with torch.no_grad():
            compiled(x)
        compiled(x).sum().backward()
        assert making.calls == 2


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(64, 8, bias=False), nn.Linear(8, 64, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def test_the_frozen_base_of_an_adapter_is_quantized_once():
    """Over two optimizer steps. The adapters are too small to be taken."""
    with counted() as making:
        train(Lora(), True)
    assert making.calls == 1


class Merging(nn.Module):
    """A linear with adapters as in PEFT, whose ``merge`` writes through ``.data`` and notes it."""

    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.deltas = {name: torch.randn(64, 64) for name in "ab"}
        self.merged_adapters = []

    def merge(self, name):
        self.base_layer.weight.data += self.deltas[name]
        self.merged_adapters.append(name)

    def unmerge(self):
        self.base_layer.weight.data -= self.deltas[self.merged_adapters.pop()]

    def forward(self, x):
        y = self.base_layer(x)
        return y if self.merged_adapters else y + x @ self.deltas["a"].t()


class MergedAlone(Merging):
    """loralib's form: the linear is the layer itself."""

    def __init__(self):
        super().__init__()
        del self.merged_adapters
        self.merged = False

    def merge(self, name):
        self.base_layer.weight.data += self.deltas[name]
        self.merged, self.name = True, name

    def unmerge(self):
        self.base_layer.weight.data -= self.deltas[self.name]
        self.merged = False

    def forward(self, x):
        return self.base_layer(x)


@pytest.mark.parametrize("kind", [Merging, MergedAlone])
def test_merging_adapters_is_seen(kind):
    """One after the other, and back: each time the result is that of the weight as it is."""
    plain, cached = models(lambda: nn.ModuleDict({"proj": kind()}))
    x = torch.randn(8, 64)
    results = []
    for model, cache in ((plain, False), (cached, True)):
        torch._dynamo.reset()
        layer, seen = model["proj"], []
        compiled = quantized(layer, cache_weights=cache)
        with torch.no_grad(), counted() as making:
            for name in (None, "a", "b"):
                if name is not None:
                    layer.merge(name)
                seen += [compiled(x), compiled(x)]
                if name is not None:
                    layer.unmerge()
                    seen += [compiled(x), compiled(x)]
        results.append(seen)
        assert making.calls == 5 * cache
    assert all(map(torch.equal, *results))


def test_other_spellings(tmp_path):
    """x @ w is a transpose that is made with the codes; tied weights are looked up, too."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(48, 64)
            self.conv = nn.Parameter(torch.randn(64, 64))

        def forward(self, tokens):
            h = self.embedding(tokens) @ self.conv
            return F.linear(h, self.embedding.weight)

    model, tokens = Tied(), torch.arange(48)
    outputs = []
    for cache in (False, True):
        torch._dynamo.reset()
        with counted() as making, torch.no_grad():
            compiled = quantized(model, cache_weights=cache)
            outputs += [compiled(tokens), compiled(tokens)]
        assert making.calls == 2 * cache
    assert all(torch.equal(outputs[0], y) for y in outputs[1:])


def test_a_weight_that_the_graph_changes_is_quantized_in_the_graph():
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64, bias=False)

        def forward(self, x):
            y = self.linear(x)
            with torch.no_grad():
                self.linear.weight.mul_(2)
            return y + self.linear(x)

    plain, cached = models(Changing)
    x = torch.randn(8, 64)
    with torch.no_grad():
        expected = quantized(plain)(x)
        torch._dynamo.reset()
        with counted() as making:
            got = quantized(cached, cache_weights=True)(x)
    assert torch.equal(expected, got) and making.calls == 0


def test_fsdp_is_refused():
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Mlp()
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        compiled = quantized(model, cache_weights=True)
        with pytest.raises(Exception, match="cache_weights can't be used under FSDP"):
            compiled(torch.randn(8, 64))
    finally:
        dist.destroy_process_group()


def test_it_contradicts_recompute_weights():
    with pytest.raises(ValueError, match="choose one"):
        q2compile.Config(cache_weights=True, recompute_weights=True)


def test_codes_are_static_inputs_of_cuda_graphs(monkeypatch):
    """As parameters are: else each replay would copy them into the memory of the graph."""
    places, plain = [], compile_fx.get_static_input_idxs
    monkeypatch.setattr(
        compile_fx,
        "get_static_input_idxs",
        lambda fixed: places.append(plain(fixed)) or plain(fixed),
    )
    for mode in ("reduce-overhead", None):
        torch._dynamo.reset()
        options = {"mode": mode, "inductor": {"fx_graph_cache": False}}
        quantized(Mlp(), inner="inductor", cache_weights=True, **options)(torch.randn(32, 64))
    # Three parameters around x, which is input 2, and the parts of two weights. The graphs that
    # quantize the weights have no static input.
    assert [p for p in places if p] == [[0, 1, 3, 4, 5, 6, 7, 8, 9], [0, 1, 3]]


def test_a_backward_is_told_that_its_codes_were_overwritten():
    w, x = nn.Parameter(torch.randn(16, 16)), torch.randn(16, 16, requires_grad=True)
    make = Counting()
    product = x * parts_of(w, FORM, make, in_place=True)[0]
    with torch.no_grad():
        w.add_(1)
    parts_of(w, FORM, make, in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.gpu
def test_cuda_graphs_replay_with_fresh_codes():
    """Codes are inputs of the captured graph; a replay after a step must not see old ones. They are
    not copied into its memory, and nothing is captured again after a step: either would raise the
    count of copied inputs. Both are replayed: under capture cuBLAS has another workspace and may
    add up in another order.

    Two things are not the same in every run, on an H200 that other processes use, too, and are
    left out. The sum of a bias's gradient is tuned by time. The first replay after a recording can
    see the generator as the recording left it: torch 2.11 writes the offset of random numbers in
    the stream of the recording, and does not order that before the replay. A `seed` of our own
    does not use the generator."""
    device, copied, trained = "cuda", [], []
    plain, cached = models(lambda: nn.Sequential(Mlp(bias=False), Mlp(bias=False)).to(device))
    options = {"inner": "inductor", "mode": "reduce-overhead", "device": device, "steps": 6}
    for model, cache in ((plain, False), (cached, True)):
        counters.clear()
        COUNTERS.clear()
        with counted() as making:
            losses, weights = train(model, cache, seed=0, **options)
        trained.append([*losses, *weights])
        copied.append(counters["inductor"]["cudagraph_recorded_non_static_inputs"])
        assert making.calls == 4 * 6 * cache
    assert all(map(torch.equal, *trained))
    assert copied[0] == copied[1] > 0


@pytest.mark.gpu
def test_a_captured_quantization_is_part_of_the_capture():
    w = nn.Parameter(torch.randn(16, 16, device="cuda"))
    make = Counting()
    parts_of(w, FORM, make)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (codes,) = parts_of(w, FORM, make)
    with torch.no_grad():
        w.add_(1)
    graph.replay()
    assert make.calls == 2 and torch.equal(codes, w)


@pytest.mark.skipif(
    not hasattr(torch.compiler, "_compile_session_context"),
    reason="before torch 2.13 no compiled model can be called while another thread compiles",
)
def test_threads_go_on_while_codes_are_compiled(monkeypatch):
    """FX notes which code is traced for all threads, and code that Dynamo compiled raises an error
    if it is traced outside a compilation. Here the other thread runs during the trace."""
    x = torch.randn(32, 64)
    others = quantized(Mlp(), inner="eager")
    expected, met, plain = others(x), [], CodesLayout.graph

    def meet():
        def call():
            try:
                met.append(torch.equal(others(x), expected))
            except RuntimeError as error:
                met.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    def meeting(form):
        gm = plain(form)
        with gm.graph.inserting_before(gm.graph.output_node()):
            gm.graph.call_function(meet)
        gm.recompile()
        return gm

    monkeypatch.setattr(CodesLayout, "graph", meeting)
    quantized(Mlp(), inner="eager", cache_weights=True)(x)
    assert met and set(met) == {True}, met


def test_codes_are_compiled_with_their_graph():
    """Codes are not compiled at the first call, when Dynamo compiles no longer: see the test above.
    Once for each form and shape."""
    compiled = []

    def compile_form(gm, inputs):
        compiled.append(tuple(inputs[0].shape))
        return gm.forward

    weights = [nn.Parameter(torch.randn(n, 32)) for n in (32, 64, 32)]
    sites = [(i, FORM) for i in range(3)]
    call = graph_inputs.CachedInputs(None).with_codes(
        lambda *args: len(args), sites, weights, compile_form
    )
    assert compiled == [(32, 32), (64, 32)]
    assert call(*weights) == 3 + 3 * 3 and len(compiled) == 2


def test_weights_of_symbolic_sizes_are_quantized_in_the_graph():
    """Codes are compiled for fixed sizes; Dynamo can be set to make sizes of parameters
    symbolic."""
    x = torch.randn(32, 64)
    with torch._dynamo.config.patch(force_parameter_static_shapes=False), counted() as making:
        compiled = quantized(F.linear, cache_weights=True, inner="eager")
        for width in (64, 96, 128):
            weight = nn.Parameter(torch.randn(width, 64))
            expected = F.linear(x, weight)
            assert F.cosine_similarity(compiled(x, weight), expected, 1).min() > 0.97
    assert making.calls == 1
