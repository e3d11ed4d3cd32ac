"""Hand-built graphs, as AOTAutograd's look after its partitioner, for the tests of passes."""

import operator

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

import q2compile.runtime_kernels  # noqa: F401  registers the ops

q2 = torch.ops.q2
EDEN = "nvfp4_ms_eden_pow2"


class Builder:
    """Hand-built post-grad graphs: nodes with fake values."""

    def __init__(self):
        self.mode = FakeTensorMode()
        self.graph = fx.Graph()

    def placeholder(self, name, *shape, dtype=torch.bfloat16):
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def call(self, target, *args):
        node = self.graph.call_function(target, args)
        values = fx.map_arg(args, lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values)
        return node

    def outputs(self, node):
        return [self.call(operator.getitem, node, i) for i in range(3)]

    def done(self, *outputs):
        self.graph.output(outputs)
        return fx.GraphModule(torch.nn.Module(), self.graph)
