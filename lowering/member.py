# SPDX-License-Identifier: Apache-2.0
"""A call of an op while its graph is lowered: as in the graph, and as it is launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._inductor import ir

from q2compile.runtime_kernels.cuda.quantize.grouped_launch import Tail
from q2compile.runtime_kernels.cuda.quantize.plan import tail_launch
from q2compile.runtime_kernels.ops.table import SPECS, QuantizerCall
from q2compile.runtime_kernels.registry import bound


class OpCall(NamedTuple):
    """The call that is lowered, with args and kwargs as the node has them."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def overload(self) -> torch._ops.OpOverload:
        return getattr(torch.ops.q2, self.op).default

    @property
    def bound(self) -> tuple[Any, ...]:
        """All arguments, in the order of the schema."""
        return bound(self.op, self.args, self.kwargs)

    @property
    def quantizer(self) -> QuantizerCall:
        """The call of a quantizing op, by the names of its arguments."""
        return QuantizerCall.of(self.op, self.bound)


class Member(NamedTuple):
    """One call to launch, alone or in a group. args: all arguments in the order of the schema; its
    tensors are in memory. buffers: one for each output, None where nobody reads it."""

    node: fx.Node
    op: str
    args: Sequence[Any]
    buffers: list[Any]

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        first: Any = next(a for a in self.args if isinstance(a, ir.IRNode))
        return first.get_device_or_error()

    @property
    def tail(self) -> Tail:
        """The last launch of the call, which other calls may share."""
        operands = len(QuantizerCall.of(self.op, self.args).operands) if self.op in SPECS else 1
        return Tail(tail_launch(self.op, self.args), operands)
