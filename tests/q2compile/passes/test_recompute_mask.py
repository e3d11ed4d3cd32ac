# SPDX-License-Identifier: Apache-2.0
"""A GEMM's result whose rows are masked is saved unmasked, with the bits of before."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from q2compile.passes.joint.recompute_mask import recompute_mask_pass
from tests.support import quantizer_calls as calls
from tests.support.graph_builder import SOURCE, Builder, q2

ROWS, K, N, EXPERTS, TOP = 96, 64, 32, 8, 4
aten = torch.ops.aten


def step(folder: Any, checkpointed: bool = False, **options: Any) -> list[Tensor]:
    """A step of Hugging Face's experts, configured so that some of them are on other ranks."""
    pytest.importorskip("transformers", reason="its experts are masked (extra: train)")
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    torch._dynamo.reset()
    torch.manual_seed(1)
    sizes = {"hidden_size": K, "moe_intermediate_size": N, "num_experts": EXPERTS}
    config = Qwen3MoeConfig(**sizes, num_experts_per_tok=TOP)
    config._experts_implementation = "grouped_mm"
    model = Qwen3MoeSparseMoeBlock(config).bfloat16()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    model.experts._is_expert_parallel = True
    x = torch.randn(1, ROWS // TOP, K).bfloat16().requires_grad_()

    def run(x: Tensor) -> Any:
        return checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)

    y = torch.compile(run, backend="quartet2", options={"dump": str(folder), **options})(x)
    y.float().square().mean().backward()
    tensors = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
    assert all(tensor is not None and tensor.isfinite().all() for tensor in tensors)
    return tensors  # type: ignore[return-value]


def saved(folder: Any) -> str:
    """The outputs of the forward, each with its dtype."""
    text = (folder / "graph_0" / "2_forward.txt").read_text()
    names = text.splitlines()[-1].removeprefix("return (").removesuffix(")").split(", ")
    lines = [line for line in text.splitlines() if line.partition(":")[0] in names]
    return "\n".join(lines)


def test_bits_and_what_is_saved(tmp_path) -> None:
    made = step(tmp_path / "with", inner="eager")
    masked = step(tmp_path / "without", inner="eager", disable_passes=["recompute_mask"])
    assert all(map(torch.equal, made, masked))
    records = json.loads((tmp_path / "with" / "graph_0" / "passes.json").read_text())
    assert [r["matches"] for r in records if r["name"] == "recompute_mask"] == [2]
    # The results of both stacks, and no masked copy of them.
    result = rf"grouped_gemm(_1)?: bf16\[{ROWS}, {K}\] = q2"
    both, none = (saved(tmp_path / name) for name in ("with", "without"))
    assert len(re.findall(result, both)) == 2 and "= aten.where" not in both
    assert len(re.findall(result, none)) == 0 and "= aten.where" in none


def test_a_checkpoint_decides_by_itself(tmp_path) -> None:
    step(tmp_path, checkpointed=True, inner="eager")
    records = json.loads((tmp_path / "graph_0" / "passes.json").read_text())
    assert [r["matches"] for r in records if r["name"] == "recompute_mask"] == [0]


def graph(mask: tuple[int, ...], value: float = 0.0, of_gemm: bool = True) -> Builder:
    b = Builder()
    x, w = b.placeholder("x", ROWS, K), b.placeholder("w", N, K)
    keep = b.placeholder("keep", *mask, dtype=torch.bool)
    qx = b.outputs(b.call(calls.plain(x, None, None, SOURCE, 0)))
    qw = b.outputs(b.call(calls.plain(w, None, None, SOURCE, 0)))
    y = b.call(q2.gemm.default, *qx, *qw, None, SOURCE, SOURCE, torch.bfloat16)
    y = y if of_gemm else b.call(aten.add.Tensor, y, y)
    y = b.call(aten.reshape.default, y, [ROWS, N])
    zero = b.call(aten.full.default, [], value)
    zero.meta["val"] = zero.meta["val"].bfloat16()
    b.done(b.call(aten.where.self, keep, y, zero))
    return b


def test_what_is_marked() -> None:
    b = graph((ROWS, 1))
    before = str(b.graph)
    assert recompute_mask_pass(b.graph) == 1 and str(b.graph) == before
    (where,) = b.graph.find_nodes(op="call_function", target=aten.where.self)
    assert where.meta["recompute"] == CheckpointPolicy.MUST_RECOMPUTE
    assert recompute_mask_pass(b.graph) == 0


@pytest.mark.parametrize(
    "b", [graph((ROWS, N)), graph((ROWS, 1), 1.0), graph((ROWS, 1), of_gemm=False)]
)
def test_what_is_left(b) -> None:
    """A mask as large as the result; another fill value; a masked copy that has another reader."""
    assert recompute_mask_pass(b.graph) == 0
