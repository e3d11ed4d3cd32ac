# SPDX-License-Identifier: Apache-2.0
"""Linear layers for arms of the branched runs: experiments of these examples, not recipes.

Each computes what `nn.Linear` computes, and changes only what q2compile quantizes. x [..., K] ->
[..., N]; w [N, K]; Q is the recipe's forward quantization along K.

    mean_split       y = Q(x - m) Q(w)ᵀ + m wᵀ     m [K], the mean of x over all tokens of the batch
    x_alone, w_alone y = Q(x) wᵀ, x Q(w)ᵀ          in BF16, with the gradients of x wᵀ
    x_in_fp8         y = Q8(x) Q(w)ᵀ               Q8 is e4m3; the backward is of these
    direct           y = Q(x) Q(w)ᵀ                the control: by the op that the following call
    balanced         y = Q(x / d) Q(w d)ᵀ          d [K], from mean squares of the columns
    fixed_balance    y = Q(x / d) Q(w d)ᵀ          d of the first batch after the stem
    error_feedback   y = Q(x) Q(w + o)ᵀ            o <- g (w + o - Q(w + o)) once a step, g = 1
    quarter_feedback, eighth_feedback, sticky      the same with g = 1/4, 1/8 and -1/4

mean_split and balanced measure the batch, also in a validation; a recipe would keep a running mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import q2compile
import q2compile.linear.dense
from q2compile.config import Config, resolved_policy
from q2compile.recipes.recipe import Operand


class MeanSplitLinear(nn.Linear):
    """x [..., K] -> [..., N], the token mean of x multiplied apart.

    The first product is the one that q2compile quantizes; the second is a sum over K in fp32, with
    the fp32 weights, and no matmul. Autograd differentiates the whole: wgrad multiplies x - m, and
    adds the outer product of m and dy's sum over the tokens, unquantized.
    """

    def forward(self, input: Tensor) -> Tensor:
        mean = input.float().flatten(0, -2).mean(0)
        of_mean = (self.weight.float() * mean).sum(-1)
        rest = functional.linear(input - mean.to(input.dtype), self.weight, self.bias)
        return rest + of_mean.to(rest.dtype)


class QuantizedLinear(nn.Linear):
    """x [..., K] -> [..., N] by a call of q2::linear. Subclasses multiply by what is no parameter,
    and q2compile leaves such products alone.

    texts: the recipe's three GEMMs, as arguments of the op. seed_index: of the layer's random bits.
    """

    texts: tuple[str, str, str]
    seed_index: int

    def forward(self, input: Tensor) -> Tensor:
        return self.multiply(input, self.weight)

    def multiply(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.q2.linear(x, w, self.bias, *self.texts, self.seed_index)


class OneOperandLinear(QuantizedLinear):
    """x [..., K] -> [..., N] in BF16; one operand is rounded in fprop, none in dgrad and wgrad."""

    rounded = ""  # x or w

    def multiply(self, x: Tensor, w: Tensor) -> Tensor:
        operands = {"x": x.bfloat16(), "w": w.bfloat16()}  # as autocast gives them to a linear
        plain = self.product(**operands)
        operands[self.rounded] = self.round(operands[self.rounded])
        with torch.no_grad():
            change = self.product(**operands).float() - plain.float()
        return (plain + change).to(plain.dtype)

    def product(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.q2.linear(x, w, self.bias, "bf16", "bf16", "bf16", self.seed_index)

    def round(self, operand: Tensor) -> Tensor:
        x_text, w_text = self.texts[0].split(" @ ")
        scheme = Operand.parse({"x": x_text, "w": w_text}[self.rounded]).scheme
        return _rounded(operand.detach(), scheme)


class XAloneLinear(OneOperandLinear):
    rounded = "x"


class WAloneLinear(OneOperandLinear):
    rounded = "w"


class XInFP8Linear(QuantizedLinear):
    """x [..., K] -> [..., N] as in the recipe, but x is rounded to e4m3 in fprop.

    The backward quantizes the values that fprop multiplied, as Quartet II's does.
    """

    def multiply(self, x: Tensor, w: Tensor) -> Tensor:
        w_scheme = Operand.parse(self.texts[0].split(" @ ")[1]).scheme
        values = _rounded(x.bfloat16(), "fp8"), _rounded(w.bfloat16(), w_scheme)
        backward = [text.replace("requantize>", "") for text in self.texts[1:]]  # of these values
        return torch.ops.q2.linear(*values, self.bias, "bf16", *backward, self.seed_index)


def _rounded(operand: Tensor, scheme: str) -> Tensor:
    """The operand's quantized values [..., K], with the gradient of the operand itself."""
    matrix = operand.detach().flatten(0, -2)
    made = torch.ops.q2.quantize(matrix, scheme=scheme, rowwise=True, columnwise=False)
    values = torch.ops.q2.dequantize(*made[:3], scheme, operand.shape[-1], operand.dtype)
    return values.view(operand.shape) + (operand - operand.detach())  # the difference is zero


