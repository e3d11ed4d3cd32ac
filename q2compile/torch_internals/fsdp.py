# SPDX-License-Identifier: Apache-2.0
"""FSDP2's records of the parameters that it shards, and what else than values it can gather.

FSDP2 gathers what a sharded tensor's method ``fsdp_pre_all_gather`` returns, and hands the result
to ``fsdp_post_all_gather``. It looks the methods up on the tensor, so attributes of a plain tensor
do as well as a subclass, and nothing that a user sees changes: parameters, optimizers and
checkpoints are those of plain FSDP2.

Between two gathers a record is as plain FSDP2 left it (`Wire.after`), so that a gather without the
methods, which `.to()` and `load_state_dict(assign=True)` lose with the tensor, gathers values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from q2compile.torch_internals.storage import WithheldMemory

# Its name from torch 2.13 on, where the older one warns.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_BEFORE, _AFTER = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_MOVE = "to"
_COPIES = ("__deepcopy__", "__reduce_ex__")


_values_too = ContextVar("values_too", default=False)


@contextmanager
def values_too() -> Iterator[None]:
    """Gathers inside of it bring the values of every parameter."""
    token = _values_too.set(True)
    try:
        yield
    finally:
        _values_too.reset(token)


def wants_values() -> bool:
    """True inside of `values_too`."""
    return _values_too.get()


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on this very module."""
    return isinstance(module, FSDPModule)


def groups_of(module: nn.Module) -> Sequence[Any]:
    """FSDP2's groups of parameters that ``module`` gathers in one collective; before torch 2.12 one
    group."""
    if not isinstance(module, FSDPModule):
        return ()
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [g for g in ([state._fsdp_param_group] if groups is None else groups) if g is not None]


def is_in_backward(group: Any) -> bool:
    return bool(group._training_state.name == "PRE_BACKWARD")


def is_in_forward(group: Any) -> bool:
    return bool(group._training_state.name == "FORWARD")


def is_kept(group: Any) -> bool:
    """Whether FSDP2 leaves the parameters gathered after the forward: the root's are, and those
    under ``reshard_after_forward=False``."""
    return not group._reshard_after_forward


def awaits_backward(group: Any) -> bool:
    """Whether a forward may have saved what was gathered for a backward to come."""
    return bool(group._post_forward_indices)


def is_gathered(record: Any) -> bool:
    return bool(record.sharded_state.name == "UNSHARDED")


def register_shard(record: Any) -> None:
    """Let the module show its shard, while FSDP2 keeps what it has gathered."""
    record._setattr_on_modules(record.sharded_param)


def register_whole(record: Any) -> None:
    """Undo `register_shard`, unless FSDP2 has freed what it had gathered since."""
    if is_gathered(record):
        record._setattr_on_modules(record._unsharded_param)


def why_values(record: Any, group: Any) -> str:
    """Why ``record`` has to gather values; "" if its codes can be gathered."""
    if not hasattr(group.mesh_info, "shard_process_group"):
        return "it is replicated, not sharded"
    if record.mesh_info.shard_mesh_size == 1:
        return "one rank holds all of it"
    if record.is_dtensor and not _parts_are_equal(record):
        return "its tensor-parallel parts differ in size"
    if record._module_info.shared_modules:
        return "it is shared by several modules"
    if isinstance(group.post_forward_mesh_info, type(group.mesh_info)) and (
        group.post_forward_mesh_info != group.mesh_info
    ):
        return "reshard_after_forward is an int, for which torch gathers only values"
    if getattr(record._sharded_local_tensor, _BEFORE, None) is not None:
        return "it has a custom all-gather"
    return ""


