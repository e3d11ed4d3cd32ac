# SPDX-License-Identifier: Apache-2.0
"""Output without a dump or a report: the log and torch's trace."""

import logging

import pytest
import torch
from torch import nn

from q2compile.cost_model.devices import data_sheet
from q2compile.cost_model.predict import predict
from q2compile.cost_model.ranges import over_bf16
from q2compile.recipes.published import RECIPES
from q2compile.report import announce
from q2compile.report.row import Row
from q2compile.torch_internals import trace
from tests.support import forked

pytestmark = pytest.mark.usefixtures("fresh_compiler")

LINE = "q2compile: 1 of 3 matmuls in NVFP4 (quartet2); left: lm_head (policy), tiny (too small)"
SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.lm_head = nn.Linear(64, 96), nn.Linear(96, 64)
        self.tiny = nn.Linear(64, 8)

    def forward(self, x):
        return self.tiny(self.lm_head(self.up(x).relu()))

def run():
    options = {"inner": "eager", "policy": {"lm_head": "bf16"}}
    torch._dynamo.reset()
    torch.compile(Net(), backend="quartet2", options=options)(torch.randn(8, 64)).sum().backward()

run()
run()
"""


@pytest.fixture
def run(monkeypatch):
    """A training step of a process that has compiled nothing yet, and configured nothing."""
    monkeypatch.setattr(announce.First, "compiled", False)
    level, handlers = announce.LOG.level, list(announce.LOG.handlers)
    announce.LOG.setLevel(logging.NOTSET)
    announce.LOG.handlers.clear()
    scope: dict = {}
    exec(SCRIPT.replace("\nrun()", ""), scope)
    yield scope["run"]
    announce.LOG.setLevel(level)
    announce.LOG.handlers[:] = handlers


def test_a_configured_root_logger_shows_it_once_in_its_own_form(run, caplog, capsys):
    run()  # pytest has put handlers on the root logger
    assert caplog.messages.count(LINE) == 1
    assert LINE not in capsys.readouterr().err


def test_a_level_of_the_users_silences_it(run, caplog):
    announce.LOG.setLevel(logging.WARNING)
    run()
    assert LINE not in caplog.messages


def test_other_ranks_are_silent(run, caplog, monkeypatch):
    monkeypatch.setattr(announce, "process_rank", lambda: 1)
    run()
    assert LINE not in caplog.messages


def test_torch_logs_have_levels(run, caplog):
    """``+q2compile`` names the options, every matmul and the passes that did something."""
    caplog.set_level(logging.DEBUG, "q2compile")
    run()
    said = caplog.messages
    title = "graph 0/0 of Net"
    assert said.count(LINE) == 1
    assert f"{title}: up 8×96×64 quartet2" in said
    assert f"{title}: lm_head 8×64×96 left: policy: 'lm_head' says bf16" in said
    assert f"{title}: pass merge_seeds on the backward graph: 1 matches" in said
    assert any(text.startswith(f"{title}: options: Config(recipe='quartet2'") for text in said)


def test_the_trace_holds_the_graphs_the_report_and_the_options(run, monkeypatch):
    found = {}
    monkeypatch.setattr("q2compile.report.graph_log.is_traced", lambda: True)
    monkeypatch.setattr(
        "q2compile.report.graph_log.trace_artifact",
        lambda name, text: found.setdefault(name, text()),
    )
    run()
    stages = ("0_dynamo", "1_rewritten", "2_forward", "3_backward")
    passes = [f"4_after_passes_{kind}" for kind in ("forward", "backward")]
    names = [*stages, *passes, "config", "report"]
    assert set(found) == {f"q2compile_{name}" for name in names}
    assert "q2.linear" in found["q2compile_1_rewritten"]
    assert "too small: the weight is [8, 64]" in found["q2compile_report"]
    assert "policy={'lm_head': 'bf16'}" in found["q2compile_config"]


def test_an_artifact_is_written_beside_torchs_own(monkeypatch):
    written = []
    monkeypatch.setattr(
        torch._logging,
        "trace_structured",
        lambda kind, metadata_fn, payload_fn, **_: written.append(
            (kind, metadata_fn(), payload_fn())
        ),
    )
    trace.trace_artifact("q2compile_report", lambda: "text")
    metadata = {"name": "q2compile_report", "encoding": "string"}
    assert written == [("artifact", metadata, "text")]


def row(name, taken=False, why="", **gemms):
    return Row(name, (8, 8, 8), taken=taken, why=why, recipe="own" if taken else "bf16", **gemms)


def test_names_that_were_left_are_counted_by_reason():
    rows = [
        row("a", True, fprop="nvfp4 @ nvfp4", dgrad="rht64>mxfp4_sr @ rht64>mxfp4_sr"),
        *(row(f"e{i}", why="experts: the policy has to name them") for i in range(5)),
        Row("<attention>", (), has_parameter=False),
    ]
    assert announce.summary(rows) == (
        "q2compile: 1 of 6 matmuls in NVFP4 and MXFP4 (own); left: e0, e1, e2 and 2 more (experts)"
    )
    nothing = announce.summary([row("a", why="recipe: bf16")])
    assert nothing == "q2compile: 0 of 1 matmuls quantized; left: a (recipe)"


@pytest.mark.parametrize(
    ("gpu", "recipe", "shape", "graphs", "line"),
    [
        ("B200", "quartet2", (4096, 512, 512), False, "the GPU waits for the host"),
        ("B200", "quartet2", (4096, 512, 512), True, "the layers are too small to gain"),
        ("B200", "quartet2", (4096, 4096, 4096), False, None),
        ("H100 80GB HBM3", "quartet2", (4096, 4096, 4096), False, 'options={"recipe": "fp8"}'),
        ("H100 80GB HBM3", "fp8", (4096, 4096, 4096), False, None),
        ("GeForce RTX 4090", "quartet2", (4096, 512, 512), False, None),
    ],
)
def test_who_loses_time_is_told(monkeypatch, gpu, recipe, shape, graphs, line):
    """By the prediction for the GPU that is present; none is made for one that is not known."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: f"NVIDIA {gpu}")
    taken = row("up", True, fprop=RECIPES[recipe].texts()[0])
    prediction = predict(RECIPES[recipe], shape, cuda_graphs=graphs)
    *_, taken.predicted = prediction.plain()
    lines = announce.slower([taken, Row("lm_head", shape)])
    device = data_sheet(f"NVIDIA {gpu}")
    assert len(lines) == (line is not None)
    for text in lines:
        assert text.startswith(f"on this {gpu.split()[0]} the quantized matmuls") and line in text
        assert f" {over_bf16([taken.predicted[device.column]]).text()} times as long" in text


