# SPDX-License-Identifier: Apache-2.0
"""The passes that have quantizers write swizzled scales: graphs built by hand, calls that they
leave, and the launches of swizzle_scales.cu that remain for each recipe."""

from __future__ import annotations

import operator
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import fx, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import q2compile.linear.dense  # noqa: F401  registers q2::linear
from q2compile import Config
from q2compile.compiler.joint_passes import JointPasses
from q2compile.compiler.post_grad_passes import PostGradPasses
from q2compile.graph.nodes import named_arguments, q2_nodes
from q2compile.passes.post_grad.swizzle_scales import swizzle_saved_scales_pass, swizzle_scales_pass
from q2compile.passes.verify import check_spec
from q2compile.recipes.resolve import resolve
from q2compile.runtime_kernels.choice import kernels
from q2compile.runtime_kernels.cuda import calls as cuda_calls
from q2compile.torch_internals.aot_autograd import aot_eager_compile, backward_at_once, graph_kind
from tests.support import quantizer_calls as calls
from tests.support.graph_builder import EDEN, SOURCE, Builder, q2, run, traced
from tests.support.serving import serve_by

AT = "@32x4x4"


@pytest.fixture(autouse=True)
def blackwell(monkeypatch) -> None:
    """The kernels that these operands would have on an sm_100."""

    def serving(op, args):
        usable = (k for k in kernels(op) if k.device_type != "cpu")
        return next(k for k in usable if k.unsupported(*args) is None)

    serve_by(monkeypatch, serving)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (10, 0))
    monkeypatch.setattr(cuda_calls, "unsupported", lambda index: None)


def test_operands_of_gemms_alone_are_made_swizzled() -> None:
    gm, inputs = traced()
    before = run(gm, inputs)
    assert swizzle_scales_pass(gm.graph) == 3
    gm.recompile()
    for node in calls.nodes(gm.graph):
        assert named_arguments(node)["scheme"] == EDEN + AT
    for node in q2_nodes(gm.graph, "gemm"):
        assert node.args[7] == node.args[8] == EDEN + AT
    check_spec(gm.graph, "backward", "test")
    assert all(torch.equal(a, b) for a, b in zip(run(gm, inputs), before, strict=True))


def assert_values_fit(graph: fx.Graph) -> None:
    """The metadata of the graph's nodes are those of their fakes, and Inductor noted no strides
    that it would require of their arguments (registry.py, flexible_layout)."""
    for node in q2_nodes(graph):
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        got, want = node.meta["val"], node.target(*args, **kwargs)
        got, want = (v if isinstance(v, tuple | list) else (v,) for v in (got, want))
        assert [t.shape for t in got] == [t.shape for t in want]
        assert "eager_input_vals" not in node.meta


def test_the_graph_says_the_new_shapes() -> None:
    gm, _ = traced()
    swizzle_scales_pass(gm.graph)
    assert_values_fit(gm.graph)


def test_twice_is_once() -> None:
    gm, _ = traced()
    assert [swizzle_scales_pass(gm.graph) for _ in range(2)] == [3, 0]


def test_what_others_read_stays_plain() -> None:
    def function(*args):
        s, t, u = (q2.seed(args[0], i) for i in range(3))
        both = q2.quantize(
            args[0],
            scheme=EDEN,
            transform="h32",
            rowwise=True,
            columnwise=True,
            rowwise_seed=s,
            columnwise_seed=t,
        )
        q = q2.quantize(
            args[0], scheme=EDEN, transform="rht128", rowwise=True, columnwise=False, rowwise_seed=u
        )
        out = q2.gemm(*q, *q, None, EDEN, EDEN, torch.bfloat16)
        return out, q2.dequantize(*q, EDEN, 40, torch.bfloat16), both[1]

    gm, _ = traced(function)
    assert swizzle_scales_pass(gm.graph) == 0


