# SPDX-License-Identifier: Apache-2.0
"""`q2compile bench`: a whole run on this machine's CPU, and its handling of a GPU's times."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from q2compile.cost_model.devices import DEVICES, H200
from q2compile.cost_model.quantizers import ROWS_UNROTATED
from q2compile.cost_model.ranges import Range
from q2compile.recipes.published import RECIPES
from q2compile.runtime_kernels import registry
from q2compile.runtime_kernels.cuda.gemm.cublaslt import Algorithm
from q2compile.runtime_kernels.kernel_states import NotServedError
from q2compile.runtime_kernels.registry import CUBLASLT_FP4, CUDA_BF16, REFERENCE, TRITON_FP4
from q2compile.tools import cli
from q2compile.tools.arguments import BENCH_UNITS
from q2compile.tools.bench import bench, command, host, machine, measurements
from q2compile.tools.bench.bench import ON_CPU, Bench
from q2compile.tools.bench.cases import CASES, OTHERS, calls_of_quantizers, step_of
from q2compile.tools.bench.llama_block import Block, LlamaBlock
from q2compile.tools.bench.measurements import BUSY, GROUPS
from q2compile.tools.bench.report import FAULT, MEASURED, UNSUPPORTED, BenchRow, Times, read, text

CPU = torch.device("cpu")


@pytest.fixture
def in_process(monkeypatch):
    """Groups run in this process, where they can be changed."""

    def run(group, log, out, start, limit):
        command.measure_group(group, out, start)
        log.write("ended", group=group, how="finished", seconds=0.0)

    monkeypatch.setattr(command, "run_group", run)


@pytest.fixture
def models_in_eager(monkeypatch):
    """Models run without Inductor, which would compile 20 graphs; functions are compiled by it."""
    by_torch = torch.compile

    def compile(model, backend="inductor", options=None, **kwargs):
        if isinstance(model, torch.nn.Module) and backend == "inductor":
            backend = "aot_eager"
        elif isinstance(model, torch.nn.Module):
            options = {**(options or {}), "inner": "eager"}
        return by_torch(model, backend=backend, options=options, **kwargs)

    monkeypatch.setattr(torch, "compile", compile)


def rows_of(path) -> list[dict]:
    return [line for line in read(path) if line["kind"] == "row"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure the GPU")
def test_a_run_on_a_cpu(
    tmp_path, capsys, monkeypatch, fresh_compiler, in_process, models_in_eager
) -> None:
    """One recipe beside bf16: the others take the same way, and seconds of compilation each."""
    recipes = {name: RECIPES[name] for name in ("bf16", "quartet2")}
    monkeypatch.setattr(measurements, "RECIPES", recipes)
    monkeypatch.setattr(bench, "ON_CPU", replace(ON_CPU, cpu_seconds=0.005, host_repeats=5))
    out = tmp_path / "bench.jsonl"
    assert cli.main(["bench", "--out", str(out)]) == 0
    printed, lines = capsys.readouterr().out, read(out)
    assert printed.startswith("device    CPU") and "torch sees no GPU" in printed
    assert f"units     {BENCH_UNITS}\n" in printed
    assert "faults    none" in printed
    assert (lines[0]["kind"], lines[-1]["kind"]) == ("machine", "done")
    assert lines[0]["versions"]["torch"] == torch.__version__
    assert [line["group"] for line in lines if line["kind"] == "ended"] == list(GROUPS)
    states = [(line["group"], line["when"]) for line in lines if line["kind"] == "state"]
    assert states == [(group, when) for group in GROUPS for when in ("before", "after")]
    rows = [line for line in lines if line["kind"] == "row"]
    names = {row["name"] for row in rows}
    assert {name for name, case in CASES.items() if not case.spec.dequantized} <= names
    assert not any(name.endswith("_bf16") for name in names)
    assert {"nvfp4 reference", "mxfp4 reference", "dequantize", "nvfp4 wgrad reference"} <= names
    begun = {line["name"] for line in lines if line["kind"] == "begun"}
    assert {"mxfp4_col", "quartet2, forward and backward", "rht_quantize_row@32x4x4"} <= begun
    for row in rows:
        assert row["status"] in (MEASURED, "passed", UNSUPPORTED, "noise"), row
        if row["status"] == MEASURED:
            assert row["microseconds"] > 0 and "predicted" not in row and "why" not in row
        if "minimum" in row:
            assert row["minimum"] <= row["microseconds"] and row["minimum"] <= row["p90"]
    # Only rows of host times have nothing to compare with.
    alone = {row["name"] for row in rows if row["status"] == MEASURED and "beside" not in row}
    assert alone <= {"a call of two launches in a compiled graph"}


def test_a_slope_that_is_lost_in_the_noise_is_no_time(
    tmp_path, capsys, monkeypatch, in_process
) -> None:
    slopes = iter((7.0, -3.0, 90.0, 20.0, -1.0, 5.0))
    monkeypatch.setattr(host, "per_call", lambda *args, **kwargs: 2.0)
    monkeypatch.setattr(host, "per_linear", lambda *args, **kwargs: next(slopes))
    out = tmp_path / "bench.jsonl"
    for expected in ({"why": f"{BUSY}: the time of more calls is not longer"}, {"ratio": 4.5}):
        assert cli.main(["bench", "--only", "host", "--out", str(out)]) == 0
        call, linear = rows_of(out)
        assert call["microseconds"] == 2.0
        assert linear.items() >= expected.items() and ("why" in linear) != ("ratio" in linear)
    assert "noise: lost in the noise" in capsys.readouterr().out
    monkeypatch.setattr(host, "per_call", lambda *args, **kwargs: -722.9)
    assert cli.main(["bench", "--only", "host", "--out", str(out)]) == 0
    assert [row["status"] for row in rows_of(out)] == ["noise"] * 2


@pytest.mark.gpu
def test_a_run_on_a_gpu(tmp_path, monkeypatch, fresh_compiler, in_process) -> None:
    """Everything runs at small sizes. Rows without a measurement are kernels of other GPUs."""
    sizes = {"matrix": (256, 512), "products": ((128, 256, 256),), "linear": (256, 256, 256)}
    monkeypatch.setattr(bench, "ON_GPU", bench.Sizes(**{**vars(ON_CPU), **sizes}))
    out = tmp_path / "bench.jsonl"
    assert cli.main(["bench", "--out", str(out)]) == 0
    lines = read(out)
    assert lines[0]["device"]["driver"] and lines[0]["versions"]["cublaslt"].isdigit()
    states = [line["state"] for line in lines if line["kind"] == "state"]
    assert all(state["clocks.sm"].endswith("MHz") for state in states)
    rows = {row["name"]: row for row in rows_of(out)}
    assert {*CASES, *OTHERS, f"nvfp4 {CUDA_BF16}", f"mxfp4 {CUDA_BF16}"} <= set(rows)
    for name, row in rows.items():
        assert row["status"] != FAULT, name


def test_what_cannot_be_asked(capsys, tmp_path) -> None:
    assert cli.main(["bench", "--only", "quantizer"]) == 2
    assert "did you mean 'quantizers'?" in capsys.readouterr().err.lower()
    assert cli.main(["bench", "--out", str(tmp_path / "none" / "x.json")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert cli.main(["bench", "--out", str(tmp_path)]) == 2
    assert "is a folder; allowed" in capsys.readouterr().err


def test_a_group_that_fails_is_a_row_and_a_status(
    tmp_path, capsys, monkeypatch, in_process
) -> None:
    def fails(bench):
        yield BenchRow("linear", "first", (1,), microseconds=1.0)
        raise RuntimeError("no\nkernel image")

    monkeypatch.setitem(GROUPS, "linear", fails)
    out = tmp_path / "bench.jsonl"
    assert cli.main(["bench", "--only", "linear,products", "--out", str(out)]) == 1
    rows = rows_of(out)
    assert [row["group"] for row in rows] == ["linear", "linear", "products", "products"]
    assert rows[1]["why"] == "RuntimeError: no kernel image" and "microseconds" not in rows[1]
    assert "raise RuntimeError" in "".join(rows[1]["more"]["traceback"])
    assert "FAULT     linear: all: RuntimeError: no kernel image" in capsys.readouterr().out


def test_a_case_is_the_call_that_the_cost_model_means() -> None:
    """Codes for each operand, rowwise or columnwise, and a mask if there is one."""
    for name in [n for n, case in CASES.items() if not case.spec.dequantized]:
        case, (rows, cols) = CASES[name], (128, 256)
        (call,) = calls_of_quantizers(CPU, rows, cols, 1, [name])[name]()
        codes = [t for t in call() if t.dtype == torch.uint8]
        expected = [(rows, cols // 2)] * (case.kind in ("row", "both", ROWS_UNROTATED))
        expected += [(cols, rows // 2)] * (case.kind != "row")
        expected += [(rows, cols // 8)] * case.spec.masked
        assert [tuple(t.shape) for t in codes] == expected
        assert step_of(name, rows * cols).launches == 2


SHAPES = ((64, 128, 128), (64, 256, 128))


@pytest.fixture
def gpu(monkeypatch):
    """A Bench that takes itself for one on a B200: candidates are the reference, and the times of
    each are given. cuBLASLt lists two algorithms."""
    times: dict[str, float] = {}
    broken: dict[str, Exception] = {}
    wrong: set[str] = set()
    taken: list = []

    def select(op, args, name):
        if name in broken:
            raise broken[name]
        reference = registry.select(op, args, REFERENCE)
        return (lambda *args: 2 * reference(*args)) if name in wrong else reference

    def measured(self, calls):
        errors = {}
        for name, make in calls.items():
            try:
                make()
            except Exception as error:
                errors[name] = error
        ran = [name for name in calls if name not in errors]
        return {name: Times.of([times[name]]) for name in ran}, errors

    class Plan:
        algorithms = ALGORITHMS

    def plan(product, wanted=None):
        taken.append(wanted)
        return Plan

    monkeypatch.setattr(Bench, "on_gpu", True)
    monkeypatch.setattr(Bench, "inputs", lambda self, bytes_: 1)
    monkeypatch.setattr(Bench, "times", measured)
    monkeypatch.setattr(measurements, "select", select)
    monkeypatch.setattr(measurements, "product_of", lambda *args: None)
    monkeypatch.setattr(measurements.cublaslt, "plan", plan)
    sizes = bench.Sizes(**{**vars(ON_CPU), "products": SHAPES})
    times |= {FIRST: 9.0, SECOND: 8.0, TRITON_FP4: 6.0, CUDA_BF16: 20.0, "BF16": 12.0}
    times[CUBLASLT_FP4] = 9.0
    return Bench(CPU, sizes, DEVICES[0], group="products"), times, broken, wrong


ALGORITHMS = [Algorithm(*[number] * 9) for number in range(2)]
FIRST, SECOND = (f"{CUBLASLT_FP4} algorithm {i}" for i in range(2))


def test_a_product_by_each_candidate(gpu) -> None:
    own, *_ = gpu
    rows = list(measurements.products(own))
    assert [row.shape for row in rows if row.kernel == TRITON_FP4] == [*SHAPES, *SHAPES]
    found = {row.name: row for row in rows if row.shape == SHAPES[0]}
    assert found[f"nvfp4 {TRITON_FP4}"].ratio == 0.5
    assert found[f"nvfp4 {CUDA_BF16}"].ratio == pytest.approx(20 / 12)
    assert found[f"nvfp4 {SECOND}"].more == {"algorithm": ALGORITHMS[1]._asdict()}
    # 2 us of GEMM are little compared with the launches: two of cuBLASLt, and one that dequantizes
    # both operands before a GEMM.
    predicted = [found[f"nvfp4 {name}"].predicted for name in (FIRST, CUDA_BF16)]
    assert [own.text(".1f") for own in predicted] == ["5.0-8.6", "5.0-8.6"]


def test_a_candidate_that_fails(gpu) -> None:
    """A kernel that fails, or is wrong by more than the self-check allows, is a fault. The others
    are timed."""
    own, _, broken, wrong = gpu
    broken[CUBLASLT_FP4] = NotServedError("it cannot run q2::gemm here: mxfp4", "unsupported")
    rows = list(measurements.products(own))
    unserved = [row for row in rows if row.name.endswith(CUBLASLT_FP4)]
    assert {row.why for row in unserved} == {f"NotServedError: {broken[CUBLASLT_FP4]}"}
    assert {(row.microseconds, row.status) for row in unserved} == {(None, UNSUPPORTED)}
    broken[CUBLASLT_FP4] = NotServedError("it cannot run q2::gemm here: it failed", "rejected")
    rows = list(measurements.products(own))
    assert {r.status for r in rows if r.name.endswith(CUBLASLT_FP4)} == {FAULT}
    broken.clear()
    wrong.add(TRITON_FP4)
    rows = list(measurements.products(own))
    (row,) = [r for r in rows if r.name == f"nvfp4 {TRITON_FP4}" and r.shape == SHAPES[0]]
    assert row.why == "it is wrong: relative error 1.0e+00" and row.microseconds == 6.0
    assert row.status == FAULT


def test_lines_say_times_in_words() -> None:
    row = partial(BenchRow, "products", "nvfp4 triton_fp4", (512, 4096, 4096))

    def words(**parts) -> list[str]:
        return text(row(**parts).as_line()).split("; ")

    beside = {"beside": "BF16", "beside_microseconds": 100.0}
    assert words(microseconds=45.0, predicted=Range(40.0, 50.0), **beside)[1:] == [
        "0.45 times BF16's time (faster)",
        "predicted 40.0-50.0 us, 0.89-1.11",
    ]
    line = row(microseconds=45.0, predicted=Range(40.0, 50.0), **beside).as_line()
    ends = {"predicted": 45.0, "predicted_low": 40.0, "predicted_high": 50.0}
    assert line.items() >= ends.items()
    earlier = {
        name: value for name, value in line.items() if name in (*line.keys() - ends, "predicted")
    }
    assert text(earlier).endswith("predicted 45.0 us, 1.00")
    assert words(microseconds=120.0, **beside)[1] == "1.20 times BF16's time (slower)"
    copies = words(
        microseconds=126.0, minimum=120.0, p90=130.0, beside="copy", beside_microseconds=100.0
    )
    assert copies[0].endswith("126.0 us (min 120.0, p90 130.0)") and copies[1] == "1.26 copies"
    assert words(status=FAULT, why="it failed")[0].endswith("FAULT: it failed")


def test_predictions_beside_a_data_sheet(gpu) -> None:
    own, times, *_ = gpu
    own.sheet = H200
    times |= dict.fromkeys(["copy", *OTHERS, *CASES], 10.0)
    own.sizes = bench.Sizes(**{**vars(ON_CPU), "matrix": (128, 256)})
    rows = {row.name: row for row in measurements.quantizers(own)}
    assert set(rows) == {*OTHERS, *CASES}
    for name, row in rows.items():
        assert row.predicted == 1e6 * step_of(name, 128 * 256).seconds(H200)
        assert row.ratio == 1.0 or row.why


def test_a_block_is_a_llama_s() -> None:
    """Its linears are those that the prediction counts; changing a token changes no earlier one."""
    block = Block(width=64, inner=128, heads=4, key_values=2, batch=2, length=8)
    torch.manual_seed(0)
    model = LlamaBlock(block)
    weights = [tuple(m.weight.shape) for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert weights == [(n, k) for n, k, *_ in block.linears]
    x = torch.randn(2, 8, 64)
    y = model(x)
    x[:, 5] += 1
    changed = (model(x) - y).abs().amax(dim=(0, 2)) > 1e-6
    assert changed.tolist() == 5 * [False] + 3 * [True]


def test_nothing_is_known_of_a_gpu_without_nvidia_smi(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert machine.asked(0, ["driver_version"]) == {}
    assert machine.state(CPU) == {}
