# SPDX-License-Identifier: Apache-2.0
"""A graph that takes the codes of its weights as inputs, and its caller, which supplies them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

import q2compile.linear.dense
import q2compile.linear.experts  # noqa: F401  registers the ops
from q2compile.capture.module_tree import named_modules
from q2compile.errors import ConfigError
from q2compile.graph.nodes import LINEAR_OPS, is_q2
from q2compile.graph.views import example, is_view_or_cast, transposes, viewed
from q2compile.recipes.recipe import Recipe, parse
from q2compile.torch_internals.dynamo import (
    compiling_apart,
    copied,
    dtensor_method,
    mark_static,
    parameter_of,
)
from q2compile.torch_internals.fsdp import local_part
from q2compile.torch_internals.optimizer_steps import look_up_optimizers
from q2compile.torch_internals.private_names import FakeTensor
from q2compile.weight_cache.adapters import Merged
from q2compile.weight_cache.cache import CodesLayout, parts_of

_LINEAR = torch.ops.q2.linear.default
_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


Site = tuple[int, CodesLayout]  # the weight's place among the graph's inputs
CompileForm = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


class CachedInputs:
    """The inputs of a graph that are weights under ``cache_weights``.

    root         the model, None if it is not known
    cuda_graphs  the graph will be recorded, with the addresses of the codes
    """

    def __init__(self, root: nn.Module | None, cuda_graphs: bool = False) -> None:
        self._root, self._cuda_graphs = root, cuda_graphs

    def take_codes(
        self, gm: fx.GraphModule, example_inputs: list[Any]
    ) -> tuple[fx.GraphModule, list[Any], list[Site]]:
        """A copy of ``gm``, rewritten to `q2::linear`, that takes the codes of its weights as
        further inputs; the example inputs with theirs; and which they are.

        Taken are parameters that are inputs of the graph, of sizes known now, and used in it by
        linears and embeddings alone, in checkpointed regions, too. Others are quantized in the
        graph as before.

        Raises ConfigError under FSDP.
        """
        root = self._root
        for _, module in () if root is None else named_modules(root):
            if isinstance(module, FSDPModule | FullyShardedDataParallel):
                raise ConfigError(
                    "cache_weights can't be used under FSDP, which rewrites the gathered weights "
                    "in every step without changing their version counters; leave out the option"
                )
        if root is None and torch.distributed.is_initialized():
            return gm, example_inputs, []  # what holds these weights, FSDP or not, is not known
        own = copied(gm)  # Dynamo goes on to read the inputs of its own
        weights = {
            node: i
            for i, node in enumerate(own.graph.find_nodes(op="placeholder"))
            if type(parameter_of(node)) is nn.Parameter
            and _has_sizes(example(node))
            and _only_read(own, node)
        }
        inputs = Inputs(own, weights, backward=torch.is_grad_enabled())
        codes = inputs.rewrite()
        if self._cuda_graphs:
            mark_static(codes)
        return own, [*example_inputs, *map(example, codes)], list(inputs.sites)

    def with_codes(
        self,
        compiled: Callable[..., Any],
        sites: Sequence[Site],
        example_inputs: Sequence[Any],
        compile_form: CompileForm,
    ) -> Callable[..., Any]:
        """``compiled``, called with the weights' codes after its own inputs.

        compile_form: makes a function of `CodesLayout.graph`, once for each layout and kind of
            weight. Now: a backend is called in Dynamo's compilation, in which the other threads go
            on. Tracing at the first call instead would fail theirs, as FX marks it for the whole
            process.
        """
        merged = Merged.of_model(self._root)
        in_place = self._cuda_graphs  # the call must not hold the model
        makers: dict[Any, Callable[..., Any]] = {}
        made = [maker(makers, form, example_inputs[i].detach(), compile_form) for i, form in sites]
        first = True

        def call(*args: Any) -> Any:
            nonlocal first
            if first:  # or each weight would wait for a look-up of its own
                first = False
                look_up_optimizers()
            codes: list[Tensor] = []
            for (index, form), make in zip(sites, made, strict=True):
                w = args[index]
                adapters = () if merged is None else merged.of(w)
                codes += parts_of(w, form, make, adapters, in_place=in_place)
            return compiled(*args, *codes)

        return call


def maker(
    makers: dict[Any, Callable[..., Any]], form: CodesLayout, w: Tensor, compile_form: CompileForm
) -> Callable[..., Any]:
    """The compiled function that makes the codes of weights like ``w``, made once."""
    key = form, w.shape, w.stride(), w.dtype, w.device
    if key not in makers:
        with compiling_apart(w) as like:
            makers[key] = compile_form(form.graph(), like)
    return makers[key]


def _has_sizes(w: Tensor) -> bool:
    """Whether sizes are ints. They are symbols if Dynamo's force_parameter_static_shapes is off and
    a weight of other sizes came."""
    return all(isinstance(size, int) for size in (*w.shape, *w.stride()))


class Inputs:
    """The weights and their codes among the inputs of a graph, or of a checkpointed region in it.

    weights  placeholder -> its place among the inputs of the whole graph; read by `is_linear` alone
    sites    Site -> the placeholders of its parts
    backward: codes that a dgrad reuses are taken transposed, too
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        weights: dict[fx.Node, int],
        outer: Any = None,
        backward: bool = False,
    ) -> None:
        self.gm, self.weights, self.backward = gm, weights, backward
        self.outer = outer  # (the Inputs around, the node that calls this graph)
        self.sites: dict[Site, list[fx.Node]] = {}

    def rewrite(self) -> list[fx.Node]:
        """Rewrite the graph; return the placeholders of all codes."""
        for node in list(self.gm.graph.nodes):
            if is_linear(node):
                self._linear(node)
            elif node.target is _CHECKPOINT:
                self._region(node)
        self.gm.recompile()
        return [node for parts in self.sites.values() for node in parts]

    def _linear(self, node: fx.Node) -> None:
        source, recipe = views_of(node.args[1])[-1], recipe_of(node)
        if source not in self.weights or recipe.fprop is None:
            return
        both = self.backward and recipe.transposes_codes and example(node.args[0]).requires_grad
        form = replace(form_of(node), both=both)
        parts = self.parts((self.weights[source], form), source)
        node.args = (*node.args, parts)

    def _region(self, node: fx.Node) -> None:
        body, arguments = region_of(self.gm, node)
        weights = {p: self.weights[w] for p, w in arguments.items() if w in self.weights}
        Inputs(body, weights, (self, node), self.backward).rewrite()

    def parts(self, site: Site, source: fx.Node) -> list[fx.Node]:
        """The placeholders for what is made of a weight, new ones at the first call."""
        if site in self.sites:
            return self.sites[site]
        if self.outer is None:
            w = example(source)
            local = local_part(w)
            assert isinstance(local, FakeTensor)
            with local.fake_mode, torch.no_grad():
                form, matrix = site[1], site[1].matrix(w)
                how = form.operand, form.dtype, form.both
                values = torch.ops.q2.quantize_weight(matrix, *how)
        else:
            around, call = self.outer
            outside = around.parts(site, next(w for w, i in around.weights.items() if i == site[0]))
            call.args = (*call.args, *outside)
            values = [example(node) for node in outside]
        self.sites[site] = [self._placeholder(value) for value in values]
        return self.sites[site]

    def _placeholder(self, value: Tensor) -> fx.Node:
        graph = self.gm.graph
        last = graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(last):
            node = graph.placeholder("weight_codes")
        node.target = node.name  # the name of the argument, unlike the name asked for unique
        node.meta["example_value"] = value
        node._dynamo_source = None  # AOTAutograd wants one or None
        return node


