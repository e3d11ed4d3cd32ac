# SPDX-License-Identifier: Apache-2.0
"""FSDP2 with and without `q2compile.gather_codes`: bits, bytes, memory and time of a step.

    torchrun --nproc-per-node 2 examples/benchmarks/gather_codes.py
    torchrun --nproc-per-node 2 examples/benchmarks/gather_codes.py --device cpu --width 1024

Blocks of a Llama, fp32 masters, bf16 elsewhere; with ``--experts`` a layer of experts behind each
block. Each is compiled, then sharded. Both trainings begin with the same weights and the same
seeds, and take turns in nothing: first one, then the other. Rank 0 prints the times of each to
stderr as they come, and one line of JSON for each recipe:

    equal     whether all losses, and the gradients and weights after the last step, have equal bits
    repeats   with ``--deterministic``: whether those of a second training without codes do. Then
              both are of further trainings under torch.use_deterministic_algorithms: the backward
              of attention adds in any order otherwise
    differs   the first step whose loss is another with codes; null for none
    weights   elements of all weights that are gathered as codes
    mb        bytes that a rank sends in the all-gathers of one step, 1e6: [without, with]
    per       those bytes for each gather of an element of its shards: [without, with]
    peak_mb   most memory allocated in a step; of a GPU
    ms        median step; the slower rank's
    host_ms   median time until the host has enqueued a step; the slower rank's
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import q2compile
from q2compile.tools.bench.llama_block import Block, LlamaBlock

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Wire:
    """FSDP2's all-gather, counted."""

    def __init__(self) -> None:
        self.bytes = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op=False):
        self.bytes += input_tensor.nbytes
        return all_gather(output_tensor, input_tensor, group, async_op)


class Experts(nn.Module):
    """x [batch, length, width] -> the same: experts take rows in turn, the last what is left."""

    offs: Tensor

    def __init__(self, block: Block, experts: int) -> None:
        super().__init__()
        inner, width, rows = block.width // 2, block.width, block.tokens // (experts - 1)
        self.norm = nn.RMSNorm(width)
        self.up = nn.Parameter(torch.randn(experts, inner, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, width, inner) * inner**-0.5)
        ends = torch.arange(1, experts + 1, dtype=torch.int32) * rows
        self.register_buffer("offs", ends.clamp(max=block.tokens))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x).flatten(0, 1)
        h = F.silu(torch._grouped_mm(h, self.up.mT, offs=self.offs))
        return x + torch._grouped_mm(h, self.down.mT, offs=self.offs).view_as(x)


class Model(nn.Module):
    def __init__(self, block: Block, layers: int, experts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(layers):
            self.layers.append(LlamaBlock(block))
            if experts:
                self.layers.append(Experts(block, experts))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def train(args: argparse.Namespace, recipe: str, *, codes: bool) -> dict[str, Any]:
    """One training. Bits, elements, bytes, times."""
    torch._dynamo.reset()
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    torch.manual_seed(0)
    width = args.width
    block = Block(width, 11 * width // 4, width // 128, width // 128, args.batch, args.length)
    device = torch.device(
        args.device, int(os.environ["LOCAL_RANK"]) if args.device == "cuda" else 0
    )
    with torch.device(device):
        model = Model(block, args.layers, args.experts)
    mesh = init_device_mesh(args.device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    options: dict[str, Any] = {"recipe": recipe, "inner": args.inner}
    if args.graphs:
        options["inductor"] = {"triton.cudagraphs": True}
    how: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if args.offload:
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=args.device == "cuda")
    for layer in model.layers:
        layer.compile(backend="quartet2", options=options)
        fully_shard(layer, reshard_after_forward=not args.keep, **how)
    fully_shard(model, **how)
    wire = Wire()
    for module in (*model.layers, model):
        module.set_custom_all_gather(wire)
    if codes:
        q2compile.gather_codes(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(args.batch, args.length, width, device=device)
    losses, times, hosts, sent, gradients = [], [], [], 0, []
    for step in range(args.steps):
        if step == 3 and args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        wire.bytes = 0
        begin = now(args.device)
        loss = (model(x).float() - x).square().mean()
        loss.backward()
        if step + 1 == args.steps:
            gradients = [local(p.grad).cpu() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        hosts.append(time.perf_counter() - begin)
        times.append(now(args.device) - begin)
        losses.append(loss.item())
        sent = wire.bytes
    weights = [local(p).cpu().clone() for p in model.parameters()]
    seconds, host = statistics.median(times[3:]), statistics.median(hosts[3:])
    if dist.get_rank() == 0:
        what = f"{recipe}, {'codes' if codes else 'values'} gathered"
        print(f"{what}: {1e3 * seconds:.1f} ms, host {1e3 * host:.1f}", file=sys.stderr, flush=True)
    elements = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    return {
        "bits": [torch.tensor(losses), *gradients, *weights],
        "elements": elements,
        "bytes": sent,
        "peak": torch.cuda.max_memory_allocated() if args.device == "cuda" else 0,
        "seconds": seconds,
        "host": host,
    }


def local(t: Any) -> Tensor:
    return (t.to_local() if isinstance(t, DTensor) else t).detach()


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def slowest(seconds: float, device: str) -> float:
    t = torch.tensor(seconds, device=device)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return float(t)


def same(one: dict[str, Any], other: dict[str, Any], device: str) -> bool:
    """Whether two trainings have equal bits on all ranks."""
    equal = all(map(torch.equal, one["bits"], other["bits"]))
    return slowest(float(not equal), device) == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--recipes", default="quartet2")
    parser.add_argument("--inner", default="inductor", choices=["inductor", "eager"])
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--experts", type=int, default=0, help="for each layer, 2 or more")
    parser.add_argument("--offload", action="store_true", help="CPUOffloadPolicy")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs")
    parser.add_argument("--keep", action="store_true", help="reshard_after_forward=False")
    parser.add_argument("--deterministic", action="store_true", help="compare bits so, and repeat")
    args = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms want it
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    for recipe in args.recipes.split(","):
        runs = [train(args, recipe, codes=codes) for codes in (False, True)]
        compared, repeats = runs, None
        if args.deterministic:
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            compared = [train(args, recipe, codes=codes) for codes in (False, True, False)]
            torch.use_deterministic_algorithms(False)
            repeats = same(compared[0], compared[2], args.device)
        values, codes = (run["bits"][0] for run in compared[:2])
        differing = (values != codes).nonzero().flatten().tolist()
        passes = 1 if args.keep else 2
        row = {
            "recipe": recipe,
            "equal": same(compared[0], compared[1], args.device),
            "repeats": repeats,
            "differs": differing[0] if differing else None,
            "weights": runs[0]["elements"],
            "mb": [round(r["bytes"] / 1e6, 2) for r in runs],
            "per": [
                round(r["bytes"] / passes / (r["elements"] / dist.get_world_size()), 4)
                for r in runs
            ],
            "peak_mb": [round(r["peak"] / 1e6) for r in runs],
            "ms": [round(1e3 * slowest(r["seconds"], args.device), 2) for r in runs],
            "host_ms": [round(1e3 * slowest(r["host"], args.device), 2) for r in runs],
        }
        if dist.get_rank() == 0:
            print(json.dumps({**row, **vars(args), "torch": torch.__version__}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
