# SPDX-License-Identifier: Apache-2.0
"""A linear layer whose three GEMMs are computed as a recipe says, under autograd.

Shapes: x [..., K], w [N, K], bias [N], y and dy [..., N]; T is the product of the leading sizes.

    forward    qx = quantize(x); qw = quantize(w); y = gemm(qx, qw, bias)
    backward   per GEMM: seed, both operands quantized along its contraction, gemm
    saved      codes, scales and global scale of x and w (and QuEST's bit masks); a high-precision
               tensor only for a GEMM that the recipe leaves in bf16, or that quantizes it afresh
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import q2compile.runtime_kernels  # noqa: F401  registers the ops used here
from q2compile.graph.storages import hint_of
from q2compile.linear.autocast import without_autocast
from q2compile.recipes.recipe import Gemm, Operand, Recipe
from q2compile.runtime_kernels.numerics.groups import UNIT, spreads
from q2compile.runtime_kernels.numerics.layout import ceil_div
from q2compile.runtime_kernels.numerics.schemes import SCHEMES
from q2compile.runtime_kernels.numerics.transforms import TRANSFORMS
from q2compile.torch_internals.aot_autograd import layouts_without_guards

Codes = tuple[Tensor, Tensor, Tensor]  # codes, scales, global scale
_PARTS = ("codes", "scales", "global_scale")


class SavedCodes(NamedTuple):
    """Codes that fprop made of x or w along K, their scheme, and how many rows their columnwise
    operand has: columns of x or w, in whole chunks where fprop rotated them."""

    codes: Codes
    scheme: str
    rows: int


def seed_of(operand: Operand, seed: Tensor | None) -> Tensor | None:
    """The seed if quantizing the operand draws random bits or signs, else None."""
    return seed if operand.draws else None


def _quantize(
    x: Tensor,
    operand: Operand,
    *,
    columnwise: bool = False,
    seed: Tensor | None = None,
    rng_offset: int = 0,
    **more: Any,
) -> list[Tensor]:
    """x [R, C] quantized along C, or columnwise along R, from the high-precision tensor. more: what
    q2::quantize takes besides."""
    scheme, own_seed = SCHEMES[operand.scheme], seed_of(operand, seed)
    # An amax of blocks in columns is computed inside; one scale for the tensor has one amax.
    amax_is_known = operand.transform == "none" and (scheme.is_tensorwise or not columnwise)
    if amax_is_known and scheme.takes_amax:
        more["amax"] = torch.ops.q2.amax(x)
    return torch.ops.q2.quantize(
        x,
        scheme=operand.scheme,
        transform=operand.transform,
        rowwise=not columnwise,
        columnwise=columnwise,
        rowwise_seed=None if columnwise else own_seed,
        columnwise_seed=own_seed if columnwise else None,
        rng_offset=rng_offset,
        **more,
    )


def _requantize(
    saved: SavedCodes, operand: Operand, seed: Tensor | None, **more: Any
) -> list[Tensor]:
    """x or w, from saved codes, quantized columnwise. more: the ends of groups.

    8-bit codes become bf16 values first, which are exact and which a quantizer may compute as it
    reads them."""
    if SCHEMES[saved.scheme].is_tensorwise:
        x = dequantized(saved)
        return _quantize(x, operand, columnwise=True, seed=seed, rng_offset=1, **more)
    return torch.ops.q2.requantize(
        *saved.codes,
        source_scheme=saved.scheme,
        scheme=operand.scheme,
        transform=operand.transform,
        rows=saved.rows,
        columnwise_seed=seed,
        rng_offset=1,
        **more,
    )


def dequantized(saved: SavedCodes) -> Tensor:
    """The values of x or w, exact in bf16 where the global scale is a power of two."""
    return torch.ops.q2.dequantize(*saved.codes, saved.scheme, saved.rows, torch.bfloat16)


class OneWeight:
    """How the GEMMs of a layer multiply: here, all rows with one weight.

    ends  of groups of rows that wgrad keeps apart, each in whole chunks of 128: offs, int32 [E],
          and padded_offs, q2::padded_ends of them; {} for one group of any number of rows. Chunks
          of few rows are filled so that MS-EDEN is unbiased there, too
          (`runtime_kernels.numerics.groups`)
    """

    def __init__(self, **ends: Tensor) -> None:
        self.ends = ends

    def columnwise(
        self, gemm_name: str, x: Tensor, operand: Operand, seed: Tensor | None, rng_offset: int
    ) -> Sequence[Tensor]:
        """``x`` quantized columnwise, along its rows, which ``gemm_name`` contracts: of dy, or of x
        or w where they are taken in high precision.
        """
        ends = self.ends if gemm_name == "wgrad" else {}
        return _quantize(x, operand, columnwise=True, seed=seed, rng_offset=rng_offset, **ends)

    def requantized(
        self, gemm_name: str, saved: SavedCodes, operand: Operand, seed: Tensor | None
    ) -> Sequence[Tensor]:
        """x or w, from saved codes, quantized columnwise."""
        return _requantize(saved, operand, seed, **(self.ends if gemm_name == "wgrad" else {}))

    def transposed(self, gemm_name: str, saved: SavedCodes) -> Sequence[Tensor]:
        """x or w as the codes that fprop made, transposed."""
        codes, scales, global_scale = saved.codes
        ends = self.ends if gemm_name == "wgrad" else {}
        made = torch.ops.q2.transpose(codes, scales, saved.scheme, saved.rows, **ends)
        # Saving an empty tensor costs the partitioner nothing, so it would run the op twice.
        has_scales = SCHEMES[saved.scheme].has_block_scales
        return made[0], made[1] if has_scales else scales, global_scale

    def gemm(
        self,
        gemm_name: str,
        gemm: Gemm,
        a: Sequence[Tensor],
        b: Sequence[Tensor],
        bias: Tensor | None,
        dtype: Any,
    ) -> Tensor:
        """The product of two operands quantized along the contraction."""
        return torch.ops.q2.gemm(*a, *b, bias, gemm.a.scheme, gemm.b.scheme, dtype)

    def plain(self, gemm_name: str, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """A GEMM that the recipe leaves in high precision: of x and w, dy and w, or dy and x."""
        if gemm_name == "fprop":
            return torch.nn.functional.linear(a, b, bias)
        return (a.t() if gemm_name == "wgrad" else a) @ b


class Grouped(OneWeight):
    """x's rows up to offs[0] with the first of the weights, those up to offs[1] with the next.

    The weights are one matrix [E * N, K], and so are their gradients."""

    def __init__(self, offs: Tensor, padded_offs: Tensor) -> None:
        super().__init__(offs=offs, padded_offs=padded_offs)
        self.experts = offs.shape[0]

    def columnwise(
        self, gemm_name: str, x: Tensor, operand: Operand, seed: Tensor | None, rng_offset: int
    ) -> Sequence[Tensor]:
        x = self._padded(x, operand) if gemm_name == "dgrad" else x
        return super().columnwise(gemm_name, x, operand, seed, rng_offset)

    def requantized(
        self, gemm_name: str, saved: SavedCodes, operand: Operand, seed: Tensor | None
    ) -> Sequence[Tensor]:
        if gemm_name == "dgrad":
            codes, scales, global_scale = saved.codes
            padded = self._padded(codes, operand), self._padded(scales, operand), global_scale
            saved = saved._replace(codes=padded)
        return super().requantized(gemm_name, saved, operand, seed)

    def _padded(self, w: Tensor, operand: Operand) -> Tensor:
        """The saved parts of w, its N rows per expert padded to whole blocks and chunks."""
        unit = max(SCHEMES[operand.scheme].width, TRANSFORMS[operand.transform].size)
        n = w.shape[0] // self.experts
        wide = -(-n // unit) * unit
        if n == wide:
            return w
        stored = w.view(torch.uint8) if w.element_size() == 1 else w  # few functions take fp8
        apart = torch.nn.functional.pad(stored.unflatten(0, (self.experts, n)), (0, 0, 0, wide - n))
        return apart.flatten(0, 1).view(w.dtype)

    def gemm(
        self,
        gemm_name: str,
        gemm: Gemm,
        a: Sequence[Tensor],
        b: Sequence[Tensor],
        bias: Tensor | None,
        dtype: Any,
    ) -> Tensor:
        offs = self.ends["padded_offs" if gemm_name == "wgrad" else "offs"]
        return torch.ops.q2.grouped_gemm(
            *a, *b, offs, gemm.a.scheme, gemm.b.scheme, gemm_name, dtype
        )

    def plain(self, gemm_name: str, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        if gemm_name == "wgrad":
            return torch.ops.q2.grouped_mm(a.t(), b, self.ends["offs"]).flatten(0, 1)
        w = b.unflatten(0, (self.experts, -1))
        return torch.ops.q2.grouped_mm(a, w.mT if gemm_name == "fprop" else w, self.ends["offs"])


# From so many rows on one short chunk is too little of them for its bias to count: at most 6% of
# its part of the gradient (groups.py), .5% of the whole, where a draw's error is 13%.
_MANY_ROWS = 1024


def of_rows(x: Tensor, recipe: Recipe) -> OneWeight:
    """How the GEMMs of a layer take the rows of x [T, K], or of dy [T, N].

    They are one group where wgrad rotates a chunk of few of them with MS-EDEN, which costs up to a
    chunk of zeros more. T may be a symbol: one that data decide is taken to be small, as an
    expert's tokens are, another by its hint. No guard is added.
    """
    rows, wgrad = x.shape[0], recipe.wgrad
    if wgrad is None or not all(
        spreads(SCHEMES[o.scheme], TRANSFORMS[o.transform]) for o in (wgrad.a, wgrad.b)
    ):
        return OneWeight()
    hint = hint_of(rows)
    if hint is not None and hint >= _MANY_ROWS:
        return OneWeight()
    if isinstance(rows, int) and not 0 < rows % UNIT <= UNIT // 2:
        return OneWeight()
    ends = {"offs": rows, "padded_offs": ceil_div(rows, UNIT) * UNIT}
    at: Any = {"dtype": torch.int32, "device": x.device}
    return OneWeight(**{name: torch.full((1,), end, **at) for name, end in ends.items()})


class Saved(dict[str, Tensor]):
    """Tensors saved for the backward, by name: "x", "x.codes", "x.mask", "wgrad.x.codes",
    "wgrad.seed"."""

    def put_codes(self, name: str, codes: Sequence[Tensor]) -> None:
        self.update(zip((f"{name}.{part}" for part in _PARTS), codes, strict=True))

    def codes(self, name: str) -> Codes:
        a, b, c = (self[f"{name}.{part}"] for part in _PARTS)
        return a, b, c


def forward_parts(x: Tensor, operand: Operand) -> Sequence[Tensor]:
    """x or w as fprop takes it: codes, scales, global scale, and QuEST's mask."""
    return _quantize(x, operand, mask=SCHEMES[operand.scheme].masked)


