# SPDX-License-Identifier: Apache-2.0
"""Every quantizer that training a linear on a Blackwell launches, run as the PTX that NVRTC makes
for that GPU (tests/support/ptx): codes, scales, global scales, masks, dbias and products of global
scales equal the reference's, bit by bit.

The launches are those of the generated code of a forward and backward pass, grouped as they are
there, with the target, the shared memory and the stages of the GPU. One thread block loops over
several tiles, the last of which are ragged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn

from q2compile.runtime_kernels.cuda.call_site import CallSite, SiteCall
from q2compile.runtime_kernels.cuda.jit import limits, nvrtc
from q2compile.runtime_kernels.cuda.quantize import plan
from q2compile.runtime_kernels.ops.table import SPLIT_SCALES
from q2compile.runtime_kernels.registry import REFERENCE, parameters, select
from tests.support import ptx
from tests.support import quantizer_calls as calls
from tests.support.emulation.fused import run_fused
from tests.support.emulation.inductor import INDUCTOR_OPTIONS, emulate, serve_as_on
from tests.support.emulation.on_cpu import assert_same_bits, matrix, pretend_device
from tests.support.prologues import PROLOGUES
from tests.support.quantizer_calls import quantized_both

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings", exc_type=ImportError)
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    # A kernel that fails is replaced by the reference, with this warning.
    pytest.mark.filterwarnings("error::q2compile.runtime_kernels.registry.KernelWarning"),
]
ROWS, INNER, OUTER = 144, 96, 160
EDEN, SEEDS = "nvfp4_ms_eden_pow2@32x4x4", torch.tensor([11, 12])
ENQUEUE = CallSite.enqueue


class Checked:
    """Runs launches of generated code, and compares what they write with the reference.

    sources: of the graphs that were compiled.
    schemes: those of all calls that were compared.
    """

    def __init__(self, sources: list[str]) -> None:
        self.sources = sources
        self.schemes: set[str] = set()

    def site(self, site: CallSite, given: Sequence[Any]) -> None:
        places, others = zip(site.calls, site.beginnings, strict=False), site.beginnings[-1]
        want = [self._reference(call, given[at:]) for call, at in places]
        ENQUEUE(site, given)
        made = [
            result
            for call, results in zip(site.calls, want, strict=True)
            for result, wanted in zip(results, call.wanted, strict=True)
            if wanted
        ]
        for (i, own), other in site._products:
            factor = given[others + other] if isinstance(other, int) else want[other[0]][other[1]]
            made.append(want[i][own] * factor)
        self._compare(given[others + site._others :], made)

    def _reference(self, site: SiteCall, given: Sequence[Any]) -> Sequence[torch.Tensor]:
        args = site.arguments(given)
        names = dict(zip((name for name, _ in parameters(site.op)), args, strict=True))
        # The outputs of Triton kernels, which are only stubs here.
        if site.op == SPLIT_SCALES:
            args[0].copy_(torch.linspace(0.5, 1.5, args[0].numel()).view(args[0].shape))
        if names.get("amax") is not None:
            names["amax"].copy_(args[0].abs().amax())
        if names.get("offs") is not None:
            names["offs"].fill_(ROWS)
            names["padded_offs"].copy_(torch.ops.q2.padded_ends(names["offs"]))
        self.schemes.update(arg for arg in args if isinstance(arg, str))
        results = select(site.op, args, REFERENCE)(*args)
        return [results] if isinstance(results, torch.Tensor) else results

    @staticmethod
    def _compare(buffers: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
        shaped = [b.view(w.shape) for b, w in zip(buffers, want, strict=True)]
        assert_same_bits(shaped, want)


@pytest.fixture
def checked(monkeypatch, capability) -> Iterator[Checked]:
    """Generated code is that for a GPU of this compute capability, and its launches are checked."""
    architecture = limits.targets(capability, nvrtc.version())[0].name
    check = Checked(emulate(monkeypatch, 10 * capability[0] + capability[1]))
    serve_as_on(monkeypatch, 10 * capability[0] + capability[1])
    monkeypatch.setattr(CallSite, "enqueue", lambda site, given: check.site(site, given))
    ptx.serve(monkeypatch, architecture)
    pretend_device(monkeypatch, 1024 * limits.SHARED_KIB.get(capability, 100), multiprocessors=1)
    shape = plan.thread_shape
    monkeypatch.setattr(plan, "thread_shape", lambda spec, rows: (shape(spec, rows)[0], 1))
    with (
        inductor_config.patch(INDUCTOR_OPTIONS),
        torch.library._scoped_library("aten", "IMPL") as library,
    ):
        library.impl("mm.dtype", lambda a, b, dtype: torch.zeros(len(a), b.shape[1]), "CPU")
        yield check


def schemes_of_gemms(sources: list[str]) -> set[str]:
    """The schemes in the calls of q2's GEMMs in generated code."""
    calls = re.findall(r"torch\.ops\.q2\.gemm\w*\.default\((.*)\)", "\n".join(sources))
    return {scheme for call in calls for scheme in re.findall(r"'((?:nv|mx)fp4_[\w@]+)'", call)}


