# SPDX-License-Identifier: Apache-2.0
"""The self-checks that a graph needs begin while it is compiled, and are awaited before its code is
returned. If one rejects a kernel, the graph is compiled again."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._inductor import compile_fx

from q2compile import backend
from q2compile.compiler.post_grad_passes import PostGradPasses
from q2compile.runtime_kernels import checks, kernel_states, selfcheck
from q2compile.runtime_kernels.cpu import build
from q2compile.runtime_kernels.cuda.call_site import CallSite
from q2compile.runtime_kernels.cuda.jit import launch, nvrtc
from q2compile.runtime_kernels.cuda.quantize import fused, rotate_quantize
from q2compile.runtime_kernels.kernel_states import KNOWN, DeviceLostError
from q2compile.runtime_kernels.ops.table import QUANTIZE, QuantizerCall
from q2compile.runtime_kernels.registry import CPP, KernelWarning
from q2compile.runtime_kernels.small_calls import form_of
from tests.support.checked_forms import REQUANTIZED, ROWWISE, arguments_of, form
from tests.support.faulty_checks import request, runs
from tests.support.new_process import forget_checks
from tests.support.warned import texts

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The folder in which checks leave marks."""
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path / "cache"))
    forget_checks()
    (tmp_path / "ran").mkdir()
    yield tmp_path / "ran"
    checks.CHECKER.end_child()


# ---- what is asked for, begins -------------------------------------------------------------------


def test_checks_run_while_a_graph_is_compiled(folder) -> None:
    """A question has an answer at once, although no check has ended; and it stays the same."""
    asked = [request(how, folder, name=how) for how in ("long", "wrong", "right")]
    with (
        pytest.warns(KernelWarning, match="'wrong' of q2::gemm on cpu is rejected") as said,
        checks.awaited_together() as rejected,
    ):
        for _ in range(2):
            assert [checks.rejection(each) for each in asked] == [None] * 3
        assert list(rejected.values()) == asked and "wrong" not in runs(folder)
        (folder.parent / "release").touch()
        checks.CHECKER.run(asked[1])
        assert KNOWN.checks[asked[1].check].differs and checks.rejection(asked[1]) is None
    assert list(rejected.values()) == [asked[1]] and len(texts(said, KernelWarning)) == 1
    assert runs(folder) == ["long", "right", "wrong"]
    with checks.awaited_together() as rejected:
        assert [checks.rejection(each) is None for each in asked] == [True, False, True]
    assert rejected == {} and len(runs(folder)) == 3


@pytest.mark.parametrize("how", ["wrong", "right"])
def test_an_error_of_a_compilation_may_be_a_rejected_kernels(how, folder) -> None:
    with (
        warnings.catch_warnings(),
        pytest.raises(ZeroDivisionError),
        checks.awaited_together() as rejected,
    ):
        warnings.simplefilter("ignore", KernelWarning)
        assert checks.rejection(request(how, folder)) is None
        1 / 0  # noqa: B018
    assert [each.check[3] for each in rejected.values()] == ["wrong"] * (how == "wrong")


def test_no_kernel_is_rejected_if_waiting_fails(monkeypatch, folder) -> None:
    def failing(request):
        raise DeviceLostError("cuda:0 failed")

    with pytest.raises(DeviceLostError), checks.awaited_together() as rejected:
        monkeypatch.setattr(checks, "begin", lambda request: None)
        monkeypatch.setattr(checks.CHECKER, "run", failing)
        assert checks.rejection(request("right", folder)) is None
    assert rejected == {}


@pytest.mark.parametrize("how", ["wrong", "wrong, not compiled", "right"])
def test_a_graph_whose_kernel_is_rejected_is_compiled_again(
    how, candidate, folder, monkeypatch
) -> None:
    """Also if the compilation fails, of which the kernel may be the cause. Inductor's caches, which
    have the code for that kernel by now, are asked by another key."""
    how, _, fails = how.partition(", ")
    run, kinds, passes, inner = PostGradPasses.run_passes, [], set(), compile_fx.compile_fx_inner

    def counted(self, graph, kind) -> None:
        kinds.append((kind, self.uuid()))
        passes.add(self)
        run(self, graph, kind)

    def failing(*args, **kwargs):
        code = inner(*args, **kwargs)
        if fails and len(kinds) == 1:
            raise RuntimeError("ptxas fatal: unknown target")
        return code

    monkeypatch.setattr(PostGradPasses, "run_passes", counted)
    monkeypatch.setattr(compile_fx, "compile_fx_inner", failing)
    calls = candidate(
        "gemm",
        ZeroDivisionError(),
        unsupported=lambda *args: checks.rejection(request(how, folder)),
    )
    # Sizes that no cache has seen.
    layer, x = nn.Linear(64, 96 if fails else 64), torch.randn(32, 64)
    if how == "wrong":
        with pytest.warns(KernelWarning, match="kernel 'broken' of q2::gemm on cpu is rejected"):
            torch.compile(layer, backend="quartet2")(x).sum().backward()
        names, keys = zip(*kinds, strict=True)
        assert names == ("forward", "forward", "backward") and calls == []
        assert keys[0] != keys[1] == keys[2]
    else:
        with pytest.warns(KernelWarning, match="ZeroDivisionError"), torch.no_grad():
            torch.compile(layer, backend="quartet2")(x)
        assert [name for name, _ in kinds] == ["forward"] and len(calls) == 1
    assert runs(folder) == [how]
    for each in passes:
        names = Counter((record.graph, record.name) for record in each.records)
        assert names and set(names.values()) == {1}


