# SPDX-License-Identifier: Apache-2.0
"""The passes before the partitioner: which tensors are saved, and which are recomputed."""

import operator
import re

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils.checkpoint import CheckpointPolicy

from q2compile import Config
from q2compile.compiler.joint_passes import JointPasses
from q2compile.passes import passes_over
from q2compile.passes.joint.anchor_seeds import anchor_seeds_pass
from q2compile.passes.joint.keep_packed import keep_packed_pass
from q2compile.passes.joint.recompute_weights import recompute_weights_pass
from tests.support import quantizer_calls as calls
from tests.support.graph_builder import Builder, q2
from tests.support.small_model import Mlp, quantized

SCHEME = "nvfp4_46_pow2"
AGAIN, SAVE = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE
PREFER = CheckpointPolicy.PREFER_RECOMPUTE


def to_bf16(b, w):
    return b.call(torch.ops.prims.convert_element_type.default, w, torch.bfloat16)


def joint_graph(weight=None, tags=None, reuse=False):
    """Forward and dgrad of y = x wᵀ, w an fp32 parameter under bf16 autocast.

    weight    what is done to w before it is quantized; a cast to bf16 by default
    tags      {name: policy}, as torch.utils.checkpoint leaves them
    reuse     dgrad takes w's codes transposed, and not requantized
    """
    b = Builder()
    scheme = "nvfp4_16x16_pow2" if reuse else SCHEME
    x = b.placeholder("primals_1", 48, 64)
    w = b.placeholder("primals_2", 32, 64, dtype=torch.float32)
    dy = b.placeholder("tangents_1", 48, 32)
    cast = (weight or to_bf16)(b, w)
    qx = b.call(calls.plain(x, None, None, SCHEME, 0))
    qw = b.call(calls.plain(cast, None, None, scheme, 0))
    x_codes, w_codes = b.outputs(qx), b.outputs(qw)
    y = b.call(q2.gemm.default, *x_codes, *w_codes, None, SCHEME, scheme, torch.bfloat16)
    if reuse:
        a = b.call(calls.plain(dy, None, None, SCHEME, 0))
        transposed = b.call(q2.transpose.default, *w_codes[:2], scheme, 64)
        operand = [*(b.call(operator.getitem, transposed, i) for i in range(2)), w_codes[2]]
    else:
        seed = b.call(q2.seed.default, dy, 0)
        a = b.call(calls.one(dy, seed, "nvfp4_ms_eden_pow2", "rht128", False, 0))
        again = (seed, SCHEME, "nvfp4_ms_eden_pow2", "rht128", 64, 1)
        operand = b.outputs(b.call(calls.again(*w_codes, *again)))
    schemes = (SCHEME, scheme) if reuse else 2 * ("nvfp4_ms_eden_pow2",)
    dx = b.call(q2.gemm.default, *b.outputs(a), *operand, None, *schemes, torch.bfloat16)
    for name, policy in (tags or {}).items():
        {"qx": qx, "qw": qw, "y": y}[name].meta["recompute"] = policy
    return b.done(y, dx).graph


def policies(graph):
    """{node: policy} of the tagged nodes, getitems by the op and the output."""
    names = {}
    for node in graph.nodes:
        if "recompute" in node.meta:
            names[node.name] = node.meta["recompute"]
    return names


def test_the_codes_of_a_weight_and_its_cast_are_made_again():
    graph = joint_graph()
    assert recompute_weights_pass(graph) == 1
    expected = ["convert_element_type_default", "quantize_default_1"]
    expected += ["getitem_3", "getitem_4", "getitem_5"]
    assert policies(graph) == dict.fromkeys(expected, AGAIN)
    assert recompute_weights_pass(graph) == 1 and len(policies(graph)) == 5


def test_codes_that_are_used_transposed_are_transposed_again():
    """Otherwise the partitioner would save them transposed."""
    graph = joint_graph(reuse=True)
    assert recompute_weights_pass(graph) == 1
    # The cast, the codes with three outputs, the transposed codes with two.
    assert {"transpose_default", "quantize_default_1"} <= set(policies(graph))
    assert len(policies(graph)) == 8 and set(policies(graph).values()) == {AGAIN}
    assert "quantize_default_2" not in policies(graph)  # the gradient's


def computed(b, w):
    return b.call(torch.ops.aten.tanh.default, w)


def computed_and_cast(b, w):
    return to_bf16(b, computed(b, w))


@pytest.mark.parametrize("weight", [computed, computed_and_cast])
def test_a_weight_that_is_computed_is_left_alone(weight):
    graph = joint_graph(weight)
    assert recompute_weights_pass(graph) == 0 and policies(graph) == {}


