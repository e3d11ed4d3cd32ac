# SPDX-License-Identifier: Apache-2.0
"""Rewrite the matmuls of a Dynamo graph to `q2::linear`, as the policy says."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

import q2compile.linear.dense
import q2compile.linear.experts  # noqa: F401  registers q2::linear and its variants
from q2compile.capture.find_matmuls import find_matmuls, unread
from q2compile.capture.matmul import Matmul, NotTaken
from q2compile.capture.module_names import Names
from q2compile.capture.routers import is_router
from q2compile.config import Config, resolved_policy
from q2compile.errors import BackendError
from q2compile.graph.node_meta import SITE
from q2compile.linear.tensor_parallel import raise_on_async_inputs
from q2compile.recipes.published import RECIPES
from q2compile.recipes.recipe import Recipe
from q2compile.report.row import Row
from q2compile.rewrite.decide import raise_on_shared, why_bf16, why_cut, with_prediction
from q2compile.rewrite.replace import replace_by_linear
from q2compile.rewrite.shared_bodies import own_bodies, share_bodies
from q2compile.torch_internals.aot_autograd import in_compiled_autograd
from q2compile.torch_internals.dynamo import called_graphs, control_flow
from q2compile.torch_internals.node_origin import stack_of

# Dynamo's own exceptions, and errors of the user, which the user has to fix.
_NOT_OF_ONE_MATMUL: tuple[type[BaseException], ...] = (*control_flow(), BackendError)


def rewrite(gm: fx.GraphModule, config: Config, names: Names) -> list[Row]:
    """Rewrite ``gm`` in place. Returns a row for every matmul in it: taken, or left with the
    reason. A body that several calls share has a row for each matmul and call.

    Raises ValueError when the policy gives different recipes to modules that one graph will serve.
    """
    if names.failure is not None and resolved_policy(config).rules:
        raise names.failure  # a policy would match other names than those it means
    rows: list[Row] = []
    seed_index = 0
    calls = own_bodies(gm)
    for found, row, recipe in planned(gm, config, names):
        if isinstance(found, Matmul) and recipe.quantizes:
            try:
                replace_by_linear(found, recipe, seed_index)
                row.taken, row.seed_index = True, seed_index
                names.taken.append(found.parameter)
                seed_index += 1
            except _NOT_OF_ONE_MATMUL:
                raise
            except Exception as error:
                _, row, _ = _left_alone(found, error, config, names)
        rows.append(row)
    if seed_index:
        inputs = gm.graph.find_nodes(op="placeholder")
        raise_on_async_inputs(node.meta.get("example_value") for node in inputs)
    seed_indices = share_bodies(calls)
    for row in rows:
        while row.seed_index in seed_indices:
            row.seed_index = seed_indices[row.seed_index]
    for module in called_graphs(gm):
        module.recompile()
    return rows


def planned(
    gm: fx.GraphModule, config: Config, names: Names
) -> Iterator[tuple[Matmul | NotTaken, Row, Recipe]]:
    """Every matmul of ``gm``, its row, and the recipe that the policy and the cost model give it;
    that of a matmul that can't be taken is bf16. The graph keeps its nodes: a caller may replace a
    matmul before it asks for the next.

    Raises ValueError when the policy gives different recipes to modules that one graph will serve.
    """
    for found in find_matmuls(gm):
        if found.parameter is None and in_compiled_autograd():
            continue  # part of a gradient: the graph of its forward has the row
        try:
            plan = _plan(found, config, names)
        except _NOT_OF_ONE_MATMUL:
            raise
        except Exception as error:
            plan = _left_alone(found, error, config, names)
        yield plan


def _plan(
    found: Matmul | NotTaken, config: Config, names: Names
) -> tuple[Matmul | NotTaken, Row, Recipe]:
    router = is_router(found)
    row = _policy_row(found, config, names, router=router)
    if isinstance(found, NotTaken):
        return found, row, RECIPES["bf16"]
    wanted, _ = resolved_policy(config).resolve(row.module, router=router)
    raise_on_shared(found, wanted, names, config, router=router)
    row.why = why_cut(found, wanted)
    recipe = RECIPES["bf16"] if row.why else with_prediction(row, found, wanted, config)
    row.fprop, row.dgrad, row.wgrad = recipe.texts()
    if not recipe.quantizes:
        row.why = row.why or why_bf16(row, config, router=router)
    return found, row, recipe


def _left_alone(
    found: Matmul | NotTaken, error: Exception, config: Config, names: Names
) -> tuple[NotTaken, Row, Recipe]:
    """A matmul that could not be read or replaced: it stays as it is, with the error as its reason,
    and the others are rewritten."""
    left = unread(found.gm, found.node, error, found.parameter)
    return left, _policy_row(left, config, names), RECIPES["bf16"]


def _policy_row(
    found: Matmul | NotTaken, config: Config, names: Names, *, router: bool = False
) -> Row:
    """A row with what the policy wants of the matmul, before anything is done with it."""
    row = _row(found, names)
    if row.has_parameter:
        found.node.meta["custom"] = {**found.node.meta.get("custom", {}), SITE: row.module}
        recipe, row.pattern = resolved_policy(config).resolve(row.module, router=router)
        row.recipe, row.wanted = recipe.name, recipe.quantizes
    elif isinstance(found, NotTaken) and found.unread:
        row.wanted = resolved_policy(config).default.quantizes  # it may have a weight
    return row


def _row(found: Matmul | NotTaken, names: Names) -> Row:
    parameter = found.parameter
    if parameter is not None:
        name = names.of(parameter, found.node)
    else:
        name = names.linear(found.node) if found.spelling == "linear" else ""
    value = found.node.meta.get("example_value")
    row = Row(name or f"<{found.node.name}>", (), found.spelling, has_parameter=bool(name))
    row.training = torch.is_grad_enabled()
    row.served = names.served_too(parameter) if parameter is not None else []
    row.scope = "" if row.has_parameter else names.scope(found.node)
    if stack := stack_of(found.node):
        row.source = [stack[-1].file, stack[-1].line, stack[-1].code]
    if isinstance(value, torch.Tensor):
        row.shape = tuple(value.shape)
        row.dtype, row.device = str(value.dtype).removeprefix("torch."), value.device.type
    if isinstance(found, Matmul):
        row.shape = found.shape
    else:
        row.why = found.why
    return row
