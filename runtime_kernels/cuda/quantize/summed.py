"""q2::rht_quantize_summed and q2::rht_quantize_both_summed on CUDA: rotate_quantize.cu sums the
columns of its tiles, the launch that ends the call adds those sums up (sums.cuh).
"""

from collections.abc import Iterator

import torch

from q2compile.runtime_kernels.cuda.calls import At, Call, Form, launching
from q2compile.runtime_kernels.cuda.jit.launch import Launch
from q2compile.runtime_kernels.cuda.quantize.plan import Direction, Summed
from q2compile.runtime_kernels.cuda.quantize.rotating_ops import (
    both_directions,
    launched,
    refuses,
    rotated,
)
from q2compile.runtime_kernels.cuda.quantize.rule import Rule
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.argument_checks import check_operand
from q2compile.runtime_kernels.ops.rht_quantize import checked
from q2compile.runtime_kernels.ops.summed import check_dtype


def _refuses(op: str, x: torch.Tensor, scheme: str, transform: str) -> str | None:
    if Rule.of(get_scheme(scheme)) == Rule.EXACT:
        return f"{scheme} has no launch behind the codes, which could add up the sums of tiles"
    return refuses(op, x, scheme, transform)


def _launched(x: torch.Tensor, scheme: str, transform: str, rows: bool) -> Iterator[Launch]:
    like = x if x.stride(1) == 1 else x.contiguous()
    return launched(like, scheme, transform, (rows, True), sums=True)


@launching(
    "rht_quantize_summed",
    refuses=lambda x, seed, scheme, transform, *rest: _refuses(
        "rht_quantize_summed", x, scheme, transform
    ),
    launches=lambda x, seed, scheme, transform, *rest: _launched(x, scheme, transform, False),
    forms={0: Form.ROWS},
)
def rht_quantize_summed(x, seed, scheme, transform, stream, dtype) -> Call:
    """See ops/summed.py."""
    check_operand("rht_quantize_summed", x)
    checked("rht_quantize_summed", seed, scheme, transform)
    check_dtype("rht_quantize_summed", dtype)
    operands = 1 + (seed is not None)
    along = Direction(At(1) if seed is not None else 0, stream, operands)
    summed = Summed(operands + 3, dtype)
    return rotated(x, scheme, transform, (None, along), operands, summed=summed)


@launching(
    "rht_quantize_both_summed",
    refuses=lambda x, row_seed, col_seed, scheme, transform, *rest: _refuses(
        "rht_quantize_both_summed", x, scheme, transform
    ),
    launches=lambda x, row_seed, col_seed, scheme, transform, *rest: _launched(
        x, scheme, transform, True
    ),
    forms={0: Form.ROWS},
)
def rht_quantize_both_summed(x, row_seed, col_seed, scheme, transform, stream, dtype) -> Call:
    """See ops/summed.py."""
    check_operand("rht_quantize_both_summed", x)
    for seed in (row_seed, col_seed):
        checked("rht_quantize_both_summed", seed, scheme, transform)
    check_dtype("rht_quantize_both_summed", dtype)
    directions, operands = both_directions(row_seed, col_seed, stream)
    summed = Summed(operands + 6, dtype)
    return rotated(x, scheme, transform, directions, operands, summed=summed)
