# SPDX-License-Identifier: Apache-2.0
"""How Inductor lowers q2 ops, from a node of a graph to a line of generated code. May import
runtime_kernels and torch_internals.

lowerings.py         the table: which steps the lowering of each op has, in order
state.py             what the lowerings of one graph tell each other: one object, the graph's own
prologue/            a CUDA kernel computes its operand
inductor_kernels/    Inductor makes a kernel of the quantizer
launches.py          calls of our kernels, past the dispatcher; member.py one call
launch_node.py          the node of such a call
gemm.py              GEMMs by bf16 tensor cores; gemm_operands.py what they read, gathered.py rows

An op without a lowering is an extern kernel: the registry's.
"""


def register() -> None:
    """Tell Inductor how to lower the q2 ops, and `torch_internals.patches` what it puts in force
    while a graph with such ops is compiled. Apart from the import of this package, because it
    imports Inductor."""
    from q2compile.lowering import lowerings
    from q2compile.lowering.inductor_kernels import (
        tile_config,  # noqa: F401
    )
    from q2compile.lowering.prologue import (
        concatenated,  # noqa: F401
    )
    from q2compile.torch_internals import inductor_repeats  # noqa: F401

    lowerings.register()