BLACKWELL, GEFORCE = (10, 0), (12, 0)
# In test_ptx_kernels.py: 11.0, the quantizer that quartet2_search has beside those of quartet2, and
# nvfp4_sr_pow2 of tetrajet2.
RUNS = [(BLACKWELL, recipe, "pow2") for recipe in ("quartet2", "quartet", "mxfp4", "mxfp4_2d")]
RUNS += [(BLACKWELL, "nvfp4", "exact"), (BLACKWELL, "tetrajet2", "exact")]
RUNS += [(GEFORCE, "quartet2", "pow2")]


@pytest.mark.parametrize("capability, recipe, global_scale", RUNS)
def test_the_bits_are_the_reference_s(capability, recipe, global_scale, checked) -> None:
    torch._dynamo.reset()
    layer = nn.Linear(INNER, OUTER, dtype=torch.bfloat16)
    x = matrix(ROWS, INNER).requires_grad_()
    options = {"recipe": recipe, "policy": {"*": recipe}, "global_scale": global_scale}
    y = torch.compile(layer, backend="quartet2", options=options)(x)
    y.backward(matrix(ROWS, OUTER))
    wanted = schemes_of_gemms(checked.sources)
    assert wanted and wanted <= checked.schemes


FUSED = [("swiglu", 100), ("rmsnorm", 100), ("rope", 120)]


@pytest.mark.parametrize("name, capability", FUSED)
def test_quantizers_that_compute_their_operand(name, capability, monkeypatch) -> None:
    """Prologue fusion, where it is expected to pay. SwiGLU's exponentials and quotients are off by
    an ulp of fp32, which changes at most a bf16 in 2^10 (tests/lowering/test_fused_launches.py),
    and the codes of fewer."""
    function, operands_of, is_exact = PROLOGUES[name]
    operands, seeds, how = operands_of(), SEEDS, (EDEN, "rht128", 3)
    monkeypatch.setenv("Q2_TEST_PTX", "1")

    def quantized(seeds: torch.Tensor, *operands: torch.Tensor) -> list[torch.Tensor]:
        return quantized_both(function(*operands), seeds[0], seeds[1], *how)

    expected = calls.both(function(*operands), *seeds, *how).positional
    want = select("quantize", expected, REFERENCE)(*expected)
    done = run_fused(monkeypatch, quantized, seeds, *operands, always=False, capability=capability)
    assert len(done.calls) == 1
    if is_exact:
        assert_same_bits(done.results, want)
        return
    for got, exact in zip(done.results, want, strict=True):
        differing = got.reshape(-1).view(torch.uint8) != exact.reshape(-1).view(torch.uint8)
        assert got.shape == exact.shape and differing.float().mean() < 2.0**-10
