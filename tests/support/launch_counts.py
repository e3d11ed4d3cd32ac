# SPDX-License-Identifier: Apache-2.0
"""Count the kernels that a linear launches and the bytes that they read and write, in code that is
generated for GPUs that are not there (emulation/inductor.py). Kernels are those of each call site
and the calls in Inductor's code; bytes are Inductor's own count of each node's buffers."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch._inductor.graph import GraphLowering

from q2compile.lowering.inductor_kernels import rows
from q2compile.runtime_kernels.cuda.call_site import CallSite
from q2compile.runtime_kernels.cuda.gemm import triton_fp4
from q2compile.runtime_kernels.cuda.jit.launch import Launch
from q2compile.runtime_kernels.numerics.schemes import SWIZZLED, get_scheme
from tests.support.emulation.inductor import INDUCTOR_OPTIONS, emulate, serve_as_on
from tests.support.emulation.on_cpu import launches_on_cpu

HOPPER, BLACKWELL = 90, 100
# A linear of 256 x 512 on 512 rows.
ROWS, INNER, OUTER = 512, 256, 512
_GEMM = re.compile(r"= torch\.ops\.q2\.gemm\.default\((.*), '(\S+)', '(\S+)', torch")
_UNROTATED = "torch.ops.q2.gemm_masked_unrotate.default("
_OTHERS = re.compile(r"\b(triton)_\w+\.run\(|\bextern_kernels\.(\w+)\(|\baten\.(randint|mm)\.\w+\(")


def launched(recipe: str, capability: int, bias: bool = False, apart: bool = False) -> Counter[str]:
    """Kernels of a forward and backward by the name of their file, or of what else launches them.

    apart: with every quantizer launched by itself, and the products of global scales ahead of the
    GEMMs (without the pass group_launches).
    """
    return _generated(recipe, capability, bias, apart)[0]


def bytes_of(recipe: str, capability: int) -> int:
    """Bytes that the kernels of a forward and backward read and write, by Inductor's count: each
    buffer once for each kernel or call. The workspace inside a call is not counted."""
    return _generated(recipe, capability, False, False)[1]


@cache
def _generated(recipe: str, capability: int, bias: bool, apart: bool) -> tuple[Counter[str], int]:
    found: Counter[str] = Counter()
    moved: list[int] = []
    codegen = GraphLowering.codegen

    def counted(graph):
        made = codegen(graph)
        moved.append(graph.count_bytes()[0])
        return made

    def bind(launch, index, grid, values, slots):
        return lambda stream, addresses: found.update([launch.variant.file])

    enqueue = CallSite.enqueue
    with (
        pytest.MonkeyPatch.context() as patch,
        inductor_config.patch(INDUCTOR_OPTIONS),
        torch.library._scoped_library("aten", "IMPL") as library,
    ):
        sources = emulate(patch, capability)
        serve_as_on(patch, capability)
        patch.setattr(rows, "why_no_conversion", lambda device: None)
        patch.setattr(CallSite, "enqueue", enqueue)
        launches_on_cpu(patch, "sm_90a" if capability == HOPPER else "sm_100a")
        patch.setattr(Launch, "bind", bind)
        patch.setattr(GraphLowering, "codegen", counted)
        patch.setattr(triton_fp4, "triton_version", lambda: (3, 8))  # serves every Blackwell
        torch._dynamo.reset()
        library.impl("mm.dtype", lambda a, b, dtype: torch.zeros(len(a), b.shape[1]), "CPU")
        options: dict[str, Any] = {"recipe": recipe}
        if apart:
            options["disable_passes"] = ["group_launches"]
        layer = nn.Linear(INNER, OUTER, bias=bias, dtype=torch.bfloat16)
        x = torch.zeros(ROWS, INNER, dtype=torch.bfloat16, requires_grad=True)
        y = torch.compile(layer, backend="quartet2", options=options)(x)
        y.backward(torch.zeros_like(y))
    assert len(sources) == 2
    for source in sources:
        body = source[source.index("def call(") :]
        found.update("".join(names) for names in _OTHERS.findall(body))
        found.update(["triton gemm"] * body.count(f"= {_UNROTATED}"))
        for args, *schemes in _GEMM.findall(body):
            found.update(_of_gemm(args, schemes))
    return found, sum(moved)


def _of_gemm(args: str, schemes: list[str]) -> list[str]:
    """The launches of an op by cuBLASLt or Triton (cuda/gemm): the GEMM, the swizzling of plain
    scales, and for cuBLASLt the product of the global scales if no quantizer computes it."""
    swizzled = ["swizzle_scales.cu" for scheme in schemes if not scheme.endswith(SWIZZLED)]
    if get_scheme(schemes[0]).format == "mxfp4":
        return ["triton gemm", *swizzled]
    is_made = args.split(", ")[-2] == "None"  # ahead of the bias
    return ["cublaslt", *swizzled, *["product"] * (not is_made)]
