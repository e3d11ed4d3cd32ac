# SPDX-License-Identifier: Apache-2.0
"""Which values are recorded, when, and that recording changes no result."""

import csv
import json
import re

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch.utils.checkpoint import checkpoint

import q2compile
from q2compile.recipes.published import RECIPES
from q2compile.runtime_kernels.numerics import constants
from q2compile.telemetry import clock
from q2compile.telemetry import folder as folders
from q2compile.telemetry.into_graph import NoteLayout
from tests.q2compile.telemetry.training import (
    LINEARS,
    PROGRAM,
    WIDTH,
    all_operands,
    batch,
    compiled,
    forget_all,
    names,
    new_model,
    operands,
    records,
    train,
)
from tests.support import forked

pytestmark = pytest.mark.usefixtures("fresh_compiler")

QUANTIZING = [name for name in RECIPES if name != "bf16"]


@pytest.fixture(autouse=True)
def fresh_telemetry():
    forget_all()
    yield
    forget_all()


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class OfRecipes(nn.Module):
    """A linear for each recipe, norms and activations between them."""

    def __init__(self, recipes) -> None:
        super().__init__()
        self.recipes, self.norm = recipes, nn.RMSNorm(WIDTH)
        for name in recipes:
            setattr(self, name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        for name in self.recipes:
            x = x + nn.functional.silu(getattr(self, name)(self.norm(x)))
        return x


@pytest.mark.parametrize(
    ("inner", "dtype", "recipes"),
    [
        ("eager", torch.float32, QUANTIZING),
        ("inductor", torch.bfloat16, ["nvfp4", "quartet"]),
    ],
)
def test_no_bit_changes(inner, dtype, recipes, tmp_path):
    """Losses and gradients are equal in recorded steps and in others, for every recipe. Inductor
    compiles one with codes of w transposed, and one with codes of x saved and a mask; kernels of
    quartet2 are compared in test_generated_code.py."""
    policy = {name: name for name in recipes}
    seen = []
    for folder in (None, tmp_path):
        torch.manual_seed(0)
        model = OfRecipes(recipes).to(dtype)
        call = compiled(model, folder, policy=policy, inner=inner, every=2)
        seen.append(train(model, call, steps=3))
        torch._dynamo.reset()
    assert same(*seen)
    found = records(tmp_path)
    assert {r["step"] for r in found} == {0, 2}
    wanted = all_operands(recipes) - {("mxfp4", "fprop", role) for role in "xw"}
    assert operands(found, 0) == operands(found, 2) == wanted


def test_numbers_are_those_of_quantize(tmp_path):
    """x and w of fprop are recorded exactly; their errors are those of q2compile.quantize."""
    model = new_model(blocks=1, dtype=torch.bfloat16)
    x = batch(0, model)
    train(model, compiled(model, tmp_path, every=10), steps=1)
    found = {(r["module"], r["gemm"], r["operand"]): r for r in records(tmp_path)}
    block = new_model(blocks=1, dtype=torch.bfloat16).layers[0]
    for role, tensor in {"x": block.norm(x), "w": block.gate.weight}.items():
        row = found["layers.0.gate", "fprop", role]
        q = q2compile.quantize(tensor, "nvfp4_46_pow2")
        exact, rounded = tensor.double(), q.dequantize().double()
        error = (rounded - exact).norm() / exact.norm()
        cosine = torch.cosine_similarity(rounded.flatten(), exact.flatten(), 0)
        assert row["amax"] == tensor.abs().max().item()
        assert row["relative_error"] == pytest.approx(error.item(), rel=1e-5)
        assert row["cosine"] == pytest.approx(cosine.item(), abs=1e-6)
        assert row["zero"] == ((rounded == 0) & (exact != 0)).double().mean().item()
        largest = 6 * q.scales.double().repeat_interleave(16, 1) * q.global_scale
        assert row["saturated"] == (exact.abs() > largest).double().mean().item()
        assert row["format"] == "nvfp4_46_pow2"
    rotated = found["layers.0.gate", "wgrad", "dy"]
    assert rotated["format"] == "rht128>nvfp4_ms_eden_pow2"
    assert 0.05 < rotated["relative_error"] < 0.15 and rotated["cosine"] > 0.98
    # The same dy, rotated along the other dimension: one quantizer measures both.
    rows = found["layers.0.gate", "dgrad", "dy"]
    assert rows["format"] == rotated["format"]
    assert rows["amax"] == rotated["amax"]  # before the rotation
    assert rows["relative_error"] != rotated["relative_error"]
    # Operands that GEMMs share have the same numbers.
    one, other = (found[f"layers.0.{name}", "fprop", "x"] for name in ("gate", "up"))
    assert {**one, "module": ""} == {**other, "module": ""}


def test_every(tmp_path):
    """In one graph. The recorder creates device constants before, since no op keeps any."""
    constants._PAIRS.clear()
    constants._ROTATIONS.clear()
    model = new_model(blocks=1)
    train(model, compiled(model, tmp_path, every=3), steps=8)
    assert sorted({r["step"] for r in records(tmp_path)}) == [0, 3, 6]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    cpu = torch.device("cpu")
    assert constants.pairs_of_bytes(cpu) is constants.pairs_of_bytes(cpu)


def test_modules(tmp_path):
    model = new_model()
    train(model, compiled(model, tmp_path, modules=["*.1.*", "re:.*0.down"]), steps=1)
    assert {r["module"] for r in records(tmp_path)} == {*names()[3:], "layers.0.down"}


def test_a_pattern_of_none_of_them_records_none(tmp_path):
    model = new_model(blocks=1)
    train(model, compiled(model, tmp_path, modules="head"), steps=2)
    assert records(tmp_path) == []


def test_of_an_accumulated_gradient_the_first_part_is_recorded(tmp_path):
    model = new_model(blocks=1)
    train(model, compiled(model, tmp_path, every=2), steps=3, micro_batches=3)
    found = records(tmp_path)
    assert len(found) == 2 * len(all_operands(names(1)))
    assert {r["step"] for r in found} == {0, 2}


def test_several_optimizers_of_a_step_count_once(tmp_path):
    """Fused optimizers do not increase the version counters."""
    model = new_model(blocks=1)
    call = compiled(model, tmp_path)
    optimizers = [torch.optim.SGD([p], lr=0.1, fused=True) for p in model.parameters()]
    others = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], fused=True)
    for _ in range(2):
        for _ in range(2):
            call(batch(0, model)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert {r["step"] for r in records(tmp_path)} == {0, 1}
    assert not others._optimizer_step_post_hooks


def test_steps_without_an_optimizer(tmp_path):
    model = new_model(blocks=1)
    call = compiled(model, tmp_path)
    for number in (None, None, 7):
        call(batch(0, model)).sum().backward()
        q2compile.telemetry.step(number)
    call(batch(0, model)).sum().backward()
    assert sorted({r["step"] for r in records(tmp_path)}) == [0, 1, 2, 7]
    with pytest.raises(ValueError, match="step: got -1; allowed: a whole number"):
        q2compile.telemetry.step(-1)


def test_codes_that_changed(tmp_path):
    """None at the first record, none if the weight stayed, otherwise every change of the weight's
    codes."""
    model = new_model(blocks=1, dtype=torch.bfloat16)
    weights = []

    def before(step):
        weights.append(model.layers[0].up.weight.detach().clone())
        model.layers[0].gate.weight.requires_grad_(True)

    train(model, compiled(model, tmp_path), steps=3, before=before, lr=10.0)
    rows = [r for r in records(tmp_path) if (r["gemm"], r["operand"]) == ("fprop", "w")]
    up = [r["changed"] for r in rows if r["module"] == "layers.0.up"]
    codes = [q2compile.quantize(w, "nvfp4_46_pow2").codes for w in weights]
    nibbles = [torch.stack([c & 15, c >> 4]) for c in codes]
    assert up[0] is None
    for i in (1, 2):
        wanted = (nibbles[i] != nibbles[i - 1]).float().mean().item()
        assert up[i] == pytest.approx(wanted, rel=1e-6) and wanted > 0
    others = [r for r in records(tmp_path) if (r["gemm"], r["operand"]) != ("fprop", "w")]
    assert all(r["changed"] is None for r in others)


def test_inference_records_nothing_and_counts_nothing(tmp_path):
    model = new_model(blocks=1)
    call = compiled(model, tmp_path)
    with torch.no_grad():
        call(batch(0, model))
    train(model, call, steps=1)
    with torch.no_grad():
        call(batch(0, model))
    assert {r["step"] for r in records(tmp_path)} == {0}


@pytest.mark.parametrize("where", ["inside", "outside", "reentrant"])
def test_under_checkpointing(where, tmp_path):
    """Checkpoints in the graph, or around a compiled block, whose forward is then called again.
    With reentrant checkpoints only the second call has gradients, and the modules around the block
    are unknown."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = new_model(blocks)

        def forward(self, x):
            for layer in self.model.layers:
                x = checkpoint(layer, x, use_reentrant=where == "reentrant")
            return x

    blocks = 1 if where == "inside" else 2  # which share a graph
    seen = []
    for folder in (None, tmp_path):
        model = Checkpointed()
        if where == "inside":
            call = compiled(model, folder, every=2)
        else:
            call = model
            for layer in model.model.layers:
                kind = {"telemetry": {"every": 2, "to": str(folder)}} if folder else {}
                layer.compile(backend="quartet2", options={"inner": "eager", **kind})
        seen.append(train(model, call, steps=3, inputs_need_gradients=where == "reentrant"))
        torch._dynamo.reset()
    assert same(*seen)
    found = records(tmp_path)
    modules = LINEARS if where == "reentrant" else [f"model.{name}" for name in names(blocks)]
    assert operands(found, 0) == operands(found, 2) == all_operands(modules)
    assert len(found) == 2 * len(all_operands(modules))


def test_blocks_that_share_a_graph_are_told_apart(tmp_path):
    """The layers have their own names and values, in forward and backward."""
    model = new_model()
    with torch.no_grad():
        model.layers[1].up.weight.mul_(8)
    for layer in model.layers:
        layer.compile(
            backend="quartet2",
            options={"inner": "eager", "telemetry": {"every": 1, "to": str(tmp_path)}},
        )
    train(model, model, steps=2)
    found = records(tmp_path)
    assert operands(found, 0) == operands(found, 1) == all_operands(names())
    amax = {r["module"]: r["amax"] for r in found if r["operand"] == "w" and r["gemm"] == "dgrad"}
    assert amax["layers.1.up"] == pytest.approx(8 * amax["layers.0.up"], rel=0.2)


@pytest.mark.parametrize("option", ["cache_weights", "recompute_weights"])
def test_beside_other_options(option, tmp_path):
    options = {option: True, "dump": str(tmp_path / "graphs")}
    seen = []
    for folder in (None, tmp_path / "telemetry"):
        model = new_model(blocks=1)
        seen.append(train(model, compiled(model, folder, **options)))
        torch._dynamo.reset()
    assert same(*seen)
    found = records(tmp_path / "telemetry")
    assert operands(found, 1) == all_operands(names(1))
    texts = [p.read_text() for p in (tmp_path / "graphs").rglob("*_forward.txt")]
    assert texts and not any("note" in text or "recorded" in text for text in texts)


def test_symbolic_sizes(tmp_path):
    model = new_model(blocks=1)
    options = {"inner": "eager", "telemetry": {"every": 1, "to": str(tmp_path)}}
    call = torch.compile(model, backend="quartet2", options=options, dynamic=True)
    for rows in (32, 40):
        call(torch.randn(rows, WIDTH)).sum().backward()
        q2compile.telemetry.step()
    found = records(tmp_path)
    assert operands(found, 0) == operands(found, 1) == all_operands(names(1))


def test_a_backward_that_is_compiled_at_once(tmp_path):
    with functorch_config.patch(force_non_lazy_backward_lowering=True):
        model = new_model(blocks=1)
        train(model, compiled(model, tmp_path, on_error="bf16"), steps=2)
    assert operands(records(tmp_path), 1) == all_operands(names(1))


def test_beside_compiled_autograd(tmp_path):
    """Graphs of compiled autograd are not recorded; the forward is."""
    with torch._dynamo.config.patch(compiled_autograd=True):
        model = new_model(blocks=1)
        train(model, compiled(model, tmp_path, every=2), steps=3)
    wanted = {o for o in all_operands(names(1)) if o[1] == "fprop"}
    assert operands(records(tmp_path), 0) == operands(records(tmp_path), 2) == wanted


def test_under_another_default_dtype(tmp_path):
    """The default dtype is that of a program's new tensors, and none of the recorder's."""
    plain, *others = places = [tmp_path / name for name in ("float32", "bfloat16", "float64")]
    defaults = (torch.float32, torch.bfloat16, torch.float64)
    for folder, default in zip(places, defaults, strict=True):
        torch.set_default_dtype(default)
        try:
            model = new_model(blocks=1, dtype=torch.float32)
            with torch.no_grad():
                for i, p in enumerate(model.parameters()):
                    p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
            train(model, compiled(model, folder), steps=2)
        finally:
            torch.set_default_dtype(torch.float32)
        torch._dynamo.reset()
        clock.restart()
    for found in map(records, others):
        assert operands(found, 1) == all_operands(names(1))
        assert [r["format"] for r in found] == [r["format"] for r in records(plain)]


def test_a_layout_can_stand_in_a_string_of_cpp():
    """Inductor's C++ wrapper writes an argument that is a string into the source as it is."""
    layout = NoteLayout(
        [(3, "fprop", "x")], [((3, "fprop", "x"), 0), ((-1, "wgrad", "dy"), 1)], [3]
    )
    assert not set(layout.text()) & set('"\\\n')
    assert NoteLayout.parse(layout.text()).text() == layout.text()


def test_files(tmp_path):
    """CSV and JSONL have the same records; the summary is short; a second run appends."""
    model = new_model(blocks=1)
    train(model, compiled(model, tmp_path, csv=True), steps=2)
    found = records(tmp_path)
    with (tmp_path / "rank0.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(found)
    assert float(table[3]["relative_error"]) == found[3]["relative_error"]
    assert table[0]["changed"] == ""
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["step"] == 1 and summary["ranks"] == 1 and len(summary["worst"]) == 10
    folders.forget_folders()
    torch._dynamo.reset()
    train(model, compiled(model, tmp_path, csv=True), steps=1)
    assert len(records(tmp_path)) > len(found)


def test_a_folder_that_cannot_be_made(tmp_path):
    """That is all that is said: at exit nothing follows about layers that were not called."""
    (tmp_path / "file").write_text("")
    model = new_model(blocks=1)
    for name in ("file", "\ud800"):
        with pytest.raises(ValueError, match="telemetry: to: .* is not a folder"):
            compiled(model, tmp_path / name)(batch(0, model))
    assert not [path for _, path in folders._Folders.asked_for if path == tmp_path / "file"]


SAID = {
    "inference": "nothing was written to",
    "raw writes": "no optimizer step was seen in 3 training calls",
    "fused": "",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """For each kind, the folder that was written to, and the process."""
    folder = tmp_path_factory.mktemp("programs")
    folders = {kind: folder / kind.replace(" ", "_") for kind in SAID}
    return {kind: (to, forked.run(PROGRAM, str(to), kind)) for kind, to in folders.items()}


@pytest.mark.parametrize("kind", SAID)
def test_what_was_not_recorded_is_said_at_exit(kind, ended):
    to, done = ended[kind]
    assert done.returncode == 0, done.stderr
    assert ("TelemetryWarning" in done.stderr) == bool(SAID[kind]), done.stderr
    assert SAID[kind] in done.stderr
    said = (
        r"q2compile: telemetry: worst operand: \w+ of \w+ of [\w.]+, relative error 0\.\d{3} at "
        r"step [012], \d\.\d\d times that of Gaussian data; "
        rf"q2compile report {to} shows all"
    )
    assert len(re.findall(said, done.stderr)) == (kind != "inference")
