# SPDX-License-Identifier: Apache-2.0
"""The dry run that finds kernels."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from q2compile.recipes.resolve import resolve
from q2compile.report.kernel_choice import kernels_used


@pytest.mark.parametrize("shape", [(64, 32, 48), (2, 64, 32, 48)])
def test_a_checkpoint_around_the_compilation_does_not_see_it(shape) -> None:
    """The hooks of an eager checkpoint count the tensors that its region saves, and recompute the
    region if one is read. While a layer inside is compiled, they must not see its fake tensors."""

    def hook(x):
        raise AssertionError("a tensor of the dry run was given to the caller's hooks")

    recipe = resolve("quartet2")
    gemms = tuple(str(gemm) for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad))
    kernels_used.cache_clear()
    with saved_tensors_hooks(hook, hook):
        used, calls = kernels_used(gemms, shape, torch.bfloat16, "cpu", False)
    product = "grouped_gemm: reference" if len(shape) > 3 else "gemm: cpp"
    assert used["wgrad"].endswith(f", {product}") and calls["fprop"]
