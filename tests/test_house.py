# SPDX-License-Identifier: Apache-2.0
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

from tests.support.tracked import parsed, tracked

ROOT = Path(__file__).resolve().parents[1]
# Top folder -> the name it is imported by.
PACKAGES = {
    "runtime_kernels": "q2compile.runtime_kernels",
    "lowering": "q2compile.lowering",
    "q2compile": "q2compile",
}
FOLDERS = [*PACKAGES, "tests", "examples"]
TOP_FILES = {
    "README.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "MANIFEST.in",
    "Makefile",
    "pyproject.toml",
    "constraints.txt",
}

# File types of the packages.
SHIPPED = (".py", ".cu", ".cuh", ".cpp", ".h", ".html", ".css", ".js", ".json", ".typed")
SOURCES = (".py", ".cu", ".cuh", ".cpp", ".h", ".js", ".css", ".html", ".sh")
MAX_FILE = 500
MAX_FUNCTION = 80
MAX_KERNEL = 200
MAX_ENTRIES = 18  # of q2compile/: what fits on one screen of a file tree

# Room -> the rooms it may import, named without "q2compile.". A room is a module, or a package with
# all it holds; a module belongs to the room with the longest name that fits.
TOOLS = ["backend", "capture", "config", "graph", "linear", "recipes", "report", "rewrite"]
TOOLS += ["runtime_kernels", "torch_internals"]
STORE = [f"runtime_kernels.{n}" for n in ("cache_folder", "kernel_states", "versions")]
CHECKS = [*STORE, *(f"runtime_kernels.{n}" for n in ("check_child", "check_results", "checks"))]
CHOOSING = [f"runtime_kernels.{n}" for n in ("choice", "check_results", "kernel_states")]
SHARED_TOOLS = ["arguments", "as_it_was", "given", "kernel_rows", "measure"]
SHARED_TOOLS = [f"tools.{n}" for n in (*SHARED_TOOLS, "time_words", "worst_layers")]
SEMANTICS = [f"runtime_kernels.{n}" for n in ("numerics", "ops", "registry")]
KERNELS_ASK = [*CHOOSING, *SEMANTICS, *CHECKS]
KERNELS_ASK += [f"runtime_kernels.{n}" for n in ("selfcheck", "small_calls")]
MAY_IMPORT = {
    # The public names, loaded on first use.
    "": ["config", "failures.stage_error", "recipes.option_types", "report", "telemetry", "tools"]
    + ["tools.compare", "tools.export", "torch_internals.tested_versions", "weight_cache"]
    + ["runtime_kernels.kernel_states", "runtime_kernels.registry"],
    "backend": ["capture", "compiler", "config", "failures", "report", "rewrite"]
    + ["runtime_kernels", "telemetry", "torch_internals", "weight_cache"],
    "config": ["passes", "recipes", "runtime_kernels", "telemetry.options", "torch_internals"],
    # Products on top: nothing below imports a folder of tools/, and none imports another, so that
    # each can be deleted. Only `Report.to_html` calls for the page.
    "tools": [*TOOLS, "compiler", "cost_model", "lowering", "tools.page.document"],
    "tools.bench": ["cost_model", "lowering", "recipes", "runtime_kernels", *SHARED_TOOLS],
    "tools.compare": [*TOOLS, *SHARED_TOOLS, "cost_model"],
    "tools.export": [*TOOLS, *SHARED_TOOLS, "telemetry"],
    "tools.page": ["cost_model", "recipes", "report.model_rows", "report.row", "report.slower"]
    + ["runtime_kernels.ops.gaussian", "telemetry.read", *SHARED_TOOLS],
    "rewrite": ["capture", "config", "cost_model", "graph", "linear", "recipes", "report.row"]
    + ["torch_internals"],
    "compiler": ["config", "graph", "lowering", "passes", "runtime_kernels", "torch_internals"]
    + ["weight_cache"],
    "telemetry": ["capture", "graph", "recipes", "report.process_lock", "runtime_kernels"]
    + ["torch_internals"],
    "telemetry.options": ["recipes.policy"],
    "weight_cache": ["capture", "graph", "linear", "recipes", "report.row"]
    + ["runtime_kernels.numerics", "torch_internals"],
    "report": ["capture", "config", "cost_model", "graph", "linear", "lowering", "passes"]
    + [*CHOOSING, "recipes", "runtime_kernels.cpu.build", "runtime_kernels.cuda.emulated"]
    + [f"runtime_kernels.{n}" for n in ("ops", "registry", "versions")]
    + ["torch_internals"],
    "report.process_lock": [],
    "failures": ["config", "graph", "torch_internals"],
    "capture": ["graph", "linear.tensor_parallel", "torch_internals"],
    "linear": ["graph", "recipes", "runtime_kernels", "torch_internals"],
    "cost_model": ["graph", "linear", "lowering", "passes", "recipes", "runtime_kernels"]
    + ["torch_internals"],
    "recipes": ["runtime_kernels.numerics"],
    "passes": ["graph", "runtime_kernels", "torch_internals"],
    "graph": ["runtime_kernels", "torch_internals"],
    **dict.fromkeys(("errors", "torch_internals"), []),
    "lowering": ["graph", "runtime_kernels", "torch_internals"],
    "runtime_kernels": [],
    "runtime_kernels.versions": ["runtime_kernels.kernel_states"],
    **dict.fromkeys((*CHECKS[3:], "runtime_kernels.choice"), CHECKS),
    "runtime_kernels.selfcheck": [*CHOOSING, *SEMANTICS, "runtime_kernels.small_calls"],
    "runtime_kernels.registry": CHOOSING,
    "runtime_kernels.ops": [*CHOOSING, "runtime_kernels.numerics", "runtime_kernels.registry"],
    **dict.fromkeys((*STORE[:2], "runtime_kernels.numerics"), []),
    "runtime_kernels.cpu": [*KERNELS_ASK, "torch_internals.cpp_compiler"],
    "runtime_kernels.cuda": KERNELS_ASK,
    "runtime_kernels.small_calls": [*CHOOSING, *SEMANTICS],
    "runtime_kernels.cuda.jit": STORE,
}
# Torch's private modules that are imported outside of torch_internals/:
# reason -> (folder or file, module).
PRIVATE_IMPORTS = {
    "lowerings are written in Inductor's IR, and read it": [
        *(("lowering", f"torch._inductor.{name}") for name in ("ir", "lowering", "virtualized")),
        ("lowering/prologue/expressions.py", "torch._inductor.inductor_prims"),
        ("lowering/prologue/expressions.py", "torch._inductor.ops_handler"),
        ("lowering", "torch.utils._sympy.functions"),
    ],
    "tiles and roundings follow Inductor's settings, and are given in its terms": [
        ("lowering/inductor_kernels/tile_config.py", "torch._inductor.codegen.triton"),
        ("lowering/inductor_kernels/tile_config.py", "torch._inductor.config"),
        ("lowering/prologue/expressions.py", "torch._inductor.config"),
    ],
    "arguments of nodes are walked as torch walks them; it has no public name": [
        ("q2compile", "torch.utils._pytree"),
    ],
    "runtime_kernels imports nothing of the rest": [
        ("runtime_kernels", "torch.utils._python_dispatch"),
        ("runtime_kernels/cuda", "torch._subclasses.fake_tensor"),
    ],
    "torch_internals raises errors, so errors can't import it": [
        ("q2compile/errors.py", "torch._dynamo.exc"),
    ],
}
EVERYBODYS = ("errors",)  # everybody may import these


