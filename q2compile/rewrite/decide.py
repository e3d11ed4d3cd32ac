# SPDX-License-Identifier: Apache-2.0
"""The decision about a matmul: by the policy, the cost model, and the limits of one graph."""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from q2compile.capture.matmul import Matmul
from q2compile.capture.module_names import Names
from q2compile.config import Config, resolved_policy, uses_cuda_graphs
from q2compile.cost_model.devices import Device, deciding_device
from q2compile.cost_model.predict import Prediction, predict
from q2compile.errors import ConfigError
from q2compile.graph.views import is_view_or_cast, viewed
from q2compile.recipes.published import RECIPES
from q2compile.recipes.recipe import Recipe
from q2compile.report.row import Row
from q2compile.torch_internals.dynamo import recompile_limit


def with_prediction(row: Row, found: Matmul, recipe: Recipe, config: Config) -> Recipe:
    """Fill in what the cost model says of a matmul, and return its recipe. Under "auto" that is the
    fastest of the policy's recipe, FP8 and BF16, halfway between the ends of each prediction: of
    these, a later one is also more exact."""
    if not recipe.quantizes:
        return recipe
    prediction = predict_matmul(found, recipe, config)
    fp8 = RECIPES["fp8"]
    if recipe.auto and prediction is not None:
        device = deciding_device(in_fp4=recipe.texts() != fp8.texts())
        in_fp8 = predict_matmul(found, fp8, config)
        if in_fp8 is not None and in_fp8.speed(device) > max(1.0, prediction.speed(device)):
            recipe, prediction = fp8, in_fp8
        elif why := why_left(prediction, in_fp8, device):
            recipe, row.why = RECIPES["bf16"], why
        row.recipe, row.wanted = recipe.name, recipe.quantizes
    if prediction is not None:
        row.flops, row.bytes, row.predicted = prediction.plain()
    return recipe


def why_bf16(row: Row, config: Config, *, router: bool) -> str:
    default = resolved_policy(config).default
    if row.pattern:
        return f"policy: {row.pattern!r} says bf16"
    if not default.quantizes or not router:
        return "recipe: bf16"
    pattern = re.sub(r"\.\d+(?=\.|$)", ".*", row.module)
    return f"router: left in BF16 unless the policy names it, {{{pattern!r}: {default.name!r}}}"


def why_cut(found: Matmul, recipe: Recipe) -> str:
    """Why the weights of experts can't be quantized in the blocks of a recipe; "" if they can."""
    rows, height = found.operands()[1].shape[-2], recipe.block_rows
    if found.op == "linear" or rows % height == 0:
        return ""
    return (
        f"experts of {rows} rows: a block of {recipe.name} has {height} and would span two experts"
    )


def raise_on_shared(
    found: Matmul, recipe: Recipe, names: Names, config: Config, *, router: bool
) -> None:
    """Raises where a policy gives equal layers different recipes, though Dynamo compiles one graph
    for them."""
    for other in names.served_too(found.parameter):
        theirs, _ = resolved_policy(config).resolve(other, router=router)
        if (theirs.texts(), theirs.auto) != (recipe.texts(), recipe.auto):
            own = names.of(found.parameter, found.node)
            raise ConfigError(
                f"the policy gives {own!r} and {other!r} different recipes, but {names.place!r} "
                "is compiled on its own, and Dynamo runs equal modules with the same graph. "
                "Compile the whole model without graph breaks between its layers, or give each "
                "block its own options: block.compile(backend='quartet2', options=...), with "
                "torch._dynamo.config.recompile_limit raised to the number of blocks if there are "
                f"more than {recompile_limit()}"
            )


def predict_matmul(found: Matmul, recipe: Recipe, config: Config) -> Prediction | None:
    """The prediction for a matmul of a Dynamo graph, for the GEMMs that it will run: without
    gradients fprop alone, for a frozen weight no wgrad. A weight whose codes are cached is not
    quantized.
    """
    x, _, _ = found.operands()
    gemms = ["fprop"]
    if torch.is_grad_enabled():
        gemms += ["dgrad"] * x.requires_grad + ["wgrad"] * found.parameter.requires_grad
    rewritten = getattr(torch.ops.q2, found.op).default
    variants = (found.node.target, rewritten)
    x_users = 1 if found.x_views else sum(user.target in variants for user in found.x.users)
    requantized = config.recompute_weights is True and "dgrad" in gemms
    try:
        return predict(
            recipe,
            found.shape,
            gemms,
            cuda_graphs=uses_cuda_graphs(config),
            x_users=max(x_users, 1),
            w_quantized=0 if config.cache_weights else 1 + requantized,
            bias=found.bias is not None,
            x_fuses=_is_computed(found.x, variants),
        )
    except Exception as error:  # a prediction runs the passes: one that fails here fails there, too
        logging.getLogger("q2compile").warning("no prediction for sizes %s: %r", found.shape, error)
        return None


def _is_computed(x: fx.Node, matmuls: tuple[Any, ...]) -> bool:
    """Whether an Inductor kernel computes x, so that its quantizer can fuse into it: not a graph
    input, nor the result of a matmul or of attention."""
    while is_view_or_cast(x) and isinstance(viewed(x), fx.Node):
        x = viewed(x)
    left = (*matmuls, F.linear, torch.matmul, F.scaled_dot_product_attention)
    return x.op not in ("placeholder", "get_attr") and x.target not in left


def why_left(prediction: Prediction, in_fp8: Prediction | None, device: Device) -> str:
    """Why "auto" leaves a layer in BF16; "" if it is taken."""
    if prediction.speed(device) >= 1:
        return ""
    other = f" ({in_fp8.over_bf16(device).text()} in FP8)" if in_fp8 is not None else ""
    at = ", ".join(f"{symbol} = {hint}" for symbol, hint in prediction.at.items())
    where = f" for {at}, the size it was compiled with" if at else ""
    times = f"{prediction.over_bf16(device).text()} times BF16's time{other} on {device.name}"
    return f"auto: predicted to take {times}{where}"
