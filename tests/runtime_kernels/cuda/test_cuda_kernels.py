# SPDX-License-Identifier: Apache-2.0
"""CUDA kernels on a GPU, against the torch reference on the CPU: the same bits, or for GEMMs a
derived error. test_cuda_emulated.py holds the same kernels to the same bits without a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import q2compile.runtime_kernels as runtime_kernels
from q2compile.lowering.inductor_kernels import selfcheck as loops
from q2compile.runtime_kernels import selfcheck
from q2compile.runtime_kernels.cuda import calls
from q2compile.runtime_kernels.cuda.jit import launch, limits, nvrtc
from q2compile.runtime_kernels.cuda.quantize import rotate_quantize
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SCHEMES, SWIZZLED, get_scheme
from q2compile.runtime_kernels.ops.table import QuantizerCall, QuantizerVariant, rowwise_call
from q2compile.runtime_kernels.registry import REFERENCE, select
from q2compile.tools import cli
from tests.support import quantizer_calls as made
from tests.support.checked_forms import CHECKED, COLUMNWISE, INDUCTOR_CHECKED, form, products
from tests.support.emulation.random_bits import close_to_their_random_bits
from tests.support.pairwise import covering, pairwise
from tests.support.quantizer_calls import SEEDS

assert runtime_kernels  # importing it registers the ops
q2 = torch.ops.q2
pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
POW2, EXACT = "nvfp4_ms_eden_pow2", "nvfp4_ms_eden"
FP4 = [name for name, scheme in SCHEMES.items() if not scheme.is_tensorwise]
# Schemes and transforms of the operands that the recipes other than quartet2 quantize.
QUANTIZERS = [
    ("nvfp4_sr_pow2", "rht128"),
    ("nvfp4_sr", "rht128"),
    ("nvfp4_sr_pow2", "rht16"),
    ("nvfp4_sr", "rht16"),
    ("nvfp4_pow2", "rht16"),
    ("nvfp4", "rht16"),
    ("mxfp4_sr", "rht64"),
    ("mxfp4_rtn34", "rht32"),
]
OF_SWIZZLED = [*QUANTIZERS, *((POW2, t) for t in ("rht128", "rht64", "rht16", "none"))]
# Rows and columns: whole tiles, parts of tiles, rows that do not start on 16 bytes, one of each.
SHAPES = [(128, 128), (1024, 640), (300, 200), (33, 517), (1, 1), (129, 4097), (5000, 72)]


def matrix(shape: tuple[int, int], dtype: torch.dtype, kind: str = "normal") -> torch.Tensor:
    """Test data on the CPU: N(0,1); columns that differ by e^6; gradients of 1e-9; many ties."""
    generator = torch.Generator().manual_seed(shape[0] * 7919 + shape[1])
    x = torch.randn(shape, generator=generator)
    if kind == "outliers":
        x *= torch.exp(3 * torch.randn((1, shape[1]), generator=generator))
    if kind == "tiny":
        x *= 1e-9
    if kind == "ties":
        x = torch.randint(-6, 7, shape, generator=generator).float()
    if kind == "zeros":
        x[: shape[0] // 2] = 0
    return x.to(dtype)


def run_both(op: str | QuantizerCall, *args, kernel: str = "cuda") -> tuple[tuple, tuple]:
    """(the kernel's results on the GPU, the reference's on the CPU), all on the CPU."""
    if isinstance(op, QuantizerCall):
        op, args = op.spec.name, op.positional
    on_gpu = [a.cuda() if isinstance(a, torch.Tensor) else a for a in args]
    got, want = select(op, on_gpu, kernel)(*on_gpu), select(op, args, REFERENCE)(*args)
    as_tuple = lambda r: tuple(r) if isinstance(r, tuple | list) else (r,)  # noqa: E731
    return tuple(t.cpu() for t in as_tuple(got)), as_tuple(want)


def assert_same_bits(got: tuple, want: tuple) -> None:
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype
        bits = torch.uint8 if a.element_size() == 1 else torch.int32
        bits = torch.int16 if a.element_size() == 2 else bits
        wrong = (a.view(bits) != b.view(bits)).sum().item()
        assert wrong == 0, f"result {i}: {wrong} of {a.numel()} differ"


def agree(call: QuantizerCall) -> None:
    assert_same_bits(*run_both(call))


def test_rht_quantize() -> None:
    for scheme, transpose, shape in pairwise([POW2, EXACT], [False, True], SHAPES):
        x = matrix(shape, torch.bfloat16)
        agree(made.one(x, SEEDS[0], scheme, "rht128", transpose, 3))


def test_rht_quantize_both() -> None:
    for kind, dtype in pairwise(["outliers", "tiny", "ties", "zeros"], DTYPES):
        x = matrix((520, 392), dtype, kind)
        agree(made.both(x, *SEEDS, POW2, "rht128", 0))


def test_transforms() -> None:
    for transform in ["none", "h32", "rht16", "rht32_fixed", "rht64", "rht128"]:
        x = matrix((200, 264), torch.bfloat16)
        agree(made.both(x, *SEEDS, POW2, transform, 1))


def test_transpose() -> None:
    for swizzled, shape in pairwise([False, True], SHAPES):
        scheme = "nvfp4_16x16_pow2"
        codes, scales, _ = made.plain(matrix(shape, torch.bfloat16), None, None, scheme)()
        groups = None, None
        assert_same_bits(*run_both("transpose", codes, scales, scheme, shape[1], swizzled, *groups))


def test_other_schemes() -> None:
    for scheme, transform in QUANTIZERS:
        for shape in ((520, 392), (129, 4097)):
            for kind in ("outliers", "ties"):
                x = matrix(shape, torch.bfloat16, kind)
                agree(made.both(x, *SEEDS, scheme, transform, 1))


def test_values_instead_of_codes() -> None:
    for kind, (scheme, transform) in pairwise(
        ["normal", "outliers"], [(POW2, "rht128"), *QUANTIZERS]
    ):
        for shape in ((520, 392), (129, 4097)):
            agree(
                made.both(
                    matrix(shape, torch.bfloat16, kind), *SEEDS, scheme + DEQUANTIZED, transform, 1
                )
            )


def test_values_of_subnormal_scales() -> None:
    """Rows of the result from 1e-38 to 1e-3."""
    for (scheme, transform), transpose in pairwise(
        [(POW2, "rht128"), ("nvfp4_46_pow2", "none")], [False, True]
    ):
        sizes = torch.logspace(-38, -3, 520)
        x = matrix((520, 520), torch.float32) * (sizes if transpose else sizes[:, None])
        agree(made.one(x, SEEDS[0], scheme + DEQUANTIZED, transform, transpose, 0))


def test_values_of_a_requantized_operand() -> None:
    x = matrix((3000, 4100), torch.bfloat16, "outliers")
    packed = made.plain(x, None, None, "nvfp4_46_pow2")()
    agree(made.again(*packed, SEEDS[0], "nvfp4_46_pow2", POW2 + DEQUANTIZED, "rht128", 4100, 1))


def test_quantize() -> None:
    for scheme in [
        *("nvfp4_46_pow2", "nvfp4_46", "nvfp4_search_pow2", "nvfp4_search"),
        *("nvfp4_sr_pow2", "nvfp4_sr", "mxfp4_sr", "nvfp4"),
    ]:
        x = matrix((300, 1000), torch.bfloat16, "outliers")
        agree(made.with_amax(x, SEEDS[0], scheme, 2))


def test_stochastic_rounding_next_to_random_bits() -> None:
    """See close_to_their_random_bits."""
    x = close_to_their_random_bits(SEEDS[0], 64, 256)
    agree(made.plain(x, None, SEEDS[0], "nvfp4_sr_pow2", 1))


@pytest.mark.parametrize("layout", ["transposed", "expanded", "sliced", "every second"])
def test_strides(layout) -> None:
    x = {
        "transposed": lambda: matrix((264, 200), torch.bfloat16).t(),
        "expanded": lambda: matrix((1, 264), torch.bfloat16).expand(200, 264),
        "sliced": lambda: matrix((200, 300), torch.bfloat16)[:, 3:267],
        "every second": lambda: matrix((200, 528), torch.bfloat16)[:, ::2],
    }[layout]()
    on_gpu = {
        "transposed": lambda: x.t().cuda().t(),
        "expanded": lambda: x[:1].cuda().expand(200, 264),
        "sliced": lambda: matrix((200, 300), torch.bfloat16).cuda()[:, 3:267],
        "every second": lambda: matrix((200, 528), torch.bfloat16).cuda()[:, ::2],
    }[layout]()
    assert on_gpu.stride() == x.stride()
    seeds = [s.cuda() for s in SEEDS]
    got = made.launched(made.both(on_gpu, *seeds, POW2, "rht128", 0))
    _, want = run_both(made.both(x, *SEEDS, POW2, "rht128", 0))
    assert_same_bits(tuple(t.cpu() for t in got), want)


def test_empty() -> None:
    for shape in [(0, 64), (64, 0)]:
        x = torch.empty(shape, dtype=torch.bfloat16)
        agree(made.both(x, *SEEDS, POW2, "rht128", 0))


def test_requantize() -> None:
    for shape, source in pairwise(
        [(256, 256), (130, 200), (257, 120), (3000, 4100)],
        ["nvfp4_46_pow2", "nvfp4_46", "nvfp4_16x16"],
    ):
        x = matrix(shape, torch.bfloat16)
        packed = made.with_amax(x, None, source)()
        for scheme in (POW2, EXACT):
            agree(made.again(*packed, SEEDS[0], source, scheme, "rht128", shape[1], 1))


def test_requantize_stochastically() -> None:
    for source, scheme in pairwise(["nvfp4_pow2", "nvfp4"], ["nvfp4_sr_pow2", "nvfp4_sr"]):
        x = matrix((257, 520), torch.bfloat16, "outliers")
        packed = made.with_amax(x, None, source)()
        agree(made.again(*packed, SEEDS[0], source, scheme, "rht128", 520, 1))


def test_requantize_mxfp4() -> None:
    for shape in [(256, 256), (130, 200)]:
        packed = made.masked(matrix(shape, torch.bfloat16), "mxfp4_quest", "h32")()[:3]
        rows = 2 * packed[0].shape[1]
        agree(made.again(*packed, SEEDS[0], "mxfp4_quest", "mxfp4_rtn34", "rht32", rows, 1))


def test_swizzled_scales() -> None:
    for shape, scheme, transform in covering(
        (s, *how) for s in SHAPES for how in [*OF_SWIZZLED, (EXACT, "rht32")]
    ):
        x, scheme = matrix(shape, torch.bfloat16, "outliers"), scheme + SWIZZLED
        agree(made.both(x, *SEEDS, scheme, transform, 2))
        for transpose in (False, True):
            agree(made.one(x, SEEDS[0], scheme, transform, transpose, 2))


def test_quantize_with_swizzled_scales() -> None:
    for scheme, shape in pairwise(["nvfp4_46_pow2", "nvfp4_46", "nvfp4_pow2", "nvfp4_sr"], SHAPES):
        x = matrix(shape, torch.bfloat16)
        agree(made.with_amax(x, SEEDS[0], scheme + SWIZZLED, 2))


def test_requantize_with_swizzled_scales() -> None:
    for (source, scheme, transform), shape in pairwise(
        [
            ("nvfp4_46_pow2", POW2, "rht128"),
            ("nvfp4_46", "nvfp4_sr", "rht16"),
            ("mxfp4_rtn", "mxfp4_rtn34", "rht32"),
        ],
        [(256, 256), (130, 200), (3000, 4100)],
    ):
        x = matrix(shape, torch.bfloat16)
        for of_source, of_result in (("", SWIZZLED), (SWIZZLED, ""), (SWIZZLED, SWIZZLED)):
            packed = made.with_amax(x, None, source + of_source)()
            names = (source + of_source, scheme + of_result, transform)
            agree(made.again(*packed, SEEDS[0], *names, shape[1], 1))


def test_quantize_masked() -> None:
    for scheme, shape in pairwise(["mxfp4_quest", "mxfp4_quest" + SWIZZLED], SHAPES):
        xs = [
            matrix(shape, torch.bfloat16, kind) for kind in ("normal", "outliers", "tiny", "zeros")
        ]
        for x in (*xs, *(matrix(shape, dtype) for dtype in (torch.float16, torch.float32))):
            agree(made.masked(x, scheme, "h32"))


def test_masked_unrotate() -> None:
    for dtype, shape in pairwise(DTYPES, SHAPES):
        mask = made.masked(matrix(shape, torch.bfloat16), "mxfp4_quest", "h32")()[3]
        grad = matrix((shape[0], 8 * mask.shape[1]), dtype)
        assert_same_bits(*run_both("masked_unrotate", grad, mask, "h32"))
        shifted = torch.cat([grad.flatten()[:1], grad.flatten()])[1:].view(grad.shape)
        assert_same_bits(*run_both("masked_unrotate", shifted, mask, "h32"))


def test_dequantize() -> None:
    for scheme, dtype in pairwise(FP4, DTYPES):
        spec = get_scheme(scheme)
        x = matrix((200, 264), torch.bfloat16)
        if spec.rounding == "ms_eden":
            packed = made.one(x, SEEDS[0], scheme, "rht16", False)()
        elif spec.rounding == "quest":
            packed = made.masked(x, scheme, "h32")()[:3]
        else:
            packed = made.with_amax(x, SEEDS[0], scheme)()
        for cols in (264, 2 * packed[0].shape[1]):
            assert_same_bits(*run_both("dequantize", *packed, scheme, cols, dtype))


def test_gemm() -> None:
    """Operands are exact in bf16, so all error is the order of fp32 sums and one rounding: relative
    2^-9 in bf16 and sqrt(K) * 2^-24 in fp32, each with a factor of 2 to spare."""
    for dtype, biased, scheme in pairwise(
        [torch.bfloat16, torch.float32], [False, True], ["nvfp4_46_pow2", "nvfp4_46", "nvfp4_16x16"]
    ):
        operands = []
        for rows in (200, 136):
            x = matrix((rows, 520), torch.bfloat16)
            operands += made.with_amax(x, None, scheme)()
        bias = matrix((1, 136), dtype)[0] if biased else None
        (got,), (want,) = run_both(
            "gemm", *operands, bias, scheme, scheme, dtype, kernel="cuda_bf16"
        )
        bound = 2.0**-8 if dtype == torch.bfloat16 else 2 * 520**0.5 * 2.0**-24
        assert (got.float() - want.float()).norm() <= bound * want.float().norm()


def test_a_captured_graph_draws_new_random_bits() -> None:
    x = matrix((300, 200), torch.bfloat16).cuda()
    seeds = [s.cuda() for s in SEEDS]
    made.launched(made.both(x, *seeds, POW2, "rht128", 0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = made.launched(made.both(x, *seeds, POW2, "rht128", 0))
    for value in (7, 8, 7):
        seeds[0].fill_(value)
        graph.replay()
        args = (x.cpu(), torch.tensor(value), SEEDS[1], POW2, "rht128", 0)
        want = made.both(*args)()
        assert_same_bits(tuple(t.cpu() for t in results), want)


def test_runs_on_the_current_stream() -> None:
    """On a side stream behind a long product. A kernel on another stream would read zeros."""
    x, seed = matrix((300, 200), torch.bfloat16), SEEDS[0].cuda()
    late, big = torch.zeros_like(x, device="cuda"), torch.randn(8192, 8192, device="cuda")
    filled = x.cuda()
    made.launched(made.one(late, seed, POW2, "rht128", True, 0))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        big @ big
        late.copy_(filled)
        got = made.launched(made.one(late, seed, POW2, "rht128", True, 0))
    torch.cuda.synchronize()
    _, want = run_both(made.one(x, SEEDS[0], POW2, "rht128", True, 0))
    assert_same_bits(tuple(t.cpu() for t in got), want)


# Ops whose kernels every GPU has (gemm_masked_unrotate's needs fp4 tensor cores), and their names.
OPS = dict.fromkeys((of for of in CHECKED if of != "gemm_masked_unrotate"), "cuda")
OPS |= dict.fromkeys(("gemm", "grouped_gemm"), "cuda_bf16")


def disagreement(of: str | QuantizerVariant, scheme: str) -> str | None:
    every = products(of, scheme) if of in ("gemm", "grouped_gemm") else [form(of, scheme)]
    served = [each for each in every if of == "gemm" or each.args[-1] != torch.float32]
    found = (selfcheck.disagreement(OPS[of], torch.device("cuda", 0), each) for each in served)
    return next(filter(None, found), None)


CASES = [(of, scheme) for of in OPS for scheme in CHECKED[of]]


def disagreements(cases: Iterable[tuple[Any, str]]) -> dict[str, str]:
    """The cases whose kernel is not the reference, and how it differs."""
    found = {f"{of} {scheme}": disagreement(of, scheme) for of, scheme in cases}
    return {case: said for case, said in found.items() if said is not None}


def test_selfcheck_agrees() -> None:
    assert disagreements(CASES) == {}


@pytest.fixture
def as_on_ampere(monkeypatch) -> None:
    """Kernels without conversion instructions, as sm_80 gets them, launched one after the other."""
    ampere, loaded = nvrtc.conversions("sm_80"), {}

    def bind(self, index, grid, values, slots) -> launch.Bound:
        if self not in loaded:
            loaded[self] = launch._load(replace(self, overlaps=False), index)
        return launch.Bound(self, loaded[self], grid, values, slots)

    monkeypatch.setattr(calls, "BOUND_CALLS", {})
    monkeypatch.setattr(nvrtc, "conversions", lambda architecture: ampere)
    monkeypatch.setattr(launch.Launch, "bind", bind)


def test_without_conversion_instructions(as_on_ampere) -> None:
    """One direction is half of both; of gemm the operands are made by dequantize.cu."""
    assert disagreements(covering(case for case in CASES if case[0] != COLUMNWISE)) == {}


def test_ms_eden_without_conversion_instructions(as_on_ampere) -> None:
    for kind in ("outliers", "tiny", "ties", "zeros"):
        x = matrix((520, 392), torch.bfloat16, kind)
        for scheme in (EXACT, POW2 + DEQUANTIZED):
            agree(made.both(x, *SEEDS, scheme, "rht128", 0))


@pytest.fixture
def as_on_12_0(monkeypatch) -> None:
    """100 KiB of shared memory a multiprocessor: one tile of a thread block at a time."""
    monkeypatch.setattr(rotate_quantize, "shared_memory", lambda index: 100 * 1024)
    monkeypatch.setattr(calls, "BOUND_CALLS", {})


def test_one_tile_at_a_time(as_on_12_0) -> None:
    cases = (
        (of, scheme)
        for of, scheme in CASES
        if isinstance(of, QuantizerVariant) and not (of.grouped or of.dbias or of.by_scales)
    )
    assert disagreements(covering(cases)) == {}


@pytest.mark.parametrize("shape", [(1024, 640), (129, 4097), (5000, 72), (8192, 1024)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_tile_at_a_time_of_many(shape, dtype, as_on_12_0) -> None:
    x = matrix(shape, dtype, "outliers")
    agree(made.both(x, *SEEDS, POW2, "rht128", 0))


@pytest.fixture
def as_on_a_gpu_that_nobody_knows(monkeypatch) -> Iterator[None]:
    """Kernels come as PTX, without the instructions of one architecture alone."""

    def bind(self, index, grid, values, slots) -> launch.Bound:
        fresh[self] = fresh.get(self) or launch._load(self, index)
        return launch.Bound(self, fresh[self], grid, values, slots)

    fresh: dict = {}
    monkeypatch.setattr(limits, "ARCHITECTURES", {})
    monkeypatch.setattr(launch.Launch, "bind", bind)
    monkeypatch.setattr(calls, "BOUND_CALLS", {})
    launch.target.cache_clear()
    yield
    launch.target.cache_clear()


def test_on_a_gpu_that_nobody_knows(as_on_a_gpu_that_nobody_knows) -> None:
    assert launch.architecture(0) == "compute_90" or torch.cuda.get_device_capability() != (9, 0)
    assert disagreements((of, CHECKED[of][0]) for of in OPS) == {}


def test_loops_agree() -> None:
    for scheme in INDUCTOR_CHECKED:
        asked = loops.request_of(torch.device("cuda", 0), rowwise_call(scheme))
        assert loops.disagreement(*asked.arguments) is None


def test_a_self_check_waits_for_nobody_and_changes_nothing() -> None:
    """It runs on a stream of its own, and is independent of the caller's default device and dtype,
    autocast and modes."""
    state = torch.cuda.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        for default in ("cuda", "meta"):
            with torch.device(default), torch.autocast("cuda"), torch.inference_mode():
                for of in OPS:
                    assert disagreement(of, CHECKED[of][0]) is None
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_products_of_nothing() -> None:
    """wgrad of no tokens is zero; with a bias, the bias."""
    for dtype, shape in pairwise(
        [torch.bfloat16, torch.float32], [(0, 8, 32), (8, 0, 32), (8, 8, 0)]
    ):
        m, n, k = shape
        scheme = "nvfp4_46_pow2"
        for bias in (None, torch.randn(n).to(dtype)):
            a, b = (
                q2.quantize(torch.randn(k, r), scheme=scheme, rowwise=False, columnwise=True)
                for r in (m, n)
            )
            (got,), (want,) = run_both(
                "gemm", *a, *b, bias, scheme, scheme, dtype, kernel="cuda_bf16"
            )
            assert got.dtype == want.dtype and torch.equal(got, want)


def test_this_gpu_is_served() -> None:
    capability = torch.cuda.get_device_capability()
    assert (launch.unsupported(0) is None) == (capability >= (8, 0))


def test_doctor(capsys) -> None:
    assert cli.main(["doctor", "--verbose"]) == 0
    report = capsys.readouterr().out
    assert report.count("  passed (") >= 80
    assert "FAULT" not in report
