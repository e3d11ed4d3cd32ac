# SPDX-License-Identifier: Apache-2.0
"""Call sites of quantizers that compute their operand (prologue fusion). They are called with the
inputs of the prologue in place of the operand. Two calls that compute their operands from one
read are one call site.

    q2_fused_0 = q2_FusedCallSite(q2_PrologueExpression(...), (
        q2_CallSite('quantize', (None,), (1, 0, 0, 1, 0, 0), fixed=True, rowwise_seed=..., ...),
    ))
    ...
    q2_fused_0(buf0, buf1, seed, seed, buf2, buf3)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from q2compile.runtime_kernels.choice import choose
from q2compile.runtime_kernels.cuda.call_site import CallSite, JointCallSite
from q2compile.runtime_kernels.cuda.calls import BoundCall, aligned
from q2compile.runtime_kernels.cuda.quantize import fused
from q2compile.runtime_kernels.cuda.quantize.prologue_expression import PrologueExpression
from q2compile.runtime_kernels.ops.table import QUANTIZE, QuantizerCall
from q2compile.runtime_kernels.registry import FUSED, failure_text, kernels_own, warn_of_failure


class FusedCallSite(JointCallSite):
    """One call, or two at once. sites: the call site of each matrix of the prologue expression,
    whose x is None."""

    def __init__(self, prologue: PrologueExpression, sites: tuple[CallSite, ...]) -> None:
        super().__init__(sites)
        self._prologue = prologue
        self._bound: BoundCall | None = None
        self._is_separate = False

    def enqueue(self, given: Sequence[Any]) -> None:
        """As CallSite.enqueue. given: the inputs of the prologue, tensors for the open arguments of
        each site, then buffers for the wanted outputs of each."""
        count = len(self._prologue.inputs)
        inputs, rest = given[:count], given[count:]
        if not self._is_separate and all(map(aligned, inputs)):
            try:
                self._bound = self._bound or self._bind(inputs, rest)
                if self._bound is not None:
                    self._bound(given)
                    return
            except Exception as error:
                device = inputs[0].device
                if not kernels_own(error, QUANTIZE, FUSED, device):
                    raise
                warn_of_failure(QUANTIZE, FUSED, device, failure_text(error))
            self._is_separate = True
        self._one_by_one(self._prologue.evaluate(inputs), rest)

    def _bind(self, inputs: Sequence[torch.Tensor], rest: Sequence[Any]) -> BoundCall | None:
        """The bound call; None if our kernels do not serve it: Inductor's caches may come from a
        process with other kernels."""
        args = self.arguments(rest)
        like = inputs[0].new_empty((0, self._prologue.cols), dtype=self._prologue.dtype)
        if choose(QUANTIZE, (like, *args[0][1:])).launching is None:
            return None
        calls = [QuantizerCall.of(QUANTIZE, each) for each in args]
        byte_offsets = [0] * len(inputs)
        for site, each in zip(self.sites, args, strict=True):
            byte_offsets += site.byte_offsets(each)
        wanted = [w for site in self.sites for w in site.wanted]
        index = inputs[0].device.index
        return BoundCall(
            fused.fused_plan(self._prologue, index, calls), index, wanted, byte_offsets
        )

    def _one_by_one(self, matrices: Sequence[torch.Tensor], rest: Sequence[Any]) -> None:
        """Run each op by any kernel that serves it, on an operand that torch computes."""
        buffers = iter(rest[self.beginnings[-1] :])
        for site, x, args in zip(self.sites, matrices, self.arguments(rest), strict=True):
            of_site = [next(buffers) for wanted in site.wanted if wanted]
            site.through_the_dispatcher([x, *args[1:]], of_site)
