# SPDX-License-Identifier: Apache-2.0
"""The numerical experiments of examples/pretraining: oracle run, stability, errors of operands."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import paper_tables  # noqa: E402
from pretraining import operands, runs, stability  # noqa: E402
from pretraining.oracle import References, by_references, exact_sums  # noqa: E402
from pretraining.record import Losses, Point  # noqa: E402
from pretraining.results import run_folder  # noqa: E402

import q2compile  # noqa: E402
from q2compile.runtime_kernels import registry  # noqa: E402
from q2compile.runtime_kernels.kernel_states import KNOWN  # noqa: E402
from tests.end_to_end.test_pretraining import comparison, numbers, tokens  # noqa: E402
from tests.end_to_end.test_pretraining_results import result  # noqa: E402
from tests.q2compile.telemetry.training import forget_all  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_compiler")


# ---------------------------------------------------------------------------------------- oracle


def test_the_oracle_multiplies_what_quantize_gives_in_fp32() -> None:
    """fprop alone, compared with an fp64 product of the operands from `quantize`."""
    model = nn.ModuleDict({"a": nn.Linear(64, 32), "b": nn.Linear(64, 32)})
    x = torch.randn(48, 64)
    recipe = {"base": "nvfp4", "dgrad": "bf16", "wgrad": "bf16"}
    plain = model["b"](x)
    by_references(model, {"recipe": recipe, "policy": {"b": "bf16"}})
    with References(), exact_sums():
        y, left = model["a"](x), model["b"](x)
    qx = q2compile.quantize(x, "nvfp4_pow2").dequantize()
    qw = q2compile.quantize(model["a"].weight.detach(), "nvfp4_16x16_pow2").dequantize()
    wanted = qx.double() @ qw.double().t() + model["a"].bias
    assert torch.equal(left, plain)
    # Sums of 64 fp32 products, each rounded by at most 2^-24 of the sum of magnitudes.
    assert (y - wanted).abs().max() < 64 * 2**-24 * (qx.abs() @ qw.abs().t()).max()


def test_the_oracle_runs_references_where_there_are_kernels() -> None:
    """A kernel that would be taken before the reference is passed over, in backward too."""
    called = []

    def spy(*args: object) -> object:
        called.append(args)
        return registry.select("quantize", args, registry.REFERENCE)(*args)

    ordinary = registry.kernels("quantize")
    first = registry.Kernel("quantize", "spy", "cpu", spy, lambda *args: None, lambda *args: None)
    registry.add(first)
    try:
        model = nn.Sequential(nn.Linear(64, 32))
        by_references(model, {"recipe": "quartet2"})
        x = torch.randn(128, 64, requires_grad=True)
        model(x).sum().backward()
        outside = len(called)
        with References():
            model(x).sum().backward()
    finally:
        registry.KERNELS["quantize"].remove(first)
        KNOWN.choices.clear()
    assert outside > 0 and len(called) == outside
    assert registry.kernels("quantize") == ordinary


def test_an_oracle_run_is_the_compiled_one_but_for_bf16_and_random_bits(tmp_path: Path) -> None:
    """The same weights and batches, so the first loss differs by bf16's error, some 2^-9 of 5.7.
    The gap to bf16 is then the same up to the effect of the random bits of 8 steps, which is
    smaller."""
    losses = {}
    for name in ("bf16", "quartet2"):
        for way, options in (("compiled", {}), ("oracle", {"oracle": True})):
            folder = tmp_path / way
            list(comparison(folder, options).train(runs.RUNS[name], [0]))
            losses[name, way] = [row[2] for row in numbers(folder, name)]
    for name in ("bf16", "quartet2"):
        both = zip(losses[name, "compiled"], losses[name, "oracle"], strict=True)
        differences = [abs(x - y) for x, y in both]
        assert 0 < differences[0] < 5.7 * 2**-9
    gaps = {
        way: sum(losses["quartet2", way]) / 10 - sum(losses["bf16", way]) / 10
        for way in ("compiled", "oracle")
    }
    assert gaps["compiled"] == pytest.approx(gaps["oracle"], abs=5.7 * 2**-9)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The checkpoint of bf16's last step, and the loss of its first batch of validation."""
    folder = tmp_path_factory.mktemp("kept")
    (done,) = comparison(folder, keep=True).train(runs.RUNS["bf16"], [0])
    return run_folder(folder, "bf16", 0) / "checkpoint.pt", done.result.val_losses[0]


def test_a_kept_checkpoint_is_that_of_the_last_step(
    kept: tuple[Path, float], tmp_path: Path
) -> None:
    trained = operands.Trained.load(kept[0], "cpu")
    assert (trained.step, trained.run) == (8, "bf16")
    assert trained.setup["size"] == "tiny"
    with torch.no_grad():
        batch = comparison(tmp_path).data.val[0]
        loss = trained.model(input_ids=batch, labels=batch).loss.item()
    assert loss == pytest.approx(kept[1], abs=5.7 * 2**-9)  # bf16's rounding
    with pytest.raises(ValueError, match="no such file; `train --keep` leaves"):
        operands.Trained.load(tmp_path / "nothing.pt", "cpu")


# ------------------------------------------------------------------------------------- stability


def test_each_variant_of_stability_is_a_command_of_its_own(tmp_path: Path) -> None:
    asked: list[list[list[str]]] = []
    variants = ["compiled", "resumed", "eager", "rounding", "oracle"]
    stability.train(["bf16"], variants, 200, tmp_path, ["train"], lambda c: asked.append(list(c)))
    first, second = asked
    common = ["train", "--runs", "bf16", "--out"]
    assert [c[: len(common)] for c in first] == [common] * 5
    assert [Path(c[4]).name for c in first] == variants
    eager = ["--compile-options", '{"inner": "eager"}']
    rest = [
        [],
        ["--stop-at", "100"],
        eager,
        ["--rounding-seed", str(stability.ROUNDING_SEED)],
        ["--oracle"],
    ]
    assert [c[5:] for c in first] == rest
    assert second == [[*common, str(tmp_path / "resumed")]]


