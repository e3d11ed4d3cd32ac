# SPDX-License-Identifier: Apache-2.0
"""A model that was compiled several times is counted once, by its training graph."""

import pytest
import torch
from torch import nn

import q2compile
from q2compile.report.model_rows import layers, of_model, rows_of_layers
from q2compile.report.row import Row
from q2compile.tools.page.command import read_dump
from q2compile.tools.page.document import document, headline
from tests.support.page_dumps import VOCABULARY, Net

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def compiled(model, folder, **options):
    options = {"inner": "eager", "dump": str(folder), **options}
    return torch.compile(model, backend="quartet2", options=options, dynamic=False)


def tokens(length):
    return torch.arange(2 * length).view(2, length) % VOCABULARY


def headline_of(folder):
    return headline(read_dump(folder)[0])


def test_an_evaluation_adds_nothing(tmp_path):
    """Neither to what is counted nor to predicted times, in whatever order both come."""
    train, evaluate = True, False
    orders = {"once": [train], "after": [train, evaluate], "before": [evaluate, train]}
    for name, passes in orders.items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = Net(1)
        model = compiled(net, tmp_path / name)
        for one in passes:
            with torch.set_grad_enabled(one):
                loss = model(tokens(12)).sum()
            if one:
                loss.backward()
    once, after, before = (headline_of(tmp_path / name) for name in ("once", "after", "before"))
    assert once == "6 of 7 matmuls with a weight run in NVFP4 (quartet2)."
    assert once == after == before
    summaries = [
        (tmp_path / name / "report.txt").read_text().partition(" matmuls with a weight")[0][-6:]
        for name in ("once", "after")
    ]
    assert summaries[0] == summaries[1] == "6 of 7"
    data = document("run", *read_dump(tmp_path / "after"))
    heads = [r for r in data["rows"] if r["module"] == "head"]
    assert [(r["training"], r["counts"]) for r in heads] == [(True, True), (False, False)]
    assert len({r["layer"] for r in heads}) == 1


def test_of_several_lengths_the_longest_is_predicted(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    call = compiled(model, tmp_path)
    for rows in (32, 96, 64):
        call(torch.randn(rows, 64)).sum().backward()
    rows = read_dump(tmp_path)[0]
    assert len(rows) == 6
    assert headline(rows) == "All 2 matmuls with a weight run in NVFP4 (quartet2)."
    counted = of_model(rows)
    assert [r["shape"] for r in counted] == [[96, 64, 64]] * 2


def test_layers_that_share_a_graph_count_all(tmp_path):
    net = Net(3)
    for layer in net.layers:
        layer.compile(backend="quartet2", options={"inner": "eager", "dump": str(tmp_path)})
    net(tokens(12)).sum().backward()
    rows, *_ = read_dump(tmp_path)
    names = {f"layers.{i}.{part}" for i in range(3) for part in ("q_proj", "k_proj", "up", "down")}
    own = [r for r in rows_of_layers(rows) if r["taken"]]
    assert {r["module"] for r in own} == names
    assert all(r["saved_bytes"] is not None for r in own)
    assert len(layers(own)) == len(names)
    assert headline(rows).startswith("12 of 15 matmuls")  # with those that no graph holds


def test_two_models_with_equal_names_are_two():
    def row(model, training=True, n=32):
        one = Row("net.0", (8, n, 32), taken=True, model=model, training=training, graph=model)
        return one.to_json()

    assert len(layers(of_model([row(0), row(1)]))) == 2
    assert len(layers(of_model([row(0), row(1, training=False)]))) == 1  # a copy, evaluated
    assert len(layers(of_model([row(0), row(1, training=False, n=64)]))) == 2


def test_a_module_that_is_called_twice_is_one_layer_and_takes_both_times():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x):
            return self.inner(self.inner(x).relu())

    report = q2compile.explain(Twice(), torch.randn(32, 64), options={"inner": "eager"})
    rows = of_model(report.to_json())
    assert len(rows) == 2 and len(layers(rows)) == 1
    assert headline(report.to_json()).startswith("All 1 matmul with a weight runs")
