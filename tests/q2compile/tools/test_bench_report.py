# SPDX-License-Identifier: Apache-2.0
"""The report of `q2compile bench` read alone: planted faults are found in it."""

from __future__ import annotations

import json
import sys
import time

import pytest
import torch

from q2compile.runtime_kernels.registry import REFERENCE
from q2compile.tools import cli
from q2compile.tools.bench import codes, command, losses
from q2compile.tools.bench.report import SCHEMA, Log, doubts, faults, read, text

CPU = torch.device("cpu")
# A process that records a beginning and then never returns.
BEGINS = """
import json, os, signal, sys, time
with open(sys.argv[2], "a") as file:
    line = {"kind": "begun", "at": 0, "group": sys.argv[1], "name": NAME}
    file.write(json.dumps(line) + "\\n")
print("planted", file=sys.stderr, flush=True)
"""
HANGS = BEGINS.replace("NAME", "'mxfp4_col'") + "time.sleep(600)"
TRAPS = BEGINS.replace("NAME", "'nvfp4 triton_fp4'") + "os.kill(os.getpid(), signal.SIGILL)"


@pytest.fixture
def report(tmp_path):
    path = tmp_path / "bench.jsonl"
    log = Log(path, time.time())
    device = {"name": "NVIDIA B200", "capability": "10.0"}
    log.write("machine", schema=SCHEMA, device=device)
    return path, log


def wrong_in_the_second_half(monkeypatch) -> None:
    """q2::requantize as it would be if its second tile were wrong."""
    own = codes.select

    def select(op, args, name):
        function = own(op, args, name)

        def spoiled(*args):
            made = [tensor.clone() for tensor in function(*args)]
            made[0][300, 5] ^= 0x10
            return made

        return spoiled if op == "requantize" and "nvfp4_sr_pow2" in args else function

    monkeypatch.setattr(codes, "select", select)


@pytest.mark.skipif(torch.cuda.is_available(), reason="would use the full size")
def test_planted_faults_are_found_by_reading_alone(report, monkeypatch, capsys) -> None:
    """Wrong bits of one quantizer, a hang, and an illegal instruction: each by its name."""
    path, log = report
    wrong_in_the_second_half(monkeypatch)
    command.measure_group("codes", path, 0.0)
    log.write("ended", group="codes", how="finished", seconds=1.0)
    for group, program, limit in (("quantizers", HANGS, 3.0), ("products", TRAPS, 60.0)):
        command.run_group(group, log, path, 0.0, limit, (sys.executable, "-c", program))
    log.write("done", seconds=9.0)
    assert faults(read(path)) == [
        "products: nvfp4 triton_fp4: the process was ended by SIGILL while this ran",
        "quantizers: mxfp4_col: the process was stopped after 3 s while this ran",
        "codes: tetrajet2_requantize, 256x384, by cpp: columnwise codes: pieces 6 of 8",
    ]
    ended = [line for line in read(path) if line["kind"] == "ended" and "stderr" in line]
    assert [line["stderr"] for line in ended] == ["planted\n"] * 2
    capsys.readouterr()
    assert cli.main(["bench", "--read", str(path)]) == 1
    printed = capsys.readouterr().out
    assert "NVIDIA B200" in printed and printed.count("FAULT     ") == 3


def test_a_group_runs_in_a_process_of_its_own(tmp_path) -> None:
    out = tmp_path / "bench.jsonl"
    assert cli.main(["bench", "--only", "checks", "--out", str(out), "--no-remember"]) == 0
    kinds = [line["kind"] for line in read(out)]
    assert kinds[:3] == ["machine", "begun", "state"] and kinds[-2:] == ["ended", "done"]


def test_a_report_that_is_cut_off_says_where(report) -> None:
    path, log = report
    log.write("begun", group="linear", name="nvfp4, forward and backward")
    with path.open("a") as file:
        file.write('{"kind": "row", "at": 3')
    assert faults(read(path)) == [
        "the report is incomplete: it ends while linear: nvfp4, forward and backward ran"
    ]