def test_another_kernel_gets_plain_scales(monkeypatch) -> None:
    gm, _ = traced()
    serve_by(monkeypatch, lambda *a: SimpleNamespace(name="cuda_bf16", launching=None))
    assert swizzle_scales_pass(gm.graph) == 0


def joint_graph(scheme=SOURCE, reader=None) -> fx.Graph:
    """Forward and wgrad of y = x wᵀ. reader: called with x's parts, to read them as well."""
    b = Builder()
    x, w = b.placeholder("primals_1", 48, 72), b.placeholder("primals_2", 32, 72)
    dy = b.placeholder("tangents_1", 48, 32)
    qx, qw = (b.outputs(b.call(calls.plain(v, None, None, scheme, 0))) for v in (x, w))
    y = b.call(q2.gemm.default, *qx, *qw, None, scheme, scheme, torch.bfloat16)
    seed = b.call(q2.seed.default, dy, 0)
    a = b.outputs(b.call(calls.one(dy, seed, EDEN, "rht128", True, 0)))
    again = b.call(calls.again(*qx, seed, scheme, EDEN, "rht128", 72, 1))
    dw = b.call(q2.gemm.default, *a, *b.outputs(again), None, EDEN, EDEN, torch.bfloat16)
    return b.done(y, dw, *([] if reader is None else [reader(b, qx)])).graph


def schemes_of(graph: fx.Graph) -> list[tuple[str, ...]]:
    found = ((*node.args, *node.kwargs.values()) for node in q2_nodes(graph))
    return [tuple(a for a in args if isinstance(a, str)) for args in found]


def test_saved_operands_are_swizzled_for_both_their_readers() -> None:
    """The other pass handles the rest, in the backward alone."""
    graph = joint_graph()
    assert swizzle_saved_scales_pass(graph) == 2
    assert_values_fit(graph)
    source, rotated = SOURCE + AT, (EDEN, "rht128")
    assert schemes_of(graph) == [
        *((source,), (source,), (source, source), (), rotated),
        *((source, *rotated), (EDEN, EDEN)),
    ]
    assert swizzle_saved_scales_pass(graph) == 0
    assert swizzle_scales_pass(graph) == 2
    assert schemes_of(graph)[-2:] == [(source, EDEN + AT, "rht128"), (EDEN + AT, EDEN + AT)]
    assert_values_fit(graph)


def dequantized(b, qx):
    return b.call(q2.dequantize.default, *qx, SOURCE, 72, torch.bfloat16)


def returned(b, qx):
    return qx[1]


def multiplied_by_groups(b, qx):
    """A second GEMM multiplies them by experts' weights."""
    w = [b.placeholder("w_codes", 64, 40, dtype=torch.uint8)]
    w += [b.placeholder("w_scales", 64, 5, dtype=torch.float8_e4m3fn)]
    w += [b.placeholder("w_global", dtype=torch.float32)]
    offs = b.placeholder("offs", 2, dtype=torch.int32)
    names = (SOURCE, SOURCE, "fprop", torch.bfloat16)
    return b.call(q2.grouped_gemm.default, *qx, *w, offs, *names)


@pytest.mark.parametrize("reader", [dequantized, returned, multiplied_by_groups])
def test_one_other_reader_keeps_an_operand_plain_for_all(reader) -> None:
    """w, which has none, is swizzled all the same: a GEMM may have one of each."""
    graph = joint_graph(reader=reader)
    assert swizzle_saved_scales_pass(graph) == 1
    (fprop, *_) = q2_nodes(graph, "gemm")
    assert fprop.args[7:9] == (SOURCE, SOURCE + AT)
    (again,) = q2_nodes(graph, "requantize")
    assert named_arguments(again)["source_scheme"] == SOURCE
    assert_values_fit(graph)


