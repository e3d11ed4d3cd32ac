"""Rewrite the matmuls of a Dynamo graph to `q2::linear`, as the policy says.

before                                             after
    y = torch._C._nn.linear(x, w, b)                   y = torch.ops.q2.linear.default(x, w, b,
                                                               'nvfp4_46_pow2 @ nvfp4_46_pow2', ...,
                                                               0)
    y = torch.matmul(x, w)          # w [K, N]         t = w.transpose(0, 1)
                                                       y = torch.ops.q2.linear.default(x, t, None,
                                                       ..., 1)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import q2compile.linear  # noqa: F401  registers q2::linear
from q2compile import compat
from q2compile.capture import Left, Matmul, View, example, find_matmuls
from q2compile.config import Config
from q2compile.errors import ConfigError
from q2compile.names import Names
from q2compile.recipes import Recipe
from q2compile.report import Row

# Keys in node.meta["custom"], which torch carries through AOTAutograd into both graphs.
SITE, SALT = "q2_site", "q2_salt"


def rewrite(gm: fx.GraphModule, config: Config, names: Names) -> list[Row]:
    """Rewrite ``gm`` in place; return a row for every matmul in it, taken or not and why.

    Raises ValueError when the policy gives different recipes to modules that one graph will serve.
    """
    rows = []
    salt = 0
    changed: dict[int, fx.GraphModule] = {}
    for found in find_matmuls(gm):
        if found.parameter is None and compat.in_compiled_autograd():
            continue  # part of a gradient: the graph of its forward has the row
        row = _row(found, names)
        if row.has_parameter:
            found.node.meta["custom"] = {**found.node.meta.get("custom", {}), SITE: row.module}
            recipe, row.pattern = config.resolved_policy.resolve(row.module)
            row.recipe, row.wanted = recipe.name, recipe.quantises
        if isinstance(found, Matmul):
            _refuse_shared(found, recipe, names, config)
            row.fprop, row.dgrad, row.wgrad = recipe.texts()
            if recipe.quantises:
                replace_by_linear(found, recipe, salt)
                changed[id(found.gm)] = found.gm
                row.taken, row.salt = True, salt
                salt += 1
            else:
                row.why = f"policy: {row.pattern!r} says bf16" if row.pattern else "recipe: bf16"
        rows.append(row)
    for module in changed.values():
        module.recompile()
    return rows


def _row(found: Matmul | Left, names: Names) -> Row:
    parameter = found.parameter
    name = names.of(parameter, found.node) if parameter is not None else f"<{found.node.name}>"
    value = found.node.meta.get("example_value")
    row = Row(name, (), found.spelling, has_parameter=parameter is not None)
    if isinstance(value, torch.Tensor):
        row.shape = tuple(value.shape)
        row.dtype, row.device = str(value.dtype).removeprefix("torch."), value.device.type
    if isinstance(found, Matmul):
        row.shape = found.shape
    else:
        row.why = found.why
    return row


def _refuse_shared(found: Matmul, recipe: Recipe, names: Names, config: Config) -> None:
    """Dynamo compiles one graph for equal layers; a policy that tells them apart can't be kept
    then.
    """
    for other in names.served_too(found.parameter):
        if config.resolved_policy.resolve(other)[0].texts() != recipe.texts():
            own = names.of(found.parameter, found.node)
            raise ConfigError(
                f"the policy gives {own!r} and {other!r} different recipes, but {names.prefix!r} "
                "is compiled on its own, and Dynamo runs equal modules with the same graph. "
                "Compile the whole model without graph breaks between its layers, or give each "
                "block its own options: block.compile(backend='quartet2', options=...)"
            )


def replace_by_linear(found: Matmul, recipe: Recipe, salt: int) -> fx.Node:
    """Put `q2::linear` and its views in the place of one matmul; return the node of the result."""
    graph, node = found.gm.graph, found.node
    site = {**node.meta.get("custom", {}), SALT: salt}
    with graph.inserting_before(node):
        x = _view(graph, found.x, found.x_views)
        w = _view(graph, found.w, found.w_views)
        y = graph.call_function(
            torch.ops.q2.linear.default, (x, w, found.bias, *recipe.texts(), salt)
        )
        y.meta = {**node.meta, "custom": site}
        if found.y_views:
            with torch.no_grad():
                shape = (*example(x).shape[:-1], example(w).shape[0])
                y.meta["example_value"] = example(node).new_empty(shape)
        out = _view(graph, y, found.y_views)
    out.meta = {**node.meta, "custom": site}
    node.replace_all_uses_with(out)
    graph.erase_node(node)
    if found.w is not w and not found.w.users and found.w.op == "call_method":
        graph.erase_node(found.w)  # the transpose that was undone
    return out


def _view(graph: fx.Graph, node: fx.Node, views: tuple[View, ...]) -> fx.Node:
    """``node`` after ``views``; a transpose of a transpose is the tensor itself."""
    for method, args in views:
        if _undoes(node, method, args):
            node = node.args[0]  # type: ignore[assignment]
            continue
        new = graph.call_method(method, (node, *args))
        operands = [example(a) if isinstance(a, fx.Node) else a for a in args]
        with torch.no_grad():
            new.meta = {"example_value": getattr(example(node), method)(*operands)}
        node = new
    return node


def _undoes(node: fx.Node, method: str, args: tuple[Any, ...]) -> bool:
    if (method, args) != ("transpose", (0, 1)) or example(node).ndim != 2:
        return False
    if node.op == "call_method" and node.target in ("t", "mT", "T"):
        return True
    return node.target is getattr and node.args[1] in ("mT", "T")