def test_packed_operands_of_a_checkpointed_region_are_kept():
    graph = joint_graph(tags={"qx": PREFER, "qw": AGAIN, "y": PREFER})
    assert keep_packed_pass(graph) == 2
    kept = [f"getitem{i}" for i in ("", "_1", "_2", "_3", "_4", "_5")]
    expected = dict.fromkeys(["quantize_default", "quantize_default_1", *kept], SAVE)
    assert policies(graph) == {**expected, "gemm_default": PREFER}
    assert keep_packed_pass(graph) == 0
    # Both options are on: the weight's codes are recomputed.
    assert [row.name for row in passes_over("joint")][-2:] == ["keep_packed", "recompute_weights"]
    assert recompute_weights_pass(graph) == 1
    assert policies(graph)["quantize_default"] == SAVE
    assert policies(graph)["quantize_default_1"] == AGAIN


@pytest.mark.parametrize("tags", [{}, {"y": PREFER}, {"qx": SAVE}])
def test_what_is_not_checkpointed_is_left_alone(tags):
    graph = joint_graph(tags=tags)
    before = policies(graph)
    assert keep_packed_pass(graph) == 0 and policies(graph) == before


def test_the_runner_runs_what_is_asked_for_and_leaves_inference_graphs():
    records = []
    runner = JointPasses(Config(recompute_weights=True), records)
    graph = joint_graph()
    runner(graph)
    ran = [(r.graph, r.name, r.matches) for r in records]
    assert ran == [
        ("joint", "anchor_seeds", 0),
        ("joint", "gather_scattered", 0),
        ("joint", "quantize_shards", 0),
        ("joint", "quantize_rows_once", 0),
        ("joint", "swizzle_saved_scales", 0),
        ("joint", "recompute_mask", 0),
        ("joint", "recompute_weights", 1),
    ]
    b = Builder()
    b.done(b.call(calls.plain(b.placeholder("arg0_1", 32, 64), None, None, SCHEME, 0)))
    runner(b.graph)
    assert len(records) == 7
    assert runner.uuid() != JointPasses(Config(keep_packed=True), []).uuid()
    assert JointPasses(Config(), [], first=lambda graph: None).uuid() is None


def passes_of_joint(**options):
    """The joint passes that run, by name, and those that are disabled."""
    records = []
    JointPasses(Config(**options), records)(joint_graph())
    return [r.name for r in records if not r.note], [r.name for r in records if r.note]


def test_the_configuration_decides_which_joint_passes_run():
    names = ["anchor_seeds", "gather_scattered", "quantize_shards", "quantize_rows_once"]
    names += ["swizzle_saved_scales", "recompute_mask", "recompute_weights"]
    assert passes_of_joint() == (names, [])
    assert passes_of_joint(recompute_weights=False) == (names[:-1], [])
    assert passes_of_joint(cache_weights=True) == (names[:-1], [])
    names[4:4] = ["share_saved_rotations"]
    names[2:2] = ["share_operands"]
    assert passes_of_joint(recipe="nvfp4") == (names, [])
    assert passes_of_joint(recipe="nvfp4", disable_passes=names) == ([], names[:-1])


def test_seeds_of_a_constant_are_anchored_on_a_gradient():
    """The one of a constant alone, and no second time."""
    b = Builder()
    x, dy = b.placeholder("primals_1", 32, 64), b.placeholder("tangents_1", 32, 64)
    zeros = b.call(torch.ops.aten.full.default, [32, 64], 0)
    view = b.call(torch.ops.aten.view.default, zeros, [64, 32])
    anchors = [x, dy, view]
    seeds = [b.call(q2.seed.default, anchor, i) for i, anchor in enumerate(anchors)]
    gm = b.done(*seeds)
    assert anchor_seeds_pass(gm.graph) == 1
    found = gm.graph.find_nodes(op="call_function", target=q2.seed.default)
    assert [(seed.args[0].name, seed.args[1]) for seed in found] == [
        ("primals_1", 0),
        ("tangents_1", 1),
        ("tangents_1", 2),
    ]
    assert anchor_seeds_pass(gm.graph) == 0


T = 128


