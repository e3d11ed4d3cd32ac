# SPDX-License-Identifier: Apache-2.0
"""The node of a call in generated code that enqueues launches, which launches.py and
fused_launches.py have in common.

It is one that changes buffers made for it, as a Triton kernel of a user's does, which all versions
of torch that are supported have. (An out variant of each op would need a second schema.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.virtualized import V


class LaunchNode(ir.ExternKernel):
    """A call of a site that stands at the top of generated code, and enqueues launches into buffers
    that were made for them.

    tensors: what it reads; buffers: what it writes. Both as inputs of an extern kernel.
    """

    _imports: tuple[str, ...]  # lines of generated code
    _prefix: str  # sites of this kind there, with a number

    def __init__(self, tensors: Sequence[Any], buffers: Sequence[Any]) -> None:
        inputs = [*tensors, *buffers]
        self._device = inputs[-1].get_device()
        super().__init__(None, ir.NoneLayout(device=self._device), inputs)
        self._tensors, self._buffers = list(tensors), list(buffers)
        self.mutation_outputs = [
            ir.MutationOutput(ir.NoneLayout(device=self._device), b, self) for b in buffers
        ]
        V.graph.register_operation(self)

    def get_outputs(self) -> list[ir.Buffer]:
        return list(self.mutation_outputs)

    def get_device(self) -> torch.device | None:
        return self._device

    def _write(self, wrapper: Any, site: str, call_args: Sequence[str]) -> None:
        """A site at the top of the generated code, and its call; call_args: for what it reads."""
        root = wrapper
        while hasattr(root, "parent_wrapper"):
            root = root.parent_wrapper
        for line in self._imports:
            root.add_import_once(line)
        root.q2_sites = counts = getattr(root, "q2_sites", Counter())
        name = f"{self._prefix}_{counts[self._prefix]}"
        counts[self._prefix] += 1
        root.header.writeline(f"{name} = {site}")
        self.codegen_comment(wrapper, name)
        call_args = [*call_args, *(b.codegen_reference() for b in self._buffers)]
        wrapper.writeline(f"{name}({', '.join(call_args)})")


def call_argument(x: Any, fixed: bool) -> tuple[str, str]:
    """The text of an operand in its call site, and the argument of the call.

    A view of known sizes is described in the call site, and the call gets the tensor behind it:
    making a view costs the host as much as the addresses of a launch.
    """
    if fixed and isinstance(x, ir.ReinterpretView):
        name = x.get_name()
        if V.graph.get_dtype(name) == x.get_dtype():
            size, stride = (tuple(map(int, sizes)) for sizes in (x.get_size(), x.get_stride()))
            return f"q2_View({size}, {stride}, {int(x.layout.offset)})", name
    return "...", x.codegen_reference()
