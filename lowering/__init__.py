# SPDX-License-Identifier: Apache-2.0
"""Loops of Inductor in the place of q2 ops, so that they fuse with what computes their operand. May
import runtime_kernels and torch_internals.

lowerings.py         the table: which steps the lowering of each op has, in order
quantize.py          Inductor kernels of q2::quantize
support.py           for which schemes, and when instead of a kernel's call
selfcheck.py         on a GPU where nobody ran them: a small graph against the reference
rounding.py          the rounding rules, once, in Inductor's `ops`; nvfp4.py, mxfp4.py the formats'
blocks.py            a matrix in blocks: reduction_blocks.py as a reduction, register_blocks.py held
                     by a thread, for rotations and random bits
tile_config.py       how many blocks a program takes
fp32.py, philox.py   fp32 arithmetic by its bits; random bits and signs
state.py             what the lowerings of one graph tell each other: one object, the graph's own
launches.py          the other ops: calls of our kernels, past the dispatcher; member.py one call
enqueued.py          the node of such a call
fused_launches.py    rotating quantizers that compute their operand: producers.py makes a loop of
                     Inductor's an expression for our kernel (index_ways.py how it reads,
                     shorter_steps.py what is computed otherwise), fusion_rule.py says when;
                     fused_halves.py those of experts, whose operand is two side by side
concatenated.py      concatenations that a quantizer reads: one loop writes all parts
emulated_gemm.py     the GEMM of bf16 tensor cores; gemm_operands.py what it reads, gathered.py rows

An op without a lowering is an extern kernel: the registry's.
"""


def register() -> None:
    """Tell Inductor how to lower the q2 ops, and `torch_internals.patches` what it puts in force
    while a graph with such ops is compiled. Apart from the import of this package, because it
    imports Inductor."""
    from q2compile.lowering import (
        concatenated,  # noqa: F401
        lowerings,
        tile_config,  # noqa: F401
    )
    from q2compile.torch_internals import inductor_repeats  # noqa: F401

    lowerings.register()
