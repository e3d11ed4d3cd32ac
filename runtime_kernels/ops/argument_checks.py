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
    """A quantized operand is codes of its scheme's dtype (uint8 [M, Kp/2]; e4m3 or bf16 [M, Kp]),
    8-bit scales (2-D) and an fp32 scalar, where an op has it."""
    got = f"{codes.dtype} in {codes.dim()} dimensions and {scales.dtype} in {scales.dim()}"
    right = codes.dtype == dtype and codes.dim() == scales.dim() == 2
    assert right, f"q2::{op}: codes are {dtype} and scales 8 bits in two dimensions, got {got}"
    if global_scale is not None:
        check_scalar(op, "the global scale", global_scale)


def check_groups(op: str, *ends: torch.Tensor) -> None:
    """The ends of groups, and those of the padded layout, are int32 [E] of at least one group."""
    for offs in ends:
        right = offs.dtype == torch.int32 and offs.dim() == 1 and offs.shape == ends[0].shape
        got = f"{offs.dtype} {list(offs.shape)}"
        assert right, f"q2::{op}: the ends of groups are int32 [E], alike in each tensor; got {got}"
