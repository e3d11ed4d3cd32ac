"""What cuts a joint graph into forward and backward: torch's partitioner, and its place."""

from __future__ import annotations

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
    """Whether the partitioner takes it that Inductor makes a loop of ``node``, to fuse with others.
    Views are such.
    """
    return node.op == "call_function" and bool(_op_types().is_fusible(node))


def is_checkpointed(graph: fx.Graph) -> bool:
    """Whether torch.utils.checkpoint marked a part of a joint graph to be computed again."""
    return any("ac_graph_id" in node.meta for node in graph.nodes)
