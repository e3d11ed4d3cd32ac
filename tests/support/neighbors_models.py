# SPDX-License-Identifier: Apache-2.0
"""A program: small models compiled by plain torch.compile, in a process in which q2compile has just
trained a model, or in one without it. Writes the generated code and the results of each.

    python -m tests.support.neighbors_models FILE with|without
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Result = list[Tensor]


@dataclass(frozen=True)
class Case:
    """make: of a function or module, and its inputs. settings: of torch.compile and Inductor."""

    make: Callable[[], tuple[Callable[..., Any], Sequence[Tensor]]]
    trains: bool = True
    compile: dict[str, Any] = field(default_factory=dict)
    inductor: dict[str, Any] = field(default_factory=dict)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Any:
    return lambda: (function, [randn(*shape) for shape in shapes])


def module(make: Callable[[], nn.Module], *shape: int) -> Any:
    return lambda: (make(), [randn(*shape)])


def tokens(make: Callable[[], nn.Module], vocabulary: int, *shape: int) -> Any:
    return lambda: (make(), [torch.randint(vocabulary, shape)])


def _by_permutation(x: Tensor) -> Tensor:
    p = x.detach()[:, 0].argsort()
    return x[p // 4].sin() * x[p]


def _scattered(x: Tensor) -> Tensor:
    index = torch.arange(x.numel()).view_as(x) % x.shape[0]
    return torch.zeros_like(x).scatter_add(0, index, x) + x.scatter(0, index[:2], x[2:4])


def _index_add(x: Tensor) -> Tensor:
    p = torch.arange(16).flip(0)
    return torch.zeros(8, 32).index_add(0, p // 2, x) * 2


def _index_put(x: Tensor) -> Tensor:
    i = torch.arange(8) * 3 % 8
    return x.clone().index_put((i,), x[i] * 2, accumulate=True)


def _routed(x: Tensor) -> Tensor:
    """Tokens go to experts and back."""
    weight, expert = x[:, :4].softmax(-1).topk(2)
    order = expert.flatten().argsort(stable=True)
    rows = x[order // 2].tanh() * weight.flatten()[order][:, None]
    return torch.zeros_like(x).index_add(0, order // 2, rows)


def _fp8(x: Tensor) -> Tensor:
    scale = x.detach().abs().amax() / 448
    return (x.detach() / scale).to(torch.float8_e4m3fn).float() * scale


def _many(x: Tensor) -> list[Tensor]:
    """A set of many nodes, each of which reads x once."""
    return [(x * (0.01 * i)).sin() for i in range(40)]


def _rope(x: Tensor) -> Tensor:
    angle = torch.outer(torch.arange(16.0), torch.arange(16.0) / 16)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * dy


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _mlp()

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


class _Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 16)

    def forward(self, ids: Tensor) -> Any:
        return self.bag(ids, torch.tensor([0, 3, 5]))


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _break(x: Tensor) -> Tensor:
    x = x.sin()
    torch._dynamo.graph_break()
    return x.cos() + torch.cat([x, x], 0)[:16]


def _cond(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


ROWS = (16, 32)
LINEAR = module(_mlp, *ROWS)
CASES = {
    "index by permutation": Case(of(_by_permutation, ROWS)),
    "scatter": Case(of(_scattered, ROWS)),
    "index_add": Case(of(_index_add, ROWS)),
    "index_put": Case(of(_index_put, (8, 32))),
    "routed": Case(of(_routed, ROWS)),
    "gather": Case(of(lambda x: x.gather(1, x.detach().argsort(1) // 2), ROWS)),
    "sort": Case(of(lambda x: x.sort(1).values * 2, ROWS)),
    "cumsum": Case(of(lambda x: x.cumsum(0).exp(), ROWS)),
    "cat": Case(of(lambda x: torch.cat([x.sin(), x.cos(), x[:, :8]], 1), ROWS)),
    "cat unused": Case(of(lambda x: (torch.cat([x, x], 0), x * 2)[1], ROWS)),
    "cat of rows": Case(of(lambda x: F.silu(torch.cat([x, x * 2], 0)).sum(1), ROWS)),
    **{f"sum of {n}": Case(of(lambda x: (x * x).sum(-1), (12, n))) for n in (2, 8, 9, 16)},
    "mean of 8": Case(
        of(lambda x: x - x.view(16, 4, 8).mean(-1, True).expand(16, 4, 8).flatten(1), ROWS)
    ),
    "softmax": Case(of(lambda x: (x @ x.t()).softmax(-1), ROWS)),
    "logsumexp": Case(of(lambda x: x.logsumexp(-1), (16, 10))),
    "fp8": Case(of(_fp8, ROWS), trains=False),
    "many nodes": Case(of(lambda x: sum(_many(x)) + x.cos(), ROWS)),
    "rope": Case(of(_rope, ROWS)),
    "dynamic": Case(LINEAR, compile={"dynamic": True}),
    "dynamic cat": Case(
        of(lambda x: torch.cat([x, x * x.shape[0]], 0), ROWS), compile={"dynamic": True}
    ),
    "linear": Case(LINEAR),
    "linear bf16": Case(lambda: (_mlp().bfloat16(), [torch.randn(ROWS).bfloat16()])),
    "inference": Case(LINEAR, trains=False),
    "freezing": Case(LINEAR, trains=False, inductor={"freezing": True}),
    "max_autotune": Case(LINEAR, trains=False, inductor={"max_autotune": True}),
    "settings of a training": Case(
        LINEAR,
        compile={"mode": "reduce-overhead"},
        inductor={"nan_asserts": True, "epilogue_fusion": False, "emulate_precision_casts": True},
    ),
    "batchnorm": Case(module(lambda: nn.BatchNorm1d(32), *ROWS)),
    "layernorm": Case(module(lambda: nn.LayerNorm(32), *ROWS)),
    "conv": Case(module(lambda: nn.Conv2d(3, 4, 3), 2, 3, 8, 8)),
    "embedding": Case(tokens(lambda: nn.Embedding(20, 16), 20, 4, 5)),
    "embedding bag": Case(tokens(_Bag, 20, 8)),
    "dropout": Case(module(lambda: nn.Dropout(0.5), *ROWS)),
    "custom function": Case(of(_Square.apply, ROWS)),
    "checkpoint": Case(module(_Checkpointed, *ROWS)),
    "attention": Case(of(_attention, *[(2, 2, 8, 16)] * 3)),
    "cross entropy": Case(of(lambda x: F.cross_entropy(x, torch.arange(16)), ROWS)),
    "graph break": Case(of(_break, ROWS)),
    "cond": Case(of(_cond, ROWS), trains=False),
    "einsum": Case(of(lambda x, y: torch.einsum("ij,kj->ik", x, y), ROWS, ROWS)),
    "bmm": Case(of(lambda x, y: x @ y, (2, 8, 16), (2, 16, 8))),
}

# Each group is one graph: to compile one takes seconds, whatever is in it.
TOGETHER = {
    "indexing": (
        *("index by permutation", "scatter", "index_add", "index_put", "routed", "gather", "sort"),
        *("cat", "cat unused", "cat of rows", "many nodes", "rope"),
    ),
    "reductions": (
        *("sum of 2", "sum of 8", "sum of 9", "sum of 16", "mean of 8", "cumsum", "softmax"),
        *("logsumexp", "cross entropy"),
    ),
    "layers": (
        *("linear", "batchnorm", "layernorm", "conv", "embedding", "embedding bag", "dropout"),
        *("custom function", "checkpoint", "attention", "einsum", "bmm", "linear bf16"),
    ),
    "dynamic shapes": ("dynamic", "dynamic cat"),
    "without gradients": ("fp8", "inference", "cond"),
}


class _Together(nn.Module):
    """The cases of a group, one after the other, each with inputs of its own."""

    def __init__(self, functions: Sequence[Callable[..., Any]], counts: Sequence[int]) -> None:
        super().__init__()
        self.functions, self.counts = functions, counts
        self.held = nn.ModuleList(f for f in functions if isinstance(f, nn.Module))

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        results, at = [], 0
        for function, count in zip(self.functions, self.counts, strict=True):
            results.append(function(*inputs[at : at + count]))
            at += count
        return results


def together(names: Sequence[str]) -> Case:
    """The case of a group."""
    cases = [CASES[name] for name in names]
    (trains,) = {case.trains for case in cases}
    assert all((case.compile, case.inductor) == (cases[0].compile, {}) for case in cases)

    def make() -> Any:
        made = [case.make() for case in cases]
        functions, inputs = zip(*made, strict=True)
        return _Together(functions, [len(i) for i in inputs]), sum(map(list, inputs), [])

    return Case(make, trains, cases[0].compile)


def graphs() -> dict[str, Case]:
    """All cases, in groups or by themselves."""
    grouped = {name for names in TOGETHER.values() for name in names}
    alone = {name: case for name, case in CASES.items() if name not in grouped}
    return {**{name: together(names) for name, names in TOGETHER.items()}, **alone}


TRAINED: tuple[dict[str, Any], ...] = (
    {"recipe": "quartet2", "fuse_rotations": True},
    {"recipe": "nvfp4", "cache_weights": True, "inductor": {"nan_asserts": True}},
)
KEPT: list[Any] = []  # alive while the others are compiled


def train_with_q2compile() -> None:
    """Small models, one with each of `TRAINED`."""
    for options in TRAINED:
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))
        compiled = torch.compile(model, backend="quartet2", options=dict(options))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            compiled(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
        KEPT.append((model, compiled, optimizer))


def run(case: Case) -> tuple[list[str], Result]:
    """Code and results of one model."""
    from torch._inductor.utils import run_and_get_code

    gc.freeze()  # collections need not visit the cases before
    torch._dynamo.reset()
    torch.manual_seed(0)
    function, inputs = case.make()
    with inductor_config.patch({"fx_graph_cache": False, **case.inductor}):
        compiled = torch.compile(function, **case.compile)
        results, code = run_and_get_code(_call, compiled, function, inputs, case.trains)
    return [_normal(text) for text in code], results


def _call(compiled: Any, function: Any, inputs: Sequence[Tensor], trains: bool) -> Result:
    if not trains:
        with torch.no_grad():
            return _listed(compiled(*inputs))
    results = _listed(compiled(*inputs))
    sum(y.float().square().sum() for y in results).backward()
    leaves = [*inputs, *(function.parameters() if isinstance(function, nn.Module) else ())]
    return [*(y.detach() for y in results), *(x.grad for x in leaves if x.grad is not None)]


def _listed(results: Tensor | list[Tensor]) -> Result:
    return [results] if isinstance(results, Tensor) else list(results)


def _normal(code: str) -> str:
    """Without AOTAutograd's number of the graph in its process, and the addresses of constants."""
    code = re.sub(r"# AOT ID: .*", "", code)
    return re.sub(r"(?m)^(_frozen_param\d+ = None .*) [0-9a-f]+$", r"\1", code)


