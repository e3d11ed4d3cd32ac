"""FSDP2 with `q2compile.gather_codes`, and the same training without it, on 2 or 4 ranks.

A scenario is a function of ``attach``, which is gather_codes or nothing. Both runs are recorded to
the last bit; those of them that have the same numbers share the run without.
"""

from __future__ import annotations

import hashlib
import io
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from training import VOCAB, loss_of, new_model

import q2compile
from q2compile.report.report import Report, collector

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
BATCH, SEQ, STEPS, LONG = 4, 32, 6, 20
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
Attach = Callable[[nn.Module], int]


@dataclass
class Run:
    """What one rank saw. bytes: that it sent in the all-gathers of each step."""

    losses: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)  # of all gradients of a step, and the weights
    bytes: list[int] = field(default_factory=list)
    count: int | None = None  # what gather_codes returned
    why: dict[str, str] = field(default_factory=dict)  # module -> what the report says of it
    notes: dict[str, Any] = field(default_factory=dict)
    error: str = ""


class Wire:
    """FSDP2's all-gather, counted."""

    def __init__(self) -> None:
        self.bytes = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op=False):
        self.bytes += input_tensor.nbytes
        return all_gather(output_tensor, input_tensor, group, async_op)


def no_attach(model: nn.Module) -> int:
    return 0


def mesh_of(*shape: int) -> DeviceMesh:
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def build(
    *,
    recipe: str = "quartet2",
    options: dict[str, Any] | None = None,
    inner: int = 128,
    policy: MixedPrecisionPolicy | None = BF16,
    mesh: tuple[int, ...] = (),
    masters: torch.dtype = torch.float32,
    checkpointed: bool = False,
    whole: bool = False,
    root_only: bool = False,
    roots: bool = False,
    **kwargs: Any,
) -> Any:
    """A model under fully_shard, and what to call: blocks compiled on their own, or (whole) all of
    it. roots: blocks are sharded, and the model is not."""
    model: Any = new_model(inner).to(masters)
    options = {"inner": "eager", "recipe": recipe, **(options or {})}
    if policy is not None:
        kwargs["mp_policy"] = policy
    kwargs["mesh"] = mesh_of(*(mesh or (dist.get_world_size(),)))
    for i, layer in enumerate(model.layers):
        if checkpointed:
            model.layers[i] = layer = checkpoint_wrapper(layer)
        if not whole:
            layer.compile(backend="quartet2", options=options)
        if not root_only:
            fully_shard(layer, **kwargs)
    if not roots:
        fully_shard(model, **kwargs)
    return model, torch.compile(model, backend="quartet2", options=options) if whole else model


