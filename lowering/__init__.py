# SPDX-License-Identifier: Apache-2.0
"""How Inductor lowers q2 ops, from a node of a graph to a line of generated code. May import
graph, runtime_kernels and torch_internals.

lowerings.py         the table: for each kernel of an op, what emits it
state.py             the state of one graph's lowering, shared by all lowerings
prologue/            prologue fusion: a CUDA kernel computes its operand
inductor_kernels/    the quantizer as a kernel that Inductor generates
launches.py          launches of our kernels, past torch's dispatcher; member.py is one call
launch_node.py       the node of such launches in Inductor's graph
gemm.py              emulated GEMMs, on bf16 tensor cores; gathered.py gathered rows

An op without a lowering is an extern kernel: a call of torch.ops.q2."""


def register() -> None:
    """Register the lowerings of the q2 ops with Inductor, and replacements with
    `torch_internals.patches`, which are in force while a graph with such ops is compiled. A
    function, because importing this package must not import Inductor."""
    from q2compile.lowering import lowerings
    from q2compile.lowering.inductor_kernels import (
        tile_config,  # noqa: F401
    )

    lowerings.register()