def test_square_blocks_stay_plain() -> None:
    b = Builder()
    w = b.placeholder("arg0_1", 32, 64)
    square = "nvfp4_16x16_pow2"
    q = b.outputs(b.call(calls.plain(w, None, None, square, 0)))
    b.done(b.call(q2.gemm.default, *q, *q, None, square, square, torch.bfloat16))
    assert swizzle_scales_pass(b.graph) == swizzle_saved_scales_pass(b.graph) == 0


@pytest.mark.parametrize("returned", [False, True])
def test_turned_codes_get_a_scale_for_each_row(returned) -> None:
    """Unless others read the scales."""
    scheme = "nvfp4_16x16_pow2"
    b = Builder()
    x = b.placeholder("arg0_1", 32, 64)
    codes, scales, unit = b.outputs(b.call(calls.plain(x, None, None, scheme, 0)))
    both = b.call(q2.transpose.default, codes, scales, scheme, 64)
    transposed = [b.call(operator.getitem, both, i) for i in range(2)]
    a = (*transposed, unit)
    y = b.call(q2.gemm.default, *a, *a, None, scheme, scheme, torch.bfloat16)
    gm = b.done(y, *transposed[1:] * returned)
    x = torch.randn(32, 64).bfloat16()
    before = gm(x)
    assert swizzle_scales_pass(b.graph) == (not returned)
    gm.recompile()
    assert all(map(torch.equal, gm(x), before))
    assert schemes_of(b.graph)[-1] == 2 * (scheme if returned else "nvfp4_pow2" + AT,)
    assert_values_fit(b.graph)
    assert swizzle_scales_pass(b.graph) == 0


def test_inference_graphs_swizzle_what_they_quantize() -> None:
    b = Builder()
    x = b.placeholder("arg0_1", 32, 64)
    q = b.outputs(b.call(calls.plain(x, None, None, SOURCE, 0)))
    b.done(b.call(q2.gemm.default, *q, *q, None, SOURCE, SOURCE, torch.bfloat16))
    assert swizzle_scales_pass(b.graph) == 1
    assert_values_fit(b.graph)


# The operands of a linear's GEMMs whose scales swizzle_scales.cu has still to swizzle, with the op
# that made them.
PLAIN = {
    "quartet2": {},
    "tetrajet2": {},
    "mxfp4": {},
    # square blocks: read transposed, too
    "nvfp4": {"fprop w": "quantize"},
    "mxfp4_2d": {"fprop w": "quantize"},
    "quartet": {},
}
OPERANDS = ("fprop x", "fprop w", "dgrad dy", "dgrad w", "wgrad dy", "wgrad x")


class Layer(nn.Module):
    def __init__(self, recipe: str, **options) -> None:
        super().__init__()
        self.texts = resolve(recipe, **options).texts()

    def forward(self, x, w):
        return (torch.ops.q2.linear(x, w, None, *self.texts, 0),)


def compiled_graphs(recipe: str, train: bool, **options) -> list[fx.Graph]:
    """After all passes: of the forward and the backward of a linear, or of its inference."""
    graphs: list[fx.Graph] = []
    config = Config(recipe=recipe, inner="eager", **options)
    manager = PostGradPasses(config)

    def on_graph(gm: fx.GraphModule) -> None:
        manager(gm.graph)
        graphs.append(gm.graph)

    inputs = [torch.randn(s).bfloat16().requires_grad_(train) for s in ((150, 200), (72, 200))]
    gm = fx.symbolic_trace(Layer(recipe, **options))
    with backward_at_once(train), torch.set_grad_enabled(train):
        aot_eager_compile(gm, inputs, on_graph, JointPasses(config, []))
    return graphs


