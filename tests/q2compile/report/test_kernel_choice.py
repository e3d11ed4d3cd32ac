# SPDX-License-Identifier: Apache-2.0
"""The dry run that finds kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from q2compile.config import Config
from q2compile.recipes.published import RECIPES
from q2compile.recipes.recipe import GEMMS
from q2compile.recipes.resolve import resolve
from q2compile.report.kernel_choice import kernels_used, set_kernels
from q2compile.report.row import Row, cells
from tests.support.emulation.inductor import serve_as_on


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    kernels_used.cache_clear()
    yield
    kernels_used.cache_clear()


@pytest.mark.parametrize("shape", [(64, 32, 48), (2, 64, 32, 48)])
def test_a_checkpoint_around_the_compilation_does_not_see_it(shape) -> None:
    """The hooks of an eager checkpoint count the tensors that its region saves, and recompute the
    region if one is read. While a layer inside is compiled, they must not see its fake tensors."""

    def hook(x):
        raise AssertionError("a tensor of the dry run was given to the caller's hooks")

    recipe = resolve("quartet2")
    gemms = tuple(str(gemm) for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad))
    with saved_tensors_hooks(hook, hook):
        used, calls = kernels_used(gemms, shape, torch.bfloat16, "cpu", False)
    product = "grouped_gemm: reference" if len(shape) > 3 else "gemm: cpp"
    assert used["wgrad"].endswith(f", {product}") and calls["fprop"]


ALL = "fprop, dgrad, wgrad"


@pytest.mark.parametrize(
    "recipe, shape, capability, rounded",
    [
        ("mxfp4_2d", (64, 32, 64), 90, ALL),
        ("quartet", (64, 32, 64), 89, ALL),
        ("mxfp4", (64, 32, 64), 90, "dgrad, wgrad"),
        ("mxfp4_2d", (64, 32, 64), 80, ""),  # emulated in BF16, and so are groups
        ("mxfp4_2d", (64, 32, 64), 100, ""),
        ("mxfp4_2d", (2, 64, 32, 64), 90, ""),
        ("fp8", (64, 32, 64), 90, ""),
        ("nvfp4", (64, 32, 64), 90, ""),
    ],
)
def test_a_row_says_where_exactness_is_lost(
    recipe, shape, capability, rounded, monkeypatch
) -> None:
    """GEMMs that multiply MXFP4 operands as e4m3 elements, layer by layer."""
    gemms = resolve(recipe)
    texts = {name: str(getattr(gemms, name) or "bf16") for name in ("fprop", "dgrad", "wgrad")}
    row = Row("layer", shape, taken=True, dtype="bfloat16", device="cpu", **texts)
    serve_as_on(monkeypatch, capability)
    set_kernels(row, Config.from_options({"recipe": recipe, "inner": "eager"}))
    words = "in e4m3, which rounds blocks over 2^14 below the largest of their operand"
    assert row.rounded == (f"{rounded} {words}" if rounded else "")
    assert cells(row)["why"] == row.rounded == row.to_json()["rounded"]


def test_an_fp8_layer_of_experts_multiplies_codes_in_every_gemm(monkeypatch) -> None:
    gemms = tuple(str(getattr(resolve("fp8"), name)) for name in ("fprop", "dgrad", "wgrad"))
    serve_as_on(monkeypatch, 90)
    used, _ = kernels_used(gemms, (4, 64, 32, 64), torch.bfloat16, "cpu", False)
    assert all("grouped_gemm: scaled_grouped_mm" in ops for ops in used.values())


@pytest.mark.parametrize("capability", [90, 100])
def test_no_quantizer_of_groups_runs_as_its_reference(capability, monkeypatch) -> None:
    """The reference gathers the rows of groups by index. With it, a step of fp8 with experts took
    3.7 times as long as in BF16."""
    serve_as_on(monkeypatch, capability)
    for name in sorted(set(RECIPES) - {"bf16"}):
        gemms = tuple(str(getattr(resolve(name), gemm) or "bf16") for gemm in GEMMS)
        used, _ = kernels_used(gemms, (4, 64, 32, 64), torch.bfloat16, "cpu", False)
        slow = ("grouped: reference", "transpose: reference", "requantize: reference")
        assert not any(words in ops for ops in used.values() for words in slow)