def _parts_are_equal(record: Any) -> bool:
    """Whether the DTensor was cut into equal parts before fully_shard."""
    spec = getattr(record, "_unsharded_dtensor_spec", None) or record._tp_spec  # in torch 2.11
    ranks = [1] * len(spec.shape)
    for size, placement in zip(spec.mesh.shape, spec.placements, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            ranks[dim] *= size
    return all(n % r == 0 for n, r in zip(spec.shape, ranks, strict=True))


def local_part(t: Tensor) -> Tensor:
    """This rank's part of a DTensor, with no gradient; any other tensor itself."""
    return t._local_tensor if isinstance(t, DTensor) else t


def names_of(record: Any) -> list[str]:
    """The parameter's names in the module that holds it."""
    return [record._module_info.param_name, *record._module_info.shared_param_names]


def process_groups(record: Any) -> tuple[dist.ProcessGroup, tuple[dist.ProcessGroup, ...]]:
    """The ranks that hold the parameter's shards, and one group for each other dimension of the
    mesh: replicas, tensor and expert parallel ranks."""
    own, mesh = record.mesh_info.shard_process_group, record._spmd_mesh
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    return own, tuple(g for g in groups if g != own and g.size() > 1)


def owner_of(record: Any) -> nn.Module:
    """The module that holds the parameter."""
    module: nn.Module = record._module_info.module
    return module


def gathered_parameter(record: Any) -> nn.Parameter | None:
    """The whole parameter, one object as long as its module is sharded; None before the first
    gather."""
    parameter: nn.Parameter | None = getattr(record, "_unsharded_param", None)
    return parameter


def shape_of(record: Any) -> tuple[int, ...]:
    """The gathered tensor: all of a parameter, or this rank's tensor-parallel part."""
    return tuple(record._orig_size)


def padded_shape(record: Any) -> tuple[int, ...]:
    """The size of each rank's shard in the gather: the last ranks' are padded with zeros."""
    return tuple(record.padded_sharded_param_size)


def sharded_dim(record: Any) -> int:
    return int(record.fsdp_placement.dim)


def shard_of(record: Any) -> Tensor:
    """This rank's shard, padded, in the dtype of the optimizer and on the device of the gather:
    under CPUOffloadPolicy a copy."""
    shard: Tensor = record._sharded_param_data
    shard = shard.to(record.device, non_blocking=True)  # as FSDP2 does
    return shard.view(record.padded_sharded_param_size)


def dtype_of(record: Any) -> torch.dtype:
    """The dtype in which the module sees its parameter."""
    dtype = record.mp_policy.param_dtype or record.sharded_param.dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


class Wire:
    """The tensors that one parameter gathers instead of its values.

    before() returns what this rank sends, bytes [rows, n], and whether the values are to be
    gathered, too; None for the values alone. It is asked in each gather.

    As long as the buffers alone are gathered, reading the parameter raises RuntimeError(message)
    (`WithheldMemory`). FSDP2 has no hook for the moment at which it frees a parameter. But it
    asks each tensor that it frees for its storage, so the last of them is a `_WhenFreed`.

    FSDP2 puts values of shards along another dimension than 0 in order behind the gather, and can't
    do that with tensors of other shapes. So in a gather with codes the record says 0, and
    ``_post`` puts values in order.
    """

    def __init__(
        self, record: Any, before: Callable[[], tuple[list[Tensor], bool] | None], message: str
    ) -> None:
        self._record, self._before, self._message = record, before, message
        self._withheld: WithheldMemory | None = None
        self._own: Tensor | None = None  # the parameter in its own memory, while it has the other
        self._values: list[Tensor] = []  # what FSDP2 gathers values into
        self._buffers: list[Tensor] = []  # what the ranks send is gathered into
        self._sent: list[torch.Size] = []
        self._placement = record.fsdp_placement
        self._views: list[Tensor] = []
        self._asked = _with_signature(self._pre)
        self.received = False  # whether the buffers hold what the ranks sent
        self.has_values = True  # whether the parameter holds its values

    @property
    def whole(self) -> list[Tensor]:
        """The gathered tensors of all ranks, uint8 [ranks * rows, n] each: the same memory in each
        gather."""
        return self._views

    def attach(self) -> None:
        """Have FSDP2 ask this object, again if the shard is another tensor than before. Call it
        after the first gather, which makes the parameter."""
        local = self._record._sharded_local_tensor
        if getattr(local, _BEFORE, None) is None:
            self._values = self._values or list(self._record.all_gather_outputs)
            setattr(local, _BEFORE, self._asked)
            setattr(local, _AFTER, self._post)
            for name in _COPIES:
                setattr(local, name, partial(_copied_plain, local, name))
            parameter = gathered_parameter(self._record)
            if self._withheld is None and parameter is not None:
                self._withheld = WithheldMemory(local_part(parameter), self._message)
            if self._record.offload_to_cpu:
                # FSDP2 looks the two up on a copy on the GPU, which has no attributes.
                setattr(local, _MOVE, lambda *args, **kwargs: local)
            self._record._init_extensions()

    def detach(self) -> None:
        """Have FSDP2 gather values, as if nothing had been attached."""
        local = self._record._sharded_local_tensor
        if getattr(local, _BEFORE, None) is not None:
            delattr(local, _BEFORE)
            delattr(local, _AFTER)
            for name in _COPIES:
                delattr(local, name)
            if self._record.offload_to_cpu:
                delattr(local, _MOVE)

    def _pre(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        """fsdp_pre_all_gather; with five arguments all sent would need the shard's shape."""
        record, values = self._record, self._values
        answer = self._before()
        sent, both = ([], True) if answer is None else answer
        if [t.shape for t in sent] != self._sent and sent:
            self._allocate(sent, values[0])
        record._unsharded_inner_tensors = []
        if sent:
            record.fsdp_placement = Shard(0)
        record.all_gather_outputs = [*(self._buffers if sent else ()), *(values if both else ())]
        own = [shard_of(record).to(dtype_of(record)).view(-1)] if both else []
        return (*sent, *own), (bool(sent), both)

    def _allocate(self, sent: list[Tensor], like: Tensor) -> None:
        ranks = self._record.mesh_info.shard_mesh_size
        self._sent = [t.shape for t in sent]
        with torch.inference_mode(False):  # a later backward may save them
            self._buffers = [like.new_empty(t.numel() * ranks, dtype=torch.uint8) for t in sent]
            self._views = [b.view(-1, t.shape[1]) for b, t in zip(self._buffers, sent, strict=True)]
        # FSDP2 asks in the stream of its copies into the gather, and writes and reads the buffers
        # in the stream of the model. So it has to allocate them there, in each gather: memory of
        # this stream's pool would go back there while the model still reads it.
        for buffer in self._buffers:
            buffer.untyped_storage().resize_(0)

    def _post(
        self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> None:
        """fsdp_post_all_gather: the record is plain FSDP2's again; buffers go with its values."""
        self.received, self.has_values = metadata
        self._record.fsdp_placement = self._placement
        if self.received and self.has_values:
            self._put_in_order()
        self._record.all_gather_outputs = list(self._values)
        self._record._unsharded_inner_tensors = list(self._buffers) if self.received else []
        if self.has_values:
            self._give_back()
        else:
            self._withhold()
            self._record._unsharded_inner_tensors.append(_WhenFreed(self._give_back))

    def _withhold(self) -> None:
        parameter = gathered_parameter(self._record)
        if self._own is None and self._withheld is not None and parameter is not None:
            local = local_part(parameter)
            with torch.inference_mode(False):
                self._own = local.data
                local.data = self._withheld.tensor

    def _give_back(self) -> None:
        parameter = gathered_parameter(self._record)
        if self._own is not None and parameter is not None:
            with torch.inference_mode(False):
                local_part(parameter).data = self._own
            self._own = None
        if self.was_read():
            raise RuntimeError(self._message)

    def was_read(self) -> bool:
        """Return whether the parameter was read without values since the last call
        (`WithheldMemory`)."""
        return self._withheld is not None and self._withheld.was_read()

    def gather_values(self) -> None:
        """Where the buffers alone were gathered, gather the values as well: a collective, which
        all ranks have to begin at this place."""
        if self.has_values:
            return
        self._give_back()
        record = self._record
        (values,) = self._values
        values.untyped_storage().resize_(values.numel() * values.itemsize)
        own = shard_of(record).to(dtype_of(record)).view(-1)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(values):
            group = record.mesh_info.shard_process_group
            _all_gather(values, own, group=group)
        self._put_in_order()
        self.has_values = True

    def _put_in_order(self) -> None:
        """The gathered values, one shard after the other, as the whole parameter."""
        dim, shape, (values,) = self._placement.dim, padded_shape(self._record), self._values
        if dim == 0:
            return
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(values):
            shards = values.view(-1, *shape).unbind()
            values.copy_(torch.cat(shards, dim).view(-1))


class _WhenFreed:
    """Replaces a tensor that FSDP2 frees: calls ``then`` at that moment."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def untyped_storage(self) -> torch.UntypedStorage:
        self._then()
        return torch.UntypedStorage(0)


def _copied_plain(shard: Tensor, method: str, *args: Any) -> Any:
    """The result of a method that copies or pickles a shard, without our attributes, which hold
    process groups."""
    own = dict(shard.__dict__)
    shard.__dict__.clear()
    try:
        return getattr(shard, method)(*args)
    finally:
        shard.__dict__.update(own)


def _with_signature(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` as a function that holds its signature. FSDP2 asks `inspect` for it in each gather
    of each weight; found anew that takes as long as all else of `Wire._pre`."""

    def asked(mesh: Any) -> Any:
        return method(mesh)

    asked.__signature__ = inspect.signature(asked)  # type: ignore[attr-defined]
    return asked