class BalancedLinear(QuantizedLinear):
    """x [..., K] -> [..., N], the columns of x and w scaled against each other.

    If all elements of a block had the same rounding error, in proportion to the root of the block's
    mean square, the error of y would be in proportion to sum(a_k / d_k²) sum(b_k d_k²) over the
    block, where a_k and b_k are column k's mean squares of x and w, and whichever of the two is
    rounded. d_k⁴ = a_k / b_k makes it least (Cauchy-Schwarz): sum(sqrt(a_k b_k))² instead of
    sum(a_k) sum(b_k).

    d⁴ is rounded to a power of two, which costs 1% of the error at most: a d that is other in each
    step would draw the rounding errors anew, and training learns around those that stay.
    """

    def forward(self, input: Tensor) -> Tensor:
        d = self.balance(input.detach())
        return self.multiply((input.float() / d).to(input.dtype), self.weight * d)

    def balance(self, x: Tensor) -> Tensor:
        """d, fp32 [K]; 1 where a column of x or w is zero."""
        of_x = x.float().flatten(0, -2).square().mean(0)
        of_w = self.weight.detach().float().square().mean(0)
        ratio = torch.where((of_x > 0) & (of_w > 0), of_x / of_w, 1.0)
        return torch.exp2(ratio.log2().round() / 4)


class FixedBalanceLinear(BalancedLinear):
    """A `BalancedLinear` with a d that stays, and is that of training also in a validation.

    d: fp32 [K], a buffer, so that a run resumes with it; 0 until `measure_balances` sets it.
    """

    d: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return self.multiply((input.float() / self.d).to(input.dtype), self.weight * self.d)


class FeedbackLinear(QuantizedLinear):
    """x [..., K] -> [..., N]; w is quantized with an offset, what the last step's rounding left.

    offset: fp32 [N, K], a buffer, so that a run resumes with it; a stem, which has none, leaves 0.
    """

    gain = 0.0
    offset: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return self.multiply(input, self.weight + self.offset)

    @torch.no_grad()
    def feed_back(self) -> None:
        """The next step's offset, from the weights that this step multiplied."""
        wanted = self.weight + self.offset
        scheme = Operand.parse(self.texts[0].split(" @ ")[1]).scheme
        # In bf16, as autocast gives it to the linear.
        rounded = q2compile.quantize(wanted.bfloat16(), scheme).dequantize()
        self.offset.copy_(self.gain * (wanted - rounded))


class ErrorFeedbackLinear(FeedbackLinear):
    """The mean over the steps of the weights that are multiplied is the mean of the weights."""

    gain = 1.0


class QuarterFeedbackLinear(FeedbackLinear):
    """A weight changes its code 3/8 of a step away from it, where others do at 1/2."""

    gain = 0.25


class EighthFeedbackLinear(FeedbackLinear):
    gain = 0.125


class StickyLinear(FeedbackLinear):
    """A weight keeps its code until it is 5/8 of a step away from it, where others do until 1/2.

    Within a cell the offset tends to -g p / (1 + g), g = 1/4, for a weight p beside its code's
    value; so the weight leaves the cell where p / (1 + g) is half a step.
    """

    gain = -0.25


LINEARS: Mapping[str, type[nn.Linear]] = {
    "mean_split": MeanSplitLinear,
    "x_alone": XAloneLinear,
    "w_alone": WAloneLinear,
    "x_in_fp8": XInFP8Linear,
    "direct": QuantizedLinear,
    "balanced": BalancedLinear,
    "fixed_balance": FixedBalanceLinear,
    "error_feedback": ErrorFeedbackLinear,
    "quarter_feedback": QuarterFeedbackLinear,
    "eighth_feedback": EighthFeedbackLinear,
    "sticky": StickyLinear,
}


def replace_linears(model: nn.Module, name: str, options: Mapping[str, Any]) -> None:
    """Turn every linear layer that the options quantize in the forward into one of `LINEARS`.

    In place. Raises ValueError for a name that is not in the table.
    """
    if name not in LINEARS:
        raise ValueError(f"linear {name!r}: there is {', '.join(LINEARS)}")
    policy = resolved_policy(Config.from_options(dict(options)))
    for seed_index, (path, module) in enumerate(model.named_modules()):
        if type(module) is not nn.Linear:
            continue
        recipe, _ = policy.resolve(path)
        if recipe.fprop is None:
            continue
        module.__class__ = LINEARS[name]
        if isinstance(module, QuantizedLinear):
            module.texts, module.seed_index = recipe.texts(), seed_index
        if isinstance(module, FeedbackLinear):
            module.register_buffer("offset", torch.zeros_like(module.weight))
            module.register_load_state_dict_pre_hook(_without_state)
        if isinstance(module, FixedBalanceLinear):
            module.register_buffer("d", torch.zeros_like(module.weight[0]))
            module.register_load_state_dict_pre_hook(_without_state)


def _without_state(module: nn.Module, state: dict[str, Any], prefix: str, *_others: Any) -> None:
    """Weights that come without the layer's buffer are loaded with zeros in it."""
    for name, buffer in module.named_buffers():
        state.setdefault(f"{prefix}{name}", torch.zeros_like(buffer))


def measure_balances(model: nn.Module, forward: Callable[[], object]) -> None:
    """Set each d that is 0, from the x that the layer has in a call of `forward`."""
    found = [m for m in model.modules() if isinstance(m, FixedBalanceLinear) and not m.d.any()]
    if not found:
        return

    def measure(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, FixedBalanceLinear)
        layer.d.copy_(layer.balance(args[0]))

    hooks = [layer.register_forward_pre_hook(measure) for layer in found]
    with torch.no_grad():
        forward()
    for hook in hooks:
        hook.remove()


def feed_back(model: nn.Module) -> None:
    """Every layer's `FeedbackLinear.feed_back`, between a backward and the optimizer's step."""
    for module in model.modules():
        if isinstance(module, FeedbackLinear):
            module.feed_back()
