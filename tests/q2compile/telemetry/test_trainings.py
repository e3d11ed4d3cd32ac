# SPDX-License-Identifier: Apache-2.0
"""Several models, trainings and processes that record into one folder."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from q2compile.telemetry import read
from tests.q2compile.telemetry.training import (
    PROGRAM,
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


@pytest.fixture(autouse=True)
def fresh_telemetry():
    forget_all()
    yield
    forget_all()


def counts(folder):
    """Step -> how many records it has."""
    return Counter(r["step"] for r in records(folder))


class Critic(nn.Module):
    """Its linears have the names of `Model`'s."""

    def __init__(self):
        super().__init__()
        self.layers = new_model(blocks=1).layers

    def forward(self, x):
        return self.layers[0](x).sum(1)


def test_two_models_that_are_trained_in_turn(tmp_path):
    """The models of a GAN: each counts the steps of its own optimizer, and has files of its own."""
    generator, critic = new_model(blocks=1), Critic()
    make, judge = compiled(generator, tmp_path), compiled(critic, tmp_path)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, critic)]
    for _ in range(2):
        for _ in range(2):
            judge(make(batch(0, generator)).detach()).mean().backward()
            optimizers[1].step()
        judge(make(batch(0, generator))).mean().backward()
        optimizers[0].step()
    assert sorted(counts(tmp_path)) == [0, 1]
    assert sorted(counts(tmp_path / "model2")) == [0, 1, 2, 3, 4]
    assert read.other_runs(tmp_path) == ["model2"]


@pytest.mark.parametrize("compiled_part", ["model", "blocks"])
def test_a_second_training_in_one_process(compiled_part, tmp_path):
    """Dynamo runs it with the graphs of the first, whose model may still be there."""
    models = []
    for steps in (3, 2):
        models.append(model := new_model())
        if compiled_part == "blocks":
            for layer in model.layers:
                layer.compile(
                    backend="quartet2",
                    options={"inner": "eager", "telemetry": {"every": 1, "to": str(tmp_path)}},
                )
        call = compiled(model, tmp_path) if compiled_part == "model" else model
        train(model, call, steps=steps)
    assert compiled_part == "blocks" or counters["stats"]["unique_graphs"] == 1
    one = len(all_operands(names()))
    assert counts(tmp_path) == {0: one, 1: one, 2: one}
    assert counts(tmp_path / "model2") == {0: one, 1: one}
    found = records(tmp_path / "model2")
    assert operands(found, 0) == operands(found, 1) == all_operands(names())


def test_a_model_that_gets_another_optimizer_goes_on(tmp_path):
    model = new_model(blocks=1)
    call = compiled(model, tmp_path)
    for _ in range(2):
        train(model, call, steps=2)
    assert sorted(counts(tmp_path)) == [0, 1, 2, 3]


def test_another_process_has_files_of_its_own(tmp_path):
    model = new_model(blocks=1)
    call = compiled(model, tmp_path)
    call(batch(0, model)).sum().backward()
    done = forked.run(PROGRAM, str(tmp_path), "fused")
    assert f"another process records into {tmp_path}; the records of this one" in done.stderr
    assert sorted(counts(tmp_path)) == [0]
    (other,) = read.other_runs(tmp_path)
    assert other.startswith("process") and sorted(counts(tmp_path / other)) == [0, 1, 2]
