"""`q2::linear`: a linear layer whose three GEMMs are computed as a recipe says.

The op is CompositeImplicitAutograd: AOTAutograd traces through it into an autograd.Function made of
the functional ops of `q2compile.runtime_kernels`, so forward and backward graphs stay readable and
torch's caches apply.

Shapes: x [..., K], w [N, K], bias [N], y and dy [..., N]; T is the product of the leading
dimensions.

    forward    qx = quantize(x); qw = quantize(w); y = gemm(qx, qw, bias)
    backward   per GEMM: seed, both operands quantised along its contraction, gemm
    saved      codes, scales and global scale of x and of w; a high-precision tensor only for a GEMM
               that the recipe leaves in bf16, or that quantises it afresh
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import q2compile.runtime_kernels  # noqa: F401  registers the ops used here
from q2compile import recipes
from q2compile.recipes import Gemm, Operand, Recipe
from q2compile.runtime_kernels.schemes import SCHEMES
from q2compile.runtime_kernels.transforms import TRANSFORMS

_library = torch.library.Library("q2", "FRAGMENT")
_library.define(
    "linear(Tensor x, Tensor w, Tensor? bias, str fprop, str dgrad, str wgrad, int salt) -> Tensor"
)


class Quantized(NamedTuple):
    """A quantised operand: (codes, scales, global scale), see `runtime_kernels`, and its scheme."""

    tensors: tuple[Tensor, Tensor, Tensor]
    scheme: str


def _quantize(
    x: Tensor, operand: Operand, *, transpose: bool, seed: Tensor | None, stream: int
) -> Quantized:
    """x [R, C] quantised along C, or along R with ``transpose``, from the high-precision tensor."""
    scheme = SCHEMES[operand.scheme]
    coins = seed if scheme.stochastic or TRANSFORMS[operand.transform].seeded else None
    if operand.transform == "none" and not transpose:
        amax = torch.ops.q2.amax(x) if scheme.takes_amax else None
        out = torch.ops.q2.quantize(x, amax, coins, operand.scheme, stream)
    else:
        out = torch.ops.q2.rht_quantize(
            x, coins, operand.scheme, operand.transform, transpose, stream
        )
    return Quantized(out, operand.scheme)


def _gemm(a: Quantized, b: Quantized, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return torch.ops.q2.gemm(*a.tensors, *b.tensors, bias, a.scheme, b.scheme, dtype)


def _second_operand(
    saved: Quantized | Tensor, operand: Operand, columns: Any, seed: Tensor
) -> Quantized:
    """w in dgrad or x in wgrad: what fprop saw as [R, columns], with its contraction along R."""
    if isinstance(saved, Tensor):
        return _quantize(saved, operand, transpose=True, seed=seed, stream=1)
    out = torch.ops.q2.requantize(
        *saved.tensors, seed, saved.scheme, operand.scheme, operand.transform, columns, 1
    )
    return Quantized(out, operand.scheme)


def _backward_gemm(
    gemm: Gemm, dy: Tensor, other: Quantized | Tensor, columns: Any, salt: int, transpose: bool
) -> Tensor:
    """dgrad (dy [T, N] as it is) or wgrad (dy transposed). One seed: the signs are shared by the
    two operands, the coins are not (streams 0 and 1)."""
    seed = torch.ops.q2.seed(dy, salt)
    a = _quantize(dy, gemm.a, transpose=transpose, seed=seed, stream=0)
    b = _second_operand(other, gemm.b, columns, seed)
    return _gemm(a, b, None, dy.dtype)


class _Linear(torch.autograd.Function):
    """x [T, K], w [N, K], bias [N] or None, one floating dtype -> y [T, N] of that dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe, salt: int
    ) -> Tensor:
        ctx.recipe, ctx.salt = recipe, salt
        qx = qw = None
        if recipe.fprop is None:
            y = torch.nn.functional.linear(x, w, bias)
        else:
            qx = _quantize(x, recipe.fprop.a, transpose=False, seed=None, stream=0)
            qw = _quantize(w, recipe.fprop.b, transpose=False, seed=None, stream=0)
            y = _gemm(qx, qw, bias, x.dtype)
        needs_x, needs_w, ctx.needs_bias, *_ = ctx.needs_input_grad
        ctx.columns = w.shape[1]
        ctx.for_dgrad = _save(recipe.dgrad, w, qw) if needs_x else None
        ctx.for_wgrad = _save(recipe.wgrad, x, qx) if needs_w else None
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(*_tensors(ctx.for_dgrad), *_tensors(ctx.for_wgrad))
        # What is kept on ctx is the form alone: tensors go through save_for_backward.
        ctx.for_dgrad, ctx.for_wgrad = _form(ctx.for_dgrad), _form(ctx.for_wgrad)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        recipe, saved = ctx.recipe, list(ctx.saved_tensors)
        for_dgrad: Any = _restore(ctx.for_dgrad, saved)
        for_wgrad: Any = _restore(ctx.for_wgrad, saved)
        dx = dw = dbias = None
        if for_dgrad is not None:
            if recipe.dgrad is None:
                dx = dy @ for_dgrad
            else:
                dx = _backward_gemm(recipe.dgrad, dy, for_dgrad, ctx.columns, 2 * ctx.salt, False)
        if for_wgrad is not None:
            if recipe.wgrad is None:
                dw = dy.t() @ for_wgrad
            else:
                dw = _backward_gemm(
                    recipe.wgrad, dy, for_wgrad, ctx.columns, 2 * ctx.salt + 1, True
                )
        if ctx.needs_bias:
            dbias = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, dbias, None, None


def _save(gemm: Gemm | None, high_precision: Tensor, codes: Quantized | None) -> Any:
    """What a backward GEMM needs of the forward's operand: its codes, or the tensor itself."""
    if gemm is not None and gemm.b.source == "requantize":
        assert codes is not None, "recipes.resolve lets only a quantised fprop be requantised"
        return codes
    return high_precision


def _tensors(saved: Quantized | Tensor | None) -> tuple[Tensor, ...]:
    if isinstance(saved, Quantized):
        return saved.tensors
    return () if saved is None else (saved,)


def _form(saved: Quantized | Tensor | None) -> str | None:
    """How `_restore` reads it back: a scheme's name, "" for a plain tensor, None for nothing."""
    if isinstance(saved, Quantized):
        return saved.scheme
    return None if saved is None else ""


def _restore(form: str | None, saved: list[Tensor]) -> Quantized | Tensor | None:
    if form is None:
        return None
    if form == "":
        return saved.pop(0)
    return Quantized((saved.pop(0), saved.pop(0), saved.pop(0)), form)


def linear(
    x: Tensor, w: Tensor, bias: Tensor | None, fprop: str, dgrad: str, wgrad: str, salt: int
) -> Tensor:
    """y [..., N] = x [..., K] wᵀ + bias, each GEMM as its text says (`recipes.Gemm`).

    Under autocast x and w are cast first, as torch's own linear would. ``salt`` tells the sites of
    one graph apart, so that two equal layers with the same gradient do not draw the same coins.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, w = x.to(dtype), w.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(device, enabled=False):
        flat = x.reshape(-1, x.shape[-1])
        y = _Linear.apply(flat, w, bias, recipes.parse(fprop, dgrad, wgrad), salt)
        return y.reshape(*x.shape[:-1], w.shape[0])


_library.impl("linear", linear, "CompositeImplicitAutograd")