TRACKED = tracked(ROOT)


def files(*suffixes: str, folders: list[str] = FOLDERS) -> list[Path]:
    return [p for p in TRACKED if p.suffix in suffixes and p.relative_to(ROOT).parts[0] in folders]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def documents() -> list[Path]:
    return [p for p in TRACKED if p.suffix == ".md"]


def test_nothing_else_at_the_top() -> None:
    names = {p.relative_to(ROOT).parts[0] for p in TRACKED}
    assert {name for name in names if not name.startswith(".")} == {*FOLDERS, *TOP_FILES}


def test_entries_of_the_front() -> None:
    names = {
        p.relative_to(ROOT / "q2compile").parts[0] for p in files(".py", folders=["q2compile"])
    }
    assert len(names) <= MAX_ENTRIES, sorted(names)


LICENSE_LINE = "SPDX-License-Identifier: Apache-2.0"


def test_sources_name_their_license() -> None:
    """In their first line, or after a line that an interpreter or a browser wants first."""
    sources = [p for p in TRACKED if p.suffix in SOURCES and p.stat().st_size]
    assert len(sources) > 400
    tops = {relative(p): p.read_text().splitlines()[:2] for p in sources}
    assert [name for name, top in tops.items() if not any(LICENSE_LINE in t for t in top)] == []


