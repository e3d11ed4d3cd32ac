"""The rotating quantisers of a gradient that sum its columns, too: the gradient of a bias from the
same read.

    rht_quantize_summed(x [M, K], seed?, scheme, transform, stream, dtype)
        -> codes [K, Mp/2], scales, global_scale;  sums [K] of dtype
    rht_quantize_both_summed(x [M, K], row_seed?, col_seed?, scheme, transform, stream, dtype)
        -> codes [M, Kp/2], scales, global_scale;  codes [K, Mp/2], ...;  sums [K] of dtype

The tensors of rht_quantize(x, seed, scheme, transform, True, stream) and rht_quantize_both(...),
then x.sum(0), in fp32 and in a fixed order (numerics/column_sums.py), rounded once to dtype.
"""

import torch

from q2compile.runtime_kernels.numerics.column_sums import column_sums
from q2compile.runtime_kernels.ops import rht_quantize, rht_quantize_both
from q2compile.runtime_kernels.registry import REFERENCE, define, kernel

SUMMED = "_summed"  # at the end of an op's name
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_dtype(op: str, dtype: torch.dtype) -> None:
    """Raises:
    ValueError: sums of this dtype are not made.
    """
    if dtype not in DTYPES:
        raise ValueError(
            f"q2::{op} sums columns to {', '.join(map(str, DTYPES))}, got {dtype}: take float32 "
            "and convert the sums."
        )


def fake(x, seed, scheme, transform, stream, dtype):
    check_dtype("rht_quantize_summed", dtype)
    parts = rht_quantize.fake(x, seed, scheme, transform, True, stream)
    return (*parts, x.new_empty((x.shape[1],), dtype=dtype))


def fake_both(x, row_seed, col_seed, scheme, transform, stream, dtype):
    check_dtype("rht_quantize_both_summed", dtype)
    parts = rht_quantize_both.fake(x, row_seed, col_seed, scheme, transform, stream)
    return (*parts, x.new_empty((x.shape[1],), dtype=dtype))


define(
    "rht_quantize_summed(Tensor x, Tensor? seed, str scheme, str transform, int stream,"
    " ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=fake,
)
define(
    "rht_quantize_both_summed(Tensor x, Tensor? row_seed, Tensor? col_seed, str scheme,"
    " str transform, int stream, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=fake_both,
)


@kernel("rht_quantize_summed", REFERENCE)
def rht_quantize_summed(
    x: torch.Tensor,
    seed: torch.Tensor | None,
    scheme: str,
    transform: str,
    stream: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """The reference: see the top of this file."""
    check_dtype("rht_quantize_summed", dtype)
    parts = rht_quantize.rht_quantize(x, seed, scheme, transform, True, stream)
    return (*parts, column_sums(x, dtype))


@kernel("rht_quantize_both_summed", REFERENCE)
def rht_quantize_both_summed(
    x: torch.Tensor,
    row_seed: torch.Tensor | None,
    col_seed: torch.Tensor | None,
    scheme: str,
    transform: str,
    stream: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """The reference: see the top of this file."""
    check_dtype("rht_quantize_both_summed", dtype)
    parts = rht_quantize_both.rht_quantize_both(x, row_seed, col_seed, scheme, transform, stream)
    return (*parts, column_sums(x, dtype))
