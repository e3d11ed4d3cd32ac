# SPDX-License-Identifier: Apache-2.0
"""The calls of quantizers, and a launch, that are timed: here, and by examples/benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import q2compile.runtime_kernels as runtime_kernels
from q2compile.cost_model.prices import quantizing, transposing
from q2compile.cost_model.quantizers import HIGH, ROWS_UNROTATED, Quantizer, packed_bits
from q2compile.cost_model.step import Step
from q2compile.runtime_kernels.cuda.calls import BufferSlot
from q2compile.runtime_kernels.cuda.gemm.swizzle import swizzle_launch
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED
from q2compile.runtime_kernels.ops.table import (
    DEQUANTIZE,
    QUANTIZE,
    REQUANTIZE,
    SPECS,
    TRANSPOSE,
    QuantizerCall,
    rowwise_call,
)
from q2compile.runtime_kernels.registry import CUDA, REFERENCE, select
from q2compile.tools.bench.timing import Call

assert runtime_kernels  # importing it registers the ops
STREAM = 1
EDEN, SR = "nvfp4_ms_eden_pow2", "nvfp4_sr_pow2"
CASES = {
    # quartet2
    "rht_quantize_row": Quantizer("row", EDEN, "rht128"),
    "rht_quantize_col": Quantizer("col", EDEN, "rht128"),
    "rht_quantize_both": Quantizer("both", EDEN, "rht128"),
    "requantize": Quantizer("requantize", EDEN, "rht128", "nvfp4_46_pow2"),
    # the other recipes
    "tetrajet2_both": Quantizer("both", SR, "rht128"),
    "tetrajet2_requantize": Quantizer("requantize", SR, "rht128", "nvfp4_pow2"),
    "tetrajet2_exact_both": Quantizer("both", "nvfp4_sr", "rht128"),
    "nvfp4_dgrad_row": Quantizer("row", SR),
    "nvfp4_wgrad_col": Quantizer("col", SR, "rht16"),
    "nvfp4_wgrad_x_col": Quantizer("col", "nvfp4_pow2", "rht16"),
    "nvfp4_both": Quantizer(ROWS_UNROTATED, SR, "rht16"),
    "nvfp4_x_both": Quantizer(ROWS_UNROTATED, "nvfp4_pow2", "rht16"),
    "mxfp4_both": Quantizer("both", "mxfp4_sr", "rht64"),
    "mxfp4_col": Quantizer("col", "mxfp4_sr", "rht64"),
    "mxfp4_2d_dgrad_row": Quantizer("row", "mxfp4_rceil_sr"),
    "mxfp4_2d_wgrad_col": Quantizer("col", "mxfp4_rceil", "h32"),
    "quartet_both": Quantizer("both", "mxfp4_rtn34", "rht32"),
    "quartet_requantize": Quantizer("requantize", "mxfp4_rtn34", "rht32", "mxfp4_rtn"),
    # forwards
    "quantize_46": Quantizer("row", "nvfp4_46_pow2"),
    "quantize_rtn": Quantizer("row", "nvfp4_pow2"),
    "quartet_forward": Quantizer("row", "mxfp4_quest", "h32"),
    "mxfp4_2d_forward": Quantizer("row", "mxfp4_rceil"),
}
# As the emulated GEMM reads them.
_EMULATED = (
    *("rht_quantize_both", "requantize", "tetrajet2_both", "tetrajet2_requantize"),
    *("nvfp4_dgrad_row", "nvfp4_wgrad_col", "nvfp4_both", "mxfp4_both", "mxfp4_col"),
    *("mxfp4_2d_dgrad_row", "mxfp4_2d_wgrad_col", "quartet_both", "quartet_requantize"),
)
CASES |= {
    f"{name}_bf16": replace(CASES[name], scheme=CASES[name].scheme + DEQUANTIZED)
    for name in _EMULATED
}
FORWARD_SCHEME, SQUARE_SCHEME = "nvfp4_46_pow2", "nvfp4_16x16_pow2"
OTHERS = (DEQUANTIZE, TRANSPOSE)


def call_of(
    case: Quantizer, x: torch.Tensor, seeds: Sequence[torch.Tensor], source: Any = None
) -> QuantizerCall:
    """The call of a case.

    x: a matrix.  seeds: two int64 scalars.  source: of a case that requantizes, the codes, scales
    and global scale of x in its scheme.
    """
    how: dict[str, Any] = {"scheme": case.scheme, "transform": case.transform}
    how["rng_offset"] = STREAM
    if case.kind == REQUANTIZE:
        read = dict(zip(SPECS[REQUANTIZE].source, source, strict=True))
        read |= {"source_scheme": case.source, "rows": x.shape[1], "columnwise_seed": seeds[1]}
        return QuantizerCall.named(REQUANTIZE, **read, **how)
    rowwise, columnwise = case.kind != "col", case.kind != "row"
    draws = case.spec.stochastic or case.transform != "none"
    return QuantizerCall.named(
        QUANTIZE,
        x=x,
        **how,
        rowwise=rowwise,
        columnwise=columnwise,
        rotate_rows=case.kind != ROWS_UNROTATED,
        rowwise_seed=seeds[0] if rowwise and draws and not case.spec.masked else None,
        columnwise_seed=seeds[rowwise] if columnwise else None,
        mask=case.spec.masked,
    )


def calls_of_quantizers(
    device: torch.device, rows: int, cols: int, inputs: int, names: Sequence[str]
) -> dict[str, Callable[[], list[Call]]]:
    """name of CASES or OTHERS, or "copy" -> its calls, one for each of so many bf16 matrices, by
    our kernel, or on a CPU by the reference. Making the calls raises where there is no such kernel.
    """
    xs = [torch.randn(rows, cols, device=device).bfloat16() for _ in range(inputs)]
    target = torch.empty_like(xs[0])
    seeds = [torch.tensor(s, device=device) for s in (1, 2)]
    packed: dict[str, list[Any]] = {}

    def of(scheme: str) -> list[Any]:
        if scheme not in packed:
            packed[scheme] = [rowwise_call(scheme, x)() for x in xs]
        return packed[scheme]

    def arguments(name: str, i: int) -> tuple[str, tuple[Any, ...]]:
        if name == DEQUANTIZE:
            return name, (*of(FORWARD_SCHEME)[i], FORWARD_SCHEME, cols, torch.bfloat16)
        if name == TRANSPOSE:
            return name, (*of(SQUARE_SCHEME)[i][:2], SQUARE_SCHEME, cols, True, None, None)
        case = CASES[name]
        source = of(case.source)[i] if case.kind == REQUANTIZE else None
        call = call_of(case, xs[i], seeds, source)
        return call.spec.name, call.positional

    def calls(name: str) -> list[Call]:
        if name == "copy":
            return [partial(target.copy_, x) for x in xs]
        kernel = CUDA if device.type == "cuda" else REFERENCE
        made = (arguments(name, i) for i in range(inputs))
        return [partial(select(op, args, kernel), *args) for op, args in made]

    return {name: partial(calls, name) for name in names}


def step_of(name: str, elements: int) -> Step:
    """The cost model's step for one of CASES or OTHERS, of so many elements."""
    if name == DEQUANTIZE:
        return Step(name, (packed_bits(FORWARD_SCHEME) + HIGH) * elements)
    if name == TRANSPOSE:
        return transposing(name, SQUARE_SCHEME, elements)
    return quantizing(name, CASES[name], elements)


def launch_call(device: torch.device) -> Call:
    """Returns one launch, which times the host."""
    scales = torch.zeros(256, 32, dtype=torch.uint8, device=device)
    slot = BufferSlot(0)
    bound = swizzle_launch().bind(device.index, (1, 1), (slot, slot, 0, 0, 0, 1, 0), {slot: 0})
    cuda_stream, at = torch.cuda.current_stream().cuda_stream, scales.data_ptr()

    def call(kept: torch.Tensor = scales) -> None:  # kept, since its memory is at that address
        bound(cuda_stream, (at,))

    return call
