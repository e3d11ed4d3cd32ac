# SPDX-License-Identifier: Apache-2.0
"""The subcommand `q2compile recipes`: every name that a recipe or a policy may have in it."""

from __future__ import annotations

from argparse import Namespace

from q2compile.recipes.published import PAPERS, RECIPES
from q2compile.recipes.recipe import GEMMS
from q2compile.recipes.resolve import resolve
from q2compile.report.printable import aligned
from q2compile.runtime_kernels.numerics.schemes import E2M1_MAX, SCHEMES, Scheme
from q2compile.runtime_kernels.numerics.transforms import TRANSFORMS, Transform

_ROUNDING = {
    "rtn": "to nearest",
    "sr": "stochastic",
    "ms_eden": "MS-EDEN, stochastic",
    "quest": "QuEST, to nearest",
}
_GLOBAL_SCALE = {
    "exact": "global scale from amax",
    "pow2": "global scale a power of two",
    "pow2_of_amax": "global scale a power of two from amax",
    "none": "no global scale",
}
_SIGNS = {"none": "no signs", "seed": "signs drawn in each step", "fixed": "one sign vector"}


def run(options: Namespace) -> int:
    """Prints recipes, schemes and transforms. Returns the exit status."""
    print("recipes: for the option recipe, and for a pattern of a policy")
    for name in RECIPES:
        print(f"\n  {name:{max(map(len, RECIPES))}}  {PAPERS[name]}")
        texts = zip(GEMMS, resolve(name, options.global_scale).texts(), strict=True)
        for gemm, text in texts:
            print(f"    {gemm}  {text}")
    print("\nschemes: how an operand is rounded, for recipes of your own and q2compile.quantize")
    print("  with global_scale='pow2', the scheme whose name ends in _pow2 is used\n")
    print(*(f"  {line}" for line in aligned([*map(_scheme, SCHEMES.values())])), sep="\n")
    print("\ntransforms: how an operand is rotated before it is rounded\n")
    print(*(f"  {line}" for line in aligned([*map(_transform, TRANSFORMS.values())])), sep="\n")
    return 0


def _scheme(scheme: Scheme) -> list[str]:
    rounding = _ROUNDING[scheme.rounding]
    if scheme.steps:
        rounding += f", the best of {len(scheme.steps)} scales"
    elif scheme.selects:
        rounding += ", 4/6"
    if scheme.rceil:
        rounding += ", scales rounded up"
    elif scheme.shrink != 1:
        rounding += f" of {scheme.shrink} x"
    elif scheme.stochastic and scheme.vmax == E2M1_MAX:
        rounding += ", may clip"
    block = "x".join(map(str, scheme.block))
    blocks = "one scale" if scheme.is_tensorwise else f"blocks {block}"
    return [scheme.name, blocks, _GLOBAL_SCALE[scheme.global_scale], rounding]


def _transform(transform: Transform) -> list[str]:
    if transform.size == 1:
        return [transform.name, "not rotated"]
    return [transform.name, f"Hadamard, chunks of {transform.size}, {_SIGNS[transform.signs]}"]
