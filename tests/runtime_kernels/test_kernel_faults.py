# SPDX-License-Identifier: Apache-2.0
"""A kernel that fails at any point: the next one runs, the user gets one warning, and nothing else
changes. On a CPU, with test kernels and pretended GPUs."""

import functools
import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from q2compile.report.report import RunReport
from q2compile.runtime_kernels import registry, selfcheck, small_calls
from q2compile.runtime_kernels.choice import Kernel
from q2compile.runtime_kernels.cuda.jit import launch, nvrtc
from q2compile.runtime_kernels.kernel_states import kernels_own
from q2compile.runtime_kernels.numerics.layout import pack_bits, unpack_bits
from q2compile.runtime_kernels.registry import (
    CPP,
    REFERENCE,
    SCALED_GROUPED_MM,
    SCALED_MM,
    KernelWarning,
)
from tests.support.checked_forms import (
    CHECKED,
    COLUMNWISE,
    arguments_of,
    checked_of,
    form,
    op_of,
    products,
)
from tests.support.pretended_gpu import on_gpu
from tests.support.small_model import Mlp, quantized
from tests.support.warned import texts

pytestmark = pytest.mark.usefixtures("fresh_compiler")
GEMMS = ("fprop", "dgrad", "wgrad")

# Faults and their errors: cuBLASLt, a torch without it, its check of arguments, NVRTC, the driver,
# Triton.
ERRORS = (
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul"),
    NotImplementedError("matmul of Float4_e2m1fn_x2 is not implemented"),
    ValueError("scale_b should be padded to 128"),
    nvrtc.CompileError("gemm.cu does not compile for sm_130a"),
    launch.LaunchError("cannot launch gemm.cu: CUDA_ERROR_INVALID_IMAGE"),
    AssertionError("no scaled dot on sm_121"),
)


def gemm_arguments(scheme="nvfp4_46_pow2"):
    return arguments_of("gemm", scheme)


def run(op, args):
    return getattr(torch.ops.q2, op)(*args)