def test_times_that_are_not_to_be_relied_on(report) -> None:
    path, log = report
    row = {"group": "linear", "name": "quartet2", "status": "measured"}
    log.write("row", **row, microseconds=10.0, p90=21.0)
    log.write("row", **row, microseconds=10.0, p90=14.0)
    state = {"clocks_throttle_reasons.active": "0x0000000000000048"}
    log.write("state", group="linear", when="after", state=state)
    assert doubts(read(path)) == [
        "linear: quartet2: p90 is 2.1 medians: something else was running, or clocks changed",
        "linear: the GPU was slowed down: hardware slowdown, thermal slowdown by hardware",
    ]


@pytest.mark.parametrize(
    "content, match",
    [
        ("", "no line names the machine"),
        ("no json\n{}\n", "line 1: not a line of a report"),
        (json.dumps({"kind": "machine", "schema": 1}) + "\n", "has schema 1; this q2compile reads"),
    ],
)
def test_what_is_no_report(tmp_path, capsys, content, match) -> None:
    path = tmp_path / "x"
    path.write_text(content)
    assert cli.main(["bench", "--read", str(path)]) == 2
    assert match in capsys.readouterr().err


# --- hashes of codes ------------------------------------------------------------------------------


def test_the_matrix_is_the_same_everywhere() -> None:
    """Pinned: magnitudes that differ by 2^7 from row to row, and rows of zeros."""
    x = codes.matrix(codes.SMALL, CPU)
    assert x[0].eq(0).all() and x[61].eq(0).all()
    sizes = x.float().std(1)[1:9]
    assert (sizes.max() / sizes.min()).log2().item() == pytest.approx(7, abs=0.3)
    assert codes.pieces(x) == (
        "26534d2e 4af4f546 c6d5138b 5804c295 e0979eea f752a819 95dd667b 22c336cb"
    )


def test_every_piece_of_every_output_is_hashed() -> None:
    name, make = next(iter(codes.calls(CPU, codes.SMALL)))
    found = codes.hashes(make(), REFERENCE)
    want = codes.shipped(codes.SMALL)[name]
    assert found == want and codes.differences(found, want) == ""
    first = found["rowwise codes"]
    spoiled = {**found, "rowwise codes": "0" * 8 + first[8:]}
    assert codes.differences(spoiled, want) == "rowwise codes: pieces 0 of 8"
    assert codes.differences({}, {"scales": "a b"}) == "scales: 0 pieces instead of 2"
    both = codes.shipped(codes.SHAPE), codes.shipped(codes.SMALL)
    assert set(both[0]) == set(both[1]) == set(codes.cases())


@pytest.mark.gpu
def test_codes_at_full_size_are_the_references() -> None:
    for name in codes.cases():
        make = dict(codes.calls(torch.device("cuda"), codes.SHAPE))[name]
        assert codes.differences(codes.hashes(make()), codes.shipped(codes.SHAPE)[name]) == ""


# --- losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", losses.RECIPES)
def test_losses_are_held_to_the_shipped_curves(recipe) -> None:
    """The band is narrower than the effect of a fault: curves that stop learning after a step, or
    are NaN, are outside."""
    curve = losses.shipped()[recipe]
    mean = curve["mean"]
    assert len(mean) == losses.STEPS and mean[0] > 5.5 and mean[-1] < 2.2
    band = losses.DEVIATIONS * curve["deviation"] + losses.ROUNDING
    assert band < 0.1
    assert losses.outside(mean, **curve) == ""
    stuck = mean[:20] + [mean[20]] * (losses.STEPS - 20)
    assert "off since step 2" in losses.outside(stuck, **curve)
    gone = mean[:40] + [float("nan")] * 10
    assert losses.outside(gone, **curve).endswith("off since step 41")


def test_lines_without_a_time_are_words() -> None:
    line = {"name": "bf16, 50 steps", "status": "passed"}
    assert text(line).split() == ["bf16,", "50", "steps", "passed"]