def _is_transpose(node: Any) -> bool:
    """Whether a node transposes a matrix."""
    return isinstance(node, fx.Node) and transposes(node) and example(node).ndim == 2


def is_linear(node: fx.Node) -> bool:
    return is_q2(node, *LINEAR_OPS)


def recipe_of(linear: fx.Node) -> Recipe:
    return parse(*linear.args[-4:-1])  # type: ignore[arg-type]


def form_of(linear: fx.Node) -> CodesLayout:
    """The form of the weight that the linear's quantized fprop takes."""
    fprop = recipe_of(linear).fprop
    assert fprop is not None
    swaps = sum(map(transposes, views_of(linear.args[1])[:-1]))
    return CodesLayout(str(fprop.b), example(linear).dtype, transposed=swaps % 2 == 1)


def views_of(w: Any) -> list[fx.Node]:
    """``w`` and what it is a view of, as `CodesLayout` sees through them; the last is no view."""
    found = [w]
    while is_seen_through(found[-1]):
        found.append(viewed(found[-1]))
    return found


def is_seen_through(node: Any) -> bool:
    """Whether a node is its first argument transposed in the last two dimensions, cast, or a rank's
    own part of a DTensor."""
    if not isinstance(node, fx.Node) or not is_view_or_cast(node):
        return False
    if not all(isinstance(n.meta.get("example_value"), Tensor) for n in (node, viewed(node))):
        return False
    if transposes(node) or dtensor_method(node) == "to_local":
        return True
    before, after = local_part(example(viewed(node))), local_part(example(node))
    same_type = type(example(viewed(node))) is type(example(node))  # redistribute moves data
    is_cast = dtensor_method(node) != "redistribute" and same_type
    return is_cast and before.shape == after.shape and before.stride() == after.stride()


def region_of(gm: fx.GraphModule, node: fx.Node) -> tuple[fx.GraphModule, dict[fx.Node, Any]]:
    """The graph of a checkpointed region, and its placeholders with what is given for them."""
    body_node: Any = node.args[0]
    body = gm.get_submodule(str(body_node.target))
    assert isinstance(body, fx.GraphModule)
    return body, dict(zip(body.graph.find_nodes(op="placeholder"), node.args[1:], strict=True))


def _only_read(gm: fx.GraphModule, w: fx.Node) -> bool:
    """Whether a weight certainly does not change inside of the graph: whether all that uses it
    are linears and look-ups."""
    reading = (_LINEAR, torch.nn.functional.embedding)
    return all(user.target in reading for user, _ in final_readers(gm, w, _is_transpose))


def final_readers(
    gm: fx.GraphModule, w: fx.Node, is_view: Callable[[Any], bool]
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The readers of ``w``, an input of a graph, by way of views or in checkpointed regions, each
    with the node that it reads."""
    for user in w.users:
        if is_view(user):
            yield from final_readers(gm, user, is_view)
        elif user.target is _CHECKPOINT and w.op == "placeholder":
            body, arguments = region_of(gm, user)
            for inner in (p for p, given in arguments.items() if given is w):
                yield from final_readers(body, inner, is_view)
        else:
            yield user, w