def main() -> None:
    file, which = sys.argv[1:]
    inductor_config.compile_threads = 1
    if which == "with":
        train_with_q2compile()
    found = {
        "cases": {name: run(case) for name, case in graphs().items()},
        "optimizer": compiled_optimizer(),
    }
    if which == "with":
        found["set by the user"] = set_by_the_user()
    assert (which == "with") == ("q2compile" in sys.modules)
    torch.save(found, file)


OF_THE_USER = ("choices handler", "lowering", "pass", "setting")


def set_by_the_user() -> dict[str, bool]:
    """Settings that a user made before a model was trained with q2compile: whether each is still
    there afterwards, and used for a model of his own."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.lowering import lowerings
    from torch._inductor.virtualized import V

    used = dict.fromkeys(OF_THE_USER, False)

    usual, asinh = V.choices, lowerings[torch.ops.aten.asinh.default]

    def lowering(*args: Any, **kwargs: Any) -> Any:
        used["lowering"] = True
        return asinh(*args, **kwargs)

    def own_pass(graph: Any) -> None:
        used["pass"] = True

    handler = InductorChoices()
    V.set_choices_handler(handler)
    lowerings[torch.ops.aten.asinh.default] = lowering
    settings = {"post_grad_custom_pre_pass": own_pass, "split_reductions": False}
    try:
        with inductor_config.patch({"fx_graph_cache": False, **settings}):
            train_with_q2compile()
            used.update(dict.fromkeys(OF_THE_USER, False))
            torch._dynamo.reset()
            torch.compile(lambda x: x.asinh().sum(-1))(torch.randn(ROWS))
            used["choices handler"] = V.choices is handler
            used["setting"] = all(
                getattr(inductor_config, key) == value for key, value in settings.items()
            )
    finally:
        V.set_choices_handler(usual)
        lowerings[torch.ops.aten.asinh.default] = asinh
    return used


def compiled_optimizer() -> dict[str, Any]:
    """Dynamo's code for the optimizer of a model that does not use q2compile."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    w = nn.Parameter(torch.ones(4, 4))
    w.grad = torch.ones(4, 4)
    optimizer = torch.optim.AdamW([w], lr=torch.tensor(0.1))
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(2):
        step()
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(3):
            step()
    return {"frames": dict(counters["frames"]), "breaks": dict(counters["graph_break"])}


if __name__ == "__main__":
    main()
