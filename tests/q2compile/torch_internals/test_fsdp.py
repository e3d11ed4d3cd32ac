"""The buffers that codes are gathered into."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.distributed.tensor import Shard

from q2compile.torch_internals.fsdp import Wire


def wire_of(dim: int, shape: tuple[int, ...]) -> Wire:
    """On two ranks, each with a shard of ``shape``."""
    record = SimpleNamespace(
        fsdp_placement=Shard(dim),
        mesh_info=SimpleNamespace(shard_mesh_size=2),
        padded_sharded_param_size=torch.Size(shape),
    )
    return Wire(record, lambda: None)


def test_buffers_are_allocated_by_fsdp2_alone() -> None:
    """`Wire` is asked in the stream of FSDP2's copies. Memory of that stream's pool would go back
    to it while the model, in its own stream, still reads the codes: so none is allocated there."""
    wire = wire_of(0, (4, 32))
    wire._allocate([torch.zeros(4, 16, dtype=torch.uint8)], torch.empty(0))
    (whole,) = wire.whole
    assert whole.shape == (8, 16) and whole.untyped_storage().nbytes() == 0
