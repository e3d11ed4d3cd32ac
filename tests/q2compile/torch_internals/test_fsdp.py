# SPDX-License-Identifier: Apache-2.0
"""The buffers that codes are gathered into, and values of shards along another dimension than 0."""

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
    """`Wire` runs in the stream of FSDP2's copies. Memory of that stream's pool could be reused
    while the model, in its own stream, still reads the codes. So `Wire` allocates none there."""
    wire = wire_of(0, (4, 32))
    wire._allocate([torch.zeros(4, 16, dtype=torch.uint8)], torch.empty(0))
    (whole,) = wire.whole
    assert whole.shape == (8, 16) and whole.untyped_storage().nbytes() == 0


def test_values_of_shards_along_another_dimension_are_put_in_order() -> None:
    for dim in (0, 1, 2):
        parameter = torch.arange(4 * 6 * 8.0).view(4, 6, 8)
        shards = parameter.chunk(2, dim)
        wire = wire_of(dim, tuple(shards[0].shape))
        wire._values = [torch.cat([shard.flatten() for shard in shards])]
        version = wire._values[0]._version
        wire._put_in_order()
        assert torch.equal(wire._values[0].view(4, 6, 8), parameter)
        assert wire._values[0]._version == version  # FSDP2's own copies leave it as it is