def tokens_of(step: int, part: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + part)
    tokens = torch.randint(VOCAB, (dist.get_world_size() * 2, SEQ), generator=generator)
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for t in tensors:
        local = t.to_local() if isinstance(t, DTensor) else t
        found.update(local.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Training:
    """Steps of AdamW, each recorded in ``run``."""

    def __init__(self, model: Any, call: Any, attach: Attach | None) -> None:
        self.run, self.wire, self.model, self.call = Run(), Wire(), model, call
        for module in model.modules():
            if hasattr(module, "set_custom_all_gather"):
                module.set_custom_all_gather(self.wire)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        self.step, self.report = 0, Report()
        if attach is not None:
            self.run.count = attach(model)
        torch.manual_seed(dist.get_rank())

    def steps(self, number: int, micro_batches: int = 1) -> Training:
        token = collector.set(self.report)
        for _ in range(number):
            self.step += 1
            before, total = self.wire.bytes, 0.0
            for part in range(micro_batches):
                if micro_batches > 1:
                    self.model.set_requires_gradient_sync(part == micro_batches - 1)
                tokens = tokens_of(self.step, part)
                loss = loss_of(self.call(tokens), tokens)
                loss.backward()
                total += loss.item()
            self.run.bytes.append(self.wire.bytes - before)
            self.run.losses.append(total)
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            self.optimizer.step()
            self.run.digests.append(digest([*gradients, *self.model.parameters()]))
            self.optimizer.zero_grad()
        collector.reset(token)
        return self

    def done(self) -> Run:
        rows = self.report.to_json()
        self.run.why = {row["module"]: row["why"] or row["gathered"] for row in rows}
        return self.run


def simple(steps: int = STEPS, **how: Any) -> Callable[[Attach], Run]:
    return lambda attach: Training(*build(**how), attach).steps(steps).done()


def accumulated(**how: Any) -> Callable[[Attach], Run]:
    return lambda attach: Training(*build(**how), attach).steps(STEPS, micro_batches=2).done()


def attached_late(attach: Attach) -> Run:
    """After two steps."""
    training = Training(*build(), None).steps(2)
    training.run.count = attach(training.model)
    return training.steps(STEPS - 2).done()


def switched(attach: Attach) -> Run:
    """The forward's late switch to bf16, and back."""
    training = Training(*build(), attach).steps(4)
    for more in ({"policy": {"*": {"fprop": "bf16"}}}, {}):
        for layer in training.model.layers:
            layer.compile(backend="quartet2", options={"inner": "eager", **more})
        training.steps(4)
    return training.done()


def evaluated(attach: Attach) -> Run:
    """Between the steps, without gradients: compiled, and without its graphs."""
    training = Training(*build(), attach)
    for _ in range(5):
        training.steps(1)
        with torch.no_grad():
            tokens = tokens_of(0)
            training.run.losses.append(loss_of(training.model(tokens), tokens).item())
            with torch.compiler.set_stance("force_eager"):
                training.run.losses.append(loss_of(training.model(tokens), tokens).item())
    return training.done()


def by_hand(attach: Attach) -> Run:
    """module.unshard() gives values, whatever is gathered in a forward."""
    training = Training(*build(), attach).steps(4)
    layer = training.model.layers[0]
    layer.unshard()
    training.run.notes["weight"] = layer.up.weight.detach().clone()
    layer.reshard()
    return training.steps(2).done()


def moved(attach: Attach) -> Run:
    """Shards in other tensors: load_state_dict(assign=True), .to(); and in the same."""
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
    return training.steps(2).done()


def resumed(attach: Attach) -> Run:
    """A checkpoint of plain tensors, read into another model."""
    first = Training(*build(), attach).steps(4)
    state = first.model.state_dict(), first.optimizer.state_dict(), torch.get_rng_state()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    second = Training(*build(), attach)
    model, optimizer, coins = torch.load(file, weights_only=False)
    second.model.load_state_dict(model)
    second.optimizer.load_state_dict(optimizer)
    torch.set_rng_state(coins)
    second.step = first.step
    run = second.steps(4).done()
    run.losses, run.digests = first.run.losses + run.losses, first.run.digests + run.digests
    return run


class InGraph(nn.Module):
    """A linear whose weight is a DTensor that its forward gathers, as SimpleFSDP's are; or a plain
    shard (functional)."""

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh, functional: bool) -> None:
        super().__init__()
        shard = distribute_tensor(linear.weight.detach(), mesh, [Shard(0)])
        self.weight = nn.Parameter(shard.to_local().clone() if functional else shard)
        self.mesh, self.functional = mesh, functional

    def forward(self, x: Tensor) -> Tensor:
        if self.functional:
            w = all_gather_tensor_autograd(self.weight.bfloat16(), 0, self.mesh.get_group())
        else:
            whole = {"placements": [Replicate()], "forward_dtype": torch.bfloat16}
            w = self.weight.redistribute(**whole).to_local(grad_placements=[Partial("avg")])
        return nn.functional.linear(x, w)


