# SPDX-License-Identifier: Apache-2.0
"""FSDP2 with `q2compile.gather_codes`, and the same training without it, on 2 or 4 ranks.

A scenario is a function of ``attach``, which is gather_codes or a no-op. Both runs are recorded bit
by bit. Scenarios with equal results share the run without gather_codes.
"""

from __future__ import annotations

import copy
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import eager_reads
import expert_parallel
import recorded
import torch
import torch.distributed as dist
from in_graph_gathers import in_graph, in_graph_experts
from recorded import (
    BF16,
    LONG,
    SEQ,
    STEPS,
    Attach,
    Run,
    Training,
    mesh_of,
    no_attach,
    of_tokens,
    of_vectors,
    tokens_of,
)
from tensor_parallel import tensor_parallel
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from training import VOCAB, loss_of, new_model

import q2compile
from q2compile.weight_cache import shard_batch

EXACT = {"global_scale": "exact"}


class Pair(nn.Module):
    """x + down(silu(up(norm(x)))): two of a block's three linears, which compile sooner."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm, self.up, self.down = block.norm, block.up, block.down

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def build(
    *,
    recipe: str = "quartet2",
    options: dict[str, Any] | None = None,
    inner: int = 128,
    gated: bool = False,
    policy: MixedPrecisionPolicy | None = BF16,
    mesh: tuple[int, ...] = (),
    masters: torch.dtype = torch.float32,
    checkpointed: bool = False,
    whole: bool = False,
    root_only: bool = False,
    compiled: bool = True,
    far_apart: bool = False,
    sharded: bool = True,
    **kwargs: Any,
) -> Any:
    """A model under fully_shard, and the function to call. Blocks are compiled one by one, or
    (whole) all at once. gated: whether they have three linears. far_apart: the last ranks' rows
    are so small that their scales underflow under the common global scale."""
    model: Any = new_model(inner).to(masters)
    if not gated:
        model.layers = nn.ModuleList(map(Pair, model.layers))
    for layer in model.layers if far_apart else ():
        with torch.no_grad():
            for linear in (layer.up, layer.down):
                linear.weight[linear.out_features // 2 :] *= 2.0**-19
    options = {"inner": "eager", "recipe": recipe, **(options or {})}
    if policy is not None:
        kwargs["mp_policy"] = policy
    kwargs["mesh"] = mesh_of(*(mesh or (dist.get_world_size(),)))
    for i, layer in enumerate(model.layers):
        if checkpointed:
            model.layers[i] = layer = checkpoint_wrapper(layer)
        if compiled and not whole:
            layer.compile(backend="quartet2", options=options)
        if sharded and not root_only:
            fully_shard(layer, **kwargs)
    if sharded:
        fully_shard(model, **kwargs)
    return model, torch.compile(model, backend="quartet2", options=options) if whole else model


def folder() -> Path:
    """The folder of the results."""
    return Path(sys.argv[1])


def simple(steps: int = STEPS, **how: Any) -> Callable[[Attach], Run]:
    return lambda attach: Training(*build(**how), attach).steps(steps).done()


def after_an_equal_model(attach: Attach) -> Run:
    """Dynamo has graphs for both models, which were compiled without gather_codes."""
    simple(1)(no_attach)
    return simple()(attach)


def accumulated(**how: Any) -> Callable[[Attach], Run]:
    return lambda attach: Training(*build(**how), attach).steps(4, micro_batches=2).done()


@torch.library.custom_op("planted::fail", mutates_args=())
def fail(x: Tensor) -> Tensor:
    raise RuntimeError("planted in a call")


@fail.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def not_compilable(attach: Attach) -> Run:
    """On rank 1 the first graph that quantizes its shards can't be compiled, and the second not be
    called."""
    trace = shard_batch.make_fx

    def failing(function: Any, **kwargs: Any) -> Any:
        if function.func is shard_batch.agreement:
            raise RuntimeError("planted")
        return trace(lambda *inputs: [fail(t) for t in function(*inputs)], **kwargs)

    shard_batch.make_fx = failing if dist.get_rank() == 1 else trace
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            run = Training(*build(), attach).steps(4).done()
    finally:
        shard_batch.make_fx = trace
    run.notes["warnings"] = [str(w.message) for w in found if "planted" in str(w.message)]
    return run


def bare(attach: Attach) -> Run:
    """Linears that are compiled by themselves, which Dynamo skips before torch 2.14."""
    model, call = build(compiled=False)
    for layer in model.layers:
        layer.up.compile(backend="quartet2", options={"inner": "eager"})
    return Training(model, call, attach).steps(4).done()


def attached_late(attach: Attach) -> Run:
    """After two steps."""
    training = Training(*build(), None).steps(2)
    training.run.count = attach(training.model)
    return training.steps(STEPS - 2).done()


def evaluated(attach: Attach) -> Run:
    """Between the steps, without gradients: compiled, and without its graphs. After them
    module.unshard(), which gives values also if the forward gathers codes. A rank has 40 rows of
    two of the three weights, and blocks span 16."""
    training = Training(*build(inner=80, recipe="nvfp4", options=EXACT), attach)
    for _ in range(5):
        training.steps(1)
        with torch.no_grad():
            tokens = tokens_of(0)
            training.run.losses.append(loss_of(training.model(tokens), tokens).item())
            with torch.compiler.set_stance("force_eager"):
                training.run.losses.append(loss_of(training.model(tokens), tokens).item())
    layer = training.model.layers[0]
    layer.unshard()
    training.run.notes["weight"] = layer.down.weight.detach().clone()
    layer.reshard()
    return training.steps(1).done()


def read_by_others(attach: Attach) -> Run:
    """Everything besides our graphs that reads weights which FSDP2 keeps gathered after a forward:
    after an evaluation, between forward and backward, after ``unshard`` there, in a hook of the
    model, in graphs of another backend, in `q2compile.export` and `q2compile.compare`."""
    training = Training(*build(root_only=True), attach).steps(3)
    model, read = training.model, training.run.notes.setdefault("read", {})

    def look(when: str) -> None:
        found = [w.full_tensor() if isinstance(w, DTensor) else w for w in model.parameters()]
        read[when] = [w.detach().bfloat16().clone() for w in found]

    def evaluate(when: str) -> None:
        with torch.no_grad():
            training.run.losses.append(of_tokens(model, 0, 0).item())
        look(when)

    def compile_blocks(**how: Any) -> None:
        for layer in model.layers:
            layer.compile(**how)

    evaluate("after an evaluation")
    training.steps(1)
    hooks = [model.register_forward_hook(torch.compiler.disable(lambda *_: look("in a hook")))]
    loss = of_tokens(model, 0, 0)
    look("before the backward")
    if attach is not no_attach:
        model.reshard()  # FSDP2 has nothing to gather otherwise
    model.unshard()
    look("unsharded")
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    hooks.pop().remove()
    given = {"options": {}, "autocast": torch.bfloat16, "example_inputs": tokens_of(0)}
    path = folder() / f"exported.{attach is no_attach}"
    read["layers"] = q2compile.export(model, path, format="safetensors", **given).layers
    read["layers"] = sorted(read["layers"])
    tokens = [tokens_of(0)]
    compared = q2compile.compare(model, tokens, loss=lambda y: loss_of(y, *tokens), alone=False)
    read["compared"] = [torch.tensor(losses) for losses in compared.losses.values()]
    copies = pickle.loads(pickle.dumps(copy.deepcopy(list(model.parameters()))))
    read["pickled"] = [copied.full_tensor().bfloat16() for copied in copies]
    training.steps(1)
    compile_blocks(backend="aot_eager")
    evaluate("by another backend")
    evaluate("by another backend again")
    compile_blocks(backend="quartet2", options={"inner": "eager"})
    training.steps(2)  # the first has what the evaluation has gathered
    return training.done()


def changed(attach: Attach) -> Run:
    """Shards in other tensors: load_state_dict(assign=True), .to(); and in the same. Then the
    forward's late switch to bf16, and back."""
    training = Training(*build(), attach).steps(3)
    state = {k: v.clone() for k, v in training.model.state_dict().items()}
    training.model.load_state_dict(state, assign=True)
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=3e-3)
    training.steps(3)
    training.model.to(torch.float64).to(torch.float32)
    training.steps(2)
    torch.manual_seed(5)
    for layer in training.model.layers:
        layer.up.reset_parameters()
    training.steps(2)
    for more in ({"policy": {"*": {"fprop": "bf16"}}}, {}):
        for layer in training.model.layers:
            layer.compile(backend="quartet2", options={"inner": "eager", **more})
        training.steps(3)
    return training.done()


