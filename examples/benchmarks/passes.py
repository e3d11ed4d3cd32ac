# SPDX-License-Identifier: Apache-2.0
"""Times training steps without one pass over the same steps with all passes.

    python examples/benchmarks/passes.py [--only MODEL,...] [--out FOLDER]

On one GPU: the variants of a model are interleaved. A row has the ratio of median times, and of
peak memory. Models, of workloads.py, under bf16 autocast except for moe:

    llama        4 layers of width 2048, 8 x 2048 tokens, fp32 parameters
    8b           8 of the 8B's 32 layers of width 4096, 1 x 4096 tokens, bf16 parameters
    30m_graphs   the 30M Llama of examples/pretraining, 64 x 512 tokens, mode="reduce-overhead"
    30m_8x512    the same with 8 x 512 tokens and without CUDA graphs: the host is the limit
    moe          Qwen3-MoE, 4 layers of 64 experts, 4 x 2048 tokens, bf16 parameters

The recipe is quartet2. Pass unrotate_in_gemm, of recipe quartet, matches only on a Blackwell.
"""

from __future__ import annotations

import gc
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
from rows import Benchmark, Row, run
from torch import nn
from workloads import (
    LLAMA,
    LLAMA_8B,
    LLAMA_8B_TOKENS,
    LLAMA_BATCH,
    LLAMA_SEQUENCE,
    MOE,
    MOE_BATCH,
    MOE_SEQUENCE,
    SEQUENCE_30M,
    VOCABULARY_30M,
    llama,
    llama_30m,
    mixture_of_experts,
    peak_gib,
    random_tokens,
    training_step,
)

from q2compile.tools.bench.timing import in_turns

Options = dict[str, Any]


def _without(*passes: str) -> Options:
    return {"disable_passes": list(passes)}


# Name of a row -> what is left out.
LEFT_OUT: dict[str, Options] = {
    "group_launches": _without("group_launches", "gather_quantizers"),
    "tabulate": _without("tabulate"),
    "share_rotations": _without("share_rotations", "share_saved_rotations"),
    "pair_directions": _without("pair_directions"),
    "dequantize_operands": _without("dequantize_operands"),
    "fuse_rotations": {"fuse_rotations": False},
}
EXPERTS: dict[str, Options] = {
    name: LEFT_OUT[name] for name in ("group_launches", "share_rotations", "dequantize_operands")
} | {
    "gather_scattered": _without("gather_scattered"),
    "recompute_mask": _without("recompute_mask"),
    "quantize_rows_once": _without("quantize_rows_once"),
    "unrolled_sums": {"inductor": {"unroll_reductions_threshold": 8}},
}


def _llama() -> tuple[nn.Module, torch.Tensor]:
    model = llama({**LLAMA, "num_hidden_layers": 4})
    return model, random_tokens(LLAMA["vocab_size"], LLAMA_BATCH, LLAMA_SEQUENCE)


def _large_llama() -> tuple[nn.Module, torch.Tensor]:
    model = llama({**LLAMA_8B, "num_hidden_layers": 8}, torch.bfloat16)
    return model, random_tokens(LLAMA_8B["vocab_size"], 1, LLAMA_8B_TOKENS)


def _small_llama(sequences: int) -> tuple[nn.Module, torch.Tensor]:
    return llama_30m(), random_tokens(VOCABULARY_30M, sequences, SEQUENCE_30M)


def _experts() -> tuple[nn.Module, torch.Tensor]:
    return mixture_of_experts(), random_tokens(MOE["vocab_size"], MOE_BATCH, MOE_SEQUENCE)


def left_out(
    args: Namespace,
    name: str,
    make: Callable[[], tuple[nn.Module, torch.Tensor]],
    options: Mapping[str, Options] = LEFT_OUT,
    mode: str | None = None,
    autocast: bool = True,
) -> list[Row]:
    """Rows of one model. options: what is left out, by the name of its row."""
    torch._dynamo.reset()
    dynamo_config.recompile_limit = 64  # beyond it a model runs in eager
    model, tokens = make()
    steps, peaks = {}, {}
    for way, changed in {"all": {}, **options}.items():
        given = {**changed, **({"mode": mode} if mode else {})}
        step = training_step(model, tokens, autocast=autocast, backend="quartet2", options=given)
        step()
        gc.collect()
        steps[way], peaks[way] = step, peak_gib(step)
    times = in_turns(steps, rounds=10, calls=2)
    return [
        {
            "name": f"without {way}, {name}",
            "ratio": round(times[way] / times["all"], 3),
            "unit": "steps with all",
            "milliseconds": round(times[way], 2),
            "peak_ratio": round(peaks[way] / peaks["all"], 3),
        }
        for way in options
    ]


def _rows_of(name: str, **more: Any) -> Benchmark:
    return Benchmark(partial(left_out, name=name, **more), "passes.json")


BENCHMARKS = {
    "llama": _rows_of("llama", make=_llama),
    "8b": _rows_of("8b", make=_large_llama),
    "30m_graphs": _rows_of("30m_graphs", make=partial(_small_llama, 64), mode="reduce-overhead"),
    "30m_8x512": _rows_of("30m_8x512", make=partial(_small_llama, 8)),
    "moe": _rows_of("moe", make=_experts, options=EXPERTS, autocast=False),
}


def main() -> None:
    run("passes", __doc__, BENCHMARKS)


if __name__ == "__main__":
    main()