def in_graph(recipe: str, functional: bool = False) -> Callable[[Attach], Run]:
    """Without: the pass that moves the quantizers before the gathers is disabled. notes: the bytes
    that a rank sends in the gathers of the compiled graphs."""

    def scenario(attach: Attach) -> Run:
        mesh, model = mesh_of(2), new_model().bfloat16()
        for layer in model.layers:
            for name in ("gate", "up", "down"):
                setattr(layer, name, InGraph(getattr(layer, name), mesh, functional))
        with tempfile.TemporaryDirectory() as folder:
            options = {"inner": "eager", "recipe": recipe, "dump": folder}
            options["policy"] = {"head": "bf16"}
            options["disable_passes"] = ["quantize_shards"] if attach is no_attach else []
            call = torch.compile(model, backend="quartet2", options=options)
            run = Training(model, call, None).steps(STEPS).done()
            graphs = Path(folder, f"rank{dist.get_rank()}").glob("*/4_after_passes_*.txt")
            gathers = r": (u8|bf16)\[(\d+), (\d+)\] = _c10d_functional\.all_gather_into_tensor"
            found = [m for path in graphs for m in re.findall(gathers, path.read_text())]
        size = {"u8": 1, "bf16": 2}
        run.notes["bytes"] = sum(size[kind] * int(n) * int(k) // 2 for kind, n, k in found)
        return run

    return scenario


def faulty(kind: str) -> Callable[[Attach], Run]:
    """What rank 1 does otherwise must be an error on all ranks."""

    def scenario(attach: Attach) -> Run:
        other = dist.get_rank() == 1
        policy = {"*.up": "bf16"} if kind == "policy" and other else {}
        model, call = build(options={"policy": policy})
        if kind == "model" and other:
            attach(model.layers[0])
        elif not (kind == "attach" and other):
            attach(model)
        return Training(model, call, None).steps(STEPS).done()

    return scenario


EXACT = {"global_scale": "exact"}
SCENARIOS: dict[str, Callable[[Attach], Run]] = {
    **{
        name: simple(LONG, recipe=name)
        for name in ("quartet2", "nvfp4", "tetrajet2", "quartet", "mxfp4")
    },
    "exact": simple(options=EXACT),
    "exact_square": simple(options=EXACT, recipe="nvfp4"),
    "fp32": simple(policy=None),
    "bf16_masters": simple(policy=None, masters=torch.bfloat16),
    "whole": simple(whole=True, root_only=True),
    "whole_blocks": simple(whole=True),
    "checkpointed": simple(checkpointed=True),
    "kept": simple(reshard_after_forward=False),
    "offloaded": simple(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "roots": simple(roots=True, policy=None),
    "uneven": simple(inner=131),
    "uneven_square": simple(inner=80, recipe="nvfp4"),
    "accumulated": accumulated(),
    "accumulated_kept": accumulated(reshard_after_forward=False),
    "attached_late": attached_late,
    "switched": switched,
    "evaluated": evaluated,
    "by_hand": by_hand,
    "moved": moved,
    "resumed": resumed,
    **{f"in_graph_{name}": in_graph(name) for name in ("quartet2", "nvfp4", "quartet")},
    "in_graph_functional": in_graph("quartet2", functional=True),
}
ON_FOUR: dict[str, Callable[[Attach], Run]] = {
    "four": simple(),
    "hsdp": simple(mesh=(2, 2)),
    "to_two": simple(reshard_after_forward=2),
    "uneven_four": simple(inner=90),
    "square_four": simple(recipe="nvfp4", inner=192),
}


def without(name: str) -> str:
    """The scenario whose run without gather_codes has the same numbers."""
    if name in ("checkpointed", "kept", "offloaded", "attached_late", "resumed"):
        return "quartet2"
    same = {"whole_blocks": "whole", "accumulated_kept": "accumulated", "to_two": "four"}
    return same.get(name, name)


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2].split(",")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    fault = names[0].removeprefix("fault_") if names[0].startswith("fault_") else ""
    todo = SCENARIOS if dist.get_world_size() == 2 else ON_FOUR
    jobs: dict[str, tuple[Callable[[Attach], Run], Attach]] = {}
    for name in () if fault else todo if names == ["all"] else names:
        jobs[f"{without(name)}.plain"] = todo[without(name)], no_attach
        jobs[name] = todo[name], q2compile.gather_codes
    if fault:
        jobs[names[0]] = faulty(fault), q2compile.gather_codes
    found: dict[str, Run] = {}
    for name, (scenario, attach) in jobs.items():
        torch._dynamo.reset()
        try:
            found[name] = scenario(attach)
        except Exception:
            found[name] = Run(error=traceback.format_exc())
    torch.save(found, folder / f"found.rank{dist.get_rank()}.pt")
    if not fault:  # after a fault the others may be gone
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
