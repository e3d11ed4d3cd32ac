# SPDX-License-Identifier: Apache-2.0
"""A graph that takes the codes of sharded weights as inputs, as FSDP2 gathers them.

As under ``cache_weights`` (`graph_inputs`): the graph has further inputs, and what calls it brings
them. But here a weight's own memory may be empty, so nothing in the graph or its backward may read
it. A weight that is read is gathered as values, and what calls the graph sees to that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn

from q2compile.capture.module_names import site_name
from q2compile.graph.views import example
from q2compile.report.row import Row
from q2compile.torch_internals import fsdp
from q2compile.torch_internals.dynamo import copied, parameter_of
from q2compile.weight_cache.cache import CodesLayout
from q2compile.weight_cache.gatherer import note_graph_without_codes
from q2compile.weight_cache.graph_inputs import (
    CompileForm,
    Inputs,
    Site,
    final_readers,
    form_of,
    is_linear,
    is_seen_through,
    maker,
    recipe_of,
    views_of,
)
from q2compile.weight_cache.sharded_weight import RequestedCodes, ShardedWeight, sharded_weight


class GatheredInputs:
    """The inputs of a graph that are gathered parameters of a model under `gather_codes`. False if
    there are none.

    weights  its place among the inputs -> the ShardedWeight
    why      place -> why its values are read; "" where its codes are taken
    """

    def __init__(self, gm: fx.GraphModule, root: nn.Module | None) -> None:
        self.weights: dict[int, ShardedWeight] = {}
        self.why: dict[int, str] = {}
        for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
            weight = sharded_weight(parameter_of(node))
            if weight is not None:
                self.weights[place] = weight
                self.why[place] = weight.why or _why_read(gm, node, weight)
        if root is not None and not self.weights:
            note_graph_without_codes(root)

    def __bool__(self) -> bool:
        return bool(self.weights)

    @property
    def takes_codes(self) -> bool:
        """Whether the graph has codes as inputs. It is compiled without CUDA graphs then: with them
        steps on two H200s took nine times as long, and had other bits than without codes."""
        return "" in self.why.values()

    def note_gathered(self, rows: Iterable[Row], cuda_graphs: bool) -> None:
        """Note in the report's rows what is gathered of each weight. cuda_graphs: whether the user
        asked for them."""
        codes = "gathers codes" + ", without CUDA graphs" * cuda_graphs
        reasons = {site_name(w.name): self.why[place] for place, w in self.weights.items()}
        for row in rows:
            why = reasons.get(row.module)
            if why is not None and row.taken:
                row.gathered = f"gathers values: {why}" if why else codes

    def take_codes(
        self, gm: fx.GraphModule, example_inputs: list[Any]
    ) -> tuple[fx.GraphModule, list[Any], list[Site]]:
        """A copy of ``gm`` that takes the codes of its weights as further inputs, the example
        inputs with theirs, and which they are."""
        own = copied(gm)  # Dynamo goes on to read the inputs of its own
        places = enumerate(own.graph.find_nodes(op="placeholder"))
        inputs = Inputs(own, {n: i for i, n in places if self.why.get(i) == ""})
        return own, [*example_inputs, *map(example, inputs.rewrite())], list(inputs.sites)

    def with_codes(
        self,
        compiled: Callable[..., Any],
        sites: Sequence[Site],
        example_inputs: Sequence[Any],
        compile_form: CompileForm,
    ) -> Callable[..., Any]:
        """``compiled``, called with the weights' codes after its own inputs.

        compile_form: makes a function of a graph: of `CodesLayout.graph`, once for each layout and
            shape, of the whole weight, which is quantized while values are gathered; and of
            shards'.
        """
        makers: dict[Any, Callable[..., Any]] = {}
        taken = []
        for place, form in sites:
            w, layout = form.matrix(example_inputs[place]), self.weights[place].layout(form)
            like = w.new_empty(w.shape)  # contiguous
            make = maker(makers, replace(form, transposed=False), like, compile_form)
            taken.append((place, RequestedCodes(form, layout, compile_form), make))
        places = {place for place, _ in sites}
        values = [place for place in self.weights if place not in places]

        def call(*args: Any) -> Any:
            codes: list[Tensor] = []
            for place, wanted, make in taken:
                weight = sharded_weight(args[place])
                if weight is None:
                    codes += make(wanted.form.matrix(args[place]).contiguous())
                else:
                    codes += weight.parts(wanted, make)
            for place in values:
                if weight := sharded_weight(args[place]):
                    weight.read_values()
            return compiled(*args, *codes)

        return call

    def with_values(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """``compiled``, a graph that reads the values of all its weights."""
        return self.with_codes(compiled, (), (), lambda gm, inputs: gm)


def _why_read(gm: fx.GraphModule, placeholder: fx.Node, weight: ShardedWeight) -> str:
    """Why the graph or its backward needs the values of a weight; "" if its codes do."""
    forms: set[CodesLayout] = set()
    for user, w in final_readers(gm, placeholder, is_seen_through):
        if not is_linear(user) or user.args[1] is not w:
            return "something besides a quantized linear reads it"
        if why := _why_linear_reads(user, weight, forms):
            return why
    return "its layers quantize it in several ways" if len(forms) > 1 else ""


def _why_linear_reads(node: fx.Node, weight: ShardedWeight, forms: set[CodesLayout]) -> str:
    recipe = recipe_of(node)
    if recipe.fprop is None:
        return "fprop is in bf16"
    if recipe.dgrad is None or recipe.dgrad.b.source == "fresh":
        return "dgrad reads w itself"
    form = form_of(node)
    forms.add(form)
    dtypes = {fsdp.dtype_of(weight.record), form.dtype}
    if not {example(view).dtype for view in views_of(node.args[1])} <= dtypes:
        return "it is cast twice"
    return weight.why_not(form)