def state_of(training: Training) -> dict[str, Any]:
    """The state in a distributed checkpoint, and this rank's random bits."""
    model, optimizer = get_state_dict(training.model, training.optimizer)
    generator = torch.get_rng_state()
    return {"model": model, "optimizer": optimizer, f"generator{dist.get_rank()}": generator}


def killed(attach: Attach) -> Run:
    """Four steps, a distributed checkpoint, a step more, and SIGKILL."""
    training = Training(*build(), attach).steps(4)
    checkpoint.save(state_of(training), checkpoint_id=folder() / "checkpoint")
    training.steps(1)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


def resumed(attach: Attach) -> Run:
    """The state that `killed` saved, loaded into another model in another process."""
    training = Training(*build(), attach)
    state = state_of(training)
    checkpoint.load(state, checkpoint_id=folder() / "checkpoint")
    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    torch.set_rng_state(state[f"generator{dist.get_rank()}"])
    training.step = 4
    return training.steps(4).done()


def two_dimensional(attach: Attach) -> Run:
    """Halves of the batch by FSDP2, halves of the matmuls by tensor parallel."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model: Any = tensor_parallel(mesh["tensor"])
    for layer in model.layers:
        layer.compile(backend="quartet2", options={"inner": "eager"})
        fully_shard(layer, mesh=mesh["data"], mp_policy=BF16)
    fully_shard(model, mesh=mesh["data"], mp_policy=BF16)

    def loss(call: Any, step: int, part: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCAB, (2, 2, SEQ), generator=generator)
        tokens = tokens[mesh["data"].get_local_rank()]
        return loss_of(call(tokens), tokens)

    training = Training(model, model, attach, loss)
    torch.manual_seed(mesh["data"].get_local_rank())
    return training.steps(STEPS).done()


def experts(recipe: str, dim: int = 0, parallel: bool = False) -> Callable[[Attach], Run]:
    """A mixture whose stacks [E, N, K] FSDP2 cuts along ``dim``. parallel: two groups of ranks have
    half of the experts each."""

    def scenario(attach: Attach) -> Run:
        torch.manual_seed(0)
        names, options = ("data", "expert"), {"inner": "eager", "recipe": recipe}
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names) if parallel else mesh_of(2)
        of_experts = mesh["expert"] if parallel else None
        model: Any = expert_parallel.Model(of_experts)
        how = {"mp_policy": BF16, "shard_placement_fn": lambda p: Shard(dim if p.ndim > 2 else 0)}
        for layer in model.layers:
            for name, weight in list(layer.experts.named_parameters()) if parallel else ():
                part = distribute_tensor(weight.data, of_experts, [Shard(0)])
                setattr(layer.experts, name, nn.Parameter(part))
            layer.experts.compile(backend="quartet2", options=options, dynamic=True)
            fully_shard(layer.experts, mesh=mesh["data"] if parallel else mesh, **how)
        fully_shard(model, mesh=mesh_of(dist.get_world_size()), **how)
        return Training(model, model, attach, of_vectors).steps(STEPS).done()

    return scenario


def faulty(kind: str) -> Callable[[Attach], Run]:
    """The second half of the ranks (on four ranks: the second replica) differs. All ranks must
    raise an error."""

    def scenario(attach: Attach) -> Run:
        half = dist.get_world_size() // 2
        other = dist.get_rank() >= half
        policy = {"*.up": "bf16"} if kind == "policy" and other else {}
        model, call = build(options={"policy": policy}, mesh=(2, 2) if half == 2 else ())
        if kind == "model" and other:
            attach(model.layers[0])
        else:
            attach(model)
        return Training(model, call, None).steps(STEPS).done()

    return scenario


# All recipes with power-of-two scales: each kind of blocks and of global scale in one graph.
RECIPES = {"layers.0.gate": "fp8", "layers.0.up": "nvfp4", "layers.0.down": "quartet"}
RECIPES |= {"layers.1.gate": "mxfp4_2d", "layers.1.up": "tetrajet2"}
RECIPES |= {"layers.1.down": "quartet2_search", "head": "quartet2_fp8"}
all_recipes = simple(
    options={"policy": RECIPES},
    policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    gated=True,
    whole=True,
    root_only=True,
)
UNEVEN = {"inner": 131, "policy": None, "masters": torch.bfloat16, "far_apart": True}
SCENARIOS: dict[str, Callable[[Attach], Run]] = {
    "quartet2": simple(LONG),
    "recipes": all_recipes,
    "fp32_columns": simple(
        4, policy=None, options=EXACT, shard_placement_fn=lambda p: Shard(min(p.ndim - 1, 1))
    ),
    "whole_blocks": simple(4, whole=True),
    "offloaded": simple(4, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "not_compiled": simple(4, compiled=False),
    "uneven": accumulated(**UNEVEN),
    "uneven_checkpointed": accumulated(**UNEVEN, checkpointed=True),
    "uneven_kept": accumulated(**UNEVEN, reshard_after_forward=False),
    "not_compilable": not_compilable,
    "bare": bare,
    "attached_late": attached_late,
    "after_an_equal_model": after_an_equal_model,
    "evaluated": evaluated,
    "read_by_others": read_by_others,
    "absorbed": partial(eager_reads.absorbed, build),
    "hooked": partial(eager_reads.hooked, build),
    "hooked_inside": partial(eager_reads.hooked_inside, build),
    "hidden": partial(eager_reads.hidden, build),
    "changed": changed,
    "killed": killed,
    "resumed": resumed,
    "experts_rows": experts("quartet", dim=1),
    "in_graph": in_graph,
    "in_graph_experts": in_graph_experts,
}
ON_FOUR: dict[str, Callable[[Attach], Run]] = {
    "hsdp": simple(4, mesh=(2, 2)),
    "to_two": simple(1, reshard_after_forward=2),
    "two_dimensional": two_dimensional,
    "expert_parallel": experts("nvfp4", parallel=True),
}
ALONE = (
    "killed",
    "resumed",
    "to_two",
    "hidden",
)  # compared with no run, or with one that others have
SAME = {
    **dict.fromkeys(("whole_blocks", "offloaded", "attached_late", "not_compilable"), "quartet2"),
    "after_an_equal_model": "quartet2",
    **dict.fromkeys(("uneven_checkpointed", "uneven_kept"), "uneven"),
}


def without(name: str) -> str:
    """The scenario whose run without gather_codes has the same results."""
    return SAME.get(name, name)


def main() -> None:
    names = sys.argv[2].split(",")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    todo = SCENARIOS if dist.get_world_size() == 2 else ON_FOUR
    jobs: dict[str, tuple[Callable[[Attach], Run], Attach]] = {}
    for name in todo if names == ["all"] else names:
        if name.startswith("fault_"):
            jobs[name] = faulty(name.removeprefix("fault_")), q2compile.gather_codes
        elif name in ALONE:
            jobs[name] = todo[name], q2compile.gather_codes
        else:
            jobs[f"{without(name)}.plain"] = todo[without(name)], no_attach
            jobs[name] = todo[name], q2compile.gather_codes
    found: dict[str, Run] = {}
    for name, (scenario, attach) in jobs.items():
        torch._dynamo.reset()
        try:
            found[name] = scenario(attach)
        except Exception:
            dist.all_reduce = recorded.all_reduce
            found[name] = Run(error=traceback.format_exc())
        dist.barrier()
        torch.save(found, folder() / f"found.{dist.get_world_size()}.rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
