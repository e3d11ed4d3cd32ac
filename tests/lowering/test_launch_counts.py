"""How many kernels a linear launches, forward and backward, by recipe: counted in generated code
for GPUs that are not there (emulation/inductor.py), where each Site says which it enqueues.

`apart` is the same code with every quantiser launched by itself, and the products of global scales
ahead of the GEMMs (lowering/together.py left out). nvfp4's was 30 on a Blackwell while
q2::transpose was eight kernels of torch's there, and swizzle_scales.cu swizzled what came out.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from functools import cache

import pytest
import torch
import torch._inductor.config as inductor_config
from expecttest import TestCase
from torch import nn

from q2compile.lowering import together
from q2compile.runtime_kernels.cuda.jit.launch import Launch
from q2compile.runtime_kernels.cuda.site import Site, Together
from q2compile.runtime_kernels.numerics.schemes import SWIZZLED, get_scheme
from tests.support.emulation.inductor import INDUCTOR_OPTIONS, emulate, serve_as_on
from tests.support.emulation.on_cpu import launches_on_cpu

RECIPES = ("quartet2", "nvfp4", "tetrajet2", "quartet", "mxfp4")
HOPPER, BLACKWELL = 90, 100
# Of a linear of 256 x 512, 512 rows.
ROWS, INNER, OUTER = 512, 256, 512
_GEMM = re.compile(r"= torch\.ops\.q2\.gemm\.default\((.*), '(\S+)', '(\S+)', torch")
_OTHERS = re.compile(r"\b(triton)_\w+\.run\(|\bextern_kernels\.(\w+)\(|\baten\.(randint|mm)\.\w+\(")


@cache
def launched(recipe: str, capability: int, bias: bool = False, apart: bool = False) -> Counter[str]:
    """Kernels by the name of their file, or of what else launches them."""
    found: Counter[str] = Counter()

    def bind(launch, index, grid, values, slots):
        return lambda stream, addresses: found.update([launch.variant.file])

    calls = {site: site._call for site in (Site, Together)}
    with (
        pytest.MonkeyPatch.context() as patch,
        inductor_config.patch(INDUCTOR_OPTIONS),
        torch.library._scoped_library("aten", "IMPL") as library,
    ):
        sources = emulate(patch, capability)
        serve_as_on(patch, capability)
        for site, call in calls.items():
            patch.setattr(site, "_call", call)
        launches_on_cpu(patch, "sm_90a" if capability == HOPPER else "sm_100a")
        patch.setattr(Launch, "bind", bind)
        if apart:
            patch.setattr(together, "waits", lambda node: False)
            patch.setattr(together, "multiplied_by", lambda scale: [])
        torch._dynamo.reset()
        library.impl("mm.dtype", lambda a, b, dtype: torch.zeros(len(a), b.shape[1]), "CPU")
        layer = nn.Linear(INNER, OUTER, bias=bias, dtype=torch.bfloat16)
        x = torch.zeros(ROWS, INNER, dtype=torch.bfloat16, requires_grad=True)
        y = torch.compile(layer, backend="quartet2", options={"recipe": recipe})(x)
        y.backward(torch.zeros_like(y))
    assert len(sources) == 2
    for source in sources:
        body = source[source.index("def call(") :]
        found.update("".join(names) for names in _OTHERS.findall(body))
        for args, *schemes in _GEMM.findall(body):
            found.update(_of_gemm(args, schemes))
    return found


def _of_gemm(args: str, schemes: list[str]) -> list[str]:
    """What an op by cuBLASLt or Triton launches (cuda/gemm): the GEMM, plain scales swizzled, and
    for cuBLASLt the product of the global scales, where it is not made."""
    swizzled = ["swizzle_scales.cu" for scheme in schemes if not scheme.endswith(SWIZZLED)]
    if get_scheme(schemes[0]).format == "mxfp4":
        return ["triton gemm", *swizzled]
    is_made = args.split(", ")[-2] == "None"  # ahead of the bias
    return ["cublaslt", *swizzled, *["product"] * (not is_made)]


def line(recipe: str, capability: int) -> str:
    found = launched(recipe, capability)
    names = ", ".join(f"{name} {found[name]}" for name in sorted(found))
    before = launched(recipe, capability, apart=True).total()
    biased = launched(recipe, capability, bias=True).total()
    title = f"{capability // 10}.{capability % 10} {recipe}: "
    text = f"{title}{before} -> {found.total()}, {biased} with a bias; {names}"
    lines = textwrap.wrap(text.replace(" ", "~").replace(",~", ", ").replace(";~", "; "), 90)
    return "\n    ".join(lines).replace("~", " ")


class TestLaunchCounts(TestCase):
    @pytest.mark.usefixtures("fresh_compiler")
    def test_of_a_linear(self) -> None:
        gpus = (BLACKWELL, HOPPER)
        table = "\n".join(line(recipe, gpu) for gpu in gpus for recipe in RECIPES)
        self.assertExpectedInline(
            table,
            """\
10.0 quartet2: 17 -> 12, 13 with a bias; align_scales.cu 3, cublaslt 3, randint 1,
    rotate_quantize.cu 5
10.0 nvfp4: 22 -> 19, 20 with a bias; align_scales.cu 5, cublaslt 3, partial_max.cu 1,
    randint 2, rotate_quantize.cu 4, swizzle_scales.cu 1, transpose.cu 1, triton 2
10.0 tetrajet2: 17 -> 12, 13 with a bias; align_scales.cu 3, cublaslt 3, randint 1,
    rotate_quantize.cu 5
10.0 quartet: 16 -> 14, 15 with a bias; align_scales.cu 3, masked_unrotate.cu 2,
    randint 1, rotate_quantize.cu 5, triton gemm 3
10.0 mxfp4: 10 -> 9, 10 with a bias; align_scales.cu 2, mm 1, randint 1,
    rotate_quantize.cu 3, triton gemm 2
9.0 quartet2: 16 -> 14, 15 with a bias; align_scales.cu 1, dequantize.cu 2, mm 3,
    randint 1, rotate_quantize.cu 5, settle_widened.cu 2
9.0 nvfp4: 21 -> 20, 21 with a bias; align_scales.cu 2, dequantize.cu 4, mm 3,
    partial_max.cu 1, randint 2, rotate_quantize.cu 4, settle_widened.cu 2, triton 2
9.0 tetrajet2: 16 -> 14, 15 with a bias; align_scales.cu 1, dequantize.cu 2, mm 3,
    randint 1, rotate_quantize.cu 5, settle_widened.cu 2
9.0 quartet: 20 -> 18, 19 with a bias; align_scales.cu 3, dequantize.cu 2,
    masked_unrotate.cu 2, mm 3, randint 1, rotate_quantize.cu 5, triton 2
9.0 mxfp4: 12 -> 11, 12 with a bias; align_scales.cu 2, mm 3, randint 1,
    rotate_quantize.cu 3, triton 2""",
        )


@pytest.mark.parametrize("recipe, most", [("quartet2", 14), ("nvfp4", 20)])
def test_on_a_blackwell_there_are_few(recipe, most) -> None:
    assert launched(recipe, BLACKWELL).total() <= most
