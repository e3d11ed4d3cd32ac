# SPDX-License-Identifier: Apache-2.0
"""The entry points of csrc/kernels.cpp, each with the struct that it takes: the same fields in the
same order as in C++, where they are described."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int32, c_int64, c_uint32, c_void_p
from functools import cache
from typing import Any

import torch

from q2compile.runtime_kernels.cpu.build import library, why_missing
from q2compile.runtime_kernels.numerics.transforms import FIXED_SIGN_SEED, Transform
from q2compile.runtime_kernels.registry import CPP, kernel
from q2compile.runtime_kernels.selfcheck import check_of

TYPES = {torch.bfloat16: 0, torch.float32: 1}
STEPS = 8  # candidates of a scale search, at most


def _fields(**kinds: Any) -> list[tuple[str, Any]]:
    """Fields of a struct, from the names of each kind of field in its order."""
    return [(name, kind) for names, kind in kinds.values() for name in names.split()]


class CpuOperand(ctypes.Structure):
    """The struct of operand.h."""

    _fields_ = _fields(
        a=("x", c_void_p),
        b=("rows columns row_stride column_stride", c_int64),
        c=("source_scales", c_void_p),
        d=("scales_across", c_int64),
        e=("type columnwise rounding selection exact height chunk rotated signs", c_int32),
        f=("above", c_int32),
        g=("rng_offset", c_uint32),
        h=("vmax vmax_four inverse_vmax inverse_vmax_four cap amax_divisor", c_float),
        i=("shrink global_scale_of_mx factor", c_float),
        j=("steps", c_int32 * STEPS),
        k=("step_count", c_int32),
        l=("seed sign_seed factor_tensor amax shares codes scales global_scale mask", c_void_p),
    )


class Quantized(ctypes.Structure):
    """The struct of quantized matrices in dequantize.h."""

    _fields_ = _fields(
        a=("codes scales global_scale out", c_void_p),
        b=("rows width columns", c_int64),
        c=("type is_mx height", c_int32),
    )


def cpu_kernel(op: str, why_not: Callable[..., str | None]) -> Callable:
    """Decorator: registers a kernel of the library, which is checked before its first use in a
    process. why_not: None if it serves the arguments, otherwise the reason in words."""

    def unsupported(*args: Any) -> str | None:
        why = why_not(*args)
        if why is None and (missing := why_missing()) is not None:
            return f"there is no library of CPU kernels: {missing}"
        return why

    return kernel(op, CPP, device_type="cpu", unsupported=unsupported, check=check_of)


_STRUCTS = {"q2_quantize": CpuOperand, "q2_dequantize": Quantized}


@cache
def entry(name: str) -> Callable[[Any], None]:
    """A function of the library, which takes a reference to its struct (ctypes.byref)."""
    function = getattr(library(), name)
    function.argtypes, function.restype = [ctypes.POINTER(_STRUCTS[name])], None
    called: Callable[[Any], None] = function
    return called


def pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


_FIXED_SEED = c_int64(FIXED_SIGN_SEED)


def sign_seed(transform: Transform, seed: torch.Tensor | None) -> int | None:
    """The address of the seed of a transform's signs."""
    if transform.signs == "none":
        return None
    return ctypes.addressof(_FIXED_SEED) if transform.signs == "fixed" else pointer(seed)