def _put_forward_parts(made: Saved, name: str, parts: Sequence[Tensor]) -> Codes:
    codes, scales, global_scale, *mask = parts
    made.put_codes(name, (codes, scales, global_scale))
    made.update((f"{name}.mask", m) for m in mask)
    return codes, scales, global_scale


def _keep(
    product: OneWeight,
    recipe: Recipe,
    gemm_name: str,
    made: Saved,
    saved: Saved,
    seed: Tensor | None,
) -> None:
    """Save what dgrad or wgrad will need: of w and the mask of x, or of x and the mask of w. seed:
    drawn by `_seed_ahead`."""
    gemm: Gemm | None = getattr(recipe, gemm_name)
    name, other = ("w", "x") if gemm_name == "dgrad" else ("x", "w")
    source = gemm.b.source if gemm else "fresh"
    if gemm is None or source == "fresh" or (source == "reuse" and recipe.fprop is None):
        saved[name] = made[name]
    elif source == "forward":
        codes = product.columnwise(gemm_name, made[name], gemm.b, seed, rng_offset=1)
        saved.put_codes(f"{gemm_name}.{name}", codes)
        if seed is not None:
            saved[f"{gemm_name}.seed"] = seed
    elif f"{gemm_name}.{name}.codes" in made:  # transposed before
        saved.put_codes(f"{gemm_name}.{name}", made.codes(f"{gemm_name}.{name}"))
    else:
        saved.put_codes(name, made.codes(name))
        if f"{other}.mask" in made:
            saved[f"{other}.mask"] = made[f"{other}.mask"]


