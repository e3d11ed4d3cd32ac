"""Times rotating quantisers that compute their operand against those that read it, on one GPU.

    python examples/benchmarks/fusion.py [--only NAME,...] [--out FILE]

Ratios are fused over unfused, in the same run, all kernels counted, of 8192x4096 and 8192x14336:

    swiglu_backward_both    dg and du of silu(g) * u, each along rows and columns
    gelu_backward_both      of the exact GELU
    residual_cast_both      a bf16 and an fp32 gradient, added and made bf16
    rope_backward_both      of q, heads of 128, 4 sequences
    rmsnorm_backward_both   the last step: (dy * w - x * mean) * rstd
    silu_mul_quest          quartet's forward: silu(g) * u, along rows with a trust mask
    dbias                   dy along rows and columns, and its sum, by the pass sum_columns over
                            Inductor's own sum; `differ` is how far the sums are apart, over the
                            largest

The rule of lowering/fusion_rule.py is left out: everything that can be is fused, and two that read
the same in one kernel. What it expects is in `expected`, a ratio for each kernel that could be, and
`fuses`: with it all are fused, too. `differ`: how many results are not the same in both. And of
whole steps, with the rule:

    llama                   fused_llama_step, that of models.py with the option fuse_rotations over
                            without it, and fused_llama_first_step, with warm caches of kernels
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch._inductor.config as inductor_config
from kernels import INPUTS, captured, time_in_turns
from models import BATCH, GPU, LLAMA, SEQUENCE, device_kernels, in_turns, record
from torch.nn.functional import silu
from training_step import Step, first_seconds, training_step

from q2compile import lowering
from q2compile.lowering import fusion_rule
from q2compile.passes.post_grad.fuse_rotations import fuse_rotations_pass, fusion_notes
from q2compile.passes.post_grad.sum_columns import sum_columns_pass

ROWS, WIDTHS = 8192, (4096, 14336)
HEAD, SEQUENCES = 128, 4
EDEN = "nvfp4_ms_eden_pow2"
aten = torch.ops.aten


def both(x: torch.Tensor, seeds: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.ops.q2.rht_quantize_both(x, seeds[0], seeds[1], EDEN, "rht128", 0)


def swiglu_backward_both(seeds, dh, g, u):
    dg = aten.silu_backward(dh * u, g)
    return *both(dg, seeds), *both(dh * silu(g), seeds)


def gelu_backward_both(seeds, dy, x):
    return both(aten.gelu_backward(dy, x), seeds)


def residual_cast_both(seeds, dy, residual):
    return both((dy + residual).bfloat16(), seeds)


def rope_backward_both(seeds, dq, cos, sin):
    half, whole = HEAD // 2, HEAD
    first, second = (dq * sin).chunk(2, -1)
    of_second = aten.slice_backward(second, dq.shape, 3, 0, half, 1)
    of_first = aten.slice_backward(-first, dq.shape, 3, half, whole, 1)
    dx = dq * cos + of_second + of_first
    return both(dx.transpose(1, 2).flatten(2).flatten(0, 1), seeds)


def rmsnorm_backward_both(seeds, dy, w, x, mean, rstd):
    return both(((dy.float() * w - x.float() * mean) * rstd).bfloat16(), seeds)


def silu_mul_quest(seeds, g, u):
    return torch.ops.q2.quantize_masked(silu(g) * u, "mxfp4_quest", "h32")


def operands(name: str, cols: int) -> tuple[torch.Tensor, ...]:
    """Of one call, after the seeds."""

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device=GPU).to(dtype)

    matrix, fp32 = partial(normal, ROWS, cols), torch.float32
    rows = ROWS // SEQUENCES
    made: dict[str, Callable[[], tuple[torch.Tensor, ...]]] = {
        "swiglu_backward_both": lambda: (matrix(), matrix(), matrix()),
        "gelu_backward_both": lambda: (matrix(), matrix()),
        "residual_cast_both": lambda: (matrix(), matrix(dtype=fp32)),
        "rope_backward_both": lambda: (
            normal(SEQUENCES, cols // HEAD, rows, HEAD),
            normal(rows, HEAD),
            normal(rows, HEAD),
        ),
        "rmsnorm_backward_both": lambda: (
            *(matrix(), normal(cols), matrix()),
            *(normal(ROWS, 1, dtype=fp32), normal(ROWS, 1, dtype=fp32)),
        ),
        "silu_mul_quest": lambda: (matrix(), matrix()),
    }
    return made[name]()


FUNCTIONS: dict[str, Callable] = {
    f.__name__: f
    for f in (
        *(swiglu_backward_both, gelu_backward_both, residual_cast_both),
        *(rope_backward_both, rmsnorm_backward_both, silu_mul_quest),
    )
}


@contextmanager
def margin(value: float) -> Iterator[None]:
    """Of the rule: infinite fuses whatever can be fused."""
    usual, fusion_rule.MARGIN = fusion_rule.MARGIN, value
    try:
        yield
    finally:
        fusion_rule.MARGIN = usual


def compiled(function: Callable, args: tuple, within: float | None) -> tuple[Callable, list[str]]:
    """A function as Inductor compiles it, its quantisers marked unless `within` is None, with the
    rule's margin there; and what the lowering said."""
    notes: list[str] = []

    def marked(graph: torch.fx.Graph) -> None:
        fuse_rotations_pass(graph)
        nonlocal notes
        notes = fusion_notes(graph)

    torch._dynamo.reset()
    settings: dict[str, Any] = {"force_disable_caches": True}
    if within is not None:
        settings["post_grad_custom_pre_pass"] = marked
    with inductor_config.patch(settings), margin(within or 0.0):
        call = torch.compile(function)
        call(*args)
    return call, notes


