# SPDX-License-Identifier: Apache-2.0
"""Which placements are taken, their collectives, and why the others are left. These tests look at
graphs of rank 0 in a fake process group of four; `test_distributed.py` compares results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from q2compile import explain
from q2compile.linear.tensor_parallel import ShardingPlan, smallest_part
from q2compile.report.report import RunReport
from q2compile.torch_internals.aot_autograd import aot_eager_compile

pytestmark = pytest.mark.usefixtures("fresh_compiler")

K, N, BATCH, SEQ = 128, 256, 4, 32
R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)

Placements = list[Placement]
EAGER = {"inner": "eager", "strict": True}

# Before 2.13 torch flattens the x of a linear, and DTensor raises an error if it is sharded along
# the sequence.
FLATTENS_X = torch.__version__ < "2.13"


@pytest.fixture(autouse=True, scope="module")
def four_ranks() -> Iterator[None]:
    """Once: DTensor's caches take equal meshes for the same, and keep the groups of the first."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def mesh_of(dimensions: int) -> DeviceMesh:
    return dist.init_device_mesh("cpu", (2, 2) if dimensions == 2 else (4,))


class Placed(nn.Module):
    """A linear whose operands are DTensors; x comes as this rank's part."""

    def __init__(self, x: Placements, w: Placements, bias: Placements | None = None) -> None:
        super().__init__()
        self.mesh, self.placements = mesh_of(len(w)), x
        self.weight = nn.Parameter(distribute_tensor(torch.randn(N, K), self.mesh, w))
        self.bias = None
        if bias is not None:
            self.bias = nn.Parameter(distribute_tensor(torch.randn(N), self.mesh, bias))

    def part(self) -> Tensor:
        whole = distribute_tensor(torch.randn(BATCH, SEQ, K), self.mesh, self.placements)
        return whole.to_local().requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        x = DTensor.from_local(x, self.mesh, self.placements)
        y = nn.functional.linear(x, self.weight, self.bias)
        return y.redistribute(placements=[R] * self.mesh.ndim).to_local()


def collectives(model: Placed, folder: Path) -> Counter[str]:
    """The collectives in the quantized forward and backward graphs."""
    torch._dynamo.reset()
    options = {"inner": "eager", "dump": str(folder)}
    torch.compile(model, backend="quartet2", options=options)(model.part()).sum().backward()
    text = "".join(path.read_text() for path in folder.rglob("4_after_passes_*.txt"))
    assert "q2.gemm" in text
    calls = Counter(word.partition("(")[0] for word in text.split() if "_c10d_functional" in word)
    del calls["_c10d_functional.wait_tensor"]
    return calls


def collectives_of_torch(model: Placed) -> Counter[str]:
    """The collectives in the graphs of torch's own linear."""
    calls: Counter[str] = Counter()

    def count(gm: torch.fx.GraphModule) -> None:
        names = (str(node.target).removesuffix(".default") for node in gm.graph.nodes)
        calls.update(name for name in names if "_c10d_functional" in name)

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return aot_eager_compile(gm, inputs, count)

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(model.part()).sum().backward()
    del calls["_c10d_functional.wait_tensor"]
    return calls


@pytest.mark.parametrize(
    ("x", "w", "bias"),
    [
        ([R], [S0], [S0]),  # column-wise
        ([S0], [S0], [S0]),  # x is gathered first
        ([S2], [S1], [R]),  # row-wise
        ([R], [S1], [R]),
        ([S0], [R], [R]),  # data parallel
        pytest.param(
            *([S1], [R], None),  # sequence parallel
            marks=pytest.mark.skipif(
                FLATTENS_X, reason="torch before 2.13 flattens a sharded sequence"
            ),
        ),
        ([R], [R], [R]),  # redundant
        ([S0, R], [R, S0], [R, S0]),  # data x column-wise
        ([S0, S2], [R, S1], [R, R]),  # data x row-wise
        ([S0, R], [R, R], None),
    ],
)
def test_no_collective_more_than_torchs_own_linear(
    x: Placements, w: Placements, bias: Placements | None, tmp_path: Path
) -> None:
    own = collectives(Placed(x, w, bias), tmp_path)
    assert own <= collectives_of_torch(Placed(x, w, bias))


def reported(model: nn.Module, *args: Tensor) -> RunReport:
    return explain(model, *args, options={"inner": "eager"})


