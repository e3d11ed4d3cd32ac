# SPDX-License-Identifier: Apache-2.0
"""The node of a call in generated code that enqueues launches. Base of the nodes in launches.py and
prologue/fused_launches.py.

It mutates buffers that were allocated for it, as a user's Triton kernel does; all supported
versions of torch have such nodes. (An out variant of each op would need a second schema.)"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.virtualized import V


class LaunchNode(ir.ExternKernel):
    """A call of a call site, which is defined at the top of generated code. It enqueues launches
    that write into buffers allocated for them.

    tensors: its operands; buffers: its results. Both are inputs of an extern kernel."""

    _imports: tuple[str, ...]  # lines of generated code
    _prefix: str  # prefix of the names of call sites of this kind

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
        """Write the call site at the top of the generated code, and its call. call_args: the
        operands."""
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
