# SPDX-License-Identifier: Apache-2.0
"""A call of an op that is launches alone, while its graph is lowered."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import fx

from q2compile.runtime_kernels.cuda.quantize.plan import last_launch
from q2compile.runtime_kernels.numerics.schemes import Scheme, get_scheme
from q2compile.runtime_kernels.ops.table import SPECS, QuantizerCall
from q2compile.runtime_kernels.registry import parameters


class Member(NamedTuple):
    """One call of an op: all its arguments, in the order of the schema, tensors among them in
    memory; a buffer for each output, or None where nobody reads it."""

    node: fx.Node
    op: str
    args: list[Any]
    buffers: list[Any]

    @property
    def last_launch(self) -> Any:
        """Calls that have the same can end in one launch; None where a call ends alone."""
        return last_launch(self.op, self.args)

    @property
    def quantizer(self) -> QuantizerCall | None:
        """None for other ops."""
        return QuantizerCall.of(self.op, self.args) if self.op in SPECS else None

    @property
    def scheme(self) -> Scheme:
        names = [name for name, _ in parameters(self.op)]
        return get_scheme(self.args[names.index("scheme")])

    @property
    def sides(self) -> int:
        """Of the last launch."""
        return len(self.quantizer.operands) if self.quantizer else 1
