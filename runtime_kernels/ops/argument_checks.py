# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that the real ops and their fakes share."""

import torch

from q2compile.runtime_kernels.numerics.schemes import Scheme
from q2compile.runtime_kernels.numerics.transforms import Transform


def check_operand(op: str, x: torch.Tensor) -> None:
    """x must be a matrix of floats.

    Raises:
        ValueError: it is not.
    """
    if x.dim() != 2:
        raise ValueError(
            f"q2::{op} takes a matrix, got {x.dim()} dimensions: flatten the leading ones first."
        )
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"q2::{op} takes float32, bfloat16 or float16, got {x.dtype}.")


def check_seed(op: str, seed: torch.Tensor | None, scheme: Scheme, transform: Transform) -> None:
    """A seed is required where random bits or signs are drawn, and ignored elsewhere.

    Raises:
        ValueError: it is missing, or not an int64 scalar.
    """
    if seed is None:
        if scheme.stochastic or transform.seeded:
            raise ValueError(
                f"q2::{op} with {scheme.name} and {transform.name} draws random bits: "
                "give it a seed."
            )
        return
    if seed.dtype != torch.int64 or seed.dim() != 0:
        raise ValueError(
            f"q2::{op}: seed must be an int64 scalar, got {seed.dtype} of {seed.dim()} dimensions."
        )


def check_scalar(op: str, name: str, scalar: torch.Tensor) -> None:
    """An argument must be an fp32 scalar.

    Raises:
        ValueError: it is not.
    """
    if scalar.dtype != torch.float32 or scalar.dim() != 0:
        raise ValueError(
            f"q2::{op}: {name} must be a float32 scalar, got {scalar.dtype} of {scalar.dim()} "
            "dimensions."
        )


def check_quantized(
    op: str,
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    *,
    dtype: torch.dtype = torch.uint8,
) -> None:
    """A quantized operand must be codes of its scheme's dtype (uint8 [M, Kp/2]; e4m3 or bf16
    [M, Kp]), 8-bit scales (2-D) and an fp32 scalar, where an op has it.

    Raises:
        ValueError: it is not.
    """
    name = str(dtype).removeprefix("torch.")
    if codes.dtype != dtype or codes.dim() != 2 or scales.dim() != 2:
        raise ValueError(
            f"q2::{op}: a quantized operand has {name} codes and 8-bit scales in two dimensions, "
            f"got {codes.dtype} in {codes.dim()} and {scales.dtype} in {scales.dim()}."
        )
    _check_global_scale(op, global_scale)


def check_scales(op: str, scales: torch.Tensor, global_scale: torch.Tensor) -> None:
    """Scales without codes must be a matrix of 8-bit values and an fp32 scalar.

    Raises:
        ValueError: they are not.
    """
    if scales.element_size() != 1 or scales.dim() != 2:
        raise ValueError(
            f"q2::{op} takes 8-bit scales in two dimensions, got {scales.dtype} in {scales.dim()}."
        )
    _check_global_scale(op, global_scale)


def _check_global_scale(op: str, global_scale: torch.Tensor | None) -> None:
    if global_scale is not None:
        check_scalar(op, "the global scale", global_scale)


def check_groups(op: str, *ends: torch.Tensor) -> None:
    """The ends of groups, and those of the padded layout, must be int32 [E] of at least one group.

    Raises:
        ValueError: they are not.
    """
    for offs in ends:
        if offs.dtype != torch.int32 or offs.dim() != 1 or offs.shape != ends[0].shape:
            got = " and ".join(f"{end.dtype} {list(end.shape)}" for end in ends)
            raise ValueError(
                f"q2::{op}: the ends of groups must be int32 [E], alike in each tensor; got {got}."
            )
