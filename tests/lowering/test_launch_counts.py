# SPDX-License-Identifier: Apache-2.0
"""How many kernels a linear launches, forward and backward, by recipe, and how many KiB they read
and write: counted in generated code (support/launch_counts.py). A BF16 linear of 256 x 512 on 512
rows reads or writes x, w and y, or their gradients, three times each: 3072 KiB.

`apart` is the same code without the pass group_launches: every quantizer has its own launches, and
the GEMMs compute the products of global scales. nvfp4 had 30 on a Blackwell when q2::transpose was
eight torch kernels and swizzle_scales.cu swizzled the result.

The cost model counts launches from a recipe's steps, and its counts are compared with these.
"""

from __future__ import annotations

import textwrap
from itertools import product

import pytest
from expecttest import TestCase

from q2compile.cost_model.layer import Layer
from q2compile.cost_model.prices import recipe_steps
from q2compile.recipes.recipe import GEMMS
from q2compile.recipes.resolve import resolve
from tests.support.launch_counts import (
    BLACKWELL,
    HOPPER,
    INNER,
    OUTER,
    ROWS,
    bytes_of,
    launched,
)

RECIPES = ("quartet2", "nvfp4", "tetrajet2", "quartet", "mxfp4", "mxfp4_2d")

# KiB by Inductor of torch 2.13, of each recipe.
KIB = {
    BLACKWELL: (3344, 3578, 3344, 3336, 3376, 3704),
    HOPPER: (6576, 7083, 6576, 6408, 4912, 5745),
}


def line(recipe: str, capability: int) -> str:
    found = launched(recipe, capability)
    names = ", ".join(f"{name} {found[name]}" for name in sorted(found))
    text = f"{capability // 10}.{capability % 10} {recipe}: "
    if capability == BLACKWELL:
        text += f"{launched(recipe, capability, apart=True).total()} -> "
    text += f"{found.total()}; {names}"
    lines = textwrap.wrap(text.replace(" ", "~").replace(",~", ", ").replace(";~", "; "), 90)
    return "\n    ".join(lines).replace("~", " ")


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("capability", KIB)
def test_bytes_of_a_linear(capability: int) -> None:
    """Within 2%: the Triton kernels of Inductor 2.15 move 1.6% more for nvfp4 on a Blackwell."""
    found = [bytes_of(recipe, capability) / 1024 for recipe in RECIPES]
    assert found == pytest.approx(list(KIB[capability]), rel=0.02)


class TestLaunchCounts(TestCase):
    @pytest.mark.usefixtures("fresh_compiler")
    def test_of_a_linear(self) -> None:
        gpus = (BLACKWELL, HOPPER)
        table = "\n".join(line(recipe, gpu) for gpu in gpus for recipe in RECIPES)
        self.assertExpectedInline(
            table,
            """\
10.0 quartet2: 17 -> 9; align_scales.cu 2, cublaslt 3, randint 1, rotate_quantize.cu 3
10.0 nvfp4: 18 -> 15; align_scales.cu 3, cublaslt 3, partial_max.cu 1, randint 2,
    rotate_quantize.cu 2, swizzle_scales.cu 1, transpose.cu 1, triton 2
10.0 tetrajet2: 17 -> 9; align_scales.cu 2, cublaslt 3, randint 1, rotate_quantize.cu 3
10.0 quartet: 14 -> 9; align_scales.cu 2, randint 1, rotate_quantize.cu 3, triton gemm 3
10.0 mxfp4: 10 -> 7; align_scales.cu 1, mm 1, randint 1, rotate_quantize.cu 2,
    triton gemm 2
10.0 mxfp4_2d: 13 -> 13; align_scales.cu 3, randint 1, rotate_quantize.cu 3,
    swizzle_scales.cu 1, transposable.cu 1, transpose.cu 1, triton gemm 3
9.0 quartet2: 11; align_scales.cu 1, dequantize.cu 2, finalize_dequantized.cu 1, mm 3,
    randint 1, rotate_quantize.cu 3
9.0 nvfp4: 17; align_scales.cu 1, dequantize.cu 4, finalize_dequantized.cu 1, mm 3,
    partial_max.cu 1, randint 2, rotate_quantize.cu 2, transpose.cu 1, triton 2
9.0 tetrajet2: 11; align_scales.cu 1, dequantize.cu 2, finalize_dequantized.cu 1, mm 3,
    randint 1, rotate_quantize.cu 3
9.0 quartet: 23; _scaled_mm 3, align_scales.cu 2, masked_unrotate.cu 2, randint 1,
    rotate_quantize.cu 3, to_e4m3.cu 12
9.0 mxfp4: 15; _scaled_mm 2, align_scales.cu 1, mm 1, randint 1, rotate_quantize.cu 2,
    to_e4m3.cu 8
9.0 mxfp4_2d: 24; _scaled_mm 3, align_scales.cu 3, randint 1, rotate_quantize.cu 3,
    to_e4m3.cu 12, transposable.cu 1, transpose.cu 1""",
        )


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "capability, recipe", [(103, "nvfp4"), (110, "quartet"), (120, "nvfp4"), (121, "quartet")]
)
def test_every_blackwell_launches_and_moves_the_same(capability, recipe) -> None:
    """With a Triton that serves it: for MXFP4, 3.8 on 12.1 and 3.7 on 11.0."""
    assert launched(recipe, capability) == launched(recipe, BLACKWELL)
    assert bytes_of(recipe, capability) == bytes_of(recipe, BLACKWELL)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("recipe", ["quartet2", "nvfp4", "quartet", "mxfp4_2d"])
def test_a_bias_costs_no_launch(recipe) -> None:
    for capability in (HOPPER, BLACKWELL):
        found = (launched(recipe, capability, bias=bias).total() for bias in (False, True))
        assert len({*found}) == 1
        assert counted(recipe, capability, bias=True) == counted(recipe, capability)


@pytest.mark.usefixtures("fresh_compiler")
def test_the_cost_model_counts_what_is_generated() -> None:
    for recipe, capability in product((*RECIPES, "fp8", "quartet2_fp8"), (HOPPER, BLACKWELL)):
        found = launched(recipe, capability)
        seeds = found["randint"]  # once a graph, however many linears it has
        assert counted(recipe, capability) == found.total() - seeds, found


def counted(recipe: str, capability: int, bias: bool = False) -> int:
    """The launches of the cost model's steps."""
    layer = Layer(ROWS, OUTER, INNER, bias=bias, x_fuses=False, capability=capability // 10)
    return sum(step.launches for step in recipe_steps(resolve(recipe), layer, GEMMS))