def step(checkpointed, folder, **options):
    """Loss, gradients, the tensors saved for backward, and the ops of the backward graph."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(Mlp(checkpointed), Mlp(checkpointed))
    x = torch.randn(T, 64, requires_grad=True)
    compiled = quantized(model, dump=str(folder), **options)
    saved = []
    noting = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with noting, torch.autocast("cpu", torch.bfloat16):
        loss = compiled(x).float().square().mean()
    torch.manual_seed(1)
    loss.backward()
    free = {p.untyped_storage().data_ptr() for p in (*model.parameters(), x)}
    saved = [t for t in saved if not isinstance(t, FakeTensor)]  # those of the trace
    saved = [t for t in saved if t.untyped_storage().data_ptr() not in free]
    text = (sorted(folder.glob("graph_*"))[-1] / "3_backward.txt").read_text()
    lines = [line for line in text.splitlines() if "transform=" not in line]  # those of a forward
    counts = {op: sum(f"q2.{op}(" in line for line in lines) for op in ("quantize", "gemm")}
    return loss.detach(), [p.grad for p in (*model.parameters(), x)], saved, counts


def equal(one, other):
    return torch.equal(one[0], other[0]) and all(map(torch.equal, one[1], other[1]))


def bytes_of(tensors, *dtypes):
    return sum(t.nbytes for t in tensors if t.dtype in dtypes)


PACKED = (torch.uint8, torch.float8_e4m3fn)
WEIGHTS = 4 * 64 * 128 * 4.5 / 8  # bytes of the codes and scales of four weights
INPUTS = 2 * T * (64 + 128) * 4.5 / 8  # and of the inputs of four linears


def test_without_the_codes_of_weights(tmp_path):
    """4.5 bits per parameter less, four quantizations more, the same bits. Tensors saved in bf16
    stay the same: under autocast the fp32 parameter is saved, not its cast."""
    plain = step(False, tmp_path)
    again = step(False, tmp_path, recompute_weights=True)
    assert equal(plain, again)
    assert bytes_of(plain[2], *PACKED) == WEIGHTS + INPUTS
    assert bytes_of(again[2], *PACKED) == INPUTS
    assert bytes_of(again[2], torch.bfloat16) == bytes_of(plain[2], torch.bfloat16)
    assert (plain[3]["quantize"], again[3]["quantize"]) == (0, 4)


def test_nvfp4_without_the_codes_of_weights(tmp_path):
    """Its dgrad takes them transposed: the saved weight is quantized in that form."""
    plain = step(False, tmp_path, recipe="nvfp4")
    again = step(False, tmp_path, recipe="nvfp4", recompute_weights=True)
    assert equal(plain, again)
    less = bytes_of(plain[2], *PACKED) - bytes_of(again[2], *PACKED)
    assert less == 4 * 64 * 128 * (4 + 8 / 256) / 8


def test_packed_operands_under_checkpointing(tmp_path):
    """With checkpoints no packed operand is saved, and the backward repeats all eight
    quantizations. With the option it repeats none, and saves as much as without checkpoints. The
    forward GEMMs of `up` are recomputed in both cases, for the derivative of silu. All runs have
    the same bits."""
    plain = step(False, tmp_path)
    checkpointed = step(True, tmp_path)
    kept = step(True, tmp_path, keep_packed=True)
    both = step(True, tmp_path, keep_packed=True, recompute_weights=True)
    assert equal(plain, checkpointed) and equal(plain, kept) and equal(plain, both)
    packed = [bytes_of(s[2], *PACKED) for s in (plain, checkpointed, kept, both)]
    assert packed == [WEIGHTS + INPUTS, 0, WEIGHTS + INPUTS, INPUTS]
    quantized = [s[3]["quantize"] for s in (plain, checkpointed, kept, both)]
    assert quantized == [0, 8, 0, 4]
    backward = 8  # a dgrad and a wgrad of each linear
    assert plain[3]["gemm"] == backward and kept[3]["gemm"] == both[3]["gemm"] == backward + 2


def test_inductor_runs_them_too(tmp_path):
    """In its joint graph, with its caches' blessing: both at once, in one compilation."""
    _, _, saved, counts = step(
        True, tmp_path, inner="inductor", keep_packed=True, recompute_weights=True
    )
    assert bytes_of(saved, *PACKED) == INPUTS
    assert counts == {"quantize": 4, "gemm": 8 + 2}


def test_wrong_values_are_refused():
    with pytest.raises(ValueError, match="keep_packed: got 1; allowed: True, False"):
        Config(keep_packed=1)
    for wrong in (1, "always", ["auto"]):
        message = re.escape(f"recompute_weights: got {wrong!r}; allowed: 'auto', True, False")
        with pytest.raises(ValueError, match=message):
            Config(recompute_weights=wrong)
    with pytest.raises(ValueError, match="it runs before them"):
        Config(inductor={"joint_custom_post_pass": None})
