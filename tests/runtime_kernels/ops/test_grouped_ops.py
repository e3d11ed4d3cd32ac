# SPDX-License-Identifier: Apache-2.0
"""The ops of experts: groups padded to whole tiles, grouped GEMMs, and their gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import q2compile.linear.dense
import q2compile.linear.experts  # noqa: F401  registers the ops
from q2compile.recipes.published import RECIPES
from q2compile.recipes.resolve import resolve
from q2compile.runtime_kernels.numerics.groups import lay_out, padded_ends, padded_rows
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED
from q2compile.runtime_kernels.numerics.statistics import FIELDS, statistics
from tests.support import quantizer_calls as calls
from tests.support.oracle import relative_error
from tests.support.pairwise import pairwise

E, K, N = 4, 32, 48
EDEN, SOURCE = "nvfp4_ms_eden_pow2", "nvfp4_46_pow2"


def pieces(offs: Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise([0, *offs.tolist()]))


def test_the_padded_layout() -> None:
    """Groups of 3, 0 and 130 rows at multiples of 128, the row of no group dropped."""
    x = torch.arange(1, 135).float()[:, None]
    offs = torch.tensor([3, 3, 133], dtype=torch.int32)
    padded = padded_ends(offs)
    assert padded.tolist() == [128, 128, 384]
    laid, shares = lay_out(x, offs, padded, spread=False)
    zeros, rows = (lambda n: [0.0] * n), (lambda s, t: list(map(float, range(s, t))))
    assert shares is None
    assert laid.flatten().tolist() == rows(1, 4) + zeros(125) + rows(4, 134) + zeros(126 + 256)
    laid, shares = lay_out(x, offs, padded, spread=True)  # 3 tokens and the last 2 at every 16th
    assert laid.flatten()[[0, 16, 32, 48, 256, 272, 288]].tolist() == [1, 2, 3, 0, 132, 133, 0]
    assert shares.tolist() == [1] * 5 and laid.count_nonzero() == 3 + 128 + 2
    assert not lay_out(x[:0], offs * 0, padded * 0, spread=True)[0].any()


@pytest.mark.parametrize("scheme", ["nvfp4_46_pow2", "nvfp4_46", "mxfp4_rtn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_gemm(scheme: str, dtype: torch.dtype) -> None:
    """Each form, compared with products of the dequantized operands, one expert at a time."""
    offs = torch.tensor([128, 128, 384, 512], dtype=torch.int32)
    x, w = torch.randn(520, 64), torch.randn(E * 96, 64)
    dy_t, x_t, w_t = torch.randn(96, 512), torch.randn(64, 512), torch.randn(64, E * 96)

    def quantized(t: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        amax = torch.ops.q2.amax(t) if scheme == "nvfp4_46" else None
        q = torch.ops.q2.quantize(t, scheme=scheme, rowwise=True, columnwise=False, amax=amax)
        return q, torch.ops.q2.dequantize(*q, scheme, t.shape[1], torch.float32).double()

    def check(gemm: str, a: Tensor, b: Tensor, right: Any) -> None:
        (qa, a_), (qb, b_) = quantized(a), quantized(b)
        out = torch.ops.q2.grouped_gemm(*qa, *qb, offs, scheme, scheme, gemm, dtype)
        # Neighbors in bf16: of the sum and, where alpha is no power of two, of its product; or
        # fp32 sums of 256 terms.
        tolerance = {"rtol": 2**-7, "atol": 2e-2} if dtype == torch.bfloat16 else {}
        tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-4}
        torch.testing.assert_close(out, right(a_, b_).to(dtype), **tolerance)

    nothing = torch.zeros(8, 96).double()
    check(
        "fprop",
        x,
        w,
        lambda a, b: torch.cat(
            [a[s:t] @ b.view(E, 96, 64)[e].T for e, (s, t) in enumerate(pieces(offs))] + [nothing]
        ),
    )
    check(
        "dgrad",
        torch.randn(520, 96),
        w_t,
        lambda a, b: torch.cat(
            [a[s:t] @ b.view(64, E, 96)[:, e].T for e, (s, t) in enumerate(pieces(offs))]
            + [nothing[:, :64]]
        ),
    )
    check(
        "wgrad",
        dy_t,
        x_t,
        lambda a, b: torch.cat([a[:, s:t] @ b[:, s:t].T for s, t in pieces(offs)]),
    )


def grouped_step(recipe: Any, dtype: torch.dtype, offs: list[int], n: int = N) -> Any:
    """y, dx, dw of q2::grouped_linear on 200 rows, and the same by torch."""
    x = torch.randn(200, K, dtype=dtype, requires_grad=True)
    w = torch.randn(E, n, K, dtype=dtype, requires_grad=True)
    ends = torch.tensor(offs)
    y = torch.ops.q2.grouped_linear(x, w, ends, *recipe.texts(), 0)
    own = torch.cat([x[s:t] @ w[e].T for e, (s, t) in enumerate(pieces(ends))])
    own = F.pad(own, (0, 0, 0, 200 - offs[-1]))
    dy = torch.randn_like(y)
    return tuple((out, *torch.autograd.grad(out, (x, w), dy)) for out in (y, own))


def test_every_recipe() -> None:
    """With an empty group, one smaller than a block, rows of no group, and N of no whole chunk."""
    for name, global_scale, dtype in pairwise(
        RECIPES, ["pow2", "exact"], [torch.float32, torch.bfloat16]
    ):
        recipe = resolve(name, global_scale)
        n = 80 if recipe.block_rows < 32 else 96  # rewrite/decide.py, why_cut
        ours, own = grouped_step(recipe, dtype, [7, 7, 150, 190], n=n)
        for got, right in zip(ours, own, strict=True):
            assert got.dtype == dtype
            assert relative_error(got, right) < 0.08  # the coarsest, SR 3/4 of MXFP4: 0.05
        assert ours[0][190:].abs().max() == 0 and ours[1][190:].abs().max() == 0
        assert ours[2][1].abs().max() == 0


@pytest.mark.parametrize("offs", [[0, 0, 0, 0], [200, 200, 200, 200], [50, 100, 150, 200]])
def test_extreme_groups(offs: list[int]) -> None:
    ours, own = grouped_step(resolve("quartet2"), torch.float32, offs)
    for got, right in zip(ours, own, strict=True):
        assert got.isfinite().all() and (got[right == 0] == 0).all()
        assert not right.any() or relative_error(got, right) < 0.05


def test_a_linear_without_rows() -> None:
    """An expert without tokens, in a loop over experts."""
    for name in RECIPES:
        x, w, bias = (torch.randn(s, requires_grad=True) for s in ((0, K), (N, K), (N,)))
        y = torch.ops.q2.linear(x, w, bias, *resolve(name).texts(), 0)
        dx, dw, dbias = torch.autograd.grad(y.sum(), (x, w, bias))
        assert (y.shape, dx.shape) == ((0, N), (0, K))
        assert dw.shape == (N, K) and not dw.any() and not dbias.any()


# Tokens per group: each way to fill a chunk, both neighbors of its size (numerics/groups.py), whole
# chunks, and last chunks of each kind.
SIZES = [1, 2, 3, 5, 8, 9, 12, 16, 17, 32, 33, 64, 65, 128, 130, 137, 200]


def test_the_mean_of_wgrad_is_the_gradient_of_the_quantized_forward() -> None:
    """Unbiased, for groups of any size: the error of a mean of n draws is 1/sqrt(n) of one draw's,
    up to the variation of so few elements. The gradient of a few tokens has low rank and depends on
    K + N rows of random bits.

    Trap: zeros after the tokens of a short chunk would bias it. Measured, 400 draws: 2 tokens in a
    chunk of 128 give a bias of 0.050 of the gradient, 4 0.056, 7 0.043, 12 0.013.
    """
    n, recipe, offs = 256, resolve("quartet2"), torch.tensor(SIZES).cumsum(0)
    x, dy = torch.randn(sum(SIZES), K), torch.randn(sum(SIZES), N)
    w = torch.randn(len(SIZES), N, K, requires_grad=True)
    y = torch.ops.q2.grouped_linear(x, w, offs, *recipe.texts(), 0)
    q = torch.ops.q2.quantize(x, scheme="nvfp4_46_pow2", rowwise=True, columnwise=False)
    x_hat = torch.ops.q2.dequantize(*q, "nvfp4_46_pow2", K, torch.float32)
    right = torch.stack([dy[s:t].T @ x_hat[s:t] for s, t in pieces(offs)])
    mean, squares = torch.zeros_like(right), torch.zeros(len(SIZES))
    for _ in range(n):
        error = torch.autograd.grad(y, w, dy, retain_graph=True)[0] - right
        mean += error / n
        squares += error.square().sum((1, 2)) / n
    for size, one, all_, norm in zip(
        SIZES, squares.sqrt(), mean.norm(dim=(1, 2)), right.norm(dim=(1, 2)), strict=True
    ):
        # A dense linear's is 0.13: a chunk that is short must not cost precision.
        assert 0.01 < one / norm < 0.15, size
        assert all_ * n**0.5 < (1.2 if size > 4 else 1.5) * one, size


@pytest.mark.parametrize("spread", [False, True])
def test_the_padded_layout_leaves_products_as_they_are(spread: bool) -> None:
    offs = (torch.tensor([0, *SIZES, 0]).cumsum(0)).to(torch.int32)
    padded, rows = padded_ends(offs), int(offs[-1]) + 9
    x, dy = torch.randn(rows, 8), torch.randn(rows, 8)
    (laid, shares), (other, _) = (lay_out(t, offs, padded, spread=spread) for t in (x, dy))
    assert laid.shape == (padded_rows(rows, len(offs)), 8)
    assert not laid[padded[-1] :].any()
    if shares is not None:
        laid, other = (t * shares.repeat_interleave(128)[:, None] for t in (laid, other))
    for (s, t), (u, v) in zip(pieces(offs), pieces(padded), strict=True):
        assert v % 128 == 0 and t - s <= v - u < t - s + 128
        # fp32 sums of up to 200 products, and shares whose squares are off by 2^-24.
        torch.testing.assert_close(laid[u:v].T @ other[u:v], x[s:t].T @ dy[s:t], rtol=0, atol=1e-4)


@pytest.mark.parametrize("rows, groups", [(0, 1), (1, 1), (128, 1), (129, 3), (1000, 64), (0, 200)])
def test_the_padded_layout_has_room_for_every_routing(rows: int, groups: int) -> None:
    """The worst: groups of one row more than a chunk, and as many rows of no group."""
    sizes = [min(1, rows)] * groups
    for extra in (0, rows // 128 * 128, rows):
        ends = torch.tensor(sizes).cumsum(0).clamp(max=rows).to(torch.int32)
        ends[-1] = min(int(ends[-1]) + extra, rows)
        for filled in (False, True):
            of_none = (rows - ends[-1] + 127) // 128 * 128
            assert padded_ends(ends, filled)[-1] + of_none <= padded_rows(rows, groups)


def test_filled_ends_leave_no_group_empty() -> None:
    """An empty group has a chunk of zeros, and the others begin after it, with what they had."""
    offs, x = torch.tensor([0, 130, 130, 140], dtype=torch.int32), torch.randn(150, 8)
    filled = padded_ends(offs, True)
    assert filled.tolist() == [128, 384, 512, 640]
    assert torch.ops.q2.padded_ends(offs, True).tolist() == filled.tolist()
    laid, _ = lay_out(x, offs, filled, spread=False)
    for (s, t), u in zip(
        [(0, 0), (0, 130), (130, 130), (130, 140)], [0, *filled[:-1]], strict=True
    ):
        assert torch.equal(laid[u : u + t - s], x[s:t])
    assert laid.count_nonzero() == x[:140].count_nonzero()


@pytest.mark.parametrize("scheme, transform", [("nvfp4_sr_pow2", "rht16"), ("mxfp4_rtn", "none")])
def test_other_schemes_are_padded_with_zeros(scheme: str, transform: str) -> None:
    """The padded layout moves rows, and rht_quantize quantizes them."""
    offs, seed = torch.tensor([7, 7, 150, 190], dtype=torch.int32), torch.tensor(3)
    padded, x = padded_ends(offs), torch.randn(200, K)
    apart, _ = lay_out(x, offs, padded, spread=False)
    want = torch.ops.q2.quantize(
        apart,
        scheme=scheme,
        transform=transform,
        rowwise=False,
        columnwise=True,
        rng_offset=1,
        columnwise_seed=seed,
    )
    got = torch.ops.q2.quantize(
        x,
        scheme=scheme,
        transform=transform,
        rowwise=False,
        columnwise=True,
        offs=offs,
        padded_offs=padded,
        columnwise_seed=seed,
        rng_offset=1,
    )
    for a, b in zip(got[:2], want[:2], strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert got[2] == want[2]


@pytest.mark.parametrize("suffix", ["", DEQUANTIZED])
def test_what_is_recorded_of_groups(suffix: str) -> None:
    """The outputs of the ops themselves, and the errors of rounding: for MS-EDEN that on N(0,1),
    sqrt(9.4e-3). For requantized codes, whose zeros round to zero, slightly different; less for a
    chunk of few tokens, which has one value per block (7 of 190 rows)."""
    offs, seed, scheme = torch.tensor([7, 7, 150, 190], dtype=torch.int32), torch.tensor(3), EDEN
    ends, x = (offs, torch.ops.q2.padded_ends(offs)), torch.randn(200, 64)
    packed = torch.ops.q2.quantize(x, scheme=SOURCE, rowwise=True, columnwise=False)
    how = seed, scheme + suffix, "rht128", 0
    for call in (
        calls.grouped(x, *ends, *how),
        calls.grouped_both(x, *ends, seed, *how),
        calls.grouped_again(*packed, *ends, seed, SOURCE, *how[1:3], 64, 1),
    ):
        want, got = call(), call.replace(recorded=True)()
        for a, b in zip(got, want, strict=False):
            assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for sums in got[len(want) :]:
            error = statistics(sums)[FIELDS.index("relative_error")]
            assert 0.9 < error / 9.4e-3**0.5 < 1.1, call.label


def test_groups_are_checked() -> None:
    x, offs = torch.randn(200, K), torch.tensor([7, 7, 150, 190])
    for ends in (offs, offs.int()[:, None], offs.int()[:3]):
        with pytest.raises(AssertionError, match=r"int32 \[E\], alike in each tensor; got"):
            torch.ops.q2.quantize(
                x,
                scheme="nvfp4_sr_pow2",
                transform="rht16",
                rowwise=False,
                columnwise=True,
                offs=ends,
                padded_offs=offs.int(),
                columnwise_seed=torch.tensor(0),
            )


@pytest.mark.gpu
def test_cuda_gives_what_the_cpu_gives() -> None:
    recipe = resolve("quartet2")
    tensors = torch.randn(200, K), torch.randn(E, N, K), torch.randn(200, N)
    results = []
    for device in ("cpu", "cuda"):
        x, w, dy = (t.to(device, torch.bfloat16) for t in tensors)
        inputs = (x.requires_grad_(), w.requires_grad_())
        offs = torch.tensor([7, 7, 150, 190], device=device)
        y = torch.ops.q2.grouped_linear(*inputs, offs, *recipe.texts(), 0)
        results.append([t.cpu() for t in (y, *torch.autograd.grad(y, inputs, dy))])
    (y, *grads), (y_cuda, *grads_cuda) = results
    torch.testing.assert_close(y_cuda, y, rtol=2**-7, atol=1e-3)  # neighbors in bf16
    for ours, reference in zip(grads_cuda, grads, strict=True):
        assert relative_error(ours, reference) < 0.06  # other random bits: twice 0.019 and more
        assert ours.isfinite().all()


@pytest.mark.gpu
def test_no_op_reads_the_offsets_on_the_host() -> None:
    scheme = "nvfp4_46_pow2"
    offs = torch.tensor([128, 128, 384, 512], dtype=torch.int32, device="cuda")
    x, w = (torch.randn(s, dtype=torch.bfloat16, device="cuda") for s in ((512, 64), (E * 96, 64)))
    qx, qx_t, qw = (
        torch.ops.q2.quantize(t, scheme=scheme, rowwise=True, columnwise=False)
        for t in (x, x.t(), w)
    )
    for mode in ("default", "error"):  # kernels are compiled and checked at their first call
        torch.cuda.set_sync_debug_mode(mode)
        try:
            torch.ops.q2.padded_ends(offs)
            for gemm, a, b in (("fprop", qx, qw), ("wgrad", qx_t, qx_t)):
                torch.ops.q2.grouped_gemm(*a, *b, offs, scheme, scheme, gemm, torch.bfloat16)
        finally:
            torch.cuda.set_sync_debug_mode("default")