def test_stability_says_from_where_and_by_how_much(tmp_path: Path) -> None:
    """Losses 5, 4, 3, 2 and a variant that differs in the last two steps, by 0.1 and 0.3."""
    losses = {"compiled": [5, 4, 3, 2], "again": [5, 4, 3, 2], "rounding": [5, 4, 3.1, 2.3]}
    for variant, values in losses.items():
        for name, added in (("bf16", 0.0), ("quartet2", 0.25)):
            place = run_folder(tmp_path / variant, name, 0)
            command = f"pretrain.py stability --out /data/{variant}"
            of_one = {"data": {"corpus": "abc"}, "device": "a GPU", "versions": {}, "date": "today"}
            of_one["command"] = command
            last = result(name, 0, [values[-1] + added], provenance=of_one)
            last.write(place / "result.json")
            rows = [Point(i, "train", v + added, 1.0, 0.1, 0.1) for i, v in enumerate(values, 1)]
            Losses.start(place / "losses.csv").add(rows)
    again, rounding = stability.differences(["bf16"], list(losses), tmp_path)
    assert str(again) == "bf16, again: the same bits in all steps"
    assert rounding.first == 3 and rounding.largest_loss == pytest.approx(0.3)
    assert rounding.mean_loss == pytest.approx(0.2) and rounding.val_loss == pytest.approx(0.3)
    assert stability.gaps(["bf16", "quartet2"], list(losses), tmp_path) == [
        "quartet2 - bf16, validation loss: compiled +0.2500, again +0.2500, rounding +0.2500"
    ]
    written = json.loads((tmp_path / "stability.json").read_text())
    firsts = {d["variant"]: d["first"] for d in written["differences"]}
    assert firsts == {"again": 0, "rounding": 3}
    assert written["val_losses"] == {"bf16": {"compiled": 2.0, "again": 2.0, "rounding": 2.3}}
    assert written["commands"] == [f"pretrain.py stability --out {v}" for v in losses]


# -------------------------------------------------------------------------------------- operands


@pytest.fixture
def fresh_telemetry() -> Iterator[None]:
    forget_all()
    yield
    forget_all()


@pytest.fixture
def trained(kept: tuple[Path, float], fresh_telemetry: None) -> operands.Trained:
    return operands.Trained.load(kept[0], "cpu")


def test_operands_are_measured_as_their_gemm_multiplies_them(
    trained: operands.Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operands, "NORMAL_SIZE", 256)
    before = {name: p.detach().clone() for name, p in trained.model.named_parameters()}
    batches = [tokens(64, seed).reshape(4, 16) for seed in (1, 2)]
    found = operands.measure(trained, runs.RUNS["nvfp4"], batches, "cpu", "eager", alone=True)
    places = [f"{gemm} {name}" for gemm, both in operands.GEMMS.items() for name in both]
    assert list(found.operands) == list(found.normal) == places
    # N(0,1): the paper's table. 256 x 256 samples, whose mean squared error is known to 1%, and the
    # table has two digits.
    for place, scheme in (
        ("fprop x", "nvfp4"),
        ("fprop w", "nvfp4_16x16"),
        ("dgrad dy", "nvfp4_sr"),
        ("wgrad x", "nvfp4"),
    ):
        wanted = math.sqrt(paper_tables.ERRORS[scheme] * 1e-3)
        assert found.normal[place] == pytest.approx(wanted, rel=0.02)
    # The run's own: w needs no run to be known. Autocast makes it bf16 first.
    layers = {
        name.removesuffix(".weight"): p.bfloat16().float()
        for name, p in before.items()
        if "proj" in name
    }
    errors = {}
    for name, w in layers.items():
        estimate = q2compile.quantize(w, "nvfp4_16x16_pow2").dequantize()
        errors[name] = float((estimate - w).norm() / w.norm())
    # Telemetry's sums are in fp32.
    assert found.operands["fprop w"] == pytest.approx(operands.rms(errors.values()), rel=1e-4)
    assert found.worst["fprop w"][0] == max(errors, key=errors.__getitem__)
    assert set(found.gemms) == set(operands.GEMMS)
    assert found.gradients["all"] > max(found.gradients[g] for g in operands.GEMMS)
    for name, p in trained.model.named_parameters():
        assert torch.equal(p, before[name]) and p.grad is None
    # tiny has one block: q, k, v, o are H x H, gate, up, down are H x 2H.
    assert {kind: size for kind, (_, size) in found.kinds.items()} == pytest.approx(
        {name: (0.1 if name[0] in "qkvo" else 0.2) for name in found.kinds}
    )
    assert len(found.kinds) == 7 and sum(effect for effect, _ in found.kinds.values()) == (
        pytest.approx(1)
    )
    shown = operands.table([found])
    assert "share of the gradient's error" in shown
    assert f"nvfp4   fprop w   {found.operands['fprop w']:.4f}" in shown


def test_a_gemm_in_bf16_has_no_line(
    trained: operands.Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operands, "NORMAL_SIZE", 128)
    batches = [tokens(64).reshape(4, 16)]
    found = operands.measure(trained, runs.RUNS["quartet2-forward"], batches, "cpu", "eager")
    assert list(found.operands) == ["fprop x", "fprop w"]
    assert list(found.gemms) == ["fprop"]
    assert "quartet2-forward" in operands.table([found])
