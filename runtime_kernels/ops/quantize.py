# SPDX-License-Identifier: Apache-2.0
"""q2::quantize: rounds a matrix to a 4-bit or 8-bit format, rowwise, columnwise, or both.

    quantize(x [M, K], *, scheme, transform="none", rotate_rows=True, rowwise, columnwise,
             amax=None, rowwise_seed=None, columnwise_seed=None, rng_offset=0, offs=None,
             padded_offs=None, mask=False, dbias=None, recorded=False) -> Tensor[]

Outputs, in order:

    rowwise      codes uint8 [M, Kp/2], scales, global_scale fp32 0-dim
    columnwise   codes uint8 [K, Mp/2], scales, global_scale: as rowwise of x.T
                 (fp8: codes float8_e4m3fn [M, Kp] and [K, Mp])
    mask         uint8 [M, Kp/8], little bit first: 1 where |x / scale| < 6, not clipped (QuEST)
    dbias        the sums of the columns of x, [K], rounded once (numerics/column_sums.py)
    recorded     statistics of each operand, fp64 (ops/recorded.py)

Formats, packing and shapes: numerics/schemes.py and layout.py. The transform, a rotation, is
applied before rounding. The contraction is padded with zeros to whole blocks and whole chunks of
the transform. A gradient is an operand of both GEMMs of the backward pass: one read of it gives the
rowwise and the columnwise operand, and the gradient of a bias.

    rotate_rows  False: of the two operands, only the columnwise one is rotated.
    amax         the largest |x|, for schemes that take it. Without it, an exact global scale is
                 computed inside; with a rotation, from the rotated matrix.
    seeds        int64 scalars, for signs and random bits. Tensors that share a seed have different
                 values of rng_offset: equal signs, different random bits.
    offs         int32 [E], the ends of groups of rows, which are quantized separately columnwise:
                 for the experts' wgrad, which contracts the tokens. padded_offs are the ends in the
                 padded layout, where each group is whole chunks of 128 rows (numerics/groups.py);
                 Mp counts the rows of that layout. Rows of no group are +0. MS-EDEN after a
                 rotation by 128 spreads short chunks, so that it is unbiased in them, too.
"""

from typing import Any

import torch

from q2compile.runtime_kernels.numerics.column_sums import column_sums
from q2compile.runtime_kernels.numerics.groups import clear_tail, lay_out, padded_rows, spreads
from q2compile.runtime_kernels.numerics.layout import Tiling, empty_quantized, padded
from q2compile.runtime_kernels.numerics.quantize_tiles import quantize_tiles, rotate_tiles
from q2compile.runtime_kernels.numerics.schemes import Scheme
from q2compile.runtime_kernels.numerics.transforms import Transform
from q2compile.runtime_kernels.ops.argument_checks import (
    check_groups,
    check_operand,
    check_scalar,
    check_seed,
)
from q2compile.runtime_kernels.ops.recorded import empty_statistics, recorded
from q2compile.runtime_kernels.ops.table import QUANTIZE, QuantizerCall
from q2compile.runtime_kernels.registry import define

DBIAS_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def checked_quantize(call: QuantizerCall) -> QuantizerCall:
    """The call, once its arguments are checked.

    Raises:
        ValueError: x is not a float matrix; the scheme or the transform is unknown; a seed is
            missing; amax or a rotation does not go with the scheme.
    """
    check_operand(QUANTIZE, call.x)
    assert call.rowwise or call.columnwise, f"q2::{QUANTIZE} has no output"
    for operand in call.operands:
        check_seed(QUANTIZE, operand.seed, call.scheme, operand.transform)
    rotates_columns = call.rowwise and call.columnwise and call.rotated
    assert call.rotates_rows or rotates_columns, "rows are left unrotated where columns are rotated"
    if call.scheme.block[0] != 1 and (call.rotated or call.columnwise):
        raise square_blocks(QUANTIZE, call.scheme)
    _check_amax(call)
    if call.masked:  # only in the forward, which is deterministic
        right = call.scheme.masked and not call.columnwise and not call.draws
        assert right, f"there is no mask of {call.label} by {call.scheme.name}"
    if call.dbias is not None:
        right = call.dbias in DBIAS_DTYPES and call.columnwise and not call.grouped
        assert right, f"there is no dbias of {call.label} in {call.dbias}"
    if call.grouped or call.args["padded_offs"] is not None:
        assert call.columnwise, f"there are no groups in {call.label}"
        check_groups(QUANTIZE, call.args["offs"], call.args["padded_offs"])
    return call


