# SPDX-License-Identifier: Apache-2.0
"""Runs a Triton kernel that Inductor generates for a GPU, as the PTX that Triton compiles it to."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.support.emulation.inductor import Kernel
from tests.support.ptx import extent, run_kernel
from tests.support.ptx.order import OrderedLaunch
from tests.support.ptx.parser import parse


def run(kernel: Kernel, capability: int, folder: Path, tensors: Sequence[torch.Tensor]) -> None:
    """Launches it over all of its one dimension.

    capability: of the GPU it is compiled for (90: 9.0).
    tensors: for its pointers, in their order; what it writes among them.
    """
    built, tile = kernel.built(capability, folder), kernel.tile
    parsed = parse(built.asm["ptx"])
    sizes = {name: int(n) for name, n in re.findall(r"(\w+numel) = (\d+)", kernel.source)}
    pointers = iter(tensors)
    values = [
        sizes[name] if name in sizes else next(pointers).data_ptr() for name in kernel.arguments
    ]
    assert next(pointers, None) is None, "more tensors than pointers"
    parameters = bytearray(parsed.end)  # those behind the arguments are Triton's, and not used
    for value, name, first in zip(
        values, kernel.arguments, parsed.parameters.values(), strict=False
    ):
        struct.pack_into("@i" if name in sizes else "@P", parameters, first, value)
    grid = (-(-sizes["xnumel"] // tile["XBLOCK"]), 1)
    windows = [extent(x) for x in tensors]
    threads, shared = 32 * tile["num_warps"], built.metadata.shared
    order = OrderedLaunch(kernel.name)
    run_kernel(parsed, threads, grid, bytes(parameters), shared, windows, order)
