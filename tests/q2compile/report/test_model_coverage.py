# SPDX-License-Identifier: Apache-2.0
"""`strict` and the report say which linears were not taken, and why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import q2compile
from q2compile.report import announce
from q2compile.report.dump_folder import DumpFolder
from tests.support.small_model import Mlp

pytestmark = pytest.mark.usefixtures("fresh_compiler", "only_rewritten")

EAGER = {"inner": "eager"}


class Rounded(torch.autograd.Function):
    """A linear with a weight that it rounds itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        rounded = (8 * w).round() / 8
        ctx.save_for_backward(x, rounded)
        return F.linear(x, rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, rounded = ctx.saved_tensors
        (dy,) = grads
        return dy @ rounded, dy.t() @ x


class RoundedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return Rounded.apply(x, self.up.weight)


class FixedLinear(nn.Module):
    """A linear with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.table)


class Replaced(nn.Linear):
    """An nn.Linear in whose parameter's place another library has put a plain tensor."""

    def __init__(self) -> None:
        super().__init__(64, 64, bias=False)
        weight = self.weight.detach().clone()
        del self.weight
        self.weight = weight


class WithReplaced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.up = nn.Identity(), Replaced()

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.first(x))


LEFT = {
    "autograd.Function": (RoundedLinear, "up", "inside a custom autograd.Function"),
    "buffer": (FixedLinear, "<linear>", "the weight is an input of the graph"),
    "plain tensor": (WithReplaced, "up", "the weight is an input of the graph"),
}


@pytest.mark.parametrize("case", LEFT)
def test_a_graph_whose_linears_are_all_left_is_never_silent(
    case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once; and strict has the same reason, and blames no graph break."""
    make, name, why = LEFT[case]
    monkeypatch.setattr(announce.First, "left", set())
    x = torch.randn(32, 64, requires_grad=True)
    for _ in range(2):
        torch.compile(make(), backend="quartet2", options=EAGER)(x).sum().backward()
        torch._dynamo.reset()
    line = f"q2compile: 0 of 1 matmuls quantized; left: {name} ({why})"
    assert caplog.messages.count(line) == 1
    strict = torch.compile(make(), backend="quartet2", options={**EAGER, "strict": True})
    if name == "<linear>":
        strict(x).sum().backward()  # it has no weight that a policy could want
        return
    with pytest.raises(
        q2compile.NotTakenError, match=f"strict: .* not taken: {name}: {why}"
    ) as got:
        strict(x)
    assert "graph break" not in str(got.value)


def test_what_a_policy_leaves_is_a_line_but_a_recipe_bf16_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(announce.First, "left", set())
    for options in ({"recipe": "bf16"}, {"policy": {"*": "bf16"}}):
        torch._dynamo.reset()
        torch.compile(Mlp(), backend="quartet2", options={**EAGER, **options})(torch.randn(8, 64))
    assert caplog.messages == ["q2compile: 0 of 2 matmuls quantized; left: up, down (policy)"]


class Blocks(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def blocks_with_options(count: int, **options: Any) -> Blocks:
    """Each block is compiled with a policy of its own."""
    model = Blocks(count)
    for i, layer in enumerate(model.layers):
        policy = {f"layers.{i}.up": "nvfp4"}
        layer.compile(backend="quartet2", options={**EAGER, "policy": policy, **options})
    return model


def test_parts_with_options_of_their_own_are_one_model(tmp_path: Path) -> None:
    model = blocks_with_options(2, strict=True, dump=str(tmp_path))
    model(torch.randn(32, 64)).sum().backward()
    rows = DumpFolder.get(str(tmp_path)).report.rows
    linears = [f"layers.{i}.{name}" for i in range(2) for name in ("up", "down")]
    assert [(row.module, row.taken) for row in rows] == [(name, True) for name in linears]


def test_a_part_that_is_never_compiled_is_missed_once(tmp_path: Path) -> None:
    model = blocks_with_options(3, dump=str(tmp_path))
    model.layers[2]._compiled_call_impl = None
    model(torch.randn(32, 64)).sum().backward()
    left = [row.module for row in DumpFolder.get(str(tmp_path)).report.rows if not row.taken]
    assert left == ["layers.2.up", "layers.2.down"]


@pytest.fixture
def two_compilations() -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=2):
        yield


def test_the_recompile_limit_is_named(two_compilations: None, tmp_path: Path) -> None:
    """Dynamo compiles no block after the limit, and warns of it in its own log alone."""
    x = torch.randn(32, 64)
    model = blocks_with_options(3, strict=True)
    with pytest.raises(q2compile.NotTakenError) as got:
        model(x).sum().backward()
    said = (
        "2 linear(s) never reached the backend because Dynamo compiles Mlp.forward 2 times at most"
    )
    assert f"{said}: layers.2.up, layers.2.down. Raise torch._dynamo.config.recompile_limit" in str(
        got.value
    )
    torch._dynamo.reset()
    model = blocks_with_options(3, dump=str(tmp_path))
    model(x)
    why = {row.module: row.why for row in DumpFolder.get(str(tmp_path)).report.rows}["layers.2.up"]
    assert why.startswith("not seen: Dynamo has compiled Mlp.forward 2 times, which is its limit")
    torch._dynamo.reset()
    model = Blocks(2)
    for layer in model.layers:
        layer.compile(backend="quartet2", options={**EAGER, "policy": {"layers.0.up": "bf16"}})
    with pytest.raises(q2compile.ConfigError, match="recompile_limit raised to the number of"):
        model(x)


def test_explain_before_does_not_make_strict_blind() -> None:
    class Broken(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x)) if self.whole else self.layers[0](x)

    model = Broken(2)
    model.whole = True
    options = {**EAGER, "strict": True}
    x = torch.randn(32, 64)
    assert all(row.taken for row in q2compile.explain(model, x, options=options).rows)
    model.whole = False
    with pytest.raises(q2compile.NotTakenError, match=r"layers\.1\.up, layers\.1\.down"):
        torch.compile(model, backend="quartet2", options=options)(x).sum().backward()


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_explain_lists_the_linears_of_a_wrapped_model_once(one_rank: None) -> None:
    model = Mlp()
    wrapped = nn.parallel.DistributedDataParallel(model)
    compiled = torch.compile(wrapped, backend="quartet2", options=EAGER)
    for each in (wrapped, compiled):
        rows = q2compile.explain(each, torch.randn(32, 64), options=EAGER).rows
        assert [(row.module, row.taken) for row in rows] == [("up", True), ("down", True)]