def test_no_long_files() -> None:
    counts = {
        relative(p): len(p.read_text().splitlines())
        for p in files(".py", ".cu", ".cuh", ".cpp", ".h", ".html", ".css", ".js")
    }
    assert len(counts) > 20
    assert {name: count for name, count in counts.items() if count > MAX_FILE} == {}


def python_functions(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(name, lines, is a Triton kernel) of every function in a file."""
    for node in ast.walk(parsed(path)):
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


def script_functions(path: Path) -> Iterator[tuple[str, int]]:
    """(first line, lines) of every function of a file and every method of its classes: by our
    layout their `}` is in column 0, a method's in column 2."""
    start, header, inside = 0, "", ""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.startswith("class "):
            inside = "  "
        elif line.startswith("}"):
            if not inside:
                yield header, number - start + 1
            inside = ""
        elif inside and line == "  }":
            yield header, number - start + 1
        elif re.match(rf"{inside}[\w\[]", line):
            start, header = number, line.strip()


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
    for path in files(".js"):
        for name, lines in script_functions(path):
            if lines > MAX_FUNCTION:
                long.append((relative(path), name, lines))
    assert long == []


def test_no_utils_module() -> None:
    names = [relative(p) for p in files(".py") if p.stem in {"utils", "util", "helpers", "misc"}]
    assert names == [], "name a module after what it does"


def module_of(path: Path) -> str:
    """The name without "q2compile." of a file of the three packages; a package for its __init__."""
    top, *inner = path.relative_to(ROOT).with_suffix("").parts
    parts = inner if top == "q2compile" else [top, *inner]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in files(".py", folders=list(PACKAGES))}


def imported_modules(path: Path) -> set[str]:
    """The modules of ours that a file imports, in functions and under TYPE_CHECKING, too."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}: relative imports hide who is imported"
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in named if name.removeprefix("q2compile.") in MODULES}
            found |= modules if modules == named else {*modules, node.module or ""}
    own = {name.removeprefix("q2compile.") for name in found if name.startswith("q2compile.")}
    return own & set(MODULES)


def within(module: str, room: str) -> bool:
    return module == room or bool(room) and module.startswith(f"{room}.")


def room_of(module: str) -> str:
    """The longest name in MAY_IMPORT that contains a module."""
    return max((room for room in MAY_IMPORT if room and within(module, room)), key=len, default="")


def test_every_module_has_a_room() -> None:
    assert [m for m in MODULES if m and not room_of(m)] == []


def test_imports_follow_the_rules() -> None:
    wrong = []
    for module, path in MODULES.items():
        room = room_of(module)
        allowed = [room, *MAY_IMPORT[room], *EVERYBODYS]
        if "__init__" in path.name:
            allowed.append(module)  # a package lists what it holds
        for other in sorted(imported_modules(path)):
            if not any(within(other, name) for name in allowed):
                wrong.append(f"{relative(path)} imports {other}: {room!r} may not")
    assert wrong == []


def test_no_import_circles() -> None:
    """Between files; a package's __init__, which imports what it holds, aside."""
    left = {
        module: {o for o in imported_modules(path) if MODULES[o].name != "__init__.py"}
        for module, path in MODULES.items()
        if path.name != "__init__.py"
    }
    while done := {module for module, imported in left.items() if not imported & set(left)}:
        left = {module: imported for module, imported in left.items() if module not in done}
    circles = {relative(MODULES[m]): sorted(i & set(left)) for m, i in left.items()}
    assert circles == {}, "these files import each other, or what does"


def test_nobody_imports_a_private_name() -> None:
    found = []
    for module, path in MODULES.items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("q2compile"):
                private = [
                    a.name for a in node.names if a.name.startswith("_") and a.name[1] != "_"
                ]
                found += [f"{module} imports {name} of {node.module}" for name in private]
    assert found == []


