# SPDX-License-Identifier: Apache-2.0
"""The part "Your process" of the guide limits.md: its tables match the sources in both
directions."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import q2compile
from q2compile.runtime_kernels.registry import LIBRARY
from tests.support import forked
from tests.support.tracked import parsed, tracked

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "examples" / "guides" / "limits.md").read_text()
PACKAGES = ("q2compile", "lowering", "runtime_kernels")


@functools.cache
def sources() -> dict[str, ast.Module]:
    """A tree for each file of the packages."""
    return {
        path.relative_to(ROOT).as_posix(): parsed(path)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def section(title: str) -> str:
    """The text under a heading."""
    return re.split(r"\n##+ ", PAGE.split(f"### {title}\n")[1])[0]


def rows(title: str) -> dict[str, list[str]]:
    """The table under a heading: the name in backquotes in its first cell -> the other cells."""
    lines = [line for line in section(title).splitlines() if line.startswith("| `")]
    cells = [line.strip("|").split("|") for line in lines]
    found = {re.findall(r"`([^`]+)`", first)[0]: rest for first, *rest in cells}
    assert found, title
    return found


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """(file, name of the called function, the call) for all sources."""
    for file, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield file, ast.unparse(node.func), node


def constants(file: str) -> dict[str, str]:
    """Texts that a file names at its top."""
    return {
        target.id: node.value.value
        for node in sources()[file].body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }


def named(file: str, value: ast.expr) -> str:
    """The text that an argument is, by name or as written."""
    if isinstance(value, ast.Constant):
        return str(value.value)
    return constants(file).get(ast.unparse(value), ast.unparse(value))


def test_registrations() -> None:
    listed = rows("Registrations")
    (point,) = [p for p in entry_points(group="torch_dynamo_backends") if p.name == "quartet2"]
    assert point.value == "q2compile.backend:quartet2"
    assert set(listed) == {"q2", "quartet2", "torch._inductor.lowering.lowerings"}
    assert LIBRARY.ns == "q2"
    spaces = {named(f, n.args[0]) for f, name, n in calls() if name.rpartition(".")[2] == "Library"}
    assert spaces <= {"q2", "LIBRARY.ns"}


def test_environment_variables() -> None:
    read = {
        named(file, node.args[0])
        for file, name, node in calls()
        if name in ("os.environ.get", "os.getenv")
    }
    subscripts = {
        named(file, node.slice)
        for file, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ"
    }
    listed = set(rows("Environment variables"))
    assert {"TORCH_LOGS", "TORCH_TRACE"} < listed
    assert read | subscripts == listed - {"TORCH_LOGS", "TORCH_TRACE"}


def test_no_other_variable_of_ours_is_named_anywhere() -> None:
    """In sources, tests, documents, the Makefile."""
    texts = [p.read_text("utf-8") for p in tracked(ROOT) if p.suffix in (".py", ".md", ".toml", "")]
    found = set(re.findall(r"\bQ2COMPILE_[A-Z_]*[A-Z]", "\n".join(texts)))
    assert found == set(re.findall(r"`(Q2COMPILE_\w+)`", section("Environment variables")))


# Calls that write a file, or create a folder or a temporary one.
WRITES = (
    r".*\.(write_text|write_bytes|mkdir|touch|symlink_to)|.*(mkdtemp|mkstemp|TemporaryDirectory)"
    r"|.*SummaryWriter|os\.(replace|makedirs)|torch\.save|save_file"
)


def writes(name: str, node: ast.Call) -> bool:
    modes = [a.value for a in node.args if isinstance(a, ast.Constant)]
    opens = name.endswith("open") and any(m in ("w", "a", "wb", "x", "xb") for m in modes)
    return opens or re.fullmatch(WRITES, name) is not None


def test_files() -> None:
    """A row for each source file that writes: "by" names it."""
    found = {file for file, name, node in calls() if writes(name, node)}
    by = " ".join(cells[-1] for cells in rows("Files").values())
    listed = set(re.findall(r"`(\S+\.py)`", by))
    assert listed == found


def test_nothing_is_written_by_default(tmp_path: Path) -> None:
    """A training on a CPU: neither where it runs nor at home nor among temporary files, but for the
    library of kernels in the cache."""
    program = (
        "import tempfile, torch\n"
        "tempfile.tempdir = None\n"  # as in a process that has asked for none so far
        "from tests.support.small_model import Mlp\n"
        "model = Mlp()\n"
        "call = torch.compile(model, backend='quartet2')\n"
        "call(torch.randn(32, 64)).sum().backward()\n"
    )
    places = {name: str(tmp_path / name) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME")}
    cache, work = tmp_path / "inductor", tmp_path / "work"
    for place in (*places.values(), cache, work):
        Path(place).mkdir()
    done = forked.run(program, cwd=work, **places, TORCHINDUCTOR_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stderr
    # Inductor's headers are among the temporary files, wherever its cache is.
    written = [p for p in tmp_path.rglob("*") if p.is_file() and cache not in p.parents]
    own = [p for p in written if "torchinductor" not in p.relative_to(tmp_path).as_posix()]
    assert [re.sub("[0-9a-f]{24}", "HASH", str(p.relative_to(tmp_path))) for p in own] == [
        "XDG_CACHE_HOME/q2compile/cpu-HASH.so"
    ]


def test_hooks() -> None:
    """The hooks, and the files that register them."""
    found = {
        (name.rpartition(".")[2], file)
        for file, name, _ in calls()
        if re.fullmatch(r"register_\w*hook", name.rpartition(".")[2]) or name == "atexit.register"
    }
    found = {("atexit" if hook == "register" else hook, file) for hook, file in found}
    found |= {
        ("excepthook", file)
        for file, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith(".excepthook")
    }
    listed = {
        (hook, name)
        for hook, cells in rows("Hooks").items()
        for name in re.findall(r"`(\S+\.py)`", cells[-1])
    }
    assert listed == found


def test_no_hook_is_the_process_s() -> None:
    named = (
        r"register_(optimizer_step|module)_\w*hook|gc\.callbacks|sys\.set(trace|profile)"
        r"|signal\.signal|register_at_fork"
    )
    assert [(file, name) for file, name, _ in calls() if re.search(named, name)] == []


def test_threads_and_subprocesses() -> None:
    begun = r"ThreadPoolExecutor|(threading\.)?Thread|ProcessPoolExecutor|subprocess\.\w+|os\.fork"
    found = {file for file, name, _ in calls() if re.fullmatch(begun, name)}
    listed = set(rows("Threads and subprocesses"))
    assert listed == found


def test_warnings_and_log() -> None:
    for module in pkgutil.walk_packages(q2compile.__path__, "q2compile."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, todo = set(), [UserWarning, Warning]
    while todo:
        kinds = todo.pop().__subclasses__()
        found |= {k.__name__ for k in kinds if k.__module__.startswith("q2compile")}
        todo += kinds
    assert {name for name in rows("Warnings and log lines") if name != "q2compile"} == found


def test_patches() -> None:
    name = "q2compile.torch_internals.patches"
    if importlib.util.find_spec(name) is None:
        pytest.skip("the table of patches is not there")
    table = importlib.import_module(name).PATCHES
    assert set(rows("Patches while a graph is compiled")) == {patch.name for patch in table}
