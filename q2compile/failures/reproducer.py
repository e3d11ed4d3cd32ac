# SPDX-License-Identifier: Apache-2.0
"""A failure as a Python file that builds the graph again and runs the stage that failed on it.

One line per node: its name, what it calls, its arguments, and dtype, shape and strides of its
value. The file needs q2compile and torch, neither the model nor its data; what it calls is in
`tools.replay`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from q2compile import __version__
from q2compile.config import Config, changed_options
from q2compile.graph.storages import hint_of
from q2compile.torch_internals.dynamo import parameter_of

_HEAD = '''\
"""{what}

    {error}

Run this file to see it again. Written by q2compile {version} with torch {torch}. Tensors hold
random numbers; a symbolic size is written as the number that it stood for.
"""

import operator
from math import inf, nan

import torch
from q2compile.graph.storages import hint_of
from torch import device
{imports}
from q2compile.tools.replay import Replay, tensor

CONFIG = {config}


'''


def write(
    folder: Path | None,
    name: str,
    what: str,
    error: str,
    call: str,
    gm: fx.GraphModule,
    config: Config,
    by_id: Mapping[int, list[str]],
) -> Path:
    """Write reproduce_<name>.py into ``folder``, or into a new temporary one, and return its path.

    what     a sentence that says what failed; ``error``: what it raised
    call     the method of `tools.replay.Replay`, with arguments, that runs the stage:
             "passes('forward')"
    by_id    id(parameter) -> its names in the model
    """
    folder = folder or Path(tempfile.mkdtemp(prefix="q2compile_"))
    writer = _GraphWriter(by_id)
    body = writer.function("graph", gm)
    text = _HEAD.format(
        what=_in_docstring(what),
        error=_in_docstring(error),
        version=__version__,
        torch=torch.__version__,
        imports="".join(f"import {module}\n" for module in sorted(writer.modules)),
        config=_options(config),
    )
    run = f'\n\nif __name__ == "__main__":\n    graph().{call}\n    print("No error this time.")\n'
    path = folder / f"reproduce_{name}.py"
    path.write_text(text + "\n\n".join([*writer.inner, body]) + run, encoding="utf-8")
    return path


def _in_docstring(text: str) -> str:
    """A text on one line, which cannot end the docstring that it is put into."""
    return " ".join(text.split())[:2000].replace("\\", "/").replace('"', "'")


def _options(config: Config) -> str:
    """The changed options as a literal, without those that say how to handle a failure."""
    changed = changed_options(config).items()
    return repr({name: _plain(v) for name, v in changed if name not in ("dump", "on_error")})


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    return list(value) if isinstance(value, tuple) else value


class _GraphWriter:
    """Turns graphs into functions that build them; collects the modules that these import."""

    def __init__(self, by_id: Mapping[int, list[str]]) -> None:
        self.by_id = by_id
        self.modules: set[str] = set()
        self.inner: list[str] = []

    def function(self, name: str, gm: fx.GraphModule) -> str:
        """The text of a function ``name`` that returns ``gm``'s graph as a Replay."""
        lines: list[str] = ["g = Replay()"]
        custom: dict[str, Any] = {}
        for node in gm.graph.nodes:
            here = {k: v for k, v in node.meta.get("custom", {}).items() if k.startswith("q2_")}
            if here != custom:
                lines.append(f"g.custom = {here!r}")
                custom = here
            lines.append(self.line(node, gm, name))
        return "\n    ".join([f"def {name}():", *lines, "return g"]) + "\n"

    def line(self, node: fx.Node, gm: fx.GraphModule, function: str) -> str:
        if node.op == "output":
            return f"g.output({self.text(node.args[0])})"
        name, variable = repr(node.name), _variable(node)
        value = self.text(node.meta.get("val", node.meta.get("example_value")))
        if node.op == "placeholder":
            return f"{variable} = g.input({name}, {value}{self.parameter(node)})"
        if node.op == "get_attr":
            return f"{variable} = g.attribute({name}, {self.attribute(node, gm, function)})"
        arguments = f"{self.text(node.args)}, {self.text(node.kwargs)}, {value}"
        if node.op == "call_method":
            return f"{variable} = g.method({name}, {node.target!r}, {arguments})"
        assert node.op == "call_function", node.op
        return f"{variable} = g.call({name}, {self.function_name(node.target)}, {arguments})"

    def parameter(self, node: fx.Node) -> str:
        parameter = parameter_of(node)
        if parameter is None:
            return ""
        return f", parameter={self.by_id.get(id(parameter), [node.name])[0]!r}"

    def attribute(self, node: fx.Node, gm: fx.GraphModule, function: str) -> str:
        """An attribute's text: a graph inside this one becomes a function, a constant a
        description."""
        value: Any = gm
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if isinstance(value, fx.GraphModule):
            inner = f"{function}_{node.name}"
            self.inner.append(self.function(inner, value))
            return f"{inner}().module()"
        return self.text(value)

    def function_name(self, target: Any) -> str:
        """How to write a function so that the file finds it."""
        if isinstance(target, torch._ops.OpOverload):
            return f"torch.ops.{target}"
        name = torch.fx.node._get_qualified_name(target)
        module = getattr(target, "__module__", None) or ""
        unneeded = module in ("torch", "builtins", "_operator") or module.startswith("torch.ops")
        if name.startswith(f"{module}.") and not unneeded:
            self.modules.add(module)
        return name.removeprefix("builtins.").replace("_operator.", "operator.")

    def text(self, value: Any) -> str:
        """A value as Python: nodes by name, tensors and sizes by what is known of them."""
        if isinstance(value, fx.Node):
            return _variable(value)
        if isinstance(value, torch.Tensor):
            return _tensor(value)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return repr(value.node.hint)
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self.text(v)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            return (
                f"slice({', '.join(self.text(v) for v in (value.start, value.stop, value.step))})"
            )
        if isinstance(value, list | torch.fx.immutable_collections.immutable_list):
            return "[" + ", ".join(self.text(v) for v in value) + "]"
        if isinstance(value, tuple):
            return "(" + ", ".join(self.text(v) for v in value) + ("," * (len(value) == 1)) + ")"
        return repr(value)


def _variable(node: fx.Node) -> str:
    """A node's name as a variable, changed if the file needs that name for something else."""
    taken = ("g", "tensor", "torch", "operator", "device", "inf", "nan")
    return f"{node.name}_node" if node.name in taken else node.name


def _tensor(value: torch.Tensor) -> str:
    shape, stride = ([hint_of(n, 1) for n in sizes] for sizes in (value.shape, value.stride()))
    parts = [str(value.dtype), *map(str, shape)]
    if stride != list(torch.empty(shape, device="meta").stride()):
        parts.append(f"stride={tuple(stride)}")
    if value.device.type != "cpu":
        parts.append(f"device={str(value.device)!r}")
    if value.requires_grad:
        parts.append("requires_grad=True")
    return f"tensor({', '.join(parts)})"