def _seed_ahead(recipe: Recipe, gemm_name: str, anchor: Tensor, seed_index: int) -> Tensor | None:
    """The seed for an operand of the backward that the forward quantizes; None where it draws none.

    It is drawn before fprop's quantizers, so that one call can make both operands from one read
    (pass pair_directions).
    """
    gemm: Gemm | None = getattr(recipe, gemm_name)
    draws = gemm is not None and gemm.b.source == "forward" and gemm.b.draws
    return torch.ops.q2.seed(anchor, seed_index) if draws else None


def _backward_gemm(
    product: OneWeight,
    recipe: Recipe,
    gemm_name: str,
    dy: Tensor,
    saved: Saved,
    columns: int,
    seed_index: int,
) -> Tensor:
    """dx [T, K] = dy w, or dw [N, K] = dyᵀ x.

    One seed for both operands: their signs are the same; their random bits are not (rng_offset 0
    and 1).
    """
    gemm: Gemm | None = getattr(recipe, gemm_name)
    transpose = gemm_name == "wgrad"
    name, other = ("x", "w") if transpose else ("w", "x")
    if gemm is None:
        return product.plain(gemm_name, dy, saved[name])
    seed = saved.get(f"{gemm_name}.seed")
    if seed is None and (gemm.a.draws or gemm.b.draws):
        seed = torch.ops.q2.seed(dy, seed_index)
    dtype = dy.dtype
    if transpose:
        a = product.columnwise(gemm_name, dy, gemm.a, seed, rng_offset=0)
    else:
        a = _quantize(dy, gemm.a, seed=seed)
    if gemm.b.source == "fresh":
        b = product.columnwise(gemm_name, saved[name], gemm.b, seed, rng_offset=1)
        return product.gemm(gemm_name, gemm, a, b, None, dtype)
    if f"{gemm_name}.{name}.codes" in saved:
        return product.gemm(gemm_name, gemm, a, saved.codes(f"{gemm_name}.{name}"), None, dtype)
    if gemm.b.source == "reuse":
        made = saved if recipe.fprop else Saved()
        if not recipe.fprop:
            made.put_codes(name, _quantize(saved[name], gemm.b, rng_offset=1))
        b = product.transposed(gemm_name, SavedCodes(made.codes(name), gemm.b.scheme, columns))
        return product.gemm(gemm_name, gemm, a, b, None, dtype)
    assert recipe.fprop is not None, "recipes.resolve makes the source 'fresh' then"
    forward = recipe.fprop.a if transpose else recipe.fprop.b
    # Codes that fprop rotated along K give a gradient in rotated coordinates, chunks of padding
    # included; the mask and the rotation of fprop's other operand lead back.
    size = TRANSFORMS[forward.transform].size
    rows = -(-columns // size) * size
    own_seed = seed_of(gemm.b, seed)
    b = product.requantized(
        gemm_name, SavedCodes(saved.codes(name), forward.scheme, rows), gemm.b, own_seed
    )
    grad = product.gemm(gemm_name, gemm, a, b, None, dtype)
    if f"{other}.mask" not in saved:
        return grad
    grad = torch.ops.q2.masked_unrotate(grad, saved[f"{other}.mask"], forward.transform)
    return torch.ops.aten.slice.Tensor(grad, 1, 0, columns)


def _ends(offs: Tensor, recipe: Recipe) -> Saved:
    # FP8's wgrad has no empty group: grouped products on FP8 tensor cores contract none.
    filled = recipe.wgrad is not None and SCHEMES[recipe.wgrad.a.scheme].is_tensorwise
    return Saved(offs=offs, padded_offs=torch.ops.q2.padded_ends(offs, filled))


class LinearFunction(torch.autograd.Function):
    """x [T, K], w [N, K], bias [N] or None, one floating dtype -> y [T, N] of that dtype. For
    experts w is [E * N, K], and offs int32 [E] are the ends of their rows; else offs is None."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        offs: Tensor | None,
        recipe: Recipe,
        seed_index: int,
        *w_parts: Tensor,
    ) -> Tensor:
        """w_parts: what `quantize_weight` makes of w, where it has been made before."""
        ctx.recipe, ctx.columns = recipe, w.shape[1]
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.seed_indices = {"dgrad": 2 * seed_index, "wgrad": 2 * seed_index + 1}
        needs_x, needs_w, *_ = ctx.needs_input_grad
        made, saved = Saved(x=x, w=w), Saved() if offs is None else _ends(offs, recipe)
        with layouts_without_guards(x.shape[0]):
            product = of_rows(x, recipe) if offs is None else Grouped(**saved)
            wanted = {"dgrad": (needs_x, w), "wgrad": (needs_w, x)}
            seeds = {
                name: _seed_ahead(recipe, name, anchor, ctx.seed_indices[name])
                for name, (needed, anchor) in wanted.items()
                if needed
            }
            if recipe.fprop is None:
                y = product.plain("fprop", x, w, bias)
            else:
                qx = _put_forward_parts(made, "x", forward_parts(x, recipe.fprop.a))
                count = 3 + SCHEMES[recipe.fprop.b.scheme].masked
                parts = w_parts[:count] or forward_parts(w, recipe.fprop.b)
                qw = _put_forward_parts(made, "w", parts)
                if transposed := w_parts[count:]:
                    made.put_codes("dgrad.w", (*transposed, qw[2]))
                y = product.gemm("fprop", recipe.fprop, qx, qw, bias, x.dtype)
            for name, seed in seeds.items():
                _keep(product, recipe, name, made, saved, seed)
        ctx.save_for_backward(*saved.values())
        ctx.names = tuple(saved)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = Saved(zip(ctx.names, ctx.saved_tensors, strict=True))
        grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        # Under autocast a GEMM in high precision would have the dtype of that.
        with layouts_without_guards(dy.shape[0]), without_autocast(dy.device.type):
            if "offs" in saved:
                product: OneWeight = Grouped(saved["offs"], saved["padded_offs"])
            else:
                product = of_rows(dy, ctx.recipe)
            for i, name in enumerate(("dgrad", "wgrad")):
                if ctx.needs_input_grad[i]:
                    index = ctx.seed_indices[name]
                    grads[i] = _backward_gemm(
                        product, ctx.recipe, name, dy, saved, ctx.columns, index
                    )
        if ctx.needs_input_grad[2]:
            grads[2] = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return tuple(grads)
