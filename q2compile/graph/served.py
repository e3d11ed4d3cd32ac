# SPDX-License-Identifier: Apache-2.0
"""Which kernel would run a node of a graph, by the fakes of its arguments."""

from __future__ import annotations

from typing import Any

from q2compile.graph.nodes import values
from q2compile.runtime_kernels.ops.table import QuantizerCall
from q2compile.runtime_kernels.registry import Kernel, serves, serving


def kernel_of(op: str, args: Any) -> Kernel:
    """The kernel that would run an op on all these arguments, nodes among them."""
    return serving(op, values(args))


def is_served_by(op: str, args: Any, *names: str) -> bool:
    """Whether a kernel of one of these names would run an op on all these arguments."""
    return serves(op, values(args), names)


def serves_quantizer(call: QuantizerCall, *names: str) -> bool:
    """Whether a kernel of one of these names would run a quantizer's call."""
    return is_served_by(call.spec.name, call.positional, *names)
