# SPDX-License-Identifier: Apache-2.0
"""The measurements of `q2compile bench`, by group. Each row has a time to compare with and, if the
cost model knows the device, a prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from q2compile.cost_model.devices import LAUNCH_SECONDS, Device
from q2compile.cost_model.layer import BLACKWELL, HOPPER, Layer
from q2compile.cost_model.predict import Prediction, predict
from q2compile.cost_model.prices import recipe_steps
from q2compile.cost_model.ranges import Range, longest, total
from q2compile.recipes.published import RECIPES
from q2compile.recipes.resolve import resolve
from q2compile.runtime_kernels.choice import kernels
from q2compile.runtime_kernels.cuda.gemm import cublaslt
from q2compile.runtime_kernels.cuda.gemm.cublaslt_fp4 import product_of
from q2compile.runtime_kernels.kernel_states import REJECTED
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SWIZZLED
from q2compile.runtime_kernels.registry import (
    CUBLASLT_FP4,
    CUDA_BF16,
    REFERENCE,
    TRITON_FP4,
    select,
)
from q2compile.runtime_kernels.selfcheck import GEMM_ERROR
from q2compile.tools.bench import codes, host
from q2compile.tools.bench.bench import Bench, failed, timed
from q2compile.tools.bench.cases import CASES, OTHERS, calls_of_quantizers, launch_call, step_of
from q2compile.tools.bench.llama_block import Block, LlamaBlock
from q2compile.tools.bench.losses import losses
from q2compile.tools.bench.rates import rates
from q2compile.tools.bench.report import (
    FAULT,
    MEASURED,
    NOISE,
    PASSED,
    UNSUPPORTED,
    BenchRow,
    Times,
)
from q2compile.tools.bench.timing import Call, host_microseconds
from q2compile.tools.kernel_rows import checked_rows, device_rows

RECIPE = "quartet2"
_FORMATS = {"nvfp4": "nvfp4_46_pow2", "mxfp4": "mxfp4_rtn"}
_RECIPE_OF = {"nvfp4": RECIPE, "mxfp4": "quartet"}  # whose fprop is a product of such operands
_COPY, _BF16 = "copy", "BF16"
BUSY = "lost in the noise of a busy machine"
_SEPARATOR = " algorithm "
_OF_CODES = (CUBLASLT_FP4, TRITON_FP4)  # on fp4 tensor cores


def quantizers(bench: Bench) -> Iterator[BenchRow]:
    """Each quantizer, beside a copy of its operand in bf16."""
    names = [*OTHERS, *CASES]
    if not bench.on_gpu:  # bf16 operands are what kernels write for emulated GEMMs
        names = [n for n in names if n not in CASES or not CASES[n].scheme.endswith(DEQUANTIZED)]
    rows, cols = bench.sizes.matrix
    inputs = bench.inputs(2 * rows * cols)
    calls = calls_of_quantizers(bench.device, rows, cols, inputs, [_COPY, *names])
    times, errors = bench.times(calls)
    for name in names:
        row = BenchRow("quantizers", name, (rows, cols), beside=_COPY)
        row.beside_microseconds = _median(times, _COPY)
        if bench.sheet:
            row.predicted = 1e6 * step_of(name, rows * cols).seconds(bench.sheet)
        yield timed(row, times.get(name), errors.get(name))


def _median(times: Mapping[str, Times], name: str) -> float | None:
    return times[name].median if name in times else None


def products(bench: Bench) -> Iterator[BenchRow]:
    """Each GEMM kernel at each shape, and each algorithm of cuBLASLt's, beside BF16's GEMM."""
    for format in _FORMATS:
        for shape in bench.sizes.products:
            yield from _product(bench, format, shape)


def _product(bench: Bench, format: str, shape: tuple[int, int, int]) -> Iterator[BenchRow]:
    m, n, k = shape
    names = (*_OF_CODES, CUDA_BF16) if bench.on_gpu else (REFERENCE,)
    count = bench.inputs((m * k + n * k) // 2)
    xs, ws = (
        [torch.randn(size, k, device=bench.device).bfloat16() for _ in range(count)]
        for size in (m, n)
    )

    def arguments(name: str) -> list[tuple[Any, ...]]:
        scheme = _FORMATS[format] + (SWIZZLED if name in _OF_CODES else "")
        pairs = zip(xs, ws, strict=True)
        codes = ((*_rowwise(x, scheme), *_rowwise(w, scheme)) for x, w in pairs)
        return [(*parts, None, scheme, scheme, torch.bfloat16) for parts in codes]

    results: dict[str, torch.Tensor] = {}

    def calls(name: str, algorithm: Sequence[int] | None = None) -> list[Call]:
        kernel = name.partition(_SEPARATOR)[0]
        given = arguments(kernel)
        made = [partial(select("gemm", args, kernel), *args) for args in given]
        if algorithm is not None:
            cublaslt.plan(product_of(given[0][0], given[0][3], None, torch.bfloat16), algorithm)
        results[name] = made[0]()
        return [*made]

    listed = _algorithms(arguments) if format == "nvfp4" and bench.on_gpu else {}
    tried = [name for name in names if name != CUBLASLT_FP4 or not listed]
    plain: list[Call] = [partial(F.linear, x, w) for x, w in zip(xs, ws, strict=True)]
    times, errors = bench.times(
        {_BF16: lambda: plain}
        | {name: partial(calls, name) for name in tried}
        | {name: partial(calls, name, algorithm) for name, algorithm in listed.items()}
    )
    for name in (*listed, *tried):
        kernel = name.partition(_SEPARATOR)[0]
        row = BenchRow("products", f"{format} {name}", shape, beside=_BF16, kernel=kernel)
        row.beside_microseconds = _median(times, _BF16)
        row.predicted = _predicted_product(bench.sheet, format, shape, kernel)
        timed(row, times.get(name), errors.get(name))
        if name in listed:
            row.more["algorithm"] = listed[name]._asdict()
        yield _compared(row, results, name, CUDA_BF16 if bench.on_gpu else REFERENCE)


def _rowwise(x: torch.Tensor, scheme: str) -> list[torch.Tensor]:
    return torch.ops.q2.quantize(x, scheme=scheme, rowwise=True, columnwise=False)


def _algorithms(
    arguments: Callable[[str], list[tuple[Any, ...]]],
) -> dict[str, cublaslt.Algorithm]:
    """cuBLASLt's algorithms, by the name of a row; {} if its kernel serves no product here."""
    args = arguments(CUBLASLT_FP4)[0]
    try:
        select("gemm", args, CUBLASLT_FP4)
        found = cublaslt.plan(product_of(args[0], args[3], None, torch.bfloat16)).algorithms
    except Exception:  # the row of the kernel says why
        return {}
    return {f"{CUBLASLT_FP4}{_SEPARATOR}{i}": one for i, one in enumerate(found)}