def private_imports(path: Path) -> Iterator[str]:
    """Modules of torch with a private part in their path, which a file imports anywhere."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, *inner = name.split(".")
            if first == "torch" and any(part.startswith("_") for part in inner):
                yield name


def test_private_modules_of_torch_are_imported_in_one_place() -> None:
    allowed = [pair for pairs in PRIVATE_IMPORTS.values() for pair in pairs]
    wrong, used = [], set()
    for path in MODULES.values():
        file = relative(path)
        if file.startswith("q2compile/torch_internals/"):
            continue
        for name in private_imports(path):
            fits = {
                (place, module)
                for place, module in allowed
                if (file == place or file.startswith(f"{place}/")) and within(name, module)
            }
            used |= fits
            if not fits:
                wrong.append(f"{file} imports {name}")
    assert wrong == [], "import it in torch_internals/, or list it with its reason"
    assert set(allowed) - used == set(), "nobody imports these any more"


def test_packages_say_what_they_are_for() -> None:
    """In their __init__: and, but for those that hold an op or a table, what they may import."""
    packages = [p for p in MODULES.values() if p.name == "__init__.py"]
    assert [relative(p) for p in packages if not ast.get_docstring(parsed(p))] == []


def test_no_device_is_hard_coded() -> None:
    """A `device="cuda"`, `.to("cuda")` or `.cuda()` outside of tests decides for the user."""
    found = []
    for path in files(".py", folders=[*PACKAGES, "examples"]):
        for node in ast.walk(parsed(path)):
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
        if (path.parent / "__init__.py").exists():
            continue  # a package, which a program beside it imports
        beside = [other.read_text() for other in path.parent.glob("*.py") if other != path]
        if any(re.search(rf"^(import|from) {path.stem}\b", text, re.MULTILINE) for text in beside):
            continue
        assert any(name == "main" for name, _, _ in python_functions(path)), relative(path)


def test_no_paths_of_one_machine() -> None:
    pattern = re.compile(
        r"(?<![\w.:/])/(" + "|".join(["work", "root", "home", "tmp", "Users"]) + r")/"
    )
    texts = [*files(".py", ".cu", ".cuh", ".html", ".css", ".js", ".json", ".md"), *documents()]
    texts += [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci" / "run"]
    assert [relative(p) for p in texts if pattern.search(p.read_text())] == []


def empty_containers(path: Path) -> Iterator[str]:
    """Names at the top of a file that are given something to be filled."""
    for node in parsed(path).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        value = ast.unparse(node.value)
        if re.fullmatch(
            r"\[\]|\{\}|(\w+\.)*\w*(?i:dict|set|list|dictionary|counter)\((\w*)\)", value
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from map(ast.unparse, targets)


def test_what_lowerings_know_of_a_graph_is_one_object() -> None:
    """lowering/state.py; nothing at the top of a file, by graphs or otherwise."""
    found = {
        (relative(p), n) for p in files(".py", folders=["lowering"]) for n in empty_containers(p)
    }
    assert found == set()


def test_no_second_registration() -> None:
    """The entry point registers the backend; a second registration makes torch assert."""
    sources = files(".py", folders=list(PACKAGES))
    assert [relative(p) for p in sources if "@register_backend" in p.read_text()] == []


# Files that may have the name of a quantizing op as a text: the table; what is another thing.
NAMES_QUANTIZERS = {
    "runtime_kernels/ops/table.py",
    "q2compile/__init__.py",  # the public function, as in tools/quantize.py
    "q2compile/tools/quantize.py",
    "q2compile/recipes/option_types.py",  # sources of operands, as in those below
    "q2compile/recipes/recipe.py",
    "q2compile/tools/bench/cases.py",  # names of timings
}


def test_quantizing_ops_are_named_in_their_table_alone() -> None:
    """Other places ask the table for their properties and arguments."""
    found = set()
    for path in files(".py", folders=list(PACKAGES)):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Constant) and node.value in ("quantize", "requantize"):
                found.add(relative(path))
    assert found == NAMES_QUANTIZERS


def paths_in(document: str) -> Iterator[str]:
    """Paths of this repository that a Markdown text names in backquotes or code blocks. Where links
    lead is in test_guides."""
    first = "|".join(re.escape(name) for name in [*FOLDERS, ".ci"])
    yield from re.findall(rf"(?<![\w./-])(?:{first})/[\w./-]*\w", document)
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
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(tree)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    shipped = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    expected = {
        "/".join(
            [*PACKAGES[p.relative_to(ROOT).parts[0]].split("."), *p.relative_to(ROOT).parts[1:]]
        )
        for p in files(*SHIPPED, folders=list(PACKAGES))
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


def test_imports_without_triton_and_cuda_bindings() -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(['triton', 'cuda', 'cuda.bindings']))"
    modules = "q2compile.runtime_kernels, q2compile.backend, q2compile.tools.cli"
    done = run_python(f"{blocked}; import {modules}")
    assert done.returncode == 0, done.stderr
