# SPDX-License-Identifier: Apache-2.0
"""Build the sdist and the wheel of HEAD, and check both as a user installs them (`make release`).

    python -m tests.support.release [--missing fail|skip] [--pythons 3.10 ...] [--out dist]

Each Python gets a fresh environment with the torch of constraints.txt. PyPI's builds bring CUDA: 6
GB while they are checked. The wheel is installed first, and then the sdist in its place. Each time
dependencies agree, the commands run, and a model trains in NVFP4 with nothing imported. A Python
that is missing is named, and fails the release unless --missing skip.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.markdown import broken_links

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
# A user's first program. It imports nothing of q2compile before torch.compile.
TRAINS = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
compiled = torch.compile(model, backend="quartet2", options={"strict": True})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(256, 64)
losses = []
for _ in range(5):
    loss = (compiled(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
import sys
from pathlib import Path
import q2compile
assert q2compile.__version__ == sys.argv[1], q2compile.__version__
assert Path(q2compile.__file__).with_name("py.typed").is_file()
assert all(getattr(q2compile, name) is not None for name in q2compile.__all__)
"""
COMMANDS = (["--version"], ["--help"], ["recipes"], ["doctor"])


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 where a Python is missing and was not to be skipped."""
    parser = argparse.ArgumentParser(description="Build sdist and wheel and check both.")
    parser.add_argument("--pythons", nargs="+", default=PYTHONS, help="default %(default)s")
    parser.add_argument("--missing", choices=("fail", "skip"), default="fail")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args(argv)
    found = {version: interpreter(version) for version in options.pythons}
    missing = [version for version, path in found.items() if path is None]
    if missing and options.missing == "fail":
        print(f"release: no Python {', '.join(missing)}; install, or make release MISSING=skip")
        return 1
    sdist, wheel = build(ROOT, options.out)
    broken = links_broken_in(sdist)
    if broken:
        print(f"release: {sdist.name} lacks what its documents link: {broken}")
        return 1
    for path in found.values():
        if path is not None:
            check(path, wheel, sdist)
    print(f"built     {sdist}\nbuilt     {wheel}")
    print(f"checked   Python {', '.join(v for v in found if v not in missing)}")
    if missing:
        print(f"MISSING   Python {', '.join(missing)}: not checked")
    return 0


def interpreter(version: str) -> Path | None:
    """The interpreter of a version of Python, on the PATH or among pyenv's; None if there is none.
    pyenv has a shim on the PATH for every version, which may fail."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    candidates = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
    for path in filter(None, candidates):
        command = [str(path), "-c", "import ensurepip, sys; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.strip() == version:
            return Path(path)
    return None


def build(root: Path, out: Path) -> tuple[Path, Path]:
    """The sdist of what is committed, and the wheel made of that sdist."""
    with tempfile.TemporaryDirectory() as folder:
        tree, built = Path(folder, "tree"), Path(folder, "built")
        tree.mkdir()
        archive = subprocess.run(
            ["git", "archive", "HEAD"], cwd=root, check=True, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built)]
        subprocess.run([*command, str(tree)], check=True, stdout=subprocess.DEVNULL)
        out.mkdir(parents=True, exist_ok=True)
        (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
        return Path(shutil.copy(sdist, out)), Path(shutil.copy(wheel, out))


def links_broken_in(sdist: Path) -> list[str]:
    """Links of the sdist's documents to files that it lacks."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
        documents = sorted(Path(folder).rglob("*.md"))
        assert any(path.name == "README.md" for path in documents)
        return [f"{path.name}: {link}" for path in documents for link in broken_links(path)]


def check(python: Path, wheel: Path, sdist: Path) -> None:
    """Install the wheel into a fresh environment, and use it; then the sdist in its place."""
    version = wheel.name.split("-")[1]
    torch = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert torch
    environment = {name: of for name, of in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:

        def run(*command: str) -> None:
            print("+", *command, flush=True)
            words = [str(bin_ / command[0]), *command[1:]]
            subprocess.run(words, cwd=folder, env=environment, check=True)

        subprocess.run([str(python), "-m", "venv", f"{folder}/venv"], check=True)
        bin_ = Path(folder, "venv", "bin")
        (Path(folder) / "trains.py").write_text(TRAINS)
        install = ("python", "-m", "pip", "install", "--quiet")
        run(*install, torch[0], str(wheel))
        for package in (wheel, sdist):
            if package is sdist:
                run(*install, "--force-reinstall", "--no-deps", str(sdist))
            run("python", "-m", "pip", "check")
            for words in COMMANDS:
                run("q2compile", *words)
            run("python", "trains.py", version)


if __name__ == "__main__":
    raise SystemExit(main())