def test_a_call_that_runs_meanwhile_waits_for_its_check(candidate, folder) -> None:
    """Inductor runs ops on constants, which must not be the first use of an unchecked kernel."""
    unsupported = lambda *args: checks.rejection(request("wrong", folder))  # noqa: E731
    calls = candidate("gemm", ZeroDivisionError(), unsupported=unsupported)
    with pytest.warns(KernelWarning), checks.awaited_together() as rejected:
        torch.ops.q2.gemm(*arguments_of("gemm", "nvfp4_46_pow2"))
    assert calls == [] and rejected == {} and runs(folder) == ["wrong"]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["quartet2", "nvfp4", "mxfp4_2d", "tetrajet2"])
def test_a_step_waits_for_no_check_that_its_compilation_did_not_begin(
    recipe, folder, monkeypatch
) -> None:
    """A call site asks whether its kernels are checked. On a new machine they all are by then, so
    nothing has to be foreseen."""
    late, launched, begin = [], [], checks.CHECKER.begin

    def noted(call):
        def enqueue(site, given):
            launched.append(site)
            call(site, given)
            launched.pop()

        return enqueue

    def begun(request, after=()):
        late.extend([request.label] if launched else [])
        begin(request, after)

    monkeypatch.setattr(CallSite, "enqueue", noted(CallSite.enqueue))
    monkeypatch.setattr(checks.CHECKER, "begin", begun)
    model = nn.Sequential(nn.Linear(512, 512), nn.SiLU(), nn.Linear(512, 512)).cuda().bfloat16()
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(model, backend="quartet2", options={"recipe": recipe})
    for _ in range(2):
        compiled(x).square().sum().backward()
    torch.cuda.synchronize()
    of_gpu = [found for check, found in KNOWN.checks.items() if check[2].type == "cuda"]
    assert late == [] and len(of_gpu) > 4 and {found.reason for found in of_gpu} == {None}


# ---- threads compile meanwhile -------------------------------------------------------------------

GPU = torch.device("cuda", 0)
EDEN = "nvfp4_ms_eden_pow2@bf16"


@pytest.fixture
def compiled(monkeypatch) -> Iterator[list]:
    """The kernels that NVRTC is given to compile for an H200 that is not there."""
    found: list = []
    properties = SimpleNamespace(name="H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(nvrtc, "begin", lambda variant, architecture: found.append(variant))
    monkeypatch.setattr(launch, "architecture", lambda index: "sm_90a")
    for module in (rotate_quantize, fused):
        monkeypatch.setattr(module, "shared_memory", lambda index: 228 * 1024)
    return found


@pytest.mark.parametrize(
    ("of", "kernel", "scheme", "files"),
    [
        (ROWWISE, "cuda", "nvfp4_46_pow2", ["align_scales.cu", "rotate_quantize.cu"]),
        (REQUANTIZED, "cuda", EDEN, ["rotate_quantize.cu"]),
        ("dequantize", "cuda", "nvfp4_46_pow2", ["dequantize.cu"] * 2),  # padding
        ("gemm", "cuda_bf16", "nvfp4_46_pow2", []),
        ("grouped_mm", "cuda", "nvfp4_46_pow2", []),
    ],
)
def test_threads_compile_what_a_check_launches(of, kernel, scheme, files, compiled) -> None:
    """GEMMs compile what they launch themselves."""
    selfcheck.compiling(kernel, GPU, form(of, scheme))
    assert [name for name in files if name not in {v.file for v in compiled}] == []
    assert len(compiled) == len(set(compiled)) >= len(files)
    assert bool(compiled) == bool(files)


@pytest.mark.parametrize("operands", [1, 2])
def test_threads_compile_what_the_check_of_a_fused_quantizer_launches(operands, compiled) -> None:
    call = QuantizerCall.named(
        QUANTIZE,
        x=None,
        scheme=EDEN,
        transform="rht128",
        rowwise=True,
        columnwise=True,
        rowwise_seed=...,
        columnwise_seed=...,
    )
    fused.compiling(GPU, form_of(QUANTIZE, call.positional), operands, torch.bfloat16)
    (rotates,) = [variant for variant in compiled if variant.file == "rotate_quantize.cu"]
    assert rotates.headers and dict(rotates.defines)["Q2_OPERANDS"] == operands


# ---- what begins with a graph on a CPU -----------------------------------------------------------


@pytest.mark.parametrize("disabled", [False, True])
def test_a_graph_on_a_cpu_begins_the_library_first(monkeypatch, disabled) -> None:
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
