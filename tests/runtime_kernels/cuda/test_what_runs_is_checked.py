# SPDX-License-Identifier: Apache-2.0
"""Self-checks cover what training runs: thread blocks with several tiles, and the algorithms of
large GEMMs. Faults that small self-checks would miss are found, and training's results are
right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from q2compile.runtime_kernels import checks, registry, selfcheck
from q2compile.runtime_kernels.cache_folder import cache_dir
from q2compile.runtime_kernels.cuda import calls
from q2compile.runtime_kernels.cuda.gemm import cublaslt_fp4, first_launch, swizzle
from q2compile.runtime_kernels.cuda.gemm.first_launch import WrongError
from q2compile.runtime_kernels.cuda.jit import launch
from q2compile.runtime_kernels.cuda.quantize import quantizers, rotate_quantize
from q2compile.runtime_kernels.numerics.schemes import SWIZZLED, get_scheme
from q2compile.runtime_kernels.ops.gemm import Factor
from q2compile.runtime_kernels.registry import KernelWarning
from tests.support import emulation
from tests.support.checked_forms import (
    CHECKED,
    COLUMNWISE,
    REQUANTIZED,
    ROWWISE,
    arguments_of,
    form,
)
from tests.support.new_process import forget_checks
from tests.support.pretended_gpu import on_gpu
from tests.support.small_model import Mlp, results_of
from tests.support.swizzled_operands import dequantized, swizzled
from tests.support.warned import texts

pytestmark = pytest.mark.usefixtures("fresh_compiler")
CPU = torch.device("cpu")
SCHEME = "nvfp4_46_pow2"


# ---- several tiles for each thread block ---------------------------------------------------------


def launch_emulated(monkeypatch, run) -> None:
    """Quantizers are launched by `run` on a device with more multiprocessors than tiles."""
    emulation.serve(monkeypatch, "sm_90a", run)

    def poisoned(size, stride, dtype):
        bytes_ = torch.full((*size, dtype.itemsize), 77, dtype=torch.uint8)
        return bytes_.view(dtype).view(size)

    monkeypatch.setattr(calls, "empty", poisoned)
    monkeypatch.setattr(launch, "all_multiprocessors", lambda index: 132)
    monkeypatch.setattr(rotate_quantize, "shared_memory", lambda index: 228 * 1024)


OF_TILES = "emulated", CPU, form(COLUMNWISE, "nvfp4_ms_eden_pow2")
LAUNCHED = {"function": quantizers.quantize, "launching": quantizers.quantize}
TILES = 28  # where their number is among the parameters of rotate_quantize.cu


def first_tiles(grids: list) -> Callable[..., None]:
    """Launches whose thread blocks work on no second tile."""

    def run(launched, architecture, grid, *values):
        values = list(values)
        if launched.variant.file == "rotate_quantize.cu":
            grids.append((grid[0], values[TILES]))
            values[TILES] = min(values[TILES], grid[0])
        emulation.emulate(launched, architecture, grid, *values)

    return run


def test_wrong_bits_in_the_second_tile_are_found(candidate, monkeypatch) -> None:
    """The second tile of a thread block. With one tile for each the results are right."""
    grids: list = []
    launch_emulated(monkeypatch, first_tiles(grids))
    candidate("quantize", None, "emulated", **LAUNCHED)
    found = selfcheck.disagreement(*OF_TILES)
    assert found is not None and found.endswith("with several tiles for each thread block")
    assert any(blocks == tiles > 1 for blocks, tiles in grids)
    assert any(2 * blocks <= tiles for blocks, tiles in grids)


def test_right_bits_in_all_tiles_agree(candidate, monkeypatch) -> None:
    launch_emulated(monkeypatch, emulation.emulate)
    candidate("quantize", None, "emulated", **LAUNCHED)
    assert selfcheck.disagreement(*OF_TILES) is None


@pytest.mark.usefixtures("checked_here")
def test_training_goes_on_without_a_kernel_with_wrong_second_tiles(candidate, monkeypatch) -> None:
    """Its self-check rejects it, with one warning; the next kernel gives the right numbers."""
    model, x = Mlp(), torch.randn(32, 64)
    want, grids = results_of(model, x), []
    launch_emulated(monkeypatch, first_tiles(grids))
    request = selfcheck.request_of(*OF_TILES)
    unsupported = lambda *args: checks.rejection(request)  # noqa: E731
    candidate("quantize", None, "emulated", **LAUNCHED, unsupported=unsupported)
    with pytest.warns(KernelWarning) as caught:
        assert all(map(torch.equal, results_of(model, x), want))
    (said,) = texts(caught, KernelWarning)
    assert "kernel 'emulated' of q2::quantize columnwise rotated on cpu is rejected" in said
    assert "differ from the reference, with several tiles for each thread block" in said
    launches = len(grids)
    assert launches > 0 and all(map(torch.equal, results_of(model, x), want))
    assert len(grids) == launches  # it runs in its check alone


# ---- the first large GEMM of an algorithm --------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path))
    forget_checks()


def factors(m, n, k, schemes=(SCHEME, SCHEME)) -> list[Factor]:
    found = []
    for rows, scheme in zip((m, n), schemes, strict=True):
        spec = get_scheme(scheme)
        x = torch.randn(rows, k)
        amax = x.abs().amax() if spec.takes_amax else None
        made = torch.ops.q2.quantize(x, scheme=scheme, rowwise=True, columnwise=False, amax=amax)
        found.append(Factor(*made, spec))
    return found


def arguments(a: Factor, b: Factor, bias=None, dtype=torch.bfloat16) -> tuple:
    return *a[:3], *b[:3], bias, a.spec.name, b.spec.name, dtype


def product(a: Factor, b: Factor, *how) -> torch.Tensor:
    return torch.ops.q2.gemm(*arguments(a, b, *how))


def request(*which, op="gemm"):
    return first_launch.request(op, "cublaslt_fp4", CPU, *which)


SCHEMES = [
    *[(SCHEME, SCHEME), (SCHEME + SWIZZLED, SCHEME + SWIZZLED), ("nvfp4_46", "nvfp4_16x16_pow2")],
    ("mxfp4_rtn34", "mxfp4_rtn34"),
]


@pytest.mark.parametrize("schemes", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_right_products_pass(schemes, dtype) -> None:
    """Every scheme, with and without a bias, with rows of zeros and of NaN or Inf."""
    a, b = factors(300, 600, 192, schemes)
    a.codes[10:200] = 0
    for i, bias in enumerate((None, torch.randn(600).to(dtype))):
        out = product(a, b, bias, dtype)
        first_launch.compare(request(i), out, arguments(a, b, bias))
        assert first_launch.known(request(i))


FAULTS = {
    "a tile": lambda out: out[128:256, 256:384].zero_(),
    "a tile from elsewhere": lambda out: out[:128, 128:256].copy_(out[:128, :128].clone()),
    "the last rows": lambda out: out[256:].mul_(1.1),
    "alpha": lambda out: out.mul_(2),
    "a NaN": lambda out: out[0].fill_(torch.nan),
    # A relative 0.002 of the whole, which the rounding of bf16 would explain.
    "a chunk of a row": lambda out: out[0, 384:].mul_(1.05),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_products_are_rejected_for_good(fault) -> None:
    """The next process rejects them, too; other algorithms still run."""
    a, b = factors(300, 512, 256)
    out = product(a, b)
    FAULTS[fault](out)
    with pytest.raises(WrongError, match="its first large result, 300 x 512 in torch.bfloat16"):
        first_launch.compare(request(1), out, arguments(a, b))
    for _ in range(2):
        with pytest.raises(WrongError, match="differs from a BF16 GEMM"):
            first_launch.known(request(1))
        forget_checks()
    assert not first_launch.known(request(2))


def test_an_unrotated_product() -> None:
    a, b = factors(256, 512, 128, ("mxfp4_rtn", "mxfp4_rtn"))
    mask = torch.randint(0, 256, (256, 64), dtype=torch.uint8)
    plain = product(a, b)
    out = torch.ops.q2.masked_unrotate(plain, mask, "h32")
    args = (*arguments(a, b, mask)[:-1], "h32", torch.bfloat16)
    first_launch.compare(request(1, op="gemm_masked_unrotate"), out, args)
    with pytest.raises(WrongError):
        first_launch.compare(request(2, op="gemm_masked_unrotate"), plain, args)


def test_large_products_alone() -> None:
    assert first_launch.needed(8192, 1024, 64) and not first_launch.needed(8192, 1023, 64)


@pytest.mark.parametrize("rows", ["of zeros", "of NaN", "of zeros, all but a few"])
def test_rows_that_show_nothing_are_no_verdict(rows) -> None:
    """A first large product of zeros, as of masked gradients: 0 equals 0 for any algorithm."""
    a, b = factors(256, 256, 192)
    if rows == "of NaN":
        a.scales.view(torch.uint8).fill_(127)
    else:
        a.codes[:] = 0
    if rows == "of zeros, all but a few":
        a.codes[:16] = 0x22
    first_launch.compare(request(1), product(a, b), arguments(a, b))
    assert not first_launch.known(request(1))
    out = torch.zeros(256, 256, dtype=torch.bfloat16)
    out[0, 3] = 1.0
    if rows != "of NaN":  # a wrong result is one
        with pytest.raises(WrongError):
            first_launch.compare(request(1), out, arguments(a, b))


def test_an_algorithm_is_compared_once_for_each_class_of_rows() -> None:
    """Others met zero rows at M = 3072 alone. Counts that change in every step, as of tokens, have
    few classes."""
    classes = {m: first_launch.rows_class(m) for m in range(1, 8193)}
    assert [m for m in classes if classes[m] == classes[3072]] == [3072]
    assert classes[2048] != classes[4096] and classes[1000] == classes[1000 + 16]
    assert len({first_launch.rows_class(m) for m in range(4096, 8192)}) == 13


def test_a_gemm_s_check_runs_in_memory_full_of_nan(candidate, monkeypatch) -> None:
    """An algorithm that multiplies what it finds in its result or workspace by 0. Here a list of
    blocks is the memory of a device."""
    memory: list[torch.Tensor] = []
    reference = registry.kernels("gemm")[-1].function

    def empty(size, dtype, device):
        memory.append(torch.zeros(size, dtype=dtype))
        return memory[-1]

    def adds(*args):
        right = reference(*args)
        found = [block.view(right.dtype)[0] for block in memory]
        return right + 0 * sum(found)

    monkeypatch.setattr(selfcheck, "empty", empty)
    candidate("gemm", None, function=adds)
    what = "broken", CPU, form("gemm", SCHEME)
    assert selfcheck.disagreement(*what) is None and memory == []
    monkeypatch.setattr(selfcheck, "reuses_memory", lambda device: True)
    found = selfcheck.disagreement(*what)
    assert found is not None and "relative error nan" in found
    sizes = [block.numel() for block in memory]
    assert sum(sizes) == 64 << 20 and max(sizes) == 32 << 20 and min(sizes) == 1 << 20


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")],
    ids=["torch", "driver"],
)
def test_without_memory_it_is_compared_the_next_time(monkeypatch, error) -> None:
    def multiplied(*args):
        raise error

    monkeypatch.setattr(first_launch, "bf16_product", multiplied)
    a, b = factors(16, 16, 32)
    first_launch.compare(request(1), product(a, b), arguments(a, b))
    assert not first_launch.known(request(1))


@pytest.mark.parametrize("capturing", [True, False])
def test_nothing_is_compared_in_a_cuda_graph_capture(monkeypatch, capturing) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)

    class OnGpu(torch.Tensor):
        is_cuda = True

    a, b = factors(16, 16, 32)
    result, compared = product(a, b).as_subclass(OnGpu), []
    multiplied = first_launch.bf16_product
    monkeypatch.setattr(
        first_launch, "bf16_product", lambda *rows: compared.append(rows) or multiplied(*rows)
    )
    first_launch.compare(request(1), result, arguments(a, b))
    assert len(compared) == (not capturing) and first_launch.known(request(1)) == (not capturing)


@pytest.mark.parametrize("wrong", [False, True])
def test_training_goes_on_without_a_wrong_algorithm(candidate, monkeypatch, wrong) -> None:
    """cuBLASLt's kernel on a CPU, whose algorithm for large products is wrong in one tile. It runs
    once, then neither in this process nor in the next."""
    ran = []

    def run(asked, a, b, alpha, bias, out):
        want = dequantized(*a, asked.rows) @ dequantized(*b, asked.columns).t() * alpha
        want = want if bias is None else want + bias
        ran.append(asked)
        out.copy_(want)
        if wrong:
            out[:16, :16] = 3.0

    monkeypatch.setattr(cublaslt_fp4, "run", run)
    monkeypatch.setattr(cublaslt_fp4, "planned", lambda asked: SimpleNamespace(algorithm=(66, 7)))
    monkeypatch.setattr(cublaslt_fp4, "choose_algorithm", lambda *what: None)
    monkeypatch.setattr(cublaslt_fp4, "on_device", lambda index: nullcontext())
    monkeypatch.setattr(cublaslt_fp4, "empty", lambda *a: torch.empty_strided(*a[:2], dtype=a[2]))
    monkeypatch.setattr(swizzle, "swizzled", swizzled)
    monkeypatch.setattr(first_launch, "FLOPS", 1)
    model, x = Mlp(), torch.randn(32, 64)
    want = results_of(model, x)
    own = {"function": cublaslt_fp4.gemm_fp4, "unsupported": _other_formats}
    candidate("gemm", None, "large", **own)
    for attempt in range(2):
        before = len(ran)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = results_of(model, x)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())
        said = texts(caught, KernelWarning)
        assert len(said) == wrong
        first = {(p.dtype, p.bias, first_launch.rows_class(p.rows)) for p in ran}
        if wrong:
            assert "kernel 'large' of q2::gemm on cpu is rejected" in said[0]
            assert "its first large result" in said[0]
            assert len(ran) - before == (0 if attempt else len(first))
        forget_checks()  # as in a new process
    assert ran
    kept = list(cache_dir().glob("gemm-*.checked"))
    assert len(kept) == len(first)


def _other_formats(*args) -> str | None:
    return None if get_scheme(args[7]).format == "nvfp4" else "it is nvfp4's"


# ---- the way a quantizer is used -----------------------------------------------------------------


def test_transform_dtype_and_alignment_are_checked_apart(gpu, monkeypatch) -> None:
    """The usual way is the variant alone; another one is another check, with operands like it."""
    gpu((9, 0))
    ran = []
    monkeypatch.setattr(selfcheck, "disagreement", lambda *what: ran.append(what[2]))
    scheme = "nvfp4_ms_eden_pow2"
    ways = [
        *[("rht128", torch.bfloat16, True), ("rht16", torch.bfloat16, True)],
        *[("rht128", torch.float16, True), ("rht128", torch.float32, True)],
        ("rht128", torch.bfloat16, False),
    ]
    asked = [{"transform": t, "x": dtype, "aligned": aligned} for t, dtype, aligned in ways]
    for way in asked:
        args = on_gpu(COLUMNWISE, scheme, **way)
        assert [registry.choose("quantize", args).name for _ in range(2)] == ["cuda"] * 2
    assert ran == [form(COLUMNWISE, scheme, **way) for way in asked]
    end = "nvfp4_ms_eden_pow2, rht128, x in torch.bfloat16, unaligned"
    assert str(ran[-1]) == f"quantize columnwise rotated, {end}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("vectors", [True, False])
def test_operands_of_a_check_are_as_it_says(dtype, vectors) -> None:
    x, *_ = arguments_of(ROWWISE, "nvfp4_46", x=dtype, aligned=vectors)
    assert x.dtype == dtype and (x.stride(0) * x.element_size() % 16 == 0) == vectors
    again = REQUANTIZED._replace(by_scales=True)
    x, *_ = args = arguments_of(again, "nvfp4_sr_pow2", transform="rht16", aligned=vectors)
    assert (x.shape[1] % 8 == 0) == vectors and len(registry.call_op("requantize", args)) == 3


# ---- kernels of other dtypes, and of operands without padding ------------------------------------

OTHER_KERNELS = {
    "dequantize": lambda args: args[5] != torch.bfloat16,
    "dequantize of all columns": lambda args: args[4] == 2 * args[0].shape[1],
    "masked_unrotate": lambda args: args[0].dtype == torch.float32,
    "transpose": lambda args: not args[4],
}
OTHER_FORMS = {
    "dequantize": {"dtype": torch.float32, "cols": False},
    "dequantize of all columns": {},  # it is not known, so both are checked
    "masked_unrotate": {"grad": torch.float32},
    "transpose": {"swizzled": False},
}


@pytest.mark.parametrize("which", OTHER_KERNELS)
def test_every_kernel_of_an_op_is_checked(candidate, which) -> None:
    """One that is wrong in its other variants alone is found."""
    op, is_other = which.partition(" ")[0], OTHER_KERNELS[which]
    reference = registry.kernels(op)[-1].function

    def broken(*args):
        made = reference(*args)
        results = made if isinstance(made, tuple) else (made,)
        spoiled = [r.clone() for r in results]
        if is_other(args):
            spoiled[0].view(torch.uint8)[0, 0] ^= 0x40
        return tuple(spoiled) if isinstance(made, tuple) else spoiled[0]

    candidate(op, None, function=broken)
    found = selfcheck.disagreement("broken", CPU, form(op, CHECKED[op][0], **OTHER_FORMS[which]))
    assert found is not None and "differ from the reference" in found
