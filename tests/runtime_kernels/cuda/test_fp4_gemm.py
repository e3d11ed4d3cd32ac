# SPDX-License-Identifier: Apache-2.0
"""The GEMM on fp4 tensor cores without a Blackwell: the code around cuBLASLt's product, cuBLASLt's
arguments, and the order of kernels on each GPU. On a GPU, the same calls of cuBLASLt with fp8."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import q2compile.runtime_kernels  # noqa: F401  registers the ops
from q2compile.runtime_kernels import versions
from q2compile.runtime_kernels.cuda.gemm import (
    cublaslt,
    cublaslt_fp4,
    cuda_bf16,
    swizzle,
    triton_fp4,
)
from q2compile.runtime_kernels.cuda.gemm.cublaslt import GemmKind
from q2compile.runtime_kernels.cuda.jit.launch import LaunchError
from q2compile.runtime_kernels.numerics.scaled_codes import scaled_codes
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SWIZZLED, get_scheme
from q2compile.runtime_kernels.registry import KernelWarning, choose, select
from tests.support.pairwise import pairwise
from tests.support.pretended_gpu import on_gpu
from tests.support.swizzled_operands import dequantized, swizzled

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SCHEME = "nvfp4_46_pow2"
GEMMS = ("fprop", "dgrad", "wgrad")


class Calls(TorchDispatchMode):
    """The ops of torch that would be launched on a GPU, and the sizes of what they return."""

    def __init__(self):
        super().__init__()
        self.names, self.sizes = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func is not torch.ops.aten.empty_strided.default:
            self.names.append(str(func))
            self.sizes.append(result.numel())
        return result


@pytest.fixture
def products(monkeypatch) -> list[GemmKind]:
    """cuBLASLt's part, done by torch: fp32 sums, times alpha, plus the bias, rounded once. Returns
    the list of products that were requested."""
    asked: list[GemmKind] = []

    def operand(codes, scales, rows, k):
        assert codes.shape == (rows, k // 2) and codes.is_contiguous()
        return dequantized(codes, scales, rows)

    def run(product, a, b, alpha, bias, out):
        asked.append(product)
        k = product.k
        assert product.k % 32 == 0 and product.columns % 16 == 0
        assert (bias is not None) == (product.bias is not None)
        with torch._C._DisableTorchDispatch():
            sums = operand(*a, product.rows, k) @ operand(*b, product.columns, k).t()
            sums = sums * alpha + (0 if bias is None else bias.float())
            out.copy_(sums.to(product.dtype))

    monkeypatch.setattr(cublaslt_fp4, "run", run)
    monkeypatch.setattr(swizzle, "swizzled", swizzled)
    monkeypatch.setattr(cublaslt_fp4, "on_device", lambda index: nullcontext())
    monkeypatch.setattr(cublaslt_fp4, "empty", lambda *a: torch.empty_strided(*a[:2], dtype=a[2]))
    return asked


def arguments(m, n, k, bias=None, dtype=BF16, schemes=(SCHEME, SCHEME)):
    packed = []
    for rows, scheme in zip((m, n), schemes, strict=True):
        x = torch.randn(rows, k)
        amax = x.abs().amax() if get_scheme(scheme).takes_amax else None
        packed += torch.ops.q2.quantize(x, scheme=scheme, rowwise=True, columnwise=False, amax=amax)
    return (*packed, bias, *schemes, dtype)


SIZES = [(128, 128, 256), (1, 200, 80), (33, 5, 48), (130, 264, 288)]
RESULTS = [(BF16, None), (BF16, BF16), (FP16, FP16), (FP32, None)]  # dtype, that of a bias


@pytest.mark.parametrize(
    "sizes, result, scheme",
    pairwise(SIZES, RESULTS, [SCHEME, "nvfp4_46", "nvfp4_16x16", SCHEME + SWIZZLED]),
)
def test_products_are_the_references(products, sizes, result, scheme):
    (m, n, k), (dtype, bias) = sizes, result
    schemes = (SCHEME + SWIZZLED if scheme.endswith(SWIZZLED) else SCHEME, scheme)
    args = arguments(m, n, k, None if bias is None else torch.randn(n).to(bias), dtype, schemes)
    got, want = cublaslt_fp4.gemm_fp4(*args), torch.ops.q2.gemm(*args)
    assert got.dtype == dtype and got.shape == (m, n) and got.is_contiguous()
    assert products[0].dtype == dtype and products[0].bias == bias
    # One rounding each of sums in two orders: a unit in the last place, or of the fp32 sums.
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("biased", [False, True])
def test_two_launches_whatever_the_bias(products, dtype, biased):
    """The product of the global scales, and the GEMM: no round trip of the result."""
    bias = torch.randn(48).to(dtype) if biased else None
    args = arguments(64, 48, 64, bias, dtype, (SCHEME + SWIZZLED,) * 2)
    with Calls() as calls:
        cublaslt_fp4.gemm_fp4(*args)
    assert len(products) == 1
    assert calls.names == ["aten.mul.Tensor"] and calls.sizes == [1]


def test_what_does_not_fit_is_padded_and_cut(products):
    args = arguments(64, 40, 80, None, BF16, (SCHEME + SWIZZLED,) * 2)
    with Calls() as calls:
        cublaslt_fp4.gemm_fp4(*args)
    padding, cut = "aten.constant_pad_nd.default", "aten.clone.default"
    assert calls.names == [padding, padding, "aten.mul.Tensor", cut]


def test_a_bias_of_another_type_is_added_in_fp32(products):
    bias = torch.randn(48)
    args = arguments(64, 48, 64, bias, BF16)
    torch.testing.assert_close(cublaslt_fp4.gemm_fp4(*args), torch.ops.q2.gemm(*args))
    assert products[0].dtype == FP32 and products[0].bias is None


@pytest.mark.parametrize("kernel", [cublaslt_fp4.gemm_fp4, triton_fp4.gemm_triton])
@pytest.mark.parametrize("shape", [(0, 8, 32), (8, 0, 32), (8, 8, 0)])
def test_nothing_to_multiply(kernel, shape):
    m, n, k = shape
    bias = torch.randn(n).bfloat16()
    codes = lambda rows: torch.zeros(rows, k // 2, dtype=torch.uint8)  # noqa: E731
    scales = lambda rows: torch.zeros(rows, k // 16).to(torch.float8_e4m3fn)  # noqa: E731
    one = torch.ones(())
    args = (codes(m), scales(m), one, codes(n), scales(n), one)
    for b in (None, bias):
        got = kernel(*args, b, SCHEME, SCHEME, BF16)
        want = torch.zeros(m, n, dtype=BF16) + (0 if b is None else b)
        assert got.dtype == BF16 and torch.equal(got, want)


@pytest.mark.parametrize("scheme", [SCHEME, "mxfp4_sr"])
def test_in_bf16_as_well_when_fp4_has_failed(monkeypatch, scheme):
    """The operands have swizzled scales."""
    read = []

    def dequantize(codes, scales, global_scale, scheme, cols, dtype):
        read.append(scheme)
        one = torch.ones(()) if global_scale is None else global_scale
        return torch.ops.q2.dequantize(codes, scales, one, scheme, cols, dtype)

    monkeypatch.setattr(cuda_bf16, "dequantize", dequantize)
    x, w = torch.randn(130, 96), torch.randn(200, 96)
    swizzled = scheme + SWIZZLED
    seed = torch.tensor(1) if get_scheme(scheme).stochastic else None
    a, b = (
        torch.ops.q2.quantize(t, scheme=swizzled, rowwise=True, columnwise=False, rowwise_seed=seed)
        for t in (x, w)
    )
    if get_scheme(scheme).has_pow2_scale:
        args = (*a, *b, None, swizzled, swizzled, BF16)
        assert torch.equal(cuda_bf16.gemm_bf16(*args), torch.ops.q2.gemm(*args))
    else:  # torch has no product with an fp32 result on a CPU
        got = cuda_bf16.dequantized(cuda_bf16.Factor(*a, get_scheme(swizzled)), False).float()
        assert torch.equal(got, scaled_codes(*a[:2], get_scheme(swizzled)))
    assert set(read) == {scheme}


# --- cuBLASLt's arguments -------------------------------------------------------------------------


class Library:
    """Stands in for cuBLASLt: records the attributes of descriptors and the arguments of products.
    It lists `found` algorithms, whose every attribute is their place in the list."""

    def __init__(self, found=1, status=0):
        self.made: dict[int, tuple] = {}
        self.attributes: dict[tuple[int, int], int] = {}
        self.products: list[tuple] = []
        self.algorithms: list[int] = []
        self.look_ups = 0
        self._found, self._status = found, status

    def __getattr__(self, name):
        kind = name.removeprefix("cublasLt")
        if kind.endswith("Destroy"):
            return lambda made: self.made.pop(made.value)
        if kind.endswith("Create"):
            return lambda made, *args: self._create(made, args)
        if kind.endswith("SetAttribute"):
            return self._set
        return {
            "MatmulAlgoGetHeuristic": self._look_up,
            "MatmulAlgoConfigGetAttribute": self._described,
            "Matmul": self._matmul,
        }[kind]

    def _create(self, made, args):
        made._obj.value = 1 + max(self.made, default=0)
        self.made[made._obj.value] = tuple(getattr(a, "value", a) for a in args)
        return 0

    def _set(self, of, attribute, value, size):
        assert size.value == ctypes.sizeof(value._obj)
        self.attributes[of.value, attribute] = value._obj.value
        return 0

    def _look_up(self, *args):
        self.look_ups += 1
        asked, found, count = args[-3:]
        assert asked == len(found) == 8
        for place, one in enumerate(found):
            one.algorithm[0] = place
        count._obj.value = self._found
        return self._status

    def _described(self, algorithm, attribute, value, size, written):
        assert size.value == ctypes.sizeof(value._obj) == (4 if attribute < 7 else 2)
        value._obj.value = algorithm._obj.algorithm[0]
        return 15 if attribute == 8 else 0  # of a later version

    def _matmul(self, *args):
        self.products.append(tuple(getattr(a, "value", a) for a in args))
        self.algorithms.append(args[12]._obj.algorithm[0])
        return self._status


@pytest.fixture
def library(monkeypatch):
    cublaslt.PLANS.clear()

    def put(**settings):
        made = Library(**settings)
        monkeypatch.setattr(cublaslt, "library", lambda: made)
        handle = ctypes.c_void_p(77), ctypes.c_void_p(88)
        monkeypatch.setattr(cublaslt, "handle", lambda index: handle)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 99, raising=False)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        return made

    yield put
    cublaslt.PLANS.clear()


def test_what_cublaslt_is_told(library):
    """A is our b, transposed; columns come first in column-major matrices."""
    told = library()
    a, b, alpha, bias = (torch.zeros(16) for _ in range(4))
    scales = torch.zeros(16), torch.zeros(16)
    out = torch.zeros(16)
    product = GemmKind(0, 130, 208, 288, BF16, BF16)
    for _ in range(2):
        cublaslt.run(product, (a, scales[0]), (b, scales[1]), alpha, bias, out)
    assert told.look_ups == 1, "once for each kind of product"
    operation, of_a, of_b, of_out, _ = told.made
    fp4, bf16 = 33, 14
    assert [told.made[m] for m in (of_a, of_b)] == [(fp4, 288, 208, 288), (fp4, 288, 130, 288)]
    assert told.made[of_out] == (bf16, 208, 130, 208)
    settings = {n: v for (of, n), v in told.attributes.items() if of == operation}
    addresses = {17: scales[1], 18: scales[0], 8: bias}
    assert settings == {
        2: 1,
        3: 1,
        7: 4,
        26: bf16,
        31: 1,
        32: 1,
        **{n: tensor.data_ptr() for n, tensor in addresses.items()},
    }
    at = [t.data_ptr() for t in (alpha, b, a, out)]
    for made in told.products:
        assert made[:4] == (77, operation, at[0], at[1]) and made[5] == at[2]
        assert made[7:12] == (88, at[3], of_out, at[3], of_out) and made[-1] == 99


@pytest.mark.parametrize("settings", [{"found": 0}, {"status": 15}])
def test_no_algorithm_is_an_error_that_has_another_kernel_serve(library, settings):
    library(**settings)
    with pytest.raises(LaunchError, match="no algorithm|NOT_SUPPORTED"):
        cublaslt.run(GemmKind(0, 8, 16, 32, BF16, None), (None,) * 2, (None,) * 2, None, None, None)


def test_the_algorithm_that_is_asked_for_is_taken_where_it_is_listed(library):
    """Its attributes identify it: another product may list it elsewhere, or not at all."""
    told = library(found=3)
    product = GemmKind(0, 130, 208, 288, BF16, None)
    first, second, third = (cublaslt.Algorithm(*[place] * 8, -1) for place in range(3))
    for wanted, taken in ((None, first), (third, third), (list(second), second), ((9,) * 9, first)):
        assert cublaslt.plan(product, wanted).algorithm == taken
        operand = torch.zeros(16), torch.zeros(16)
        cublaslt.run(product, operand, operand, torch.zeros(()), None, torch.zeros(16))
        assert told.algorithms[-1] == taken.id
    assert cublaslt.plan(product).algorithms == [first, second, third]


def test_without_cublaslt_the_reason_is_told(monkeypatch):
    versions.cublaslt.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(LaunchError, match="built without CUDA"):
        versions.cublaslt()
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    with pytest.raises(LaunchError, match=r"libcublasLt.so.99, .* cannot be loaded"):
        versions.cublaslt()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, bias", [(BF16, None), (BF16, BF16), (FP16, FP16), (FP32, None)])
def test_cublaslt_multiplies_fp8(dtype, bias):
    """With another dtype and other scales, these calls multiply fp4: alpha a power of two or not,
    on the device, before the bias; several shapes and streams."""
    for m, n, k in ((1, 16, 64), (130, 208, 288), (256, 512, 1024)):
        a, b = (torch.randn(r, k, device="cuda").to(torch.float8_e4m3fn) for r in (m, n))
        scale = torch.tensor(0.5, device="cuda"), torch.tensor(4.0, device="cuda")
        added = None if bias is None else torch.randn(n, device="cuda").to(bias)
        product = GemmKind(0, m, n, k, dtype, bias, cublaslt.E4M3, cublaslt.SCALES_ARE_ONE_FP32)
        sums = 2 * a.double() @ b.double().t()
        found = []
        for value in (1.0, 2.0**-9, 0.3):
            with torch.cuda.stream(torch.cuda.Stream()):
                alpha = torch.full((), value, device="cuda")
                out = torch.empty(m, n, dtype=dtype, device="cuda")
                cublaslt.run(product, (a, scale[0]), (b, scale[1]), alpha, added, out)
                found.append((value, out))
        torch.cuda.synchronize()
        for value, out in found:
            want = sums * value + (0 if added is None else added.double())
            # fp8 tensor cores keep 14 bits of each sum on their way to fp32.
            atol = 2.0**-12 * value * (a.double().abs() @ b.double().abs().t()).max().item()
            torch.testing.assert_close(
                out.double(), want, rtol=2 * torch.finfo(dtype).eps, atol=atol
            )


@pytest.mark.gpu
def test_cublaslt_in_a_cuda_graph():
    product = GemmKind(0, 64, 64, 64, BF16, None, cublaslt.E4M3, cublaslt.SCALES_ARE_ONE_FP32)
    a, b = (torch.ones(64, 64, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one, out = torch.ones((), device="cuda"), torch.zeros(64, 64, device="cuda", dtype=BF16)
    graph, alpha = torch.cuda.CUDAGraph(), torch.ones((), device="cuda")
    cublaslt.run(product, (a, one), (b, one), alpha, None, out)
    with torch.cuda.graph(graph):
        cublaslt.run(product, (a, one), (b, one), alpha, None, out)
    for value in (1.0, 0.25):
        alpha.fill_(value)
        graph.replay()
        assert (out == 64 * value).all()


def test_what_triton_refuses_is_compiled_once(monkeypatch):
    """It is not compiled again for another number of tokens. Another tile, dtype, bias or inverse
    rotation is another kernel."""
    triton_kernel = pytest.importorskip("q2compile.runtime_kernels.cuda.gemm.triton_kernel")
    tried = []

    def gemm(a, b, bias, dtype, tile, unrotation):
        tried.append((tile, dtype, unrotation))
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(triton_kernel, "gemm_fp4", gemm)
    monkeypatch.setattr(triton_fp4, "on_device", lambda index: nullcontext())
    monkeypatch.setattr(triton_fp4, "multiprocessors", lambda index: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (10, 0))
    asked = [(64, BF16), (96, BF16), (640, BF16), (768, BF16), (64, FP32), (96, FP32)]
    for rows, dtype in asked:
        args = arguments(rows, 48, 64, None, dtype, (SCHEME + SWIZZLED,) * 2)
        with pytest.raises(RuntimeError, match="PassManager"):
            triton_fp4.gemm_triton(*args)
    large, small = triton_kernel._TILES[10]
    assert tried == [(small, BF16, None), (large, BF16, None), (small, FP32, None)]
    for rows in (64, 96):
        args = arguments(rows, 64, 64, None, BF16, (SCHEME + SWIZZLED,) * 2)
        *operands, _, scheme, _, dtype = args
        mask = torch.zeros(rows, 9, dtype=torch.uint8)[:, 1:]  # neither in one piece nor on a word
        with pytest.raises(RuntimeError, match="PassManager"):
            triton_fp4.gemm_masked_unrotate_triton(*operands, mask, scheme, scheme, "h32", dtype)
    ((tile, _, (words, norm)),) = tried[3:]
    assert tile == small and words.is_contiguous() and words.data_ptr() % 16 == 0
    assert words.shape == (64, 8) and norm == pytest.approx(32**-0.5)
    with pytest.raises(AssertionError, match="with a mask of"):
        args = (*operands, mask[1:], scheme, scheme, "h32", dtype)
        triton_fp4.gemm_masked_unrotate_triton(*args)


# --- who is asked ---------------------------------------------------------------------------------


FORMATS = {"nvfp4": "nvfp4_46_pow2", "mxfp4": "mxfp4_rtn"}
CAPABILITIES = [(10, 0), (10, 3), (12, 0), (12, 1), (9, 0), (8, 9), (10, 1), (11, 0), (13, 0)]


@pytest.mark.parametrize(
    "capability, triton, format_, op",
    pairwise(CAPABILITIES, [None, (3, 6), (3, 8)], FORMATS, ["gemm", "grouped_gemm"]),
)
def test_order(gpu, monkeypatch, capability, triton, format_, op):
    """mxfp4 and groups never use cuBLASLt. Unknown GPUs get bf16, never the reference. Triton's
    kernel is used where tl.dot_scaled multiplies codes."""
    gpu(capability)
    monkeypatch.setattr(triton_fp4, "triton_version", lambda: triton)
    monkeypatch.setattr("q2compile.runtime_kernels.selfcheck.disagreement", lambda *a: None)
    args = on_gpu(op, FORMATS[format_])
    blackwell = capability in [(10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]
    first = {(11, 0): (3, 7), (12, 1): (3, 8)}.get(capability, (3, 6))
    by_triton = blackwell and triton is not None and triton >= first
    want = "triton_fp4" if by_triton else "cuda_bf16"
    if blackwell and (op, format_) == ("gemm", "nvfp4"):
        want = "cublaslt_fp4"
    if capability in [(8, 9), (9, 0)] and (op, format_) == ("gemm", "mxfp4"):
        want = "scaled_mm"  # in e4m3
    assert choose(op, args).name == want
    if not by_triton:
        with pytest.raises(ValueError, match="dot_scaled works|not installed|fp4 tensor cores"):
            select(op, args, "triton_fp4")
    if op == "gemm":
        unrotated = on_gpu("gemm_masked_unrotate", FORMATS[format_])
        served = choose("gemm_masked_unrotate", unrotated).name
        assert served == ("triton_fp4" if by_triton else "reference")
        with pytest.raises(
            ValueError, match="without signs back, not rht32|dot_scaled|not inst|fp4 tensor"
        ):
            select("gemm_masked_unrotate", (*unrotated[:9], "rht32", BF16), "triton_fp4")


@pytest.mark.parametrize("format_", FORMATS)
def test_groups_that_triton_does_not_multiply(gpu, monkeypatch, format_):
    gpu((10, 0))
    monkeypatch.setattr(triton_fp4, "triton_version", lambda: (3, 8))
    args = on_gpu("grouped_gemm", FORMATS[format_])
    for schemes, why in (
        ((FORMATS[format_] + DEQUANTIZED,) * 2, "it reads codes"),
        ((FORMATS[format_] + SWIZZLED,) * 2, "plain scales"),
        (tuple(FORMATS.values()), "the operands are nvfp4 and mxfp4"),
    ):
        with pytest.raises(ValueError, match=why):
            select("grouped_gemm", (*args[:7], *schemes, *args[9:]), "triton_fp4")


@pytest.mark.parametrize("wrong", ["fprop", "dgrad", "wgrad"])
def test_one_grouped_gemm_that_fails_is_in_bf16_and_the_others_in_fp4(gpu, monkeypatch, wrong):
    gpu((12, 0))

    def disagreement(name, device, form):
        return "relative error 1.0e+00" * ((name, form.args[9]) == ("triton_fp4", wrong)) or None

    monkeypatch.setattr("q2compile.runtime_kernels.selfcheck.disagreement", disagreement)
    args = on_gpu("grouped_gemm", SCHEME)
    with pytest.warns(KernelWarning, match="'triton_fp4' of q2::grouped_gemm on cuda:0 is rej"):
        names = {g: choose("grouped_gemm", (*args[:9], g, BF16)).name for g in GEMMS}
    assert names == {g: "cuda_bf16" if g == wrong else "triton_fp4" for g in GEMMS}


@pytest.mark.parametrize("sizes", [(0, 64, 64), (30, 0, 64), (30, 64, 0)])
@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_nothing_to_multiply_in_groups(sizes, gemm):
    t, n, k = sizes
    a, b = {
        "fprop": ((t, k), (2 * n, k)),
        "dgrad": ((t, n), (k, 2 * n)),
        "wgrad": ((n, 128 * (t > 0)), (k, 128 * (t > 0))),
    }[gemm]
    empty = [
        torch.ops.q2.quantize(torch.zeros(size), scheme=SCHEME, rowwise=True, columnwise=False)
        for size in (a, b)
    ]
    offs = torch.zeros(2, dtype=torch.int32)
    args = (*empty[0], *empty[1], offs, SCHEME, SCHEME, gemm, BF16)
    if 0 in (*args[0].shape, args[3].shape[0]):
        got = triton_fp4.grouped_gemm_triton(*args)
        shape = {"fprop": (t, n), "dgrad": (t, k), "wgrad": (2 * n, k)}[gemm]
        assert got.shape == shape and got.dtype == BF16 and not got.any()


@pytest.mark.parametrize("wrong", ["cublaslt_fp4", "triton_fp4", "cuda_bf16"])
def test_one_form_that_fails_costs_that_form_alone(gpu, monkeypatch, wrong):
    """cuBLASLt may have no bias in fp16, say."""
    gpu((10, 0))
    checks = []

    def disagreement(name, device, form):
        checks.append((name, form))
        return "relative error 1.0e+00" * (name == wrong and form.args[9] == FP16) or None

    monkeypatch.setattr("q2compile.runtime_kernels.selfcheck.disagreement", disagreement)
    order = [k for k in ("cublaslt_fp4", "triton_fp4", "cuda_bf16", "reference") if k != wrong]
    args = on_gpu("gemm", SCHEME)
    half = (*args[:-1], FP16)
    first = choose("gemm", args).name
    if wrong == "cublaslt_fp4":
        with pytest.warns(KernelWarning, match="relative error 1.0e"):
            assert choose("gemm", half).name == order[0]
        assert choose("gemm", args).name == first == "cublaslt_fp4"
    assert len(checks) == len(set(checks)), "each once"
