# SPDX-License-Identifier: Apache-2.0
"""Linear layers that split the token mean of x off, an arm of the branched runs.

    y = x wᵀ + b  ->  y = (x - m) wᵀ + b + m wᵀ     m = mean of x over all tokens of the batch, [K]

The first product is the one that q2compile quantizes; the second is a sum over K in fp32, with the
fp32 weights, and no matmul. Autograd differentiates the whole: wgrad multiplies x - m, and adds the
outer product of m and dy's sum over the tokens, unquantized. An experiment of these examples, not a
recipe: a served model has no batch whose mean it could take.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class MeanSplitLinear(nn.Linear):
    """x [..., K] -> [..., N], the token mean of x multiplied apart."""

    def forward(self, input: Tensor) -> Tensor:
        mean = input.float().flatten(0, -2).mean(0)
        of_mean = (self.weight.float() * mean).sum(-1)
        rest = functional.linear(input - mean.to(input.dtype), self.weight, self.bias)
        return rest + of_mean.to(rest.dtype)


def split_means(model: nn.Module) -> None:
    """Turn every linear layer but the output layer into a `MeanSplitLinear`, in place."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and not name.endswith("lm_head"):
            module.__class__ = MeanSplitLinear
