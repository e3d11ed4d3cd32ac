# SPDX-License-Identifier: Apache-2.0
"""The passes on the backward of experts: both operands of a gradient from one read, also if the
ends of the groups are computed too late for that, and dequantized operands."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from q2compile.graph.nodes import q2_nodes
from q2compile.graph.quantizers import quantizers
from q2compile.passes.post_grad.dequantize_operands import dequantize_operands_pass
from q2compile.passes.post_grad.pair_directions import pair_directions_pass
from q2compile.passes.post_grad.share_rotations import share_rotations_pass
from q2compile.passes.verify import check_spec
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED
from tests.support import quantizer_calls as calls
from tests.support.graph_builder import EDEN, SOURCE, q2
from tests.support.serving import serve_by

E, T, N, K = 3, 200, 64, 48


def inputs() -> tuple[torch.Tensor, ...]:
    """dy of two stacks that share x, the saved codes of x and w, and the ends of the groups."""
    generator = torch.Generator().manual_seed(0)
    dy, dz, x, w = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((T, N), (T, N), (T, K), (E * N, K))
    )
    packed = (q2.quantize(t, scheme=SOURCE, rowwise=True, columnwise=False) for t in (x, w))
    offs = torch.tensor([7, 150, 190], dtype=torch.int32)
    return dy, dz, *itertools.chain(*packed), offs


def backward(dy, dz, x, x_scales, x_global, w, w_scales, w_global, offs):
    """Seeds up front, as merge_seeds leaves them; padded_offs made by wgrad, as the partitioner
    does that saves offs alone."""
    grads = []
    seeds = [(q2.seed(d, i), q2.seed(d, i + 2)) for i, d in enumerate((dy, dz))]
    for d, (of_dgrad, of_wgrad) in zip((dy, dz), seeds, strict=True):
        a = q2.quantize(
            d, scheme=EDEN, transform="rht64", rowwise=True, columnwise=False, rowwise_seed=of_dgrad
        )
        b = q2.requantize(
            w,
            w_scales,
            w_global,
            source_scheme=SOURCE,
            scheme=EDEN,
            transform="rht64",
            rows=K,
            columnwise_seed=of_dgrad,
            rng_offset=1,
        )
        grads.append(q2.grouped_gemm(*a, *b, offs, EDEN, EDEN, "dgrad", torch.bfloat16))
        ends = q2.padded_ends(offs)
        a = q2.quantize(
            d,
            scheme=EDEN,
            transform="rht64",
            rowwise=False,
            columnwise=True,
            offs=offs,
            padded_offs=ends,
            columnwise_seed=of_wgrad,
        )
        b = calls.grouped_again(
            *(x, x_scales, x_global, offs, ends, of_wgrad, SOURCE, EDEN, "rht64", K, 1)
        )()
        grads.append(q2.grouped_gemm(*a, *b, ends, EDEN, EDEN, "wgrad", torch.bfloat16))
    return grads


def traced() -> fx.GraphModule:
    gm = make_fx(backward, tracing_mode="fake")(*inputs())
    # As in AOTAutograd's graphs: one padded_ends, where the first wgrad needs it.
    first, *others = q2_nodes(gm.graph, "padded_ends")
    for other in others:
        other.replace_all_uses_with(first)
        gm.graph.erase_node(other)
    return gm


def result(gm: fx.GraphModule) -> list[torch.Tensor]:
    gm.graph.lint()
    gm.recompile()
    torch.manual_seed(1)
    return gm(*inputs())


def test_directions_are_paired_and_the_ends_moved_up() -> None:
    gm = traced()
    before = result(gm)
    assert pair_directions_pass(gm.graph) == 2
    check_spec(gm.graph, "backward", "test")
    made = [call for _, call in quantizers(gm.graph) if not call.reads_codes]
    assert [(call.rowwise, call.columnwise, call.grouped) for call in made] == 2 * [(True,) * 3]
    for got, want in zip(result(gm), before, strict=True):
        assert torch.equal(got, want)
    assert pair_directions_pass(gm.graph) == 0


def test_directions_of_other_groups_are_not_paired_when_those_come_too_late() -> None:
    """Ends that are no padded_ends stay where they are."""
    gm = traced()
    (ends,) = q2_nodes(gm.graph, "padded_ends")
    with gm.graph.inserting_after(ends):
        other = gm.graph.call_function(torch.ops.aten.clone.default, (ends,))
    other.meta = dict(ends.meta)
    ends.replace_all_uses_with(other, delete_user_cb=lambda user: user is not other)
    assert pair_directions_pass(gm.graph) == 1  # the second gradient's, whose ops come after it


def test_stacks_that_share_x_rotate_it_once() -> None:
    gm = traced()
    pair_directions_pass(gm.graph)
    assert share_rotations_pass(gm.graph) == 1
    check_spec(gm.graph, "backward", "test")
    found = [call for _, call in quantizers(gm.graph)]
    assert sum(call.reads_codes and call.grouped for call in found) == 1
    both = [call for call in found if call.rowwise and call.columnwise]
    assert [call.args["rng_offset"] for call in both] == [0, 2]
    assert all(grad.isfinite().all() for grad in result(gm))


def test_operands_are_dequantized_for_grouped_products(monkeypatch: pytest.MonkeyPatch) -> None:
    def serving(op, args):
        return SimpleNamespace(name="cuda_bf16" if op == "grouped_gemm" else "cuda", launching=None)

    serve_by(monkeypatch, serving)
    gm = traced()
    pair_directions_pass(gm.graph)
    before = result(gm)
    # Both operands of two gradients, and the codes w for dgrad and x for wgrad.
    assert dequantize_operands_pass(gm.graph) == 2 + 2 + 2
    for gemm in q2_nodes(gm.graph, "grouped_gemm"):
        assert gemm.args[7:9] == (EDEN + DEQUANTIZED,) * 2
        assert gemm.args[0].meta["val"].dtype == gemm.args[3].meta["val"].dtype == torch.bfloat16
    check_spec(gm.graph, "backward", "test")
    for got, want in zip(result(gm), before, strict=True):
        assert torch.equal(got, want)  # the reference multiplies the same dequantized operands
