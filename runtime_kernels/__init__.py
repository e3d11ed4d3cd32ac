# SPDX-License-Identifier: Apache-2.0
"""The ops of namespace q2 and what runs them. Knows nothing of graphs; imports neither q2compile
nor lowering. Importing this package registers the ops and their kernels.

choice.py     which kernel runs a call
registry.py   ops, the kernels behind them, and what happens when one fails
checks.py     the self-check of a kernel before its first use, in check_child.py, stored by
              check_results.py; kernel_states.py is the memory of a process
selfcheck.py  small calls of a kernel (small_calls.py), compared with the reference
versions.py   of what compiles and runs kernels
numerics/     formats, layouts, rotations and rounding rules, in torch alone: the semantics of all
              kernels
ops/          one op per file: schema, fake and reference
cpu/          kernels in C++ for CPUs
cuda/         CUDA kernels and GEMMs behind some of the ops
"""

# The references come first: a later registration is tried before an earlier one.
from q2compile.runtime_kernels import ops  # isort: skip
from q2compile.runtime_kernels import cpu  # isort: skip
from q2compile.runtime_kernels import cuda  # isort: skip

__all__ = ["cpu", "cuda", "ops"]
