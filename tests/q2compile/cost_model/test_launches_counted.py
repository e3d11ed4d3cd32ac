# SPDX-License-Identifier: Apache-2.0
"""The launches that the cost model counts, against those of the code that is generated: a linear
of each recipe, as on an H200 and as on a Blackwell."""

from itertools import product

import pytest

from q2compile.cost_model.layer import Layer
from q2compile.cost_model.prices import recipe_steps
from q2compile.recipes.recipe import GEMMS
from q2compile.recipes.resolve import resolve
from tests.support.launch_counts import BLACKWELL, HOPPER, INNER, OUTER, ROWS, launched

pytestmark = pytest.mark.usefixtures("fresh_compiler")
RECIPES = "quartet2", "nvfp4", "quartet", "tetrajet2", "mxfp4", "mxfp4_2d", "fp8", "quartet2_fp8"
BIASED = (("quartet2", True), ("nvfp4", True), ("mxfp4_2d", True))


def test_the_model_counts_what_is_generated() -> None:
    for (recipe, bias), capability in product(
        [*((recipe, False) for recipe in RECIPES), *BIASED], [HOPPER, BLACKWELL]
    ):
        found = launched(recipe, capability, bias=bias)
        seeds = found["randint"]  # once a graph, however many linears it has
        layer = Layer(ROWS, OUTER, INNER, bias=bias, x_fuses=False, capability=capability // 10)
        counted = sum(step.launches for step in recipe_steps(resolve(recipe), layer, GEMMS))
        assert counted == found.total() - seeds, found
