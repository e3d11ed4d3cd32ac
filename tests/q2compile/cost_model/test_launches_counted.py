"""The launches that the cost model counts, against those of the code that is generated: a linear
of each recipe, as on an H200 and as on a Blackwell, made without either (emulation/inductor.py)."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn

from q2compile.cost_model.steps import Layer, recipe_steps
from q2compile.recipes.recipe import GEMMS
from q2compile.recipes.resolve import resolve
from q2compile.runtime_kernels.cuda.calls import tensors_of
from q2compile.runtime_kernels.cuda.gemm import triton_fp4
from q2compile.runtime_kernels.cuda.quantize import plan, split_scales
from q2compile.runtime_kernels.cuda.site import Site
from q2compile.runtime_kernels.registry import serving
from tests.support.emulation.inductor import INDUCTOR_OPTIONS, emulate, serve_as_on

pytestmark = pytest.mark.usefixtures("fresh_compiler")
SIZE = 256
# Here nothing follows that fuses with the scaling and rounding of mxfp4's fp32 sums, of dx and dw.
ALONE = {("mxfp4", 90): 2}
_LINE = re.compile(
    r"= torch\.ops\.(?P<op>q2\.\w+|aten\.mm)[.\w]*\((?P<args>.*)|(?P<triton>\btriton_\w+)\.run\("
    r"|\bextern_kernels\.(?P<torch>\w+)\("
)


def launches(monkeypatch: pytest.MonkeyPatch, recipe: str, capability: int) -> dict[str, int]:
    """By what: those of a forward and backward in generated code."""
    found: dict[str, int] = {}

    def count(what: str, number: int) -> None:
        found[what] = found.get(what, 0) + number

    def call(site: Site, given) -> None:
        """What a Site does, but for the launches themselves."""
        args, bases = list(site._args), iter(given)
        for i in site._open:
            base = next(bases)
            args[i] = args[i].of(base) if args[i] is not ... else base
        kernel = serving(site._op, args)
        assert tensors_of(args)
        count(site._op, len(kernel.launching.call(*kernel.launching.in_form(args)).steps))

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype), "CPU")
    with contextlib.ExitStack() as stack:
        stack.callback(library._destroy)
        stack.enter_context(inductor_config.patch(INDUCTOR_OPTIONS))
        sources = emulate(monkeypatch, capability)
        serve_as_on(monkeypatch, capability)
        monkeypatch.setattr(Site, "_call", call)
        monkeypatch.setattr(triton_fp4, "triton_version", lambda: (3, 8))
        monkeypatch.setattr(plan, "_fixed_seed", lambda index: torch.zeros((), dtype=torch.int64))
        for module in (plan, split_scales):
            monkeypatch.setattr(module, "multiprocessors", lambda index: 132)
        linear = nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16)
        x = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, requires_grad=True)
        y = torch.compile(linear, backend="quartet2", options={"recipe": recipe})(x)
        y.backward(torch.ones_like(y))
    for source in sources:
        body = source[source.index("def call(") :]
        for line in body.splitlines():
            match = _LINE.search(line)
            if match is None or line.lstrip().startswith("#"):
                continue
            if match["op"] == "q2.gemm":
                # cuBLASLt's: the product of both global scales and itself, and ahead of it
                # swizzle_scales.cu for plain scales. Triton's: itself.
                schemes = re.findall(r"'(\w+(?:@32x4x4)?)'", match["args"])
                mx = schemes[0].startswith("mxfp4")
                plain = sum(not scheme.endswith("@32x4x4") for scheme in schemes)
                count("gemm", 1 + (not mx) + plain)
            elif match["op"] == "q2.transpose":
                count("transpose", 8)
            else:  # aten.randint is one a graph, however many linears it has
                count(match["op"] or match["torch"] or "triton", 1)
    return found


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("recipe", ["quartet2", "nvfp4", "quartet", "tetrajet2", "mxfp4"])
def test_the_model_counts_what_is_generated(monkeypatch, recipe, capability) -> None:
    found = launches(monkeypatch, recipe, capability)
    layer = Layer(SIZE, SIZE, SIZE, x_fuses=False, emulated=capability == 90)
    counted = sum(step.launches for step in recipe_steps(resolve(recipe), layer, GEMMS))
    assert counted + ALONE.get((recipe, capability), 0) == sum(found.values()), found
