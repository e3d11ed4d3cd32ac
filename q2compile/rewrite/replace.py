"""Rewrite the matmuls of a Dynamo graph to `q2::linear`, as the policy says.

before                                             after
    y = torch._C._nn.linear(x, w, b)                   y = torch.ops.q2.linear.default(x, w, b,
                                                               'nvfp4_46_pow2 @ nvfp4_46_pow2', ...,
                                                               0)
    y = torch.matmul(x, w)          # w [K, N]         t = w.transpose(0, 1)
                                                       y = torch.ops.q2.linear.default(x, t, None,
                                                       ..., 1)
    y = torch._grouped_mm(x, v, offs)                  w = v.transpose(-2, -1)   # v [E, K, N]
                                                       y = torch.ops.q2.grouped_linear.default(
                                                               x, w, offs, ..., 2)
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

import q2compile.experts  # noqa: F401  registers q2::linear and its kin
from q2compile import compat, cost
from q2compile.capture import find_matmuls
from q2compile.capture_experts import is_look_up
from q2compile.config import Config
from q2compile.errors import ConfigError
from q2compile.matmuls import Left, Matmul, View, example, is_view_or_cast, transposes
from q2compile.names import Names
from q2compile.recipes import RECIPES, Recipe
from q2compile.report import Row
from q2compile.tensor_parallel import refuse_async_inputs

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
            recipe, row.pattern = config.resolved_policy.resolve(row.module, stacked=found.stacked)
            row.recipe, row.wanted = recipe.name, recipe.quantises
        if isinstance(found, Matmul):
            _refuse_shared(found, recipe, names, config)
            recipe = _predicted(row, found, recipe, config)
            row.fprop, row.dgrad, row.wgrad = recipe.texts()
            if recipe.quantises:
                replace_by_linear(found, recipe, salt)
                changed[id(found.gm)] = found.gm
                row.taken, row.salt = True, salt
                salt += 1
            else:
                row.why = row.why or _why_bf16(row, found, config)
        rows.append(row)
    if changed:
        inputs = gm.graph.find_nodes(op="placeholder")
        refuse_async_inputs(node.meta.get("example_value") for node in inputs)
    for module in changed.values():
        module.recompile()
    return rows


def _predicted(row: Row, found: Matmul, recipe: Recipe, config: Config) -> Recipe:
    """Fill in what the cost model says of a matmul; bf16 if "auto" leaves it for that."""
    if not recipe.quantises:
        return recipe
    prediction = cost.predict_matmul(found, recipe, config)
    if prediction is not None:
        row.flops, row.bytes, row.predicted = prediction.plain()
    why = cost.why_left(prediction) if recipe.auto else ""
    if not why:
        return recipe
    bf16 = RECIPES["bf16"]
    row.recipe, row.wanted, row.why = bf16.name, False, why
    return bf16


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


def _why_bf16(row: Row, found: Matmul, config: Config) -> str:
    default = config.resolved_policy.default
    if row.pattern:
        return f"policy: {row.pattern!r} says bf16"
    if not default.quantises or not found.stacked:
        return "recipe: bf16"
    parent = re.sub(r"\.\d+(?=\.|$)", ".*", row.module.rpartition(".")[0])
    pattern = f"{parent}.*" if parent else row.module
    return f"experts: the policy has to name them, {{{pattern!r}: {default.name!r}}}"


def _refuse_shared(found: Matmul, recipe: Recipe, names: Names, config: Config) -> None:
    """Dynamo compiles one graph for equal layers; a policy that tells them apart can't be kept
    then.
    """
    for other in names.served_too(found.parameter):
        theirs, _ = config.resolved_policy.resolve(other, stacked=found.stacked)
        if (theirs.texts(), theirs.auto) != (recipe.texts(), recipe.auto):
            own = names.of(found.parameter, found.node)
            raise ConfigError(
                f"the policy gives {own!r} and {other!r} different recipes, but {names.prefix!r} "
                "is compiled on its own, and Dynamo runs equal modules with the same graph. "
                "Compile the whole model without graph breaks between its layers, or give each "
                "block its own options: block.compile(backend='quartet2', options=...)"
            )


def replace_by_linear(found: Matmul, recipe: Recipe, salt: int) -> fx.Node:
    """Put `q2::linear`, or its kin for experts, and its views in the place of one matmul; return
    the node of the result.
    """
    graph, node = found.gm.graph, found.node
    site = {**node.meta.get("custom", {}), SALT: salt}
    with graph.inserting_before(node):
        x = _view(graph, found.x, found.x_views)
        w = _view(graph, found.w, found.w_views)
        third = {"linear": (found.bias,), "batched_linear": ()}.get(found.op, (found.groups,))
        op = getattr(torch.ops.q2, found.op).default
        y = graph.call_function(op, (x, w, *third, *recipe.texts(), salt))
        y.meta = {**node.meta, "custom": site}
        if found.y_views:
            with torch.no_grad():
                shape = (*example(x).shape[:-1], example(w).shape[-2])
                y.meta["example_value"] = example(node).new_empty(shape)
        out = _view(graph, y, found.y_views)
    out.meta = {**node.meta, "custom": site}
    operands = node.all_input_nodes
    node.replace_all_uses_with(out)
    graph.erase_node(node)
    for operand in operands:
        _erase_unused_views(graph, operand)
    return out


def _erase_unused_views(graph: fx.Graph, node: Any) -> None:
    """The transpose that was undone, the look-up of weights, the view that was viewed back."""
    while not node.users and (is_view_or_cast(node) or is_look_up(node)):
        unused, node = node, node.args[0]
        graph.erase_node(unused)


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
    """Whether the view is a transpose, and ``node`` the same transpose."""
    n = example(node).ndim
    return method == "transpose" and {a % n for a in args} == {n - 2, n - 1} and transposes(node)
