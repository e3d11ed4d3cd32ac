# SPDX-License-Identifier: Apache-2.0
"""The buffers that codes are gathered into, and values of shards along another dimension than 0."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
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
    return Wire(record, lambda: None, "")


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


@pytest.mark.parametrize("offloaded", [False, True])
def test_an_offloaded_shard_keeps_its_methods_where_fsdp2_moves_it(offloaded: bool) -> None:
    """``FSDPParam.all_gather_inputs`` moves it to the device first, here from the CPU to meta. Any
    other shard moves as ever."""
    shard = torch.zeros(4)
    record = SimpleNamespace(
        _sharded_local_tensor=shard,
        _init_extensions=lambda: None,
        all_gather_outputs=[torch.zeros(8)],
        fsdp_placement=None,
        offload_to_cpu=offloaded,
    )
    wire = Wire(record, lambda: None, "")
    wire.attach()
    moved = shard.to(torch.device("meta"), non_blocking=True)
    assert (moved is shard) == offloaded
    assert hasattr(moved, "fsdp_pre_all_gather") == hasattr(moved, "fsdp_post_all_gather")
    assert hasattr(moved, "fsdp_pre_all_gather") == offloaded
    wire.detach()
    assert shard.to("meta").device.type == "meta" and not vars(shard)