def _compared(
    row: BenchRow, results: Mapping[str, torch.Tensor], name: str, usual: str
) -> BenchRow:
    """A row with a fault if a candidate's result differs from that of the BF16 GEMM of dequantized
    operands by more than the self-check allows."""
    if row.status == MEASURED and usual in results:
        got, want = results[name].float(), results[usual].float()
        off = ((got - want).norm() / want.norm()).item()
        if not off <= GEMM_ERROR[torch.bfloat16]:
            row.status, row.why = FAULT, f"it is wrong: relative error {off:.1e}"
    return row


def _predicted_product(
    sheet: Device | None, format: str, shape: tuple[int, int, int], name: str
) -> Range | None:
    if sheet is None or (sheet.emulates and name in _OF_CODES):
        return None
    layer = Layer(*shape, capability=BLACKWELL if name in _OF_CODES else HOPPER)
    steps = recipe_steps(resolve(_RECIPE_OF[format]), layer, ["fprop"])
    asked = [s for s in steps if s.what == "fprop"]
    # By a launch of their own: no quantizer is there whose last one could.
    dequantized = [s for s in steps if s.what.startswith("dequantize")]
    asked += [replace(s, launches=int(i == 0)) for i, s in enumerate(dequantized)]
    # Called by itself, cuBLASLt's has the product of the global scales ahead of it.
    alone = LAUNCH_SECONDS * (format == "nvfp4" and name == CUBLASLT_FP4)
    return 1e6 * (total(step.seconds(sheet) for step in asked) + alone)


