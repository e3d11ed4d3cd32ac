# SPDX-License-Identifier: Apache-2.0
"""One parameter under FSDP2 whose codes may be gathered in the place of its values."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from q2compile.torch_internals import fsdp
from q2compile.weight_cache import shard_codes
from q2compile.weight_cache.cache import Form
from q2compile.weight_cache.shard_codes import Layout

Make = Callable[[Tensor], Sequence[Tensor]]
Compile = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
# A rank's last read of a weight, if it did not read codes.
UNREAD, VALUES = 0, 1


@dataclass(frozen=True)
class Wanted:
    """Codes that a graph takes of weights cut so. compile: what compiled that graph."""

    form: Form
    layout: Layout
    compile: Compile = field(compare=False)

    @cached_property
    def number(self) -> int:
        """The same on ranks that want the same; neither UNREAD nor VALUES."""
        return zlib.crc32(repr(self.form).encode()) >> 2 | 2

    @property
    def operand(self) -> str:
        """By which the codes are made."""
        return self.form.operand

    def quantized(self, rows: Tensor) -> Sequence[Tensor]:
        """The parts of a matrix [R, K]."""
        parts: list[Tensor] = torch.ops.q2.quantize_weight(rows, self.operand, self.form.dtype)
        return parts


class ShardedWeight:
    """The gathering of one parameter, and the input of its graph.

    name     in the model that `gather_codes` was called with
    why      why its values are always gathered; else ""
    wanted   the codes that the last graph took; None if it took the values
    read     whether a graph has read it since `gather_codes`
    agreed   the codes that all ranks take, gathered from now on; None for values
    """

    def __init__(self, name: str, record: Any, group: Any) -> None:
        self.name, self.why = name, fsdp.why_values(record, group)
        self.record, self.group = record, group
        self.wanted: Wanted | None = None
        self.read = False
        self.agreed: Wanted | None = None
        self._wire = fsdp.Wire(record, self._before_gather)
        self._sent: list[Tensor] = []  # this rank's codes, of the last forward
        self._global_scale: Tensor | None = None
        self._views: tuple[Any, ...] | None = None  # of `_whole`
        self._layouts: dict[Form, Layout] = {}
        self._fresh = False  # whether they are those of the forward that runs now
        self._values_too = False  # whether this forward has read values, and its backward may

    @property
    def number(self) -> int:
        """A hash of what this rank's graphs read, to compare."""
        return (self.wanted.number if self.wanted else VALUES) if self.read else UNREAD

    def adopt(self, number: int) -> None:
        """All ranks read the same: gather that from now on."""
        wanted = self.wanted if self.wanted and number == self.wanted.number else None
        self.agreed = wanted
        if wanted is not None:
            self._wire.attach()
        elif not self._sent:  # a backward of codes may be still to come
            self._wire.detach()

    def begin_forward(self) -> None:
        """Its codes are to be made next."""
        self._wire.attach()
        self._fresh, self._values_too = True, False

    def send(self, codes: list[Tensor], global_scale: Tensor) -> None:
        """Send these in this forward and its backward. codes: of `shard_codes.of_shard`."""
        self._sent, self._global_scale = codes, global_scale

    def end_forward(self) -> None:
        """Codes serve one forward, and its backward: then the optimizer may have stepped."""
        self._fresh = False

    def _before_gather(self) -> tuple[list[Tensor], bool] | None:
        """The tensors that FSDP2 sends, and whether it sends the values, too."""
        if fsdp.is_in_backward(self.group) and self._sent:
            both = self._values_too or self.agreed is None
            sent = self._sent
            if self.agreed is None:
                self._sent = []
            return sent, both
        if self._fresh and self.agreed is not None and fsdp.is_in_forward(self.group):
            return self._sent, False
        return None  # a gather by hand, or a forward that did not begin in the model

    def parts(self, wanted: Wanted, make: Make) -> Sequence[Tensor]:
        """The graph inputs for the gathered parameter. make: quantizes all of it."""
        fits = self.layout(wanted.form) == wanted.layout
        self.wanted, self.read = (wanted if fits and not self.why else None), True
        agreed = self.agreed
        if self._wire.received and agreed is not None and agreed.number == wanted.number:
            assert self._global_scale is not None
            codes, scales, *mask = self._whole(wanted)
            return codes, scales, self._global_scale, *mask
        self._gather_values()
        w = fsdp.gathered_parameter(self.record)
        assert w is not None
        return make(wanted.form.matrix(w).contiguous())

    def _whole(self, wanted: Wanted) -> list[Tensor]:
        """The gathered tensors, as parts of the whole weight. Views of them are made once, since
        each gather writes the same memory."""
        received = self._wire.whole
        key = id(received), wanted
        if self._views is None or self._views[:2] != key:
            whole = shard_codes.of_whole(received, wanted.layout, wanted.operand)
            if wanted.layout.dim:  # copies
                return whole
            self._views = (*key, whole, received)  # the last, so that its id stays its own
        found: list[Tensor] = self._views[2]
        return found

    def why_not(self, form: Form) -> str:
        """Why codes of a form can't be gathered; "" if they can."""
        if self.why:
            return self.why
        dtypes = {fsdp.dtype_of(self.record), form.dtype}
        return shard_codes.why_not(form.operand, dtypes, self.layout(form))

    def layout(self, form: Form) -> Layout:
        """How its shards are cut for a form: always the same."""
        if form not in self._layouts:
            whole, shard = fsdp.shape_of(self.record), fsdp.padded_shape(self.record)
            dim = fsdp.sharded_dim(self.record)
            self._layouts[form] = Layout.of(whole, shard, dim, form.transposed)
        return self._layouts[form]

    def read_values(self) -> None:
        """Something is about to read the gathered parameter itself. Without gradients that says
        nothing of the steps: codes are gathered on, and the values besides."""
        if torch.is_grad_enabled() or not self.read:
            self.wanted, self.read = None, True
        self._gather_values()

    def _gather_values(self) -> None:
        if not self._wire.has_values:
            self._values_too = True
            self._wire.gather_values()


_of_parameter: Any = WeakIdKeyDictionary()  # gathered parameter -> weakref of its ShardedWeight
_all: Any = WeakIdKeyDictionary()  # ShardedWeight -> None


def add(weight: ShardedWeight) -> None:
    _all[weight] = None


def sharded_weight(w: object) -> ShardedWeight | None:
    """The record of a gathered parameter that `gather_codes` knows."""
    if not _all or not isinstance(w, nn.Parameter):
        return None
    if w not in _of_parameter:
        for weight in _all:
            parameter = fsdp.gathered_parameter(weight.record)
            if parameter is not None:
                _of_parameter[parameter] = weakref.ref(weight)
    found = _of_parameter.get(w)
    return None if found is None else found()
