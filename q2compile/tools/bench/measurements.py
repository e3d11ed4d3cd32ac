"""What `q2compile bench` measures, group by group: rows, each with what it is compared with and,
where there is a data sheet of the device, with the cost model's prediction."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from q2compile.cost_model.devices import LAUNCH_SECONDS, Device, data_sheet
from q2compile.cost_model.predict import Prediction, predict
from q2compile.cost_model.steps import Layer, recipe_steps
from q2compile.recipes.resolve import resolve
from q2compile.runtime_kernels.cuda.gemm.remembered import CANDIDATES, Choice
from q2compile.runtime_kernels.cuda.selfcheck import GEMM_ERROR
from q2compile.runtime_kernels.numerics.schemes import SWIZZLED, WIDENED
from q2compile.runtime_kernels.registry import CUBLASLT_FP4, CUDA_BF16, REFERENCE, select
from q2compile.tools.bench import host
from q2compile.tools.bench.cases import CASES, OTHERS, calls_of_host, calls_of_quantizers, step_of
from q2compile.tools.bench.llama_block import Block, LlamaBlock
from q2compile.tools.bench.timing import (
    CALLS,
    Call,
    captured,
    cpu_microseconds,
    host_microseconds,
    in_turns,
    time_in_turns,
)

RECIPE = "quartet2"
_FORMATS = {"nvfp4": "nvfp4_46_pow2", "mxfp4": "mxfp4_rtn"}
_RECIPE_OF = {"nvfp4": RECIPE, "mxfp4": "quartet"}  # whose fprop is a product of such operands
_ROUNDS = 20
_COPY, _BF16 = "copy", "BF16"
BUSY = "lost in the noise of a busy machine"  # a row without a figure, but no fault


@dataclass(frozen=True)
class Sizes:
    """What is measured. Those of a GPU are large enough to fill one of today's; those of a CPU, on
    which every op is its reference, show that all of it works."""

    matrix: tuple[int, int]
    products: tuple[tuple[int, int, int], ...]  # M, N, K
    linear: tuple[int, int, int]  # T, N, K
    block: Block
    host_repeats: int
    host_calls: tuple[int, int]  # in two graphs, of which the second takes longer by the others
    host_linears: tuple[int, int]  # likewise
    cpu_seconds: float = 0.05  # of each call that is timed on a CPU


_WEIGHTS = ((1024, 1024), (4096, 4096), (14336, 4096), (4096, 14336))
ON_GPU = Sizes(
    matrix=(8192, 4096),
    products=tuple((m, n, k) for n, k in _WEIGHTS for m in (128, 512, 2048, 8192)),
    linear=(8192, 4096, 4096),
    block=Block(width=4096, inner=14336, heads=32, key_values=8, batch=1, length=4096),
    host_repeats=200,
    host_calls=(8, 40),
    host_linears=(4, 12),
)
ON_CPU = Sizes(
    matrix=(128, 256),
    products=((64, 128, 128),),
    linear=(64, 128, 128),
    block=Block(width=128, inner=256, heads=4, key_values=2, batch=1, length=64),
    host_repeats=15,
    host_calls=(1, 3),
    host_linears=(1, 3),
)


@dataclass
class Row:
    """One thing that was measured.

    microseconds: of a call; None where it could not be, `why` says it.
    beside: what it is compared with, "BF16" or "copy", which takes beside_microseconds.
    predicted: microseconds, by data sheet; None where there is none.
    """

    group: str
    name: str
    shape: tuple[int, ...]
    microseconds: float | None = None
    beside: str = ""
    beside_microseconds: float | None = None
    predicted: float | None = None
    why: str = ""

    @property
    def ratio(self) -> float | None:
        if self.microseconds is None or not self.beside_microseconds:
            return None
        return self.microseconds / self.beside_microseconds


@dataclass
class Bench:
    """A device, and what was measured on it."""

    device: torch.device
    sizes: Sizes
    sheet: Device | None = None
    rows: list[Row] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)

    @classmethod
    def of(cls, device: torch.device) -> Bench:
        if device.type != "cuda":
            return cls(device, ON_CPU)
        return cls(device, ON_GPU, data_sheet(torch.cuda.get_device_name(device)))

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def inputs(self, bytes_: int) -> int:
        """How many operands of so many bytes take turns: where that can be, together more than an
        L2 cache of today, 128 MiB, holds."""
        return min(CALLS, max(2, math.ceil(2**28 / bytes_))) if self.on_gpu else 1

    def times(
        self, calls: Mapping[str, Callable[[], list[Call]]]
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Microseconds of those that run, and why the others do not; in turns on a GPU."""
        ready: dict[str, Any] = {}
        why: dict[str, str] = {}
        for name, make in calls.items():
            try:
                own = make()
                if self.on_gpu:
                    ready[name] = captured(own)
                else:
                    ready[name] = cpu_microseconds(own[0], self.sizes.cpu_seconds)
            except Exception as error:  # whatever one does, the others are measured
                why[name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if self.on_gpu:
            medians = {n: statistics.median(t) for n, t in time_in_turns(ready, _ROUNDS).items()}
            return medians, why
        return ready, why

    def steps(self, calls: Mapping[str, Call]) -> dict[str, float]:
        """Microseconds of steps that the host launches, in turns on a GPU."""
        if self.on_gpu:
            return {name: 1e3 * ms for name, ms in in_turns(calls).items()}
        return {n: cpu_microseconds(call, self.sizes.cpu_seconds) for n, call in calls.items()}


def quantizers(bench: Bench) -> Iterator[Row]:
    """Each quantizer, beside a copy of its operand in bf16."""
    names = [*OTHERS, *CASES]
    if not bench.on_gpu:  # bf16 numbers are what kernels leave for emulated GEMMs
        names = [n for n in names if n not in CASES or not CASES[n].scheme.endswith(WIDENED)]
    rows, cols = bench.sizes.matrix
    inputs = bench.inputs(2 * rows * cols)
    calls = calls_of_quantizers(bench.device, rows, cols, inputs, [_COPY, *names])
    times, why = bench.times(calls)
    for name in names:
        predicted = 1e6 * step_of(name, rows * cols).seconds(bench.sheet) if bench.sheet else None
        own = times.get(name), _COPY, times.get(_COPY), predicted, why.get(name, "")
        yield Row("quantizers", name, (rows, cols), *own)


def products(bench: Bench) -> Iterator[Row]:
    """Each GEMM candidate at each shape, beside BF16's GEMM; the fastest are noted."""
    for format in _FORMATS:
        for shape in bench.sizes.products:
            yield from _product(bench, format, shape)


def _product(bench: Bench, format: str, shape: tuple[int, int, int]) -> Iterator[Row]:
    m, n, k = shape
    names = (*CANDIDATES, CUDA_BF16) if bench.on_gpu else (REFERENCE,)
    count = bench.inputs((m * k + n * k) // 2)
    xs, ws = (
        [torch.randn(size, k, device=bench.device).bfloat16() for _ in range(count)]
        for size in (m, n)
    )

    def arguments(name: str) -> list[tuple[Any, ...]]:
        scheme = _FORMATS[format] + (SWIZZLED if name in CANDIDATES else "")

        def quantized(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(torch.ops.q2.quantize(x, scheme=scheme, rowwise=True, columnwise=False))

        return [
            (*quantized(x), *quantized(w), None, scheme, scheme, torch.bfloat16)
            for x, w in zip(xs, ws, strict=True)
        ]

    results: dict[str, torch.Tensor] = {}

    def calls(name: str) -> list[Call]:
        made = [partial(select("gemm", args, name), *args) for args in arguments(name)]
        results[name] = made[0]()
        return [*made]

    plain: list[Call] = [partial(F.linear, x, w) for x, w in zip(xs, ws, strict=True)]
    times, why = bench.times({_BF16: lambda: plain} | {n: partial(calls, n) for n in names})
    usual = CUDA_BF16 if bench.on_gpu else REFERENCE
    for name in names:
        wrong = _disagreement(results, name, usual)
        if wrong and name in times:
            why[name] = wrong
        predicted = _predicted_product(bench.sheet, format, shape, name)
        own = times.get(name), _BF16, times.get(_BF16), predicted, why.get(name, "")
        yield Row("products", f"{format} {name}", shape, *own)
    able = {name: times[name] for name in CANDIDATES if name in times and name not in why}
    if len(able) > 1:
        bench.choices.append(Choice(format, shape, min(able, key=able.__getitem__)))


def _disagreement(results: Mapping[str, torch.Tensor], name: str, usual: str) -> str:
    """How a candidate's result differs from that of the product of bf16 numbers, by more than the
    self-check allows; "" if it does not."""
    if name not in results or usual not in results:
        return ""
    got, want = results[name].float(), results[usual].float()
    off = ((got - want).norm() / want.norm()).item()
    return "" if off <= GEMM_ERROR[torch.bfloat16] else f"it is wrong: relative error {off:.1e}"


def _predicted_product(
    sheet: Device | None, format: str, shape: tuple[int, int, int], name: str
) -> float | None:
    if sheet is None or (sheet.emulates and name in CANDIDATES):
        return None
    layer = Layer(*shape, emulated=name not in CANDIDATES)
    steps = recipe_steps(resolve(_RECIPE_OF[format]), layer, ["fprop"])
    asked = [s for s in steps if s.what == "gemm"]
    # By a launch of their own: no quantizer is there whose last one could.
    widened = [s for s in steps if s.what.startswith("dequantize")]
    asked += [replace(s, launches=int(i == 0)) for i, s in enumerate(widened)]
    # Called by itself, cuBLASLt's has the product of the global scales ahead of it.
    alone = LAUNCH_SECONDS * (format == "nvfp4" and name == CUBLASLT_FP4)
    return 1e6 * (sum(step.seconds(sheet) for step in asked) + alone)


def linear(bench: Bench) -> Iterator[Row]:
    """Forward and backward of one linear in bf16, beside plain Inductor."""
    tokens, outputs, inputs = bench.sizes.linear
    steps = {}
    for backend in ("inductor", RECIPE):
        torch._dynamo.reset()
        layer = nn.Linear(inputs, outputs, bias=False, device=bench.device, dtype=torch.bfloat16)
        x = torch.randn(tokens, inputs, device=bench.device, dtype=torch.bfloat16)
        steps[backend] = _step(layer, x, backend)
    times = bench.steps(steps)
    predicted = None
    if bench.sheet:
        found = predict(resolve(RECIPE), bench.sizes.linear, x_fuses=False)
        assert found is not None
        predicted = 1e6 * found.times(bench.sheet)[1]
    own = times[RECIPE], _BF16, times["inductor"], predicted
    yield Row("linear", f"{RECIPE}, forward and backward", bench.sizes.linear, *own)


def block(bench: Bench) -> Iterator[Row]:
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
        steps[backend] = _step(model, x, backend)
    times = bench.steps(steps)
    predicted = None
    if bench.sheet:
        predicted = times["inductor"] + 1e6 * _added(bench.sheet, sizes)
    own = times[RECIPE], _BF16, times["inductor"], predicted
    yield Row("block", f"{RECIPE}, forward and backward", shape, *own)


def _added(sheet: Device, sizes: Block) -> float:
    """Seconds that a block's linears take more than BF16's, on the GPU or on the host."""
    found: list[Prediction] = []
    for n, k, users, fuses in sizes.linears:
        one = predict(resolve(RECIPE), (sizes.tokens, n, k), x_users=users, x_fuses=fuses)
        assert one is not None
        found.append(one)
    column = sheet.column
    gpu = sum(one.seconds[column] - one.bf16_seconds[column] for one in found)
    return max(gpu, sum(one.host_seconds[column] - one.bf16_host_seconds[column] for one in found))


def _step(module: nn.Module, x: torch.Tensor, backend: str) -> Call:
    compiled = torch.compile(module, backend=backend)
    x.requires_grad_()
    dy = torch.randn_like(compiled(x))

    def step() -> None:
        x.grad = None
        module.zero_grad(set_to_none=True)
        compiled(x).backward(dy)

    return step


def on_host(bench: Bench) -> Iterator[Row]:
    """What calls take of the host."""
    if bench.on_gpu:
        for name, call in calls_of_host(bench.device).items():
            yield Row("host", name, (256, 256), host_microseconds(call))
    repeats = bench.sizes.host_repeats
    each = host.per_call(bench.device, *bench.sizes.host_calls, repeats=repeats)
    yield _host_row("a call of two launches in a compiled graph", (128, 128), each)
    own, bf16 = (
        host.per_linear(bench.device, backend, *bench.sizes.host_linears, repeats=repeats)
        for backend in (RECIPE, "inductor")
    )
    yield _host_row("a linear of a training step", (128, 128, 128), own, _BF16, bf16)


def _host_row(name: str, shape: tuple[int, ...], own: float, *beside: Any) -> Row:
    """own, and what it is beside, are slopes: one that is not positive is no time."""
    if own <= 0 or (beside and beside[1] <= 0):
        return Row("host", name, shape, why=f"{BUSY}: the time of more calls is not longer")
    return Row("host", name, shape, own, *beside)


GROUPS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "quantizers": quantizers,
    "products": products,
    "linear": linear,
    "block": block,
    "host": on_host,
}


def measured(bench: Bench, groups: Sequence[str]) -> Iterator[Row]:
    """The rows of the groups, as they come. A group that fails is a row that says why."""
    for group in groups:
        try:
            for row in GROUPS[group](bench):
                bench.rows.append(row)
                yield row
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            bench.rows.append(Row(group, "all", (), why=why))
            yield bench.rows[-1]