def grouped(bench: Bench) -> Iterator[BenchRow]:
    """The three grouped GEMMs of a stack of experts by each kernel, beside the one that is last
    asked."""
    experts, tokens, outputs, inputs = bench.sizes.grouped
    ends = torch.arange(1, experts + 1, device=bench.device, dtype=torch.int32)
    ends = ends * (tokens // experts)
    shapes = {
        "fprop": ((tokens, inputs), (experts * outputs, inputs)),
        "dgrad": ((tokens, outputs), (inputs, experts * outputs)),
        "wgrad": ((outputs, tokens), (inputs, tokens)),
    }
    for format, scheme in _FORMATS.items():
        for gemm, (a, b) in shapes.items():
            operands = (torch.randn(shape, device=bench.device).bfloat16() for shape in (a, b))
            parts = (part for operand in operands for part in _rowwise(operand, scheme))
            args = (*parts, ends, scheme, scheme, gemm, torch.bfloat16)
            yield from _grouped(bench, f"{format} {gemm}", args)


def _grouped(bench: Bench, words: str, args: tuple[Any, ...]) -> Iterator[BenchRow]:
    names = [k.name for k in kernels("grouped_gemm") if bench.on_gpu != (k.name == REFERENCE)]
    results: dict[str, torch.Tensor] = {}

    def calls(name: str) -> list[Call]:
        call = partial(select("grouped_gemm", args, name), *args)
        results[name] = call()
        return [call]

    times, errors = bench.times({name: partial(calls, name) for name in names})
    for name in names:
        row = BenchRow(
            "grouped", f"{words} {name}", bench.sizes.grouped, beside=names[-1], kernel=name
        )
        row.beside_microseconds = _median(times, names[-1])
        timed(row, times.get(name), errors.get(name))
        yield _compared(row, results, name, names[-1])


def linear(bench: Bench) -> Iterator[BenchRow]:
    """Forward and backward of one linear in bf16 by each recipe, beside plain Inductor."""
    for recipe in RECIPES:
        if recipe != "bf16":
            yield _linear(bench, recipe)


def _linear(bench: Bench, recipe: str) -> BenchRow:
    tokens, outputs, inputs = bench.sizes.linear
    name = f"{recipe}, forward and backward"
    bench.begun(name)
    row = BenchRow("linear", name, bench.sizes.linear, beside=_BF16)
    try:
        steps = {}
        for backend in ("inductor", "quartet2"):
            torch._dynamo.reset()
            layer = nn.Linear(inputs, outputs, False, bench.device, torch.bfloat16)
            x = torch.randn(tokens, inputs, device=bench.device, dtype=torch.bfloat16)
            steps[backend] = _step(layer, x, backend, recipe)
        times = bench.steps(steps)
        if bench.on_gpu:
            row.more["kernels"] = _kernels_of(steps["quartet2"])
    except Exception as error:  # the other recipes are measured
        failed(row, error)
        return row
    row.beside_microseconds = times["inductor"].median
    if bench.sheet:
        sizes, devices = bench.sizes.linear, (bench.sheet,)
        found = predict(resolve(recipe), sizes, devices=devices, x_fuses=False)
        assert found is not None
        row.predicted = 1e6 * found.times(bench.sheet)[1]
    return timed(row, times["quartet2"])


def _kernels_of(step: Call) -> list[str]:
    """The kernels of a step and their microseconds, as torch's profiler sees them; what it raised
    where it cannot."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
    except Exception as error:
        return [f"{type(error).__name__}: {error}"[:300]]
    return [
        f"{event.count} x {event.key[:120]}: {event.self_device_time_total:.1f} us"
        for event in profile.key_averages()
        if event.self_device_time_total
    ]


def block(bench: Bench) -> Iterator[BenchRow]:
    """Forward and backward of a Llama's block in bf16, beside plain Inductor. Predicted: BF16 as
    measured here, and what its linears take more."""
    sizes = bench.sizes.block
    torch.manual_seed(0)
    model = LlamaBlock(sizes).to(bench.device, torch.bfloat16)
    shape = sizes.batch, sizes.length, sizes.width
    steps = {}
    for backend in ("inductor", RECIPE):
        torch._dynamo.reset()
        x = torch.randn(shape, device=bench.device, dtype=torch.bfloat16)
        steps[backend] = _step(model, x, backend, RECIPE)
    times = bench.steps(steps)
    row = BenchRow("block", f"{RECIPE}, forward and backward", shape, beside=_BF16)
    row.beside_microseconds = times["inductor"].median
    if bench.sheet:
        row.predicted = 1e6 * _added(bench.sheet, sizes) + times["inductor"].median
    yield timed(row, times[RECIPE])


def _added(sheet: Device, sizes: Block) -> Range:
    """Seconds that a block's linears take more than BF16's, on the GPU or on the host."""
    found: list[Prediction] = []
    for n, k, users, fuses in sizes.linears:
        shape = sizes.tokens, n, k
        one = predict(resolve(RECIPE), shape, devices=(sheet,), x_users=users, x_fuses=fuses)
        assert one is not None
        found.append(one)
    column = sheet.column
    gpu = total(one.seconds[column] - one.bf16_seconds[column] for one in found)
    host = total(one.host_seconds[column] - one.bf16_host_seconds[column] for one in found)
    return longest(gpu, host)


def _step(module: nn.Module, x: torch.Tensor, backend: str, recipe: str) -> Call:
    options: dict[str, Any] | None = {"recipe": recipe} if backend == "quartet2" else None
    compiled = torch.compile(module, backend=backend, options=options)
    x.requires_grad_()
    dy = torch.randn_like(compiled(x))

    def step() -> None:
        x.grad = None
        module.zero_grad(set_to_none=True)
        compiled(x).backward(dy)

    return step


def on_host(bench: Bench) -> Iterator[BenchRow]:
    """Host times of calls."""
    if bench.on_gpu:
        bench.begun("host_launch")
        micro = host_microseconds(launch_call(bench.device))
        yield BenchRow("host", "host_launch", microseconds=micro)
    repeats = bench.sizes.host_repeats
    bench.begun("calls")
    each = host.per_call(bench.device, *bench.sizes.host_calls, repeats=repeats)
    yield _host_row("a call of two launches in a compiled graph", (128, 128), each)
    bench.begun("linears")
    own, bf16 = (
        host.per_linear(bench.device, backend, *bench.sizes.host_linears, repeats=repeats)
        for backend in (RECIPE, "inductor")
    )
    yield _host_row("a linear of a training step", (128, 128, 128), own, bf16)


def _host_row(name: str, shape: tuple[int, ...], own: float, bf16: float | None = None) -> BenchRow:
    """A row of host times. own and bf16 are slopes, and one that is not positive is not a time."""
    if own <= 0 or (bf16 is not None and bf16 <= 0):
        why = f"{BUSY}: the time of more calls is not longer"
        return BenchRow("host", name, shape, NOISE, why=why)
    beside = "" if bf16 is None else _BF16
    return BenchRow("host", name, shape, microseconds=own, beside=beside, beside_microseconds=bf16)


def checks(bench: Bench) -> Iterator[BenchRow]:
    """The self-check of every kernel, anew, in a process of its own: one that traps or hangs does
    not hide the others."""
    if not bench.on_gpu:
        why = "no CUDA device: `q2compile doctor` checks the kernels of a CPU"
        yield BenchRow("checks", "all", status=UNSUPPORTED, why=why)
        return
    rows = list(device_rows(bench.device))
    for found in checked_rows(rows, True, lambda row: bench.begun(f"{row.name} {row.scheme}")):
        status = {PASSED: PASSED, REJECTED: FAULT}.get(found.state, UNSUPPORTED)
        name = f"{found.of} {found.scheme}"
        row = BenchRow("checks", name, status=status, kernel=found.kernel, why=found.reason)
        row.more = {"milliseconds": found.milliseconds}
        if found.traceback:
            row.more["traceback"] = found.traceback
        yield row


def hashes(bench: Bench) -> Iterator[BenchRow]:
    """The codes of a large matrix by every quantizer of the recipes, which must be those of the
    references on a CPU."""
    shape = codes.SHAPE if bench.on_gpu else codes.SMALL
    expected = codes.shipped(shape)
    for name, make in codes.calls(bench.device, shape):
        bench.begun(name)
        row = BenchRow("codes", name, shape, status=PASSED)
        try:
            call = make()
            row.kernel = codes.kernel_of(call)
            found = codes.hashes(call)
            row.why = codes.differences(found, expected[name])
            if row.why:
                row.status, row.more = FAULT, {"hashes": found}
        except Exception as error:
            failed(row, error)
        yield row


GROUPS: dict[str, Callable[[Bench], Iterator[BenchRow]]] = {
    "rates": rates,
    "checks": checks,
    "codes": hashes,
    "quantizers": quantizers,
    "products": products,
    "grouped": grouped,
    "linear": linear,
    "block": block,
    "host": on_host,
    "losses": losses,
}


def measured(bench: Bench) -> Iterator[BenchRow]:
    """The rows of a bench's group, as they come. One that fails ends in a row that says why."""
    try:
        yield from GROUPS[bench.group](bench)
    except Exception as error:
        row = BenchRow(bench.group, "all")
        failed(row, error)
        row.status = FAULT
        yield row
