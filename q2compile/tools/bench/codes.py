# SPDX-License-Identifier: Apache-2.0
"""Hashes of what quantizers make of one input, which must be the same on every device.

The input is made of integers, so its bits are the same everywhere, and kernels are defined to the
bit. `codes.json` has the hashes that the references give on a CPU
(tests/support/bench_references.py writes it).

Each output is hashed in PIECES pieces along its first dimension: a report from another machine then
says which output of which quantizer differs, and where.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import resources

import torch

from q2compile.cost_model.quantizers import Quantizer
from q2compile.runtime_kernels.choice import choose
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SWIZZLED
from q2compile.runtime_kernels.ops.table import REQUANTIZE, QuantizerCall, rowwise_call
from q2compile.runtime_kernels.registry import select
from q2compile.tools.bench.cases import CASES, call_of

SHAPE = (8192, 4096)
SMALL = (256, 384)  # for tests and for a CPU
PIECES = 8
FILE = "codes.json"
_MAGNITUDES = 8  # of rows, by powers of two
_EMPTY = 61  # every so many rows one is zeros


def cases() -> dict[str, Quantizer]:
    """Every quantizer of the recipes that makes codes, with its scales in rows and swizzled."""
    found = {name: case for name, case in CASES.items() if not case.scheme.endswith(DEQUANTIZED)}
    found["quantize_16x16"] = Quantizer("row", "nvfp4_16x16_pow2")
    swizzled = {
        f"{name}{SWIZZLED}": replace(
            case,
            scheme=case.scheme + SWIZZLED,
            source=case.source + SWIZZLED * (case.kind == REQUANTIZE),
        )
        for name, case in found.items()
        if case.spec.block[0] == 1
    }
    return found | swizzled


def matrix(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """A bf16 matrix, nearly normal, whose bits are the same on every device: sums of four bytes of
    a hash of the position, scaled by powers of two from row to row. Some rows are zeros."""
    rows, cols = shape
    position = torch.arange(rows * cols, device=device)
    words = (position * 2654435761 + 12345) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # MurmurHash3's finalizer
        words = ((words ^ (words >> shift)) * factor) & 0xFFFFFFFF
    words = words ^ (words >> 16)
    total = torch.stack([(words >> shift) & 0xFF for shift in (0, 8, 16, 24)]).sum(0)
    row = torch.arange(rows, device=device)
    powers = torch.tensor([2.0**-i for i in range(_MAGNITUDES)], device=device)
    scale = powers[row * 5 % _MAGNITUDES] * (row % _EMPTY != 0)
    return ((total - 510).view(rows, cols).float() * scale[:, None]).bfloat16()


def calls(
    device: torch.device, shape: tuple[int, int]
) -> Iterator[tuple[str, Callable[[], QuantizerCall]]]:
    """(name, what makes the call) of each case."""
    x = matrix(shape, device)
    seeds = [torch.tensor(seed, device=device) for seed in (1, 2)]

    def call(case: Quantizer) -> QuantizerCall:
        source = rowwise_call(case.source, x)() if case.kind == REQUANTIZE else None
        return call_of(case, x, seeds, source)

    for name, case in cases().items():
        yield name, partial(call, case)


def hashes(call: QuantizerCall, kernel: str | None = None) -> dict[str, str]:
    """The outputs of a call by name, "codes", "scales", "global scale" of each operand and a mask,
    each as the hashes of its pieces.

    kernel: its name; by default the one that serves the call.
    """
    function = select(call.spec.name, call.positional, kernel or kernel_of(call))
    made = function(*call.positional)
    names = [
        f"{'columnwise' if operand.columnwise else 'rowwise'} {part}"
        for operand in call.operands
        for part in ("codes", "scales", "global scale")
    ]
    names += ["mask"] * call.masked
    return {name: pieces(tensor) for name, tensor in zip(names, made, strict=True)}


def pieces(tensor: torch.Tensor) -> str:
    """Hashes of PIECES pieces of a tensor along its first dimension, 8 digits each."""
    parts = tensor.detach().cpu().reshape(len(tensor) if tensor.dim() else 1, -1).chunk(PIECES)
    bytes_ = (part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)
    return " ".join(hashlib.sha256(part).hexdigest()[:8] for part in bytes_)


def kernel_of(call: QuantizerCall) -> str:
    return choose(call.spec.name, call.positional).name


def differences(got: dict[str, str], want: dict[str, str]) -> str:
    """Which outputs differ, and in which of their pieces; "" if none."""
    found = []
    for name, expected in want.items():
        own, theirs = got.get(name, "").split(), expected.split()
        wrong = [str(i) for i, (a, b) in enumerate(zip(own, theirs, strict=False)) if a != b]
        if len(own) != len(theirs):
            found.append(f"{name}: {len(own)} pieces instead of {len(theirs)}")
        elif wrong:
            found.append(f"{name}: pieces {', '.join(wrong)} of {len(theirs)}")
    return "; ".join(found)


def shipped(shape: tuple[int, int]) -> dict[str, dict[str, str]]:
    """The references' hashes for SHAPE or SMALL, by case."""
    text = resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    found: dict[str, dict[str, str]] = json.loads(text)["x".join(map(str, shape))]
    return found
