# SPDX-License-Identifier: Apache-2.0
"""The node of a call in generated code that enqueues launches. Base of the nodes in launches.py and
prologue/fused_launches.py.

It has several outputs, which Inductor allocates for it. (A node of the scheduler for each of them,
which the launches mutate, would double the time that a graph is scheduled.)"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.virtualized import V


class LaunchOutput(ir.InputsKernel):
    """A result of launches. Inductor allocates it before the call of the node that writes it. (The
    base is of those that Inductor takes as tensors in memory.)"""

    def __init__(self, like: torch.Tensor) -> None:
        size, stride = map(ir.convert_shape_to_inductor, (like.size(), like.stride()))
        layout = ir.FixedLayout(like.device, like.dtype, size, stride)
        super().__init__(name=None, layout=layout, inputs=[])
        self.name = V.graph.register_buffer(self)
        self.writer: LaunchNode | None = None

    def get_defining_op(self) -> ir.Operation | None:
        return self.writer

    def should_allocate(self) -> bool:
        return True

    @property
    def is_read(self) -> bool:
        """Whether a node reads it. Asked when code is generated."""
        return self.name not in V.graph.removed_buffers


class LaunchNode(ir.ExternKernel):
    """A call of a call site, which is defined at the top of generated code. It enqueues launches
    that write into buffers allocated for them.

    tensors: its operands; buffers: its results."""

    _imports: tuple[str, ...]  # lines of generated code
    _prefix: str  # prefix of the names of call sites of this kind

    def __init__(self, tensors: Sequence[Any], buffers: Sequence[LaunchOutput]) -> None:
        self._device = [*buffers, *tensors][0].get_device()
        super().__init__(None, ir.NoneLayout(device=self._device), list(tensors))
        self._tensors, self._buffers = list(tensors), list(buffers)
        for buffer in buffers:
            buffer.writer = self
        V.graph.register_operation(self)

    def get_outputs(self) -> list[ir.Buffer]:
        return [*self._buffers]

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
        call_args = [*call_args, *(b.get_name() for b in self._buffers if b.is_read)]
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
