# SPDX-License-Identifier: Apache-2.0
"""torch's partitioner, which cuts a joint graph into forward and backward: its setting, and the
tensors that a forward saves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn

PARTITIONER_SLOT = "custom_partitioner_fn"


class MinCut(CustomPartitionerFn):
    """torch's own, which Inductor takes where its slot is empty."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return "min cut"


def partitioner_in_slot() -> Any:
    """The partitioner that Inductor's global config names, else torch's own."""
    from torch._inductor import config

    return getattr(config, PARTITIONER_SLOT) or MinCut()


@cache
def _op_types() -> Any:
    from torch._functorch.partitioners import get_default_op_list

    return get_default_op_list()


def fuses(node: fx.Node) -> bool:
    """Whether the partitioner assumes that Inductor fuses ``node``, such as a view, with others."""
    return node.op == "call_function" and bool(_op_types().is_fusible(node))


def is_checkpointed(graph: fx.Graph) -> bool:
    """Whether torch.utils.checkpoint marked a part of a joint graph to be recomputed."""
    return any("ac_graph_id" in node.meta for node in graph.nodes)


def save_instead(
    forward: fx.Graph, backward: fx.Graph, results: int, pairs: Sequence[tuple[fx.Node, fx.Node]]
) -> None:
    """Let the backward of a graph that is cut take values from the forward that it recomputed.

    A forward returns its results, then what it saves: tensors, objects and symbols, in this order.
    A backward takes the symbols, the tensors, the objects, and then the tangents. Newly saved
    tensors come first among the tensors; those that have lost their last reader are not saved.

    results  how many of the forward's outputs are not saved
    pairs    nodes of the forward, and those of the backward that make the same
    """
    from torch.fx.experimental.proxy_tensor import is_sym_node

    outputs: Any = forward.output_node().args[0]
    inputs = backward.find_nodes(op="placeholder")
    symbols = sum(is_sym_node(node) for node in outputs[results:])
    end = len(outputs) - symbols
    read = dict(zip(range(results, end), inputs[symbols:], strict=False))
    read = {i: taken for i, taken in read.items() if taken.users}
    for _, again in pairs:
        name = again.name
        with backward.inserting_before(inputs[symbols]):
            taken = backward.placeholder(name)
        taken.meta.update(again.meta)
        again.replace_all_uses_with(taken)
        _erase_unused(backward, again)
        taken.name = taken.target = name  # a graph does not give a name twice
    dropped = {i for i, taken in read.items() if not taken.users}
    for i in dropped:
        backward.erase_node(read[i])
    saved = [i for i in range(results, len(outputs)) if i not in dropped]
    _return(forward, results, [*(made for made, _ in pairs), *saved])


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node that nobody reads, and what only it has read, inputs aside."""
    if node.users or node.op == "placeholder":
        return
    read = node.all_input_nodes
    graph.erase_node(node)
    for one in read:
        _erase_unused(graph, one)


def _return(forward: fx.Graph, results: int, saved: Sequence[fx.Node | int]) -> None:
    """Have a forward save what is named: nodes, and by their places what it returns already."""
    from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput

    output = forward.output_node()
    before: Any = output.args[0]
    output.args = (
        (*before[:results], *(before[one] if isinstance(one, int) else one for one in saved)),
    )
    if (descriptors := output.meta.get("desc")) is not None:
        output.meta["desc"] = [
            *descriptors[:results],
            *(
                (type(descriptors[one]) if isinstance(one, int) else SavedForBackwardsAOTOutput)(i)
                for i, one in enumerate(saved)
            ),
        ]
    if (traces := output.meta.get("output_stack_traces")) is not None:  # from 2.13 on
        output.meta["output_stack_traces"] = [
            *traces[:results],
            *(
                traces[one] if isinstance(one, int) else one.meta.get("stack_trace")
                for one in saved
            ),
        ]


def module_of(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph that was changed. Its code is written when somebody asks for it, where
    Inductor has said that it is not going to."""
    from torch.fx._lazy_graph_module import _make_graph_module

    module: fx.GraphModule = _make_graph_module(root, graph)
    return module
