"""Dumps: every stage of every graph as text, one folder a graph.

graphs/
    report.json, report.txt
    graph_0/
        0_dynamo.txt               as Dynamo captured it
        1_rewritten.txt            matmuls replaced by q2.linear
        2_forward.txt              after AOTAutograd and the partitioner
        3_backward.txt
        4_after_passes_forward.txt
        4_after_passes_backward.txt
        5_output_code_forward.py   what Inductor generated
        5_output_code_backward.py
        passes.json                per pass: matches, time, change in op counts
        reproduce_*.py             of a stage that failed: builds its graph again and runs it
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils._dtype_abbrs import dtype_abbrs

from q2compile.errors import ConfigError
from q2compile.passes.manager import PassRecord
from q2compile.report import Report
from q2compile.rewrite import SITE

_MARKER = ".q2compile"


class DumpFolder:
    """The folder of one process's dumps (of one rank's, ``rank<r>`` inside it, under
    torch.distributed).

    The first use in a process removes what an earlier run left: ``graph_<n>`` folders and reports,
    and only in a folder that q2compile itself marked.
    """

    _open: dict[Path, DumpFolder] = {}

    def __init__(self, path: Path) -> None:
        self.path = path
        self.report = Report()
        _make(path)
        if (path / _MARKER).exists():
            for old in path.glob("graph_*"):
                if re.fullmatch(r"graph_\d+", old.name) and old.is_dir() and not old.is_symlink():
                    shutil.rmtree(old)
            for name in ("report.json", "report.txt", "report.html"):
                (path / name).unlink(missing_ok=True)
        _write(path / _MARKER, "written by q2compile; its dumps are replaced on the next run\n")

    @classmethod
    def get(cls, path: str) -> DumpFolder:
        folder = Path(path)
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if distributed and torch.distributed.get_world_size() > 1:
            folder = folder / f"rank{torch.distributed.get_rank()}"
        folder = folder.resolve()
        if folder not in cls._open:
            cls._open[folder] = cls(folder)
        return cls._open[folder]

    def new_graph(self) -> GraphDump:
        number = self.report.graphs
        path = self.path / f"graph_{number}"
        _make(path)
        return GraphDump(path, number)

    def write_report(self) -> None:
        """report.json (the rows), report.txt (the table and the notes)."""
        _write(self.path / "report.json", json.dumps(self.report.to_json(), indent=1) + "\n")
        _write(self.path / "report.txt", f"{self.report}\n")


class GraphDump:
    """The folder of one compiled graph."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.number = number

    def write_graph(self, stage: str, gm: fx.GraphModule) -> None:
        _write(self.path / f"{stage}.txt", readable(gm))

    def write_code(self, stage: str, source: str) -> None:
        _write(self.path / f"{stage}.py", source)

    def write_passes(self, records: list[PassRecord]) -> None:
        text = json.dumps([asdict(r) for r in records], indent=1)
        _write(self.path / "passes.json", text + "\n")


def _make(folder: Path) -> None:
    """A folder, there or made now. A link is refused: it could lead out of the folder named."""
    if folder.is_symlink():
        raise _cannot(folder, "it is a symbolic link")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot(folder, str(error.strerror)) from None


def _write(path: Path, text: str) -> None:
    if path.is_symlink():
        raise _cannot(path, "it is a symbolic link")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _cannot(path, str(error.strerror)) from None


def _cannot(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"dump: cannot write {path}: {why}; name a folder with room that you may write to, or "
        "leave 'dump' out"
    )


def readable(gm: fx.GraphModule) -> str:
    """A graph as text: a line a node with dtype and shape, module names as comments where they
    change, inner graphs (checkpoint bodies) after it."""
    lines = _lines(gm.graph)
    for name, inner in gm.named_modules():
        if name and isinstance(inner, fx.GraphModule):
            lines += ["", f"# {name}", *_lines(inner.graph)]
    return "\n".join(lines) + "\n"


def _lines(graph: fx.Graph) -> list[str]:
    lines: list[str] = []
    module = ""
    for node in graph.nodes:
        if node.op == "placeholder":
            lines.append(f"{node.name}{_annotation(node)}")
            continue
        if node.op == "output":
            lines.append(f"return {_text(node.args[0])}")
            continue
        here = module_of(node)
        if here != module and (here or module):
            lines += ["", f"# {here or 'no module'}"]
        module = here
        lines.append(f"{node.name}{_annotation(node)} = {_call(node)}")
    return lines


def module_of(node: fx.Node) -> str:
    """The module that a node belongs to: the site's absolute name where known, else Dynamo's
    path.
    """
    site = node.meta.get("custom", {}).get(SITE)
    if site:
        return site
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return list(stack.values())[-1][0] if stack else ""


def _annotation(node: fx.Node) -> str:
    value = node.meta.get("val", node.meta.get("example_value"))
    text = _shape(value)
    return f": {text}" if text else ""


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = dtype_abbrs.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{', '.join(str(n) for n in value.shape)}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(_shape(v) for v in value)})"
    return ""


def _call(node: fx.Node) -> str:
    arguments = [_text(a) for a in node.args] + [f"{k}={_text(v)}" for k, v in node.kwargs.items()]
    if node.op == "get_attr":
        return f"self.{node.target}"
    if node.op == "call_method":
        return f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
    if node.op == "call_module":
        return f"self.{node.target}({', '.join(arguments)})"
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target.name().split("::")
        overload = "" if target._overloadname == "default" else f".{target._overloadname}"
        return f"{namespace}.{name.split('.')[0]}{overload}({', '.join(arguments)})"
    name = getattr(target, "__name__", str(target))
    return f"{name}({', '.join(arguments)})"


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, tuple | list):
        inner = ", ".join(_text(v) for v in value)
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    return repr(value)
