# SPDX-License-Identifier: Apache-2.0
"""Constant tensors, one for each device, so that using one costs no launches (statistics.py).

    make(device)                        before the first call that may be captured
    pairs_of_bytes(device)              formats.byte_pairs
    rotation_matrix(transform, device)  fp64 [size, size] of 1 and -1: x @ it rotates a chunk x, but
                                        for the norm, and for the signs that a seed gives

A call that finds none makes one and does not store it. In the warm-up of a CUDA graph it would be
in the graph's memory pool, and torch rejects graphs whose pool holds tensors that outlive a call.
"""

import torch

from q2compile.runtime_kernels.numerics.formats import byte_pairs
from q2compile.runtime_kernels.numerics.transforms import (
    TRANSFORMS,
    Transform,
    hadamard,
    signs_of,
)

_PAIRS: dict[torch.device, torch.Tensor] = {}
_ROTATIONS: dict[tuple[str, torch.device], torch.Tensor] = {}


def make(device: torch.device) -> None:
    """Makes all constants of a device, once."""
    if device in _PAIRS:
        return
    pairs = byte_pairs(device)
    if type(pairs) is not torch.Tensor:
        return  # a fake tensor, made by a mode
    for transform in TRANSFORMS.values():
        _ROTATIONS[transform.name, pairs.device] = _rotation(transform, device)
    _PAIRS[pairs.device] = pairs  # with an index, as operands have it


def pairs_of_bytes(device: torch.device) -> torch.Tensor:
    """See above."""
    found = _PAIRS.get(device)
    return byte_pairs(device) if found is None else found


def rotation_matrix(transform: Transform, device: torch.device) -> torch.Tensor:
    """See above."""
    found = _ROTATIONS.get((transform.name, device))
    return _rotation(transform, device) if found is None else found


def _rotation(transform: Transform, device: torch.device) -> torch.Tensor:
    eye = torch.eye(transform.size, dtype=torch.float32, device=device)
    matrix = hadamard(eye[None])[0].to(torch.float64)
    if transform.signs == "fixed":
        signs = signs_of(transform, None, device)
        assert signs is not None
        matrix.mul_(signs[:, None])
    return matrix