def square_blocks(op: str, scheme: Scheme) -> ValueError:
    return ValueError(
        f"q2::{op} takes schemes with one row per block here, got {scheme.name}: blocks "
        f"of {scheme.block[0]}x{scheme.block[1]} exist to be reused transposed, which a rotation "
        "along one dimension rules out."
    )


def _check_amax(call: QuantizerCall) -> None:
    amax = call.args["amax"]
    if amax is None:
        return
    if not call.scheme.takes_amax or call.rotated:
        why = "after a rotation" if call.rotated else f"with scheme {call.scheme.name}"
        raise ValueError(f"q2::{QUANTIZE} takes no amax {why}: pass None.")
    check_scalar(QUANTIZE, "amax", amax)


def fake(*args: Any) -> list[torch.Tensor]:
    call = checked_quantize(QuantizerCall.of(QUANTIZE, args))
    x, scheme = call.x, call.scheme
    rows, columns = x.shape
    made: list[torch.Tensor] = []
    height = padded_rows(rows, call.args["offs"].shape[0]) if call.grouped else rows
    for operand in call.operands:
        size = (columns, height) if operand.columnwise else (rows, columns)
        made += empty_quantized(x, *size, scheme, operand.transform)
    if call.masked:
        width = padded(columns, scheme, call.transform)
        made.append(x.new_empty((rows, width // 8), dtype=torch.uint8))
    if call.dbias is not None:
        made.append(x.new_empty((columns,), dtype=call.dbias))
    return [*made, *empty_statistics(call)]


@define(
    "quantize(Tensor x, *, str scheme, str transform='none', bool rotate_rows=True,"
    " bool rowwise, bool columnwise, Tensor? amax=None, Tensor? rowwise_seed=None,"
    " Tensor? columnwise_seed=None, int rng_offset=0, Tensor? offs=None,"
    " Tensor? padded_offs=None, bool mask=False, ScalarType? dbias=None,"
    " bool recorded=False) -> Tensor[]",
    fake=fake,
)
def quantize(*args: Any) -> list[torch.Tensor]:
    """The reference: see the top of this file."""
    call = checked_quantize(QuantizerCall.of(QUANTIZE, args))
    if call.recorded:
        return recorded(call)
    made: list[torch.Tensor] = []
    for columnwise, seed, _, transform in call.operands:
        if columnwise and call.grouped:
            made += quantized_in_groups(call, call.x, 1.0)
            continue
        drawn = seed, call.args["rng_offset"]
        *parts, mask = rotate_and_quantize(
            call.x, 1.0, *drawn, call.scheme, transform, columnwise, amax=call.args["amax"]
        )
        made += parts
        if call.masked:
            assert mask is not None
            made.append(mask)
    if call.dbias is not None:
        made.append(column_sums(call.x, call.dbias))
    return made


def rotate_and_quantize(
    x: torch.Tensor,
    factor: float | torch.Tensor,
    seed: torch.Tensor | None,
    rng_offset: int,
    scheme: Scheme,
    transform: Transform,
    columnwise: bool,
    *,
    shares: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> Parts:
    """One operand of x * factor, which may be applied late (quantize_tiles.py has shares, too), and
    the trust mask of a scheme that has one."""
    rows = x.shape[0]
    if rows % scheme.block[0]:
        x = torch.nn.functional.pad(x, (0, 0, 0, -rows % scheme.block[0]))
    tiling = Tiling.of(x, max(scheme.width, transform.size), transpose=columnwise)
    tiles = rotate_tiles(tiling.cut(x), transform, seed)
    codes, scales, global_scale, mask = quantize_tiles(
        tiles,
        tiling,
        scheme,
        factor=factor * transform.norm,
        amax=amax,
        seed=seed,
        rng_offset=rng_offset,
        shares=shares,
    )
    return codes if scheme.block[0] == 1 else codes[:rows], scales, global_scale, mask


def quantized_in_groups(
    call: QuantizerCall, x: torch.Tensor, factor: float | torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """x * factor columnwise, in the groups of a call."""
    how, padded_offs = (call.scheme, call.transform), call.args["padded_offs"]
    laid, shares = lay_out(x, call.args["offs"], padded_offs, spread=spreads(*how))
    drawn = call.args["columnwise_seed"], call.args["rng_offset"]
    codes, scales, global_scale, _ = rotate_and_quantize(
        *(laid, factor, *drawn, *how),
        columnwise=True,
        shares=shares,
        amax=call.args.get("amax"),
    )
    return clear_tail(codes, padded_offs), scales, global_scale
