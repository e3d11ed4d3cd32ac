# SPDX-License-Identifier: Apache-2.0
"""A graph as text, as dumps have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from q2compile.graph.node_meta import ALPHA_FROM, LAUNCH_GROUP, site_of
from q2compile.torch_internals.private_names import dtype_abbrs


def readable(gm: fx.GraphModule, known: Mapping[fx.GraphModule, list[str]] | None = None) -> str:
    """A graph as text: one line per node with dtype and shape, module names as comments where they
    change, inner graphs (checkpoint bodies) after it; ``known``: lines of some of these."""
    lines = lines_of(gm.graph)
    for name, inner in gm.named_modules():
        if name and isinstance(inner, fx.GraphModule):
            lines += ["", f"# {name}", *((known or {}).get(inner) or lines_of(inner.graph))]
    return "\n".join(lines) + "\n"


def lines_of(graph: fx.Graph) -> list[str]:
    """The lines of one graph, without those that it calls."""
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
        lines.append(f"{node.name}{_annotation(node)} = {_call(node)}{_launches(node)}")
    return lines


def module_of(node: fx.Node) -> str:
    """The module that a node belongs to: the site's absolute name where known, else Dynamo's
    path.
    """
    site = site_of(node)
    if site:
        return site
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return list(stack.values())[-1][0] if stack else ""


def _annotation(node: fx.Node) -> str:
    value = node.meta.get("val", node.meta.get("example_value"))
    text = shape_of(value)
    return f": {text}" if text else ""


def shape_of(value: Any) -> str:
    """The dtype and shape of a tensor, or of several."""
    if isinstance(value, torch.Tensor):
        dtype = dtype_abbrs.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{', '.join(str(n) for n in value.shape)}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(shape_of(v) for v in value)})"
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


def _launches(node: fx.Node) -> str:
    """A comment that says what the pass group_launches has decided of a node."""
    if LAUNCH_GROUP in node.meta:
        return f"  # launch group {node.meta[LAUNCH_GROUP]}"
    if ALPHA_FROM in node.meta:
        return f"  # alpha from launch group {node.meta[ALPHA_FROM]}"
    return ""


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, tuple | list):
        inner = ", ".join(_text(v) for v in value)
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    return repr(value)
