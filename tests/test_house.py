"""The rules of the house: what is where, how long it may be, who may import whom."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Top folder -> the name it is imported by. A later one may import an earlier one, not the reverse.
PACKAGES = {
    "runtime_kernels": "q2compile.runtime_kernels",
    "lowering": "q2compile.lowering",
    "q2compile": "q2compile",
}
FOLDERS = [*PACKAGES, "tests", "examples"]
TOP_FILES = {
    "README.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "pyproject.toml",
    "constraints.txt",
}
NOT_OURS = {"build", "dist", "runs", "graphs", "__pycache__"}

MAX_FILE = 500
MAX_FUNCTION = 80
MAX_KERNEL = 200


def files(*suffixes: str, folders: list[str] = FOLDERS) -> list[Path]:
    found = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
    return sorted(p for p in found if not NOT_OURS & set(p.parts))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *files(".md")])


def test_nothing_else_at_the_top() -> None:
    names = {p.name for p in ROOT.iterdir() if not p.name.startswith(".")}
    generated = NOT_OURS | {name for name in names if name.endswith(".egg-info")}
    assert names - generated <= {*FOLDERS, *TOP_FILES}
    assert {*FOLDERS, *TOP_FILES} <= names


def test_no_long_files() -> None:
    counts = {
        relative(p): len(p.read_text().splitlines()) for p in files(".py", ".cu", ".cuh", ".html")
    }
    assert len(counts) > 20
    assert {name: count for name, count in counts.items() if count > MAX_FILE} == {}


def python_functions(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(name, lines, is a Triton kernel) of every function in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield node.name, lines, any("triton.jit" in text for text in decorators)


def cuda_functions(path: Path) -> Iterator[tuple[str, int]]:
    """(first line, lines) of every top-level brace block: by our layout its `}` is in column 0."""
    start, header = 0, ""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.startswith("}"):
            yield header, number - start + 1
        elif line and not line[0].isspace() and line[0] not in "#/{":
            start, header = number, line


def test_no_long_functions() -> None:
    long = []
    for path in files(".py"):
        for name, lines, is_kernel in python_functions(path):
            if lines > (MAX_KERNEL if is_kernel else MAX_FUNCTION):
                long.append((relative(path), name, lines))
    for path in files(".cu", ".cuh"):
        for name, lines in cuda_functions(path):
            if lines > (MAX_KERNEL if "__global__" in name else MAX_FUNCTION):
                long.append((relative(path), name, lines))
    assert long == []


def test_no_utils_module() -> None:
    names = [relative(p) for p in files(".py") if p.stem in {"utils", "util", "helpers", "misc"}]
    assert names == [], "name a module after what it does"


def imported_modules(path: Path, package: str) -> Iterator[str]:
    """Absolute names of the modules a file imports; `package` is the one that holds the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def owner(module: str) -> str | None:
    """The top folder whose package a module belongs to."""
    for folder, package in PACKAGES.items():
        if module == package or module.startswith(f"{package}."):
            return folder
    return None


def test_imports_point_one_way() -> None:
    order = list(PACKAGES)
    wrong = []
    for folder, package in PACKAGES.items():
        for path in files(".py", folders=[folder]):
            inner = path.parent.relative_to(ROOT / folder).parts
            for module in imported_modules(path, ".".join([package, *inner])):
                target = owner(module)
                # `from q2compile import runtime_kernels` also names the package itself.
                if module != "q2compile" and target and order.index(target) > order.index(folder):
                    wrong.append((relative(path), module))
    assert wrong == []


def test_no_device_is_hard_coded() -> None:
    """A `device="cuda"`, `.to("cuda")` or `.cuda()` outside of tests decides for the user."""
    found = []
    for path in files(".py", folders=[*PACKAGES, "examples"]):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            values = [k.value for k in node.keywords if k.arg == "device"]
            values += node.args if name == "to" else []
            literal = [v.value for v in values if isinstance(v, ast.Constant)]
            if name == "cuda" or any(str(value).startswith("cuda") for value in literal):
                found.append((relative(path), node.lineno))
    assert found == []


def test_examples_have_a_main() -> None:
    """All but what another example beside it imports."""
    for path in files(".py", folders=["examples"]):
        beside = [other.read_text() for other in path.parent.glob("*.py") if other != path]
        if any(re.search(rf"^import {path.stem}$", text, re.MULTILINE) for text in beside):
            continue
        assert any(name == "main" for name, _, _ in python_functions(path)), relative(path)


def test_no_paths_of_one_machine() -> None:
    pattern = re.compile(
        r"(?<![\w.:/])/(" + "|".join(["work", "root", "home", "tmp", "Users"]) + r")/"
    )
    texts = [*files(".py", ".cu", ".cuh", ".html", ".json", ".md"), *documents()]
    texts += [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci" / "run"]
    assert [relative(p) for p in texts if pattern.search(p.read_text())] == []


def test_no_second_registration() -> None:
    """The entry point registers the backend; a second registration makes torch assert."""
    sources = files(".py", folders=list(PACKAGES))
    assert [relative(p) for p in sources if "@register_backend" in p.read_text()] == []


def paths_in(document: str) -> Iterator[str]:
    """Paths of this repository that a Markdown text names in backquotes, code blocks or links."""
    first = "|".join(re.escape(name) for name in [*FOLDERS, ".ci"])
    yield from re.findall(rf"(?<![\w./-])(?:{first})/[\w./-]*\w", document)
    yield from re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", document)
    top = "|".join(re.escape(name) for name in TOP_FILES)
    yield from re.findall(rf"`({top})`", document)


def test_paths_named_in_documents_exist() -> None:
    named = {(relative(d), path) for d in documents() for path in paths_in(d.read_text())}
    assert len(named) > 5
    assert [(doc, path) for doc, path in sorted(named) if not (ROOT / path).exists()] == []


def test_the_wheel_holds_every_source(tmp_path: Path) -> None:
    """A folder forgotten in pyproject.toml works in an editable install and is not in the wheel."""
    tree = tmp_path / "tree"
    for folder in PACKAGES:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(tree)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    shipped = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    expected = {
        "/".join(
            [*PACKAGES[p.relative_to(ROOT).parts[0]].split("."), *p.relative_to(ROOT).parts[1:]]
        )
        for p in files(".py", ".cu", ".cuh", ".html", folders=list(PACKAGES))
    }
    assert expected - shipped == set(), "add the folder to [tool.setuptools] packages"
    assert shipped - expected == set()


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """In a fresh process, outside of the repository."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path("/")
    )


def test_importing_q2compile_is_cheap() -> None:
    done = run_python("import sys, q2compile; print(*sorted(sys.modules))")
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "q2compile" in loaded
    assert not {"triton", "cuda", "cuda.bindings"} & loaded


@pytest.mark.parametrize(
    "module", ["q2compile.backend", "q2compile.runtime_kernels", "q2compile.cli"]
)
def test_imports_without_triton_and_cuda_bindings(module: str) -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(['triton', 'cuda', 'cuda.bindings']))"
    done = run_python(f"{blocked}; import {module}")
    assert done.returncode == 0, done.stderr
