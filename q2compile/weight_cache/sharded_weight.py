# SPDX-License-Identifier: Apache-2.0
"""One parameter under FSDP2 whose codes may be gathered in place of its values."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from q2compile.recipes.recipe import Operand
from q2compile.runtime_kernels.numerics import shards
from q2compile.runtime_kernels.numerics.schemes import SCHEMES, Scheme
from q2compile.runtime_kernels.numerics.shards import ShardLayout
from q2compile.runtime_kernels.numerics.transforms import TRANSFORMS
from q2compile.torch_internals import fsdp
from q2compile.weight_cache.cache import CodesLayout

Make = Callable[[Tensor], Sequence[Tensor]]
Compile = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
# A rank's last read of a weight, if it did not read codes.
UNREAD, VALUES = 0, 1
_WITHHELD = (
    "gather_codes: {name!r} was read in the middle of a forward or a backward, where only its "
    "codes are gathered: by code that is not compiled, and in no hook that was registered when the "
    "forward began. Read it in such a hook of a module, or before the forward "
    "(parameter.full_tensor()), or compile the code that reads it with backend='quartet2'"
)


@dataclass(frozen=True)
class RequestedCodes:
    """Codes that a graph takes of weights cut so. compile: what compiled that graph."""

    form: CodesLayout
    layout: ShardLayout
    compile: Compile = field(compare=False)

    @cached_property
    def number(self) -> int:
        """A number equal on ranks that want the same codes; neither UNREAD nor VALUES."""
        return zlib.crc32(repr(self.form).encode()) >> 2 | 2

    @cached_property
    def scheme(self) -> Scheme:
        return SCHEMES[Operand.parse(self.form.operand).scheme]

    @property
    def is_local(self) -> bool:
        """True if the codes of a block depend on no other block."""
        return self.scheme.global_scale == "none"

    def quantized(self, rows: Tensor) -> Sequence[Tensor]:
        """Quantize a matrix [R, K]: its parts."""
        parts: list[Tensor] = torch.ops.q2.quantize_weight(rows, self.form.operand, self.form.dtype)
        return parts


class ShardedWeight:
    """The gathering of one parameter, and the input of its graph.

    name     in the model that `gather_codes` was called with
    home     the module under fully_shard that it is gathered for
    why      why its values are always gathered; else ""
    wanted   the codes that the last graph took; None if it took the values
    read     whether a graph has read it since `gather_codes`
    agreed   the codes that all ranks take, gathered from now on; None for values
    has_readers  whether `eager_readers` may read it in this forward or its backward
    withheld the error of code that reads it where only its codes are gathered
    """

    def __init__(self, name: str, home: nn.Module, record: Any, group: Any) -> None:
        self.name, self.home, self.why = name, home, fsdp.why_values(record, group)
        self.record, self.group = record, group
        self.wanted: RequestedCodes | None = None
        self.read = False
        self.agreed: RequestedCodes | None = None
        self.has_readers = False
        self.withheld = _WITHHELD.format(name=name)
        self._wire = fsdp.Wire(record, self._before_gather, self.withheld)
        self._sent: list[Tensor] = []  # this rank's codes, of the last forward
        self._global_scale: Tensor | None = None
        self._views: tuple[Any, ...] | None = None  # of `_whole`
        self._layouts: dict[CodesLayout, ShardLayout] = {}
        self._runs = False  # whether a forward of the model does
        self._values_too = False  # whether this forward has read values, and its backward may
        self._serves = False  # whether the codes gathered last are those of the present values
        self._read_outside = False  # whether graphs read it outside of the model's forward
        self._is_hidden = False  # whether its module shows the shard in its place
        self.others: Collection[bool] = ()  # see `Gatherer`

    @property
    def number(self) -> int:
        """A hash of what this rank's graphs read, to compare."""
        return (self.wanted.number if self.wanted else VALUES) if self.read else UNREAD

    def adopt(self, number: int) -> None:
        """Gather what all ranks read, from now on."""
        wanted = self.wanted if self.wanted and number == self.wanted.number else None
        self.agreed = wanted
        if wanted is not None:
            self._wire.attach()
        elif not self._sent:  # a backward of codes may be still to come
            self._wire.detach()

    def begin_forward(self) -> None:
        """The model's forward begins; its codes are to be made next."""
        self.show()
        if self.agreed is not None:
            self._wire.attach()
        self._runs = True
        self._values_too = fsdp.wants_values() or torch.is_grad_enabled() in self.others

    def bring_values(self) -> None:
        """Gather the values, too, in this forward and its backward."""
        self.has_readers = self._values_too = True

    def send(self, codes: list[Tensor], global_scale: Tensor) -> None:
        """Send these in this forward and its backward. codes: of `shards.of_shard`."""
        self._sent, self._global_scale = codes, global_scale

    def end_forward(self) -> None:
        """Drop the codes: after a forward and its backward the optimizer may have stepped."""
        self._runs = False

    def was_read(self) -> bool:
        """Return whether code that is not compiled has read the parameter without its values since
        the last call."""
        return self._wire.was_read()

    def leave(self, has_backward: bool) -> bool:
        """Called after a forward, when nobody may see a parameter without values. Where FSDP2 frees
        it, it does that; where it does not, and no backward follows, gather the values, as FSDP2
        would have. Before a backward its module shows the shard, until `show`; return whether it
        does.

        A weight that graphs read outside of the model's forward stays as it is: they expect it.
        """
        if self._wire.has_values or not fsdp.is_gathered(self.record):
            return False
        if not has_backward:
            if fsdp.is_kept(self.group):
                self.gather_values()
            return False
        self._is_hidden = not self._read_outside
        if self._is_hidden:
            fsdp.register_shard(self.record)
        return self._is_hidden

    def show(self) -> None:
        """Have the module show the gathered parameter again."""
        if self._is_hidden:
            self._is_hidden = False
            fsdp.register_whole(self.record)

    def _before_gather(self) -> tuple[list[Tensor], bool] | None:
        """The tensors that FSDP2 sends, and whether it sends the values, too."""
        self._serves = True
        if fsdp.is_in_backward(self.group) and self._sent:
            both = self._values_too or self.agreed is None
            sent = self._sent
            if self.agreed is None:
                self._sent = []
            return sent, both
        if self._runs and self.agreed is not None and fsdp.is_in_forward(self.group):
            return self._sent, self._values_too
        # A gather by hand, or a forward that did not begin in the model: codes are those of the
        # last forward, and only a backward of it may read them.
        self._serves = False
        return (self._sent, True) if self._sent and fsdp.awaits_backward(self.group) else None

    def parts(self, wanted: RequestedCodes, make: Make) -> Sequence[Tensor]:
        """The graph inputs for the gathered parameter. make: quantizes all of it."""
        fits = self.layout(wanted.form) == wanted.layout
        self.wanted, self.read = (wanted if fits and not self.why else None), True
        self._note_place()
        agreed = self.agreed
        received = self._serves and self._wire.received
        if received and agreed is not None and agreed.number == wanted.number:
            assert self._global_scale is not None
            codes, scales, *mask = self._whole(wanted)
            return codes, scales, self._global_scale, *mask
        self.gather_values()
        w = fsdp.gathered_parameter(self.record)
        assert w is not None
        return make(wanted.form.matrix(w).contiguous())

    def _whole(self, wanted: RequestedCodes) -> list[Tensor]:
        """The gathered tensors, as parts of the whole weight. Views of them are made once, since
        each gather writes the same memory."""
        received = self._wire.whole
        key = id(received), wanted
        if self._views is None or self._views[:2] != key:
            whole = shards.of_whole(received, wanted.layout, wanted.scheme)
            if wanted.layout.dim:  # copies
                return whole
            self._views = (*key, whole, received)  # the last, so that its id stays its own
        found: list[Tensor] = self._views[2]
        return found

    def why_not(self, form: CodesLayout) -> str:
        """Why codes of a form can't be gathered; "" if they can."""
        if self.why:
            return self.why
        operand = Operand.parse(form.operand)
        scheme, transform = SCHEMES[operand.scheme], TRANSFORMS[operand.transform]
        dtypes = {fsdp.dtype_of(self.record), form.dtype}
        return shards.why_not(scheme, transform, dtypes, self.layout(form))

    def layout(self, form: CodesLayout) -> ShardLayout:
        """How its shards are cut for a form: always the same."""
        if form not in self._layouts:
            whole, shard = fsdp.shape_of(self.record), fsdp.padded_shape(self.record)
            dim = fsdp.sharded_dim(self.record)
            self._layouts[form] = ShardLayout.of(whole, shard, dim, form.transposed)
        return self._layouts[form]

    def read_values(self) -> None:
        """Called when something is about to read the gathered parameter itself. Without gradients
        that says nothing of the steps: codes are gathered on, and the values besides; and so for
        `eager_readers`, one of which Dynamo may have compiled."""
        if (torch.is_grad_enabled() or not self.read) and not self.has_readers:
            self.wanted = None
        self.read = True
        self._note_place()
        self._values_too = True
        self.gather_values()

    def _note_place(self) -> None:
        self._read_outside |= not self._runs and not fsdp.is_in_backward(self.group)

    def gather_values(self) -> None:
        """Gather the values if only codes are gathered; all ranks call this at the same place."""
        if not self._wire.has_values and fsdp.is_gathered(self.record):
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
