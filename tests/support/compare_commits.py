# SPDX-License-Identifier: Apache-2.0
"""Whether a refactoring changed what the compiler writes: the dumps of a fixed set of models, at
two commits, compared file by file.

    python tests/support/compare_commits.py HEAD~3            against the working tree
    python tests/support/compare_commits.py HEAD~3 HEAD --rename @bf16=@dequantized
    python tests/support/compare_commits.py HEAD~3 --only '90_*' --only cpu_telemetry

Each commit is checked out into a temporary folder and imported from there, in a process of its own
with empty caches. It compiles every case below: on this CPU as it is, and for a GPU that is not
there (`emulation.inductor`, kernels are stubs), forward and backward. Everything that the option
``dump`` writes is compared, every stage of every graph and Inductor's code, except what differs
from run to run (times, paths, hashes of sources).

--rename    words that were changed on purpose
--only      the cases to compare, by a pattern

Exit status 0: equal; 1: a diff is printed.

All cases take about 120 s for each commit on one core (torch 2.13).
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ("quartet2", "nvfp4", "quartet", "mxfp4", "mxfp4_2d", "tetrajet2")
# Text that differs between two runs of the same commit.
_VARIES = (
    (re.compile(r'("seconds": )[\d.e-]+'), r"\g<1>0"),
    (re.compile(r"/\S*/(torchinductor\w*|tmp\w*)/\S*"), "PATH"),
    (re.compile(r"\b[a-z0-9]{40,}\b"), "HASH"),
    (re.compile(r"\bc[a-z2-7]{50}\b"), "HASH"),
    (re.compile(r"# AOT ID: .*"), ""),
    (re.compile(r'^ "(date|command)": .*$', re.M), ""),  # of run.json
    (re.compile(r"<lambda> at 0x\w+|0x[0-9a-f]{8,}"), "ADDRESS"),
)


# ---- in a process of the commit that is looked at ------------------------------------------------


def _models() -> dict[str, Callable[[], Any]]:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        """Norm, q, k and v of one x, a product with a bias, and a SwiGLU with a residual."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(64)
            self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in range(3))
            self.o = nn.Linear(64, 64)
            self.gate, self.up = (nn.Linear(64, 128, bias=False) for _ in range(2))
            self.down = nn.Linear(128, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(x)
            q, k, v = (
                p(h).unflatten(-1, (4, 16)).transpose(1, 2) for p in (self.q, self.k, self.v)
            )
            x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
            return x + self.down(F.silu(self.gate(x)) * self.up(x))

    class Checkpointed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    class Experts(nn.Module):
        """Four experts of a batched product, and spellings other than F.linear."""

        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Parameter(torch.randn(4, 64, 32) / 8)
            self.table = nn.Parameter(torch.randn(64, 48) / 8)
            self.mixed = nn.MultiheadAttention(64, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.mixed(x, x, x, need_weights=False)[0]
            return (x[:, None] @ self.experts).sum(1) @ self.table[:32] + torch.einsum(
                "btk,kn->btn", x, self.table
            )

    class TensorParallel(nn.Module):
        """A column-wise and a row-wise linear of two ranks; this process is rank 0."""

        def __init__(self) -> None:
            super().__init__()
            if not dist.is_initialized():
                dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
            self.mesh = dist.init_device_mesh("cpu", (2,))
            placed = ((self._weight(256, 64), Shard(0)), (self._weight(64, 256), Shard(1)))
            self.up, self.down = (
                nn.Parameter(distribute_tensor(w.bfloat16(), self.mesh, [shard]))
                for w, shard in placed
            )

        @staticmethod
        def _weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape) / 8

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            whole = DTensor.from_local(x, self.mesh, [Replicate()])
            y = F.linear(F.gelu(F.linear(whole, self.up)), self.down)
            return y.redistribute(placements=[Replicate()]).to_local()

    return {
        "block": Block,
        "checkpointed": Checkpointed,
        "experts": Experts,
        "head": lambda: _stack(64, 64, 64, 2048),
        "stack": lambda: _stack(64, 64, 64, 64),
        "tensor_parallel": TensorParallel,
        **_LARGER,
    }


def _stack(*widths: int) -> Any:
    """Linears. Memory is at its peak while codes of weights wait for the backward; if the last one
    is wide, while its gradient is quantized."""
    from itertools import pairwise

    from torch import nn

    linears = (nn.Linear(*sizes, bias=False) for sizes in pairwise(widths))
    return nn.Sequential(*(layer for linear in linears for layer in (linear, nn.Tanh())))


def _mixture() -> Any:
    import torch
    from torch import nn

    class Mixture(nn.Module):
        """Each token goes to 4 of 8 experts, of which the last 2 are other ranks': its rows are
        gathered, those of other ranks are zeroed, and gradients of rows are scattered."""

        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(6, 64, 64) / 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x.flatten(0, 1)
            ids, order = h[:, :8].detach().float().topk(4).indices.flatten().sort(stable=True)
            rows = h[order // 4].masked_fill((ids > 5)[:, None], 0.0)
            ends = torch.histc(ids.float(), bins=6, min=0, max=5).cumsum(0).to(torch.int32)
            y = torch._grouped_mm(rows, self.up, offs=ends) + h[order // 4]
            return x + y[order.argsort()].unflatten(0, (-1, 4)).sum(1).view_as(x)

    return Mixture()


def _rotary() -> Any:
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Rotary(nn.Module):
        """Rotary embeddings, a squared ReLU, and a linear whose gradient is a constant 0."""

        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.up, self.unused = (
                nn.Linear(64, 64, bias=False) for _ in range(5)
            )
            self.down = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            angles = torch.arange(x.shape[1])[:, None] * 0.5 ** torch.arange(8.0)
            angles = torch.cat([angles, angles], -1)
            heads = (p(x).unflatten(-1, (4, 16)).transpose(1, 2) for p in (self.q, self.k, self.v))
            q, k, v = heads
            q, k = (
                (t * angles.cos() + torch.cat([-t[..., 8:], t[..., :8]], -1) * angles.sin()).to(
                    x.dtype
                )
                for t in (q, k)
            )
            x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
            x = x + self.down(F.relu(self.up(x)).square())
            return x + 0 * self.unused(x).sum()

    return Rotary()


def _producers() -> Any:
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Producers(nn.Module):
        """A chain of linears. Each one's gradient is computed by the backward of what follows it:
        GELU, RMSNorm, rotary embeddings, dropout, a sum of two in fp32."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.q, self.o, self.last = (
                nn.Linear(64, 64, bias=False) for _ in range(5)
            )
            self.norm = nn.RMSNorm(64)
            angles = torch.arange(128)[:, None] * 0.5 ** torch.arange(16.0).repeat(2)
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            cos, sin = (table[: x.shape[1]].float() for table in (self.cos, self.sin))
            h = self.norm(self.down(F.gelu(self.up(x))))
            q = self.q(h).unflatten(-1, (2, 32)).transpose(1, 2)
            swapped = torch.cat([-q[..., 16:], q[..., :16]], -1)
            q = (q * cos + swapped * sin).to(x.dtype)
            y = F.dropout(self.o(q.transpose(1, 2).flatten(2)), training=self.training)
            y = self.last(y).float()
            return y * x.float() + y.relu()

    return Producers()


_LARGER = {"mixture": _mixture, "rotary": _rotary, "producers": _producers}


class Case(NamedTuple):
    """
    capability   the compute capability to write for, 90 for 9.0, or 0 for this CPU
    every_byte   decisions about memory are made for sizes that no GPU is short of, too
    tokens       sequences, and tokens of each. With fewer than 128 tokens, contractions over tokens
                 are spread over two chunks, and such a quantizer reads its operand.
    dynamic      whether the number of tokens is symbolic
    """

    name: str
    model: str
    capability: int
    options: dict[str, Any]
    training: bool = True
    every_byte: bool = False
    tokens: tuple[int, int] = (2, 24)
    dynamic: bool = False


def _fused_cases() -> Iterator[Case]:
    """Prologue fusion: `_collect_one` asserts that quantizers compute their operand."""
    emulated = {"inductor": {"emulate_precision_casts": True}}
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "90_fused_pair": ("block", {}),  # dg and du of the SwiGLU in one kernel
        "100_fused_pair": ("block", {}),
        "90_fused_masked": ("block", {"recipe": "quartet"}),  # in the forward
        "90_fused_exact": ("block", {"global_scale": "exact"}),
        "90_fused_producers": ("producers", {}),
        "120_fused_producers": ("producers", {}),
        "90_fused_rounded": ("producers", emulated),
    }
    for name, (model, options) in cases.items():
        capability, options = int(name.partition("_")[0]), {**options, "fuse_rotations": True}
        yield Case(name, model, capability, options, tokens=(2, 128))


def _cases() -> Iterator[Case]:
    yield Case("cpu_quartet2", "block", 0, {})
    yield Case("cpu_eager_nvfp4", "block", 0, {"recipe": "nvfp4", "inner": "eager"})
    experts = {"policy": {"*": "quartet2"}}
    yield Case("cpu_eager_experts", "experts", 0, {**experts, "inner": "eager"})
    yield Case("cpu_telemetry", "block", 0, {"telemetry": {"every": 1}})
    yield Case("cpu_inference", "block", 0, {}, training=False)
    for capability in (90, 100):
        for recipe in (*RECIPES, "bf16"):
            yield Case(f"{capability}_{recipe}", "block", capability, {"recipe": recipe})
        exact = {"global_scale": "exact"}
        yield Case(f"{capability}_global_scale", "block", capability, exact)
        yield Case(f"{capability}_inference", "block", capability, {}, training=False)
        yield Case(f"{capability}_experts", "experts", capability, experts)
        yield Case(f"{capability}_rotary", "rotary", capability, {})
        for model in ("head", "stack"):
            yield Case(f"{capability}_{model}", model, capability, {}, every_byte=True)
    yield Case("cpu_stack", "stack", 0, {}, every_byte=True)
    yield from _fused_cases()
    yield Case("90_dynamic", "block", 90, {"recipe": "nvfp4"}, tokens=(2, 128), dynamic=True)
    yield Case("cpu_eager_mixture", "mixture", 0, {**experts, "inner": "eager"})
    yield Case("90_mixture", "mixture", 90, experts)
    yield Case("90_mixture_dynamic", "mixture", 90, experts, dynamic=True)
    yield Case("90_policy", "block", 90, {"policy": {"down": {"dgrad": "bf16"}, "q": "nvfp4"}})
    for option in ("keep_packed", "recompute_weights", "cache_weights"):
        yield Case(f"90_{option}", "checkpointed", 90, {option: True})
    yield Case("90_telemetry", "block", 90, {"telemetry": {"every": 1}})
    yield Case("90_tensor_parallel", "tensor_parallel", 90, {"policy": {"*": "quartet2"}})
    for recipe in RECIPES[1:]:
        policy = {"policy": {"*": recipe}}
        yield Case(f"90_experts_{recipe}", "experts", 90, policy)
        yield Case(f"cpu_experts_{recipe}", "experts", 0, {**policy, "inner": "eager"})
        telemetry = {**policy, "inner": "eager", "telemetry": {"every": 1}}
        yield Case(f"cpu_experts_telemetry_{recipe}", "experts", 0, telemetry)


def _multiply_on_cpu(library: Any) -> None:
    """Products of bf16 operands in fp32, which code for GPUs calls, are CUDA's alone in torch."""
    import torch

    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm.dtype", "CPU"):
        return

    def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return a.to(dtype) @ b.to(dtype)

    library.impl("mm.dtype", product, "CPU")


def collect(tree: Path, out: Path, only: list[str]) -> None:
    """Dump the cases that match one of the patterns, or all, into ``out``, with the package that
    this process imports."""
    sys.path[:0] = [str(tree / part) for part in ("installed", "tests/support", "tests", "")]
    import torch

    try:
        from tests.support.emulation import inductor as emulation
    except ImportError:  # where the commit has it elsewhere
        from emulation import inductor as emulation

    from q2compile import lowering

    assert Path(str(lowering.__file__)).is_relative_to(tree.resolve()), "not this commit's package"
    torch.set_num_threads(1)
    library = torch.library.Library("aten", "IMPL")  # as long as this lives
    _multiply_on_cpu(library)
    for case in _cases():
        if not only or any(fnmatch.fnmatch(case.name, pattern) for pattern in only):
            _collect_one(case, out / case.name, emulation)


def _collect_one(case: Case, folder: Path, emulation: Any) -> None:
    import pytest
    import torch
    import torch._inductor.config as inductor_config

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = _models()[case.model]().bfloat16().train(case.training)
    x = torch.randn(*case.tokens, 64, dtype=torch.bfloat16, requires_grad=case.training)
    if case.dynamic:
        torch._dynamo.mark_dynamic(x, (0, 1))
    settings: dict[str, Any] = {**case.options, "dump": str(folder)}
    if "telemetry" in settings:
        # Stub kernels record uninitialized memory, so telemetry's files are not compared.
        to = folder.parent.with_name("telemetry") / case.name if case.capability else folder
        settings["telemetry"] = {**settings["telemetry"], "to": str(to / "telemetry")}
    with (
        pytest.MonkeyPatch.context() as patch,
        inductor_config.patch(force_disable_caches=True),
        torch.set_grad_enabled(case.training),
    ):
        if case.capability:
            emulation.emulate(patch, case.capability)
            emulation.serve_as_on(patch, case.capability)
            settings["inductor"] = {**case.options.get("inductor", {}), "cpu_backend": "triton"}
        if case.every_byte:
            for module in ("joint.saved_weights", "post_grad.pair_directions"):
                patch.setattr(f"q2compile.passes.{module}.SMALL", 0, raising=False)
        y = torch.compile(model, backend="quartet2", options=settings)(x)
        if case.training:
            y.float().square().mean().backward()
    if case.options.get("fuse_rotations"):
        told = "".join(path.read_text() for path in folder.rglob("passes.json"))
        assert ": fused with" in told, f"{case.name}: no quantizer computes its operand"
    if not case.capability:  # else the kernels did nothing
        gradients = [t.grad for t in (x, *model.parameters()) if t.grad is not None]
        sums = [float(t.double().abs().sum()) for t in (y.detach(), *gradients)]
        (folder / "numbers.txt").write_text(f"{sums}\n")


# ---- in the process that compares ----------------------------------------------------------------


def checked_out(commit: str | None, folder: Path) -> Path:
    """A commit's files in ``folder``; the working tree, tracked files alone, for None."""
    folder.mkdir()
    if commit is None:
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
        archive = subprocess.run(
            ["tar", "-c", "--null", "--ignore-failed-read", "-T", "-"],
            cwd=ROOT,
            input=files.stdout,
            check=True,
            capture_output=True,
        )
    else:
        command = ["git", "archive", commit]
        archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
    installed = folder / "installed" / "q2compile"  # as pyproject.toml maps the three folders
    installed.mkdir(parents=True)
    for entry in [
        *(folder / "q2compile").iterdir(),
        folder / "lowering",
        folder / "runtime_kernels",
    ]:
        (installed / entry.name).symlink_to(entry)
    return folder


def _dumps(commit: str | None, folder: Path, only: list[str]) -> dict[str, str]:
    """{file: text} of a commit's dumps."""
    tree = checked_out(commit, folder / "tree")
    out = folder / "dumps"
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree / "installed"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
    }
    command = [sys.executable, __file__, "--collect", str(tree), str(out)]
    command += [f"--only={pattern}" for pattern in only]
    subprocess.run(command, env=environment, cwd=tree / "installed", check=True)
    files = sorted(p for p in out.rglob("*") if p.suffix in (".txt", ".json", ".py"))
    assert len(files) > (0 if only else 400), f"only {len(files)} files were dumped"
    return {p.relative_to(out).as_posix(): _without_what_varies(p.read_text()) for p in files}


def _without_what_varies(text: str) -> str:
    for pattern, instead in _VARIES:
        text = pattern.sub(instead, text)
    return text


def compare(old: dict[str, str], new: dict[str, str], renamed: dict[str, str]) -> list[str]:
    """The lines of the diff; [] if nothing differs."""
    lines = []
    for name in sorted({*old, *new}):
        before, after = old.get(name, ""), new.get(name, "")
        for word, other in renamed.items():
            before = before.replace(word, other)
        texts = (before.splitlines(), after.splitlines())
        lines += difflib.unified_diff(*texts, f"old/{name}", f"new/{name}", lineterm="", n=1)
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", help="a commit")
    parser.add_argument("new", nargs="?", help="another; by default the working tree")
    parser.add_argument("--rename", action="append", default=[], metavar="OLD=NEW")
    parser.add_argument("--only", action="append", default=[], metavar="CASE", help="a pattern")
    parser.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.collect:
        collect(Path(arguments.old), Path(arguments.new), arguments.only)
        return 0
    renamed = dict(pair.split("=", 1) for pair in arguments.rename)
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary) / name for name in ("old", "new")]
        for folder in folders:
            folder.mkdir()
        old, new = (
            _dumps(commit, folder, arguments.only)
            for commit, folder in zip((arguments.old, arguments.new), folders, strict=True)
        )
    lines = compare(old, new, renamed)
    print("\n".join(lines[:400]))
    size = sum(map(len, new.values()))
    print(
        f"{len(new)} files, {size} characters: "
        + (f"{len(lines)} lines differ" if lines else "equal")
    )
    return bool(lines)


if __name__ == "__main__":
    raise SystemExit(main())