@pytest.mark.parametrize(
    ("x", "w", "bias", "why"),
    [
        ([S2], [R], None, "the weight is replicated and the activation placed S(2)"),
        ([P], [R], None, "the weight is replicated and the activation placed P(sum)"),
        ([R, P], [S0, R], None, "the activation placed P(sum)"),
    ],
)
def test_placements_that_no_plan_covers_are_left_with_a_reason(
    x: Placements, w: Placements, bias: Placements | None, why: str
) -> None:
    model = Placed([R] * len(x), w, bias)
    model.placements = x
    local = torch.randn(BATCH, SEQ, K // (4 if x == [S2] else 1))
    (row,) = reported(model, local).rows
    assert not row.taken and row.wanted and why in row.why


def test_too_small_is_what_a_rank_has() -> None:
    class Narrow(Placed):
        def __init__(self) -> None:
            super().__init__([R], [S0])
            self.weight = nn.Parameter(distribute_tensor(torch.randn(32, K), self.mesh, [S0]))

    model = Narrow()
    (row,) = reported(model, model.part()).rows
    assert row.why == "too small: a rank's part of the weight is [8, 128], a block has 16 values"


def test_all_ranks_agree_on_what_is_too_small() -> None:
    """33 rows on 4 ranks are 9, 9, 9 and 6; 5 are 2, 2, 1 and none."""
    mesh = mesh_of(1)
    assert smallest_part(distribute_tensor(torch.randn(33, K), mesh, [S0])) == (6, K)
    assert smallest_part(distribute_tensor(torch.randn(5, K), mesh, [S0])) == (0, K)
    assert smallest_part(torch.randn(33, K)) == (33, K)


def test_the_report_has_a_ranks_part() -> None:
    shapes = {
        (BATCH * SEQ, N // 4, K): ([R], [S0]),
        (BATCH * SEQ, N, K // 4): ([S2], [S1]),
        (BATCH * SEQ // 2, N // 2, K): ([S0, R], [R, S0]),
    }
    if not FLATTENS_X:
        shapes[BATCH * SEQ // 4, N, K] = ([S1], [R])
    for shape, (x, w) in shapes.items():
        torch._dynamo.reset()  # or sizes that differ become symbols, which DTensor can't split by
        model = Placed(x, w)
        (row,) = reported(model, model.part()).rows
        assert row.shape == shape and row.taken


def test_the_plan() -> None:
    """Data-parallel rows times a row-wise layer with a bias, on 2 x 2."""
    mesh = mesh_of(2)
    x = distribute_tensor(torch.randn(BATCH, SEQ, K), mesh, [S0, S2])
    w = distribute_tensor(torch.randn(N, K), mesh, [R, S1])
    bias = distribute_tensor(torch.randn(N), mesh, [R, R])
    plan = ShardingPlan.of(x, w, bias)
    assert isinstance(plan, ShardingPlan)
    assert (plan.x, plan.bias, plan.y) == ((S0, S2), (R, R), (S0, P))
    assert (plan.grad_x, plan.grad_w, plan.grad_bias) == ((S0, S2), (P, S1), (P, R))
    assert plan.addends == 2


def test_operands_that_do_not_go_together() -> None:
    mesh = mesh_of(1)
    x, w = torch.randn(SEQ, K), distribute_tensor(torch.randn(N, K), mesh, [S0])
    assert ShardingPlan.of(x, w, None) == (
        "some of activation, weight and bias are DTensors and some are not"
    )
    elsewhere = distribute_tensor(x, mesh_of(2), [R, R])
    assert "different device meshes" in str(ShardingPlan.of(elsewhere, w, None))


class ExpertParallel(nn.Module):
    """A rank's experts, taken out of a DTensor as torchtitan takes them."""

    def __init__(self) -> None:
        super().__init__()
        # A fake rank would not send its part of a distributed tensor.
        w = torch.randn(2, N, K, dtype=torch.bfloat16)
        self.w = nn.Parameter(DTensor.from_local(w, mesh_of(1), [S0]))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.w.to_local().transpose(-2, -1), offs=offs)


class Gathered(nn.Module):
    """A weight that the model gathers itself, in the dtype of x."""

    def __init__(self) -> None:
        super().__init__()
        w = torch.randn(N // 4, K)
        self.w = nn.Parameter(DTensor.from_local(w, mesh_of(1), [S0]))

    def forward(self, x: Tensor) -> Tensor:
        w = self.w.redistribute(placements=[R], forward_dtype=x.dtype)
        return nn.functional.linear(x, w.to_local(grad_placements=[P]))


def test_a_weight_that_the_model_gathers() -> None:
    (row,) = explain(Gathered(), torch.randn(8, K, dtype=torch.bfloat16), options=EAGER).rows
    assert (row.module, row.taken, row.shape) == ("w", True, (8, N, K))


def test_a_ranks_experts_out_of_a_dtensor() -> None:
    model, offs = ExpertParallel(), torch.tensor([9, 40], dtype=torch.int32)
    x = torch.randn(40, K, dtype=torch.bfloat16, requires_grad=True)
    (row,) = explain(model, x, offs, options=EAGER).rows
    assert (row.module, row.taken, row.shape) == ("w", True, (2, 40, N, K))
    compiled = torch.compile(model, backend="quartet2", options={"inner": "eager"})
    dy = torch.randn(40, N, dtype=torch.bfloat16)
    inputs = (x, model.w)
    dx, dw = torch.autograd.grad(compiled(x, offs), inputs, dy)
    own_dx, own_dw = torch.autograd.grad(model(x, offs), inputs, dy)
    assert isinstance(dw, DTensor) and dw.placements == own_dw.placements
    # fprop's operands have relative errors of sqrt(0.0075), those of a gradient sqrt(0.0094).
    for ours, own in ((dx, own_dx), (dw.to_local(), own_dw.to_local())):
        assert torch.cosine_similarity(ours.flatten().float(), own.flatten().float(), 0) > 0.97
