# SPDX-License-Identifier: Apache-2.0
"""Self-checks that begin before a graph is traced: those that its compilation will need."""

from __future__ import annotations

import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn

from q2compile import backend
from q2compile.linear import checks_ahead
from q2compile.linear.checks_ahead import begin_checks, checked_calls
from q2compile.recipes.published import RECIPES
from q2compile.recipes.resolve import resolve
from q2compile.runtime_kernels import kernel_states
from q2compile.runtime_kernels.cpu import build
from q2compile.runtime_kernels.cuda import checked_cases, checks, selfcheck
from q2compile.runtime_kernels.cuda.checked_cases import CheckKey
from q2compile.runtime_kernels.cuda.gemm.operands import operand_forms
from q2compile.runtime_kernels.cuda.jit import launch, nvrtc
from q2compile.runtime_kernels.cuda.quantize import fused, quantizers
from q2compile.runtime_kernels.kernel_states import assumed_capability
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.requantize import rounds_by_scales
from q2compile.runtime_kernels.ops.table import QuantizerVariant
from q2compile.runtime_kernels.registry import CPP, CUDA
from tests.support.emulation.inductor import INDUCTOR_OPTIONS, emulate, serve_as_on

QUANTIZING = sorted(name for name in RECIPES if name != "bf16")
CASES = [(name, capability) for capability in (100, 90) for name in QUANTIZING]


def asked(monkeypatch, recipe: str, capability: int) -> set[tuple[str, str]]:
    """The quantizers that passes and lowerings ask about, with the schemes that they ask for."""
    emulate(monkeypatch, capability)
    serve_as_on(monkeypatch, capability)
    found = set()

    def rejection(op, name, index, scheme, what=None):
        if name == CUDA and not get_scheme(scheme).is_tensorwise and not assumed_capability():
            found.add((what if isinstance(what, QuantizerVariant | CheckKey) else op, scheme))

    for name, module in list(sys.modules.items()):
        theirs = name.startswith("q2compile.runtime_kernels.cuda.") and "fused" not in name
        if theirs and module is not selfcheck and hasattr(module, "rejection"):
            monkeypatch.setattr(module, "rejection", rejection)
    layers = [nn.Linear(256, 256, bias=False) for _ in range(2)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1]).bfloat16()
    x = torch.randn(256, 256, dtype=torch.bfloat16, requires_grad=True)
    torch._dynamo.reset()
    with inductor_config.patch({**INDUCTOR_OPTIONS, "force_disable_caches": True}):
        compiled = torch.compile(model, backend="quartet2", options={"recipe": recipe})
        compiled(x).sum().backward()
    return found


@pytest.mark.parametrize(("recipe", "capability"), CASES)
def test_those_are_begun_that_are_asked_for(monkeypatch, recipe, capability):
    """Checks that this model does not need: split_scales in nvfp4, since two ops read x and only
    Inductor kernels use it; large weights, which are only dequantized; codes that are not saved."""
    foreseen = set(checked_calls(resolve(recipe), operand_forms(divmod(capability, 10))))
    found = asked(monkeypatch, recipe, capability)
    assert found <= foreseen
    fprop, dgrad = resolve(recipe).fprop, resolve(recipe).dgrad
    weight = get_scheme(fprop.b.scheme) if fprop else None
    # A large weight in square blocks, in fp8 or in e4m3 is not dequantized.
    dequantized = capability == 90 and weight and weight.format == "nvfp4"
    dequantized = dequantized and not weight.is_transposable
    large = {checked_cases.ROWWISE} if dequantized else set()
    if weight and dgrad.b.requantized and rounds_by_scales(weight):
        large |= {checked_cases.REQUANTIZED._replace(by_scales=True)}
    assert {op for op, _ in foreseen - found} == ({"split_scales"} if recipe == "nvfp4" else large)


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """The kernels that NVRTC is given to compile for an H200 that is not there."""
    found = []
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path))
    properties = SimpleNamespace(name="H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(nvrtc, "begin", lambda variant, architecture: found.append(variant))
    monkeypatch.setattr(checks, "begin", lambda request, after=(): None)
    for module in (checks_ahead, selfcheck):
        monkeypatch.setattr(module, "unsupported", lambda index: None)
    for module in (selfcheck, fused, launch):
        monkeypatch.setattr(module, "architecture", lambda index: "sm_90a")
    for module in (quantizers, fused):
        monkeypatch.setattr(module, "shared_memory", lambda index: 228 * 1024)
    return found


def begin(fuses=False):
    begin_checks([resolve("quartet2").texts()] * 3, torch.device("cuda", 0), fuses)


def test_equal_layers_need_one_check(begun):
    begin()
    files = Counter(variant.file for variant in begun)
    assert files == {
        # x or w, a large w, dy rowwise and columnwise, codes, and w by its scales: codes and
        # dequantized
        "rotate_quantize.cu": 6,
        "align_scales.cu": 3,  # those of the kernels, and of Inductor's
        "finalize_dequantized.cu": 4,
        "partial_max.cu": 1,
        "dequantize.cu": 6,  # of three dtypes, with and without padding
    }


def test_a_fused_quantizer_has_a_check_with_one_operand_and_with_two(begun):
    begin()
    plain = len(begun)
    begin(fuses=True)
    files = [variant.file for variant in begun[2 * plain :]]
    assert files.count("rotate_quantize.cu") == 2
    assert all(variant.headers for variant in begun[2 * plain :] if "rotate" in variant.file)


def test_what_is_known_to_agree_is_not_begun(begun, monkeypatch):
    monkeypatch.setattr(checks, "is_known", lambda request: True)
    begin(fuses=True)
    assert begun == []


def test_a_graph_begins_with_them_on_a_gpu_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(backend, "begin_checks", lambda *args: asked.append(args))
    torch.compile(nn.Linear(64, 64), backend="quartet2", options={"inner": "eager"})(
        torch.randn(4, 64)
    )
    assert asked == []


@pytest.mark.parametrize("disabled", [False, True])
def test_a_graph_on_a_cpu_begins_the_library_first(fresh_compiler, monkeypatch, disabled):
    order = []

    def noted(name, function):
        return lambda *args: order.append(name) or function(*args)

    monkeypatch.setattr(build, "begin", noted("library", build.begin))
    monkeypatch.setattr(backend, "compile_graph", noted("graph", backend.compile_graph))
    if disabled:
        kernel_states.disable([CPP], "a test")  # conftest enables it again
    torch.compile(nn.Linear(64, 64), backend="quartet2", options={"inner": "eager"})(
        torch.randn(4, 64)
    )
    assert order[:2] == (["graph"] if disabled else ["library", "graph"])
