"""Whether a refactoring changed what the compiler writes: the dumps of a fixed set of models, at
two commits, compared file by file.

    python tests/support/compare_commits.py HEAD~3            against the working tree
    python tests/support/compare_commits.py HEAD~3 HEAD --rename @bf16=@widened

Each commit is checked out into a temporary folder and imported from there, in a process of its own
with empty caches. It compiles every case below: on this CPU as it is, and for a GPU that is not
there (`emulation.inductor`, kernels are stubs), forward and backward. What is compared is all that
the option ``dump`` writes, every stage of every graph and Inductor's code, less what differs from
run to run (times, paths, hashes of sources). --rename says which words were changed on purpose.
Exit status 0: equal; 1: a diff is printed.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ("quartet2", "nvfp4", "quartet", "mxfp4", "tetrajet2")
# What a run may differ in from one of the same commit.
_VARIES = (
    (re.compile(r'("seconds": )[\d.e-]+'), r"\g<1>0"),
    (re.compile(r"/\S*/(torchinductor\w*|tmp\w*)/\S*"), "PATH"),
    (re.compile(r"\b[a-z0-9]{40,}\b"), "HASH"),
    (re.compile(r"\bc[a-z2-7]{50}\b"), "HASH"),
    (re.compile(r"# AOT ID: .*"), ""),
    (re.compile(r"<lambda> at 0x\w+|0x[0-9a-f]{8,}"), "ADDRESS"),
)


# ---- in a process of the commit that is looked at ------------------------------------------------


def _models() -> dict[str, Callable[[], Any]]:
    import torch
    import torch.nn.functional as F
    from torch import nn
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

    return {"block": Block, "checkpointed": Checkpointed, "experts": Experts}


def _cases() -> Iterator[tuple[str, str, int, dict[str, Any]]]:
    """(name, model, compute capability to write for or 0 for this CPU, options)."""
    yield "cpu_quartet2", "block", 0, {}
    yield "cpu_eager_nvfp4", "block", 0, {"recipe": "nvfp4", "inner": "eager"}
    yield "cpu_eager_experts", "experts", 0, {"policy": {"*": "quartet2"}, "inner": "eager"}
    for capability in (90, 100):
        for recipe in RECIPES:
            yield f"{capability}_{recipe}", "block", capability, {"recipe": recipe}
    yield "90_exact", "block", 90, {"global_scale": "exact"}
    yield "100_exact", "block", 100, {"global_scale": "exact"}
    yield "90_policy", "block", 90, {"policy": {"down": {"dgrad": "bf16"}, "q": "nvfp4"}}
    for option in ("keep_packed", "recompute_weights", "cache_weights"):
        yield f"90_{option}", "checkpointed", 90, {option: True}
    yield "90_experts", "experts", 90, {"policy": {"*": "quartet2"}}


def _multiply_on_cpu(library: Any) -> None:
    """Products of bf16 numbers in fp32, which code for GPUs calls, are CUDA's alone in torch."""
    import torch

    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm.dtype", "CPU"):
        return

    def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return a.to(dtype) @ b.to(dtype)

    library.impl("mm.dtype", product, "CPU")


def collect(tree: Path, out: Path) -> None:
    """Dump every case into ``out``, with the package that this process imports."""
    sys.path[:0] = [str(tree / part) for part in ("installed", "tests/support", "tests", "")]
    import pytest
    import torch
    import torch._inductor.config as inductor_config

    try:
        from tests.support.emulation import inductor as emulation
    except ImportError:  # where the commit has it elsewhere
        from emulation import inductor as emulation

    from q2compile import lowering

    assert Path(str(lowering.__file__)).is_relative_to(tree.resolve()), "not this commit's package"
    torch.set_num_threads(1)
    library = torch.library.Library("aten", "IMPL")  # as long as this lives
    _multiply_on_cpu(library)
    for name, model_name, capability, options in _cases():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = _models()[model_name]().bfloat16()
        x = torch.randn(2, 24, 64, dtype=torch.bfloat16, requires_grad=True)
        settings = {**options, "dump": str(out / name)}
        with (
            pytest.MonkeyPatch.context() as patch,
            inductor_config.patch(force_disable_caches=True),
        ):
            if capability:
                emulation.emulate(patch, capability)
                emulation.serve_as_on(patch, capability)
                settings["inductor"] = {"cpu_backend": "triton"}
            y = torch.compile(model, backend="quartet2", options=settings)(x)
            y.float().square().mean().backward()
        gradients = [p.grad for p in (x, *model.parameters())]
        if not capability:  # else the kernels did nothing
            sums = [float(g.double().abs().sum()) for g in gradients if g is not None]
            (out / name / "numbers.txt").write_text(f"{[float(y.double().sum()), *sums]}\n")


# ---- in the process that compares ----------------------------------------------------------------


def _checked_out(commit: str | None, folder: Path) -> Path:
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


def _dumps(commit: str | None, folder: Path) -> dict[str, str]:
    """{file: text} of what a commit dumps."""
    tree = _checked_out(commit, folder / "tree")
    out = folder / "dumps"
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree / "installed"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
    }
    command = [sys.executable, __file__, "--collect", str(tree), str(out)]
    subprocess.run(command, env=environment, cwd=tree / "installed", check=True)
    files = sorted(p for p in out.rglob("*") if p.suffix in (".txt", ".json", ".py"))
    assert len(files) > 100, f"only {len(files)} files were dumped"
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
    parser.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.collect:
        collect(Path(arguments.old), Path(arguments.new))
        return 0
    renamed = dict(pair.split("=", 1) for pair in arguments.rename)
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary) / name for name in ("old", "new")]
        for folder in folders:
            folder.mkdir()
        old, new = (
            _dumps(commit, folder)
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