def producer(name: str, cols: int) -> dict[str, Any]:
    function = FUNCTIONS[name]
    seeds = torch.tensor([1, 2], device=GPU)
    inputs = [(seeds, *operands(name, cols)) for _ in range(INPUTS)]
    _, refused = compiled(function, inputs[0], 0.0)  # which tells what the rule expects
    _, by_rule = compiled(function, inputs[0], fusion_rule.MARGIN)
    results, said, graphs, kernels = {}, {}, {}, {}
    for how, within in (("unfused", None), ("fused", math.inf)):
        call, said[how] = compiled(function, inputs[0], within)
        results[how] = call(*inputs[0])
        # Before the other is compiled: both are of one function, and Dynamo would take the later.
        graphs[how] = captured([partial(call, *args) for args in inputs])
        kernels[how] = device_kernels(partial(call, *inputs[0]))
    times = time_in_turns(graphs)
    ratio = statistics.median(a / b for a, b in zip(times["fused"], times["unfused"], strict=True))
    expected = [float(n.partition("to take ")[2].split()[0]) for n in refused if "to take" in n]
    pairs = zip(results["fused"], results["unfused"], strict=True)
    return {
        "name": name,
        "shape": [ROWS, cols],
        "ratio": round(ratio, 3),
        "unit": "of the time without fusion",
        "microseconds": {how: round(statistics.median(own), 2) for how, own in times.items()},
        "expected": expected,
        "fuses": all("fused with" in note for note in by_rule),
        "differ": sum(int((a.float() != b.float()).sum()) for a, b in pairs),
        "said": said["fused"],
        "kernels": kernels,
    }


def producers(name: str) -> list[dict[str, Any]]:
    lowering.register()
    return [producer(name, cols) for cols in WIDTHS]


def dbias() -> list[dict[str, Any]]:
    def function(seeds, dy):
        return *both(dy, seeds), dy.sum(0, dtype=torch.float32)

    def passed(graph: torch.fx.Graph) -> None:
        assert sum_columns_pass(graph) == 1

    lowering.register()
    rows = []
    for cols in WIDTHS:
        seeds = torch.tensor([1, 2], device=GPU)
        inputs = [(seeds, torch.randn(ROWS, cols, device=GPU).bfloat16()) for _ in range(INPUTS)]
        sums, graphs, kernels = {}, {}, {}
        for how, settings in (("unfused", {}), ("fused", {"post_grad_custom_pre_pass": passed})):
            torch._dynamo.reset()
            with inductor_config.patch({"force_disable_caches": True, **settings}):
                call = torch.compile(function)
                *_, sums[how] = call(*inputs[0])
            graphs[how] = captured([partial(call, *args) for args in inputs])
            kernels[how] = device_kernels(partial(call, *inputs[0]))
        times = time_in_turns(graphs)
        pairs = zip(times["fused"], times["unfused"], strict=True)
        apart = (sums["fused"] - sums["unfused"]).abs().max() / sums["unfused"].abs().max()
        rows.append(
            {
                "name": "dbias",
                "shape": [ROWS, cols],
                "ratio": round(statistics.median(a / b for a, b in pairs), 3),
                "unit": "of the time with Inductor's sum",
                "microseconds": {h: round(statistics.median(own), 2) for h, own in times.items()},
                "differ": apart.item(),
                "kernels": kernels,
            }
        )
    return rows


def llama() -> list[dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = torch.randint(LLAMA["vocab_size"], (BATCH, SEQUENCE), device=GPU)
    torch.manual_seed(0)
    model: torch.nn.Module = LlamaForCausalLM(LlamaConfig(**LLAMA, use_cache=False))
    model.to(GPU)
    steps: dict[str, Step] = {}
    first: dict[str, list[float]] = {"unfused": [], "fused": []}
    for _ in range(2):  # the second time with warm caches of kernels
        torch._dynamo.reset()
        for how in first:
            options = {"fuse_rotations": how == "fused"}
            steps[how] = training_step(model, tokens, backend="quartet2", options=options)
            first[how].append(first_seconds(steps[how]))
    times = in_turns(steps, calls=2)
    unit = "of that without fuse_rotations"
    begin = {how: seconds[-1] for how, seconds in first.items()}
    return [
        {"name": "fused_llama_step", "ratio": round(times["fused"] / times["unfused"], 3)}
        | {"unit": unit, "milliseconds": times},
        {"name": "fused_llama_first_step", "ratio": round(begin["fused"] / begin["unfused"], 3)}
        | {"unit": unit, "seconds": begin, "cold": {how: s[0] for how, s in first.items()}},
    ]


BENCHMARKS: dict[str, Callable[[], Any]] = {
    **{name: functools.partial(producers, name) for name in FUNCTIONS},
    "dbias": dbias,
    "llama": llama,
}


def main() -> None:
    record("fusion", __doc__, BENCHMARKS)


if __name__ == "__main__":
    main()