def step(model, compiled, x):
    torch.manual_seed(1)
    y = compiled(x)
    y.square().sum().backward()
    results = [y.detach(), *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    return results


# ---- in a call ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_a_kernel_that_fails_in_training_is_replaced_once_and_for_all(candidate, error):
    """The results are those of the next kernel. The failed one is not tried again for GEMMs of the
    same kind; a step has six, with two kinds of operands each."""
    model, x = Mlp(), torch.randn(32, 64)
    want = step(model, quantized(model), x)
    torch._dynamo.reset()
    calls = candidate("gemm", error)
    compiled = quantized(model)
    said = f"(?s)kernel 'broken' of q2::gemm on cpu is rejected: it failed: .*{str(error)[:20]}"
    with pytest.warns(KernelWarning, match=said) as caught:
        got = step(model, compiled, x)
    assert len(texts(caught, KernelWarning)) == 1
    assert all(map(torch.equal, got, want))
    tried = len(calls)
    assert 0 < tried <= 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(map(torch.equal, step(model, compiled, x), want))
    assert len(calls) == tried


def test_the_next_one_may_fail_too(candidate):
    args = gemm_arguments()
    want = run("gemm", args)
    second, first = candidate("gemm", ERRORS[0], "second"), candidate("gemm", ERRORS[1], "first")
    with pytest.warns(KernelWarning) as caught:
        assert torch.equal(run("gemm", args), want)
    assert sorted(w.split("'")[1] for w in texts(caught, KernelWarning)) == ["first", "second"]
    assert torch.equal(run("gemm", args), want)
    assert len(first) == len(second) == 1


def test_a_kernel_is_rejected_for_calls_of_that_kind_alone(candidate):
    """cuBLASLt raises an error for one shape, not for all."""
    calls = candidate("gemm", ERRORS[0])
    with pytest.warns(KernelWarning) as caught:
        run("gemm", gemm_arguments("nvfp4_46_pow2"))
        run("gemm", gemm_arguments("mxfp4_rtn"))
    assert len(texts(caught, KernelWarning)) == 1 and len(calls) == 2
    kernel = registry.kernels("gemm")[0]
    for scheme in ("nvfp4_46_pow2", "mxfp4_rtn"):
        assert "NOT_SUPPORTED" in kernel.why_not(*gemm_arguments(scheme))
    other = gemm_arguments()[:-1] + (torch.float32,)
    assert kernel.why_not(*other) is None


def test_reports_note_what_was_rejected(candidate):
    report = RunReport()
    assert report.notes == []
    candidate("gemm", ERRORS[0])
    with pytest.warns(KernelWarning):
        run("gemm", gemm_arguments())
    (note,) = report.notes
    said = "kernel 'broken' of q2::gemm on cpu is rejected: it failed: RuntimeError: CUDA error"
    assert note.startswith(said) and f"note: {note}" in report.text()


def of_gpus(op: str) -> list[Kernel]:
    """Kernels of an op that a GPU can run, but for the reference."""
    return [k for k in registry.kernels(op)[:-1] if k.device_type == "cuda"]


def test_a_kernel_asked_for_by_name_is_never_replaced(candidate):
    args = gemm_arguments()
    calls = candidate("gemm", ERRORS[0])
    with pytest.raises(RuntimeError, match="NOT_SUPPORTED"):
        registry.select("gemm", args, "broken")(*args)
    with pytest.warns(KernelWarning):
        run("gemm", args)
    with pytest.raises(ValueError, match="'broken' cannot run q2::gemm here: rejected: it fai"):
        registry.select("gemm", args, "broken")
    assert len(calls) == 2 and registry.choose("gemm", args).name == CPP


def test_want_of_memory_is_no_fault_of_the_kernel(candidate):
    args = gemm_arguments()
    calls = candidate("gemm", torch.OutOfMemoryError("CUDA out of memory"))
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            run("gemm", args)
    assert len(calls) == 2 and registry.kernels("gemm")[0].why_not(*args) is None


def test_a_call_that_nobody_can_serve_raises_what_the_first_one_did(candidate, recwarn):
    """A caller's mistake, or a device that is lost."""
    args = gemm_arguments()
    wrong = (args[0][:, :8], *args[1:])
    calls = candidate("gemm", ValueError("as the first one says it"))
    for _ in range(2):
        with pytest.raises(ValueError, match="as the first one says it"):
            run("gemm", wrong)
    assert len(calls) == 2 and not texts(recwarn, KernelWarning)


def test_nothing_is_replaced_in_a_cuda_graph_capture(monkeypatch):
    """The capture is lost anyway, and a kernel that could not be loaded there may load at another
    time."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        own = kernels_own(ERRORS[4], "gemm", "broken", torch.device("cuda", 0))
        assert own == (not capturing)
    assert kernels_own(ERRORS[4], "gemm", "broken", torch.device("cpu"))


def test_a_source_that_nvrtc_refuses_is_compiled_once(monkeypatch, tmp_path):
    """A compilation takes seconds, and each shape would repeat it."""
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    compiled = []

    def compile_variant(variant, architecture):
        compiled.append(architecture)
        raise nvrtc.CompileError("unknown instruction")

    monkeypatch.setattr(nvrtc, "compile_variant", compile_variant)
    for architecture in ("sm_120a", "sm_120a", "sm_121a"):
        with pytest.raises(nvrtc.CompileError, match="unknown instruction"):
            nvrtc.cubin(nvrtc.KernelVariant("dequantize.cu", ()), architecture)
    assert compiled == ["sm_120a", "sm_121a"]


# ---- in its self-check, and on unknown GPUs -----------------------------------------------------


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_a_kernel_that_raises_in_its_self_check_is_refused(gpu, monkeypatch, error):
    gpu((12, 0))
    checks = []

    def disagreement(*what):
        checks.append(what)
        raise error

    monkeypatch.setattr(selfcheck, "disagreement", disagreement)
    with pytest.warns(KernelWarning) as caught:
        for of, (scheme, *_) in CHECKED.items():
            op, args = op_of(of), on_gpu(of, scheme)
            assert [registry.choose(op, args).name for _ in range(2)] == [REFERENCE] * 2
            for kernel in of_gpus(op):
                if kernel.name in (SCALED_MM, SCALED_GROUPED_MM):  # PyTorch's own, for other codes
                    continue
                with pytest.raises(ValueError, match=r"cannot run q2::.*it failed: .*Error"):
                    registry.select(op, args, kernel.name)
    assert len(checks) == len(set(checks)) == len(texts(caught, KernelWarning)), "each once"


@pytest.mark.parametrize("capability", [(8, 8), (10, 1), (13, 0)])
def test_an_unknown_gpu_runs_the_nearest_kernels_and_gemms_in_bf16(gpu, monkeypatch, capability):
    """After their self-checks, and none of the references. On the first GPU every scheme."""
    gpu(capability)
    monkeypatch.setattr(selfcheck, "disagreement", lambda *what: None)
    first = [(of, scheme) for of, (scheme, *_) in CHECKED.items()]
    for of, scheme in checked_of() if capability == (8, 8) else first:
        op = op_of(of)
        served = registry.choose(op, on_gpu(of, scheme)).name
        want = {"gemm_masked_unrotate": REFERENCE}  # which calls the two ops
        want |= dict.fromkeys(("gemm", "grouped_gemm"), "cuda_bf16")
        assert served == want.get(op, "cuda"), (op, scheme)


def test_a_gpu_too_old_runs_the_references_and_every_kernel_says_why(gpu):
    gpu((7, 5))
    with pytest.warns(RuntimeWarning, match="none of its CUDA kernels runs on cuda:0") as said:
        for of, scheme in checked_of():
            op, args = op_of(of), on_gpu(of, scheme)
            assert registry.choose(op, args).name == REFERENCE
            for kernel in of_gpus(op):
                assert kernel.why_not(*args)
    assert len(texts(said, RuntimeWarning)) == 1


@pytest.mark.parametrize("error", [OSError("libnvrtc.so: bad ELF"), AssertionError("status 7")])
def test_whatever_is_wrong_with_nvrtc_the_references_run(gpu, monkeypatch, error):
    gpu((9, 0))

    def version():
        raise error

    monkeypatch.setattr(nvrtc, "version", version)
    args = on_gpu(COLUMNWISE, "nvfp4_ms_eden_pow2")
    with pytest.warns(RuntimeWarning, match=str(error)):
        assert registry.choose("quantize", args).name == REFERENCE
    with pytest.raises(ValueError, match=str(error)):
        registry.select("quantize", args, "cuda")


def test_in_a_capture_nothing_is_checked_and_the_error_says_what_to_do(gpu, monkeypatch):
    gpu((12, 0))
    checks = []
    monkeypatch.setattr(selfcheck, "disagreement", lambda *what: checks.append(what))
    args = on_gpu(COLUMNWISE, "nvfp4_ms_eden_pow2")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(2):
        with pytest.raises(launch.LaunchError, match="run the model once before capturing"):
            registry.choose("quantize", args)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert registry.choose("quantize", args).name == "cuda" and len(checks) == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert registry.choose("quantize", args).name == "cuda"


# ---- what a self-check covers -------------------------------------------------------------------

ON_CPU = torch.device("cpu")


def product(*args, of):
    """The reference of q2::gemm, wrong in one way."""
    a_codes, a_scales, a_global, b_codes, b_scales, b_global, bias, scheme, _, dtype = args
    result = FAULTS[of](
        registry.kernels("gemm")[-1].function(*args[:6], None, scheme, scheme, torch.float32),
        a_global * b_global,
        0 if bias is None else bias.float(),
        dtype,
        scheme,
    )
    return result.to(dtype)


def off(here):
    return 1.01 if here else 1


# Faults: a product without its bias or alpha, and a wrong bias, dtype or scheme.
FAULTS = {
    "no bias": lambda out, alpha, bias, *_: out,
    "bias before alpha": lambda out, alpha, bias, *_: out + alpha * bias,
    "no alpha": lambda out, alpha, bias, *_: out / alpha + bias,
    "one row": lambda out, alpha, bias, *_: (out + bias) * (len(out) > 1),
    "second tile": lambda out, alpha, bias, *_: (out + bias)[:128].repeat(2, 1)[: len(out)],
    "fp16": lambda out, alpha, bias, dtype, _: (out + bias) * off(dtype == torch.float16),
    "fp32": lambda out, alpha, bias, dtype, _: (out + bias) * off(dtype == torch.float32),
    "swizzled": lambda out, alpha, bias, _, scheme: (out + bias) * off("@32x4x4" in scheme),
}


def disagreement(op: str, scheme: str, name: str = "broken") -> str | None:
    """Returns the reason for the first form of a product that has one."""
    found = (selfcheck.disagreement(name, ON_CPU, each) for each in products(op, scheme))
    return next(filter(None, found), None)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("scheme", CHECKED["gemm"])
def test_a_gemm_that_is_wrong_in_one_way_is_found(candidate, fault, scheme):
    if fault == "no alpha":  # which is one for a product of one scheme of mxfp4, not of the other
        assert any("mxfp4_rtn34" in each.args for each in products("gemm", "mxfp4_rtn"))
    candidate("gemm", None, function=functools.partial(product, of=fault))
    found = disagreement("gemm", scheme)
    assert found is not None and "relative error" in found


def test_a_gemm_that_is_right_in_every_way_agrees(candidate):
    """Also one that does not support some small calls of a form."""
    reference = registry.select("gemm", gemm_arguments(), REFERENCE)
    for unsupported in (
        lambda *args: None,
        lambda *args: "few rows" if len(args[0]) == 1 else None,
    ):
        candidate("gemm", None, "right", function=reference, unsupported=unsupported)
        for scheme in CHECKED["gemm"]:
            assert disagreement("gemm", scheme, "right") is None
    candidate("gemm", None, "none", function=reference, unsupported=lambda *args: "plain scales")
    with pytest.raises(ValueError, match="plain scales"):
        disagreement("gemm", "nvfp4_46_pow2", "none")


def test_alpha_is_not_one():
    for scheme in ("nvfp4_46_pow2", "nvfp4_46", "mxfp4_rtn34"):
        args = arguments_of("gemm", scheme)
        assert args[2] * args[5] != 1
    assert small_calls.ROWS == (130, 1)


GROUPED_FAULTS = {
    **{gemm: lambda out, asked, of=gemm: out * off(asked[9] == of) for gemm in GEMMS},
    "fp32": lambda out, asked: out * off(asked[10] == torch.float32),
    "no alpha": lambda out, asked: out / (asked[2] * asked[5]),
    "last group": lambda out, asked: torch.cat([out[: len(out) // 2], 0 * out[len(out) // 2 :]]),
    "rows of no group": lambda out, asked: out + (asked[9] != "wgrad") * tail(asked),
}


def tail(asked) -> torch.Tensor:
    """Rows of no group, which nothing has zeroed."""
    return (torch.arange(asked[0].shape[0]) >= asked[6][-1])[:, None]


@pytest.mark.parametrize("fault", GROUPED_FAULTS)
@pytest.mark.parametrize("scheme", CHECKED["grouped_gemm"])
def test_a_grouped_gemm_that_is_wrong_in_one_way_is_found(candidate, fault, scheme):
    reference = registry.kernels("grouped_gemm")[-1].function
    wrong = GROUPED_FAULTS[fault]
    candidate("grouped_gemm", None, function=lambda *a: wrong(reference(*a).float(), a).to(a[10]))
    found = disagreement("grouped_gemm", scheme)
    assert found is not None and "relative error" in found


UNROTATED_FAULTS = {
    "no mask": lambda out, a: torch.ops.q2.masked_unrotate(out, torch.full_like(a[6], 255), a[9]),
    "no rotation": lambda out, a: out * unpack_bits(a[6]),
    "mask of bytes turned": lambda out, a: torch.ops.q2.masked_unrotate(
        out, pack_bits(unpack_bits(a[6]).unflatten(1, (-1, 8)).flip(2).flatten(1)), a[9]
    ),
    "mask of the row before": lambda out, a: torch.ops.q2.masked_unrotate(
        out, a[6].roll(1, 0), a[9]
    ),
    "last chunk": lambda out, a: torch.cat(
        [torch.ops.q2.masked_unrotate(out, a[6], a[9])[:, :-32], out[:, -32:]], 1
    ),
}


@pytest.mark.parametrize("fault", UNROTATED_FAULTS)
@pytest.mark.parametrize("scheme", CHECKED["gemm_masked_unrotate"])
def test_a_rotation_back_that_is_wrong_in_one_way_is_found(candidate, fault, scheme):
    def broken(*args):
        out = torch.ops.q2.gemm(*args[:6], None, *args[7:9], args[10])
        return UNROTATED_FAULTS[fault](out, args)

    candidate("gemm_masked_unrotate", None, function=broken)
    found = disagreement("gemm_masked_unrotate", scheme)
    assert found is not None and "relative error" in found and "rotated back" in found


@pytest.mark.parametrize("of", CHECKED, ids=str)
def test_a_self_check_leaves_alone_what_the_caller_has_set(of, candidate):
    """Default device and type, modes, autocast, the random state."""
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    op, asked = op_of(of), form(of, CHECKED[of][0])
    candidate(op, None, "same", function=registry.kernels(op)[-1].function)
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        for device in ("meta", "cpu"):
            modes = torch.autocast("cpu", torch.float16), Mode(), FakeTensorMode()
            with torch.device(device), modes[0], modes[1], modes[2], torch.inference_mode():
                assert selfcheck.disagreement("same", ON_CPU, asked) is None
    finally:
        torch.set_default_dtype(torch.float32)
    assert seen == [] and torch.equal(torch.get_rng_state(), state)
