# SPDX-License-Identifier: Apache-2.0
"""Hand-built graphs, as AOTAutograd's look after its partitioner, for the tests of passes."""

import operator

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import q2compile.runtime_kernels  # noqa: F401  registers the ops
from q2compile.runtime_kernels.ops.table import QuantizerCall

q2 = torch.ops.q2
EDEN, SOURCE = "nvfp4_ms_eden_pow2", "nvfp4_46_pow2"


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
        """A call of an op, or a QuantizerCall of nodes."""
        kwargs = {}
        if isinstance(target, QuantizerCall):
            args, kwargs = target.written()
            target = target.spec.overload
        node = self.graph.call_function(target, args, kwargs)
        values, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values, **named)
        return node

    def outputs(self, node):
        return [self.call(operator.getitem, node, i) for i in range(3)]

    def done(self, *outputs):
        self.graph.output(outputs)
        return fx.GraphModule(torch.nn.Module(), self.graph)


def backward(dy, codes, scales, global_scale):
    """dgrad and wgrad with one quantization of the gradient, rowwise and columnwise."""
    s, t = q2.seed(dy, 0), q2.seed(dy, 1)
    both = q2.quantize(
        dy,
        scheme=EDEN,
        transform="rht128",
        rowwise=True,
        columnwise=True,
        rowwise_seed=s,
        columnwise_seed=t,
    )
    w = q2.requantize(
        codes,
        scales,
        global_scale,
        source_scheme=SOURCE,
        scheme=EDEN,
        transform="rht128",
        rows=72,
        columnwise_seed=s,
        rng_offset=1,
    )
    x = q2.requantize(
        codes,
        scales,
        global_scale,
        source_scheme=SOURCE,
        scheme=EDEN,
        transform="rht128",
        rows=72,
        columnwise_seed=t,
        rng_offset=1,
    )
    dx = q2.gemm(*both[:3], *w, None, EDEN, EDEN, torch.bfloat16)
    dw = q2.gemm(*both[3:], *x, None, EDEN, EDEN, torch.bfloat16)
    return dx, dw


def traced(function=backward, tracing_mode="fake"):
    """The graph of a function of a gradient [40, 40] and a saved operand [40, 72], and inputs."""
    dy = torch.randn(40, 40).bfloat16()
    packed = q2.quantize(
        torch.randn(40, 72).bfloat16(), scheme=SOURCE, rowwise=True, columnwise=False
    )
    inputs = (dy, *packed)
    return make_fx(function, tracing_mode=tracing_mode)(*inputs), inputs


def run(graph_module, inputs):
    torch.manual_seed(1)
    return graph_module(*inputs)