def operands(graph: fx.Graph) -> dict[str, tuple[str, str]]:
    """For each operand of each GEMM of a graph: the op that made it, or "saved", and its scheme."""
    names = iter(OPERANDS[:2] if graph_kind(graph) == "forward" else OPERANDS[2:])
    found = {}
    # dgrad before wgrad: only the latter quantizes along the gradient's other dimension.
    nodes = q2_nodes(graph, "gemm", "gemm_masked_unrotate")
    gemms = sorted(nodes, key=lambda n: n.meta["val"].shape[0] == 72)
    for node in gemms:
        for codes, scheme in ((0, 7), (3, 8)):
            made = node.args[codes]
            op = made.args[0].target.name()[4:] if made.op == "call_function" else "saved"
            found[next(names)] = (op, node.args[scheme])
    return found


@pytest.mark.parametrize("recipe", PLAIN)
@pytest.mark.parametrize("global_scale", ["pow2", "exact"])
def test_what_is_left_to_the_gemm(recipe, global_scale) -> None:
    graphs = compiled_graphs(recipe, True, global_scale=global_scale)
    assert len(graphs) == 2
    found = {name: made for graph in graphs for name, made in operands(graph).items()}
    fprop = 0 if recipe == "mxfp4" else 2  # its fprop is in bf16
    assert len(found) == 4 + fprop
    plain = {name: op for name, (op, scheme) in found.items() if not scheme.endswith(AT)}
    assert plain == PLAIN[recipe]
    for graph in graphs:
        assert_values_fit(graph)


@pytest.mark.parametrize("recipe", ["quartet2", "tetrajet2"])
def test_inference(recipe) -> None:
    (graph,) = compiled_graphs(recipe, False)
    assert all(scheme.endswith(AT) for _, scheme in operands(graph).values())


def step(inner: str, disable_passes: tuple[str, ...] = (), **options) -> list[torch.Tensor]:
    """Result and gradients of a linear in a checkpointed region."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    linear = nn.Linear(200, 72, bias=False, dtype=torch.bfloat16)
    options |= {"inner": inner, "disable_passes": disable_passes}

    @torch.compile(backend="quartet2", options=options)
    def model(x):
        return checkpoint(linear, x, use_reentrant=False)

    x = torch.randn(150, 200).bfloat16().requires_grad_()
    y = model(x)
    torch.manual_seed(1)
    y.backward(y.detach())
    return [y.detach(), x.grad, linear.weight.grad]


@pytest.mark.parametrize(
    ("recipe", "keep"),
    [*((recipe, True) for recipe in PLAIN), ("quartet2", False), ("mxfp4_2d", False)],
)
def test_the_same_bits(recipe, keep) -> None:
    """The same bits as without the passes, whatever is saved and whatever is recomputed."""
    options = {"recipe": recipe, "keep_packed": keep, "recompute_weights": keep}
    swizzled = step("eager", **options)
    plain = step("eager", ("swizzle_scales", "swizzle_saved_scales"), **options)
    assert all(map(torch.equal, swizzled, plain))


def test_inductor_lays_out_swizzled_scales_as_they_are() -> None:
    """They do not get the strides that plain scales had when the graph was traced."""
    with inductor_config.patch(fx_graph_cache=False):
        assert all(map(torch.equal, step("inductor"), step("eager")))


def test_dynamic_rows() -> None:
    """One compilation for all numbers of tokens, whatever tiles they fill."""

    def results(*disable_passes: str) -> list[torch.Tensor]:
        torch._dynamo.reset()
        graphs = counters["stats"]["unique_graphs"]
        torch.manual_seed(0)
        linear = nn.Linear(200, 72, bias=False, dtype=torch.bfloat16)
        options = {"inner": "eager", "disable_passes": disable_passes}
        model = torch.compile(linear, backend="quartet2", options=options, dynamic=True)
        found = []
        for rows in (150, 40, 300):
            x = torch.randn(rows, 200).bfloat16().requires_grad_()
            y = model(x)
            y.backward(y.detach())
            found += [y, x.grad]
        assert counters["stats"]["unique_graphs"] == graphs + 1
        return [*found, linear.weight.grad]

    plain = results("swizzle_scales", "swizzle_saved_scales")
    assert all(map(torch.equal, results(), plain))
