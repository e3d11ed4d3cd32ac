"""FSDP2's records of the parameters that it shards, and what else than values it can gather.

FSDP2 gathers what a sharded tensor's method ``fsdp_pre_all_gather`` returns, and hands the result
to ``fsdp_post_all_gather``. It looks the methods up on the tensor, so attributes of a plain tensor
do as well as a subclass, and nothing that a user sees changes: parameters, optimizers and
checkpoints are those of plain FSDP2.

Between two gathers a record is as plain FSDP2 left it (`Wire.after`), so that a gather without the
methods, which `.to()` and `load_state_dict(assign=True)` lose with the tensor, gathers values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

# Its name from torch 2.13 on, where the older one warns.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_BEFORE, _AFTER = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on this very module."""
    return isinstance(module, FSDPModule)


def groups_of(module: nn.Module) -> Sequence[Any]:
    """FSDP2's groups of the parameters that ``module`` gathers together; before torch 2.12 one."""
    if not isinstance(module, FSDPModule):
        return ()
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [g for g in ([state._fsdp_param_group] if groups is None else groups) if g is not None]


def is_in_backward(group: Any) -> bool:
    return bool(group._training_state.name == "PRE_BACKWARD")


def is_in_forward(group: Any) -> bool:
    return bool(group._training_state.name == "FORWARD")


def why_values(record: Any, group: Any) -> str:
    """Why ``record`` has to gather values; "" if its codes can be gathered."""
    if not hasattr(group.mesh_info, "shard_process_group"):
        return "it is replicated, not sharded"
    if record.mesh_info.shard_mesh_size == 1:
        return "one rank holds all of it"
    if record.is_dtensor:
        return "it is a DTensor, as tensor parallel makes it"
    if record._module_info.shared_modules:
        return "it is shared by several modules"
    if record.fsdp_placement.dim != 0:
        return f"it is sharded along dimension {record.fsdp_placement.dim}, and not along rows"
    if record.offload_to_cpu:
        return "CPUOffloadPolicy: torch moves the shard to the GPU as it is"
    if isinstance(group.post_forward_mesh_info, type(group.mesh_info)) and (
        group.post_forward_mesh_info != group.mesh_info
    ):
        return "reshard_after_forward is an int, for which torch gathers values alone"
    if getattr(record._sharded_local_tensor, _BEFORE, None) is not None:
        return "it has an all-gather of its own"
    return ""


def names_of(record: Any) -> list[str]:
    """The parameter's names in the module that holds it."""
    return [record._module_info.param_name, *record._module_info.shared_param_names]


def process_group(record: Any) -> dist.ProcessGroup:
    """The ranks that the parameter's shards lie on."""
    group: dist.ProcessGroup = record.mesh_info.shard_process_group
    return group


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
    return tuple(record._orig_size)


def padded_rows(record: Any) -> int:
    """Rows of each rank's shard, as they are gathered: the last ranks' with zeros."""
    return int(record.padded_sharded_param_size[0])


def shard_of(record: Any) -> Tensor:
    """This rank's rows, padded, in the dtype of the optimizer."""
    shard: Tensor = record._sharded_param_data
    return shard.view(record.padded_sharded_param_size)


def dtype_of(record: Any) -> torch.dtype:
    """The dtype in which the module sees its parameter."""
    dtype = record.mp_policy.param_dtype or record.sharded_param.dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


class Wire:
    """What one parameter gathers in the place of values.

    before() returns what this rank sends, bytes [padded rows or fewer, n], and whether the values
    are to be gathered, too; None for the values alone. It is asked in each gather.
    """

    def __init__(self, record: Any, before: Callable[[], tuple[list[Tensor], bool] | None]) -> None:
        self._record, self._before = record, before
        self._values: list[Tensor] = []  # what FSDP2 gathers values into
        self._buffers: list[Tensor] = []  # what the ranks send is gathered into
        self._sent: list[torch.Size] = []
        self._views: list[Tensor] = []
        self.received = False  # whether the buffers hold what the ranks sent
        self.has_values = True  # whether the parameter holds its values

    @property
    def whole(self) -> list[Tensor]:
        """What all ranks sent, uint8 [ranks * rows, n] each: the same tensors in each gather."""
        return self._views

    def attach(self) -> None:
        """Have FSDP2 ask; again if its shard is another tensor than before. Not before the first
        gather, which makes the parameter."""
        local = self._record._sharded_local_tensor
        if getattr(local, _BEFORE, None) is None:
            self._values = self._values or list(self._record.all_gather_outputs)
            setattr(local, _BEFORE, self._pre)
            setattr(local, _AFTER, self._post)
            self._record._init_extensions()

    def detach(self) -> None:
        """Have FSDP2 gather values, as if nothing had been attached."""
        local = self._record._sharded_local_tensor
        if getattr(local, _BEFORE, None) is not None:
            delattr(local, _BEFORE)
            delattr(local, _AFTER)

    def _pre(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        """One argument: with five FSDP2 wants all that is sent to have the shape of the shard."""
        record, values = self._record, self._values
        answer = self._before()
        sent, both = ([], True) if answer is None else answer
        if [t.shape for t in sent] != self._sent and sent:
            self._allocate(sent, values[0])
        record._unsharded_inner_tensors = []
        record.all_gather_outputs = [*(self._buffers if sent else ()), *(values if both else ())]
        own = shard_of(record).to(dtype_of(record)).view(-1)
        return (*sent, *([own] if both else ())), (bool(sent), both)

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
        """The record is as plain FSDP2 has it again; its buffers are freed with its values."""
        self.received, self.has_values = metadata
        self._record.all_gather_outputs = list(self._values)
        self._record._unsharded_inner_tensors = list(self._buffers) if self.received else []

    def gather_values(self) -> None:
        """Where the buffers alone were gathered, gather the values as well: a collective, which
        all ranks have to begin at this place."""
        if self.has_values:
            return
        record = self._record
        (values,) = self._values
        values.untyped_storage().resize_(values.numel() * values.itemsize)
        own = shard_of(record).to(dtype_of(record)).view(-1)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(values):
            group = record.mesh_info.shard_process_group
            _all_gather(values, own, group=group)
        self.has_values = True


def post(key: str, text: str) -> None:
    """Let other ranks read ``text`` under ``key``, without a collective."""
    _store().set(f"q2compile/{key}/{dist.get_rank()}", text)


def count_posts(key: str, more: int) -> int:
    """Add ``more`` to a number that all ranks share; return it."""
    return int(_store().add(f"q2compile/{key}/count", more))


def read_posts(
    key: str, ranks: Sequence[int], seconds: float, sooner: Mapping[str, float]
) -> dict[int, str | None]:
    """What the ranks have posted under ``key``; None for those that have not after that time.
    sooner: how long to wait for something else than these texts."""
    store, began = _store(), time.monotonic()
    found: dict[int, str | None] = {}
    for rank in ranks:
        place = f"q2compile/{key}/{rank}"
        while True:
            text = store.get(place).decode() if store.check([place]) else None
            limit = seconds if text is None else sooner.get(text, 0.0)
            if time.monotonic() - began >= limit:
                break
            time.sleep(0.02)
        found[rank] = text
    return found


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