def test_a_graph_without_weights_or_all_in_bf16_is_not_the_first(run, caplog):
    bf16 = {"inner": "eager", "recipe": "bf16"}
    torch.compile(nn.Linear(32, 32), backend="quartet2", options=bf16)(torch.randn(4, 32))
    assert not announce.First.compiled and not caplog.messages
    scores = torch.compile(lambda x: x @ x.t(), backend="quartet2", options={"inner": "eager"})
    scores(torch.randn(32, 32))
    assert not announce.First.compiled
    torch.compile(nn.Linear(32, 32), backend="quartet2", options={"inner": "eager"})(
        torch.randn(4, 32)
    )
    assert announce.First.compiled
    assert "q2compile: 1 of 1 matmuls in NVFP4 (quartet2)" in caplog.messages


NO_GRAPH_CAME = "q2compile: torch.compile was given backend='quartet2', and no graph came to it"
INSIDE_ANOTHER = """
import torch

inner = torch.compile(torch.nn.Linear(64, 96), backend="quartet2")
torch.compile(lambda x: inner(x).relu(), backend="eager")(torch.randn(8, 64))
"""


OF_TORCH_S_OWN_CLASS = """
import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 96))
model.compile(backend="quartet2", options={"recipe": "quartet3"})  # not read: no graph comes
model(torch.randn(8, 64))
"""


OF_A_DATA_LOADER = """
import torch

torch.compile(torch.nn.Linear(64, 96), backend="quartet2")
torch.utils.data._utils.worker._worker_info = "that of a spawned worker"
"""


SCRIPTS = {
    "a worker of a DataLoader": OF_A_DATA_LOADER,
    "inside another compile": INSIDE_ANOTHER,
    "Sequential": OF_TORCH_S_OWN_CLASS,
    "never called": "import torch; torch.compile(torch.nn.Linear(64, 96), backend='quartet2')",
    "imported": "import q2compile; q2compile.explain",
    "trained": SCRIPT,
}
if torch.__version__ >= "2.14":  # it compiles them
    del SCRIPTS["Sequential"]


@pytest.fixture(scope="module")
def ended() -> dict[str, forked.Ended]:
    return {name: forked.run(script) for name, script in SCRIPTS.items()}


def test_the_first_graph_is_a_line_on_stderr_and_the_others_are_silent(ended):
    done = ended["trained"]
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines().count(LINE) == 1


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_backend_that_no_graph_came_to_is_named_at_exit(name, ended):
    silent = name in ("imported", "trained", "a worker of a DataLoader")
    done, lines = ended[name], 0 if silent else 1
    assert done.returncode == 0
    assert done.stderr.count(NO_GRAPH_CAME) == lines
    assert done.stderr.count("Module.compile of torch's own class, such as nn.Sequential") == lines
