# SPDX-License-Identifier: Apache-2.0
"""Output for users: dumps, the report, its page, the command line."""

import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import nn

import q2compile
from q2compile.report.report import RunReport, table
from q2compile.report.row import Row
from q2compile.tools import cli
from tests.support.new_process import forget_dump_folders
from tests.support.page_data import data_of

pytestmark = pytest.mark.usefixtures("fresh_compiler")

EAGER = {"inner": "eager"}


class Net(nn.Module):
    """A linear, a small one, attention of its output with itself, and a head."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 48, bias=False)
        self.tiny = nn.Linear(48, 8)
        self.head = nn.Linear(48, 32)

    def forward(self, x):
        h = F.silu(self.up(x))
        return self.head(torch.softmax(h @ h.t(), -1) @ h) + self.tiny(h).sum()


def explained(**options):
    torch.manual_seed(0)
    return q2compile.explain(Net(), torch.randn(5, 32), options={**EAGER, **options})


class TestReport(TestCase):
    def test_text(self):
        torch._dynamo.reset()
        self.assertExpectedInline(
            # expecttest writes ASCII alone
            str(explained(policy={"head": {"dgrad": "bf16"}})).replace("×", "x"),
            """\
module      shape    taken  recipe                    saved            b200  rtx5090  why
----------  -------  -----  ------------------------  ---------------  ----  -------  -------------------------------------------------------
up          5x48x32  yes    quartet2                  94 B, 4.70 bit   3.85  3.85
<matmul>    5x5      no                                                               activation x activation
<matmul_1>  5x48     no                                                               activation x activation
head        5x32x48  yes    quartet2 with bf16 dgrad  139 B, 4.63 bit  1.88  1.88
tiny        5x8      no                                                               too small: the weight is [8, 48], a block has 16 values

recipe quartet2
  fprop  nvfp4_46_pow2 @ nvfp4_46_pow2
  dgrad  rht128>nvfp4_ms_eden_pow2 @ requantize>rht128>nvfp4_ms_eden_pow2
  wgrad  rht128>nvfp4_ms_eden_pow2 @ requantize>rht128>nvfp4_ms_eden_pow2

recipe quartet2 with bf16 dgrad
  fprop  nvfp4_46_pow2 @ nvfp4_46_pow2
  dgrad  bf16
  wgrad  rht128>nvfp4_ms_eden_pow2 @ requantize>rht128>nvfp4_ms_eden_pow2

2 of 3 matmuls with a weight taken; 2 matmuls without one; 1 graph; quantized for backward: 233 B, 4.66 bits per element
note: predicted time of the GEMMs taken and their quantizers (not of a step), divided by BF16's: 2.44 on B200, 2.44 on RTX 5090; for each matmul in the columns b200 and rtx5090
note: predicted, not measured, from data-sheet peaks and the share that published GEMMs reach: B200 9000 TFLOP/s FP4 (40%-58% reached), 2250 BF16 (60%-67%), 8 TB/s; RTX 5090 1676 TFLOP/s FP4 (45%-81% reached), 209.5 BF16 (88%-113%), 1.792 TB/s; a quantizer reaches 78%-88% of the bandwidth, 62%-76% of the issue slots (57%-69% with stochastic rounding), or 65%-100% of its fullest pipe; 2.5-4.3 us per launch; forward quantizers fused; 8-14 us of the host per call of two launches, if that is longer""",
        )

    def test_stages_golden(self):
        """The rewritten Dynamo graph: module names as comments, dtypes and shapes."""
        torch._dynamo.reset()
        import tempfile
        from pathlib import Path

        with tempfile.TemporaryDirectory() as folder:
            explained(dump=folder)
            text = (Path(folder) / "graph_0" / "1_rewritten.txt").read_text()
        self.assertExpectedInline(
            text.replace("rht128>nvfp4_ms_eden_pow2", "EDEN"),
            """\
l_self_modules_up_parameters_weight_: f32[48, 32]
l_x_: f32[5, 32]
l_self_modules_head_parameters_weight_: f32[32, 48]
l_self_modules_head_parameters_bias_: f32[32]
l_self_modules_tiny_parameters_weight_: f32[8, 48]
l_self_modules_tiny_parameters_bias_: f32[8]

# up
linear_default: f32[5, 48] = q2.linear(l_x_, l_self_modules_up_parameters_weight_, None, 'nvfp4_46_pow2 @ nvfp4_46_pow2', 'EDEN @ requantize>EDEN', 'EDEN @ requantize>EDEN', 0)

# no module
h: f32[5, 48] = silu(linear_default)
t: f32[48, 5] = h.t()
matmul: f32[5, 5] = matmul(h, t)
softmax: f32[5, 5] = softmax(matmul, -1)
matmul_1: f32[5, 48] = matmul(softmax, h)

# head
linear_default_1: f32[5, 32] = q2.linear(matmul_1, l_self_modules_head_parameters_weight_, l_self_modules_head_parameters_bias_, 'nvfp4_46_pow2 @ nvfp4_46_pow2', 'EDEN @ requantize>EDEN', 'EDEN @ requantize>EDEN', 1)

# tiny
linear_2: f32[5, 8] = linear(h, l_self_modules_tiny_parameters_weight_, l_self_modules_tiny_parameters_bias_)

# no module
sum_1: f32[] = linear_2.sum()
add: f32[5, 32] = add(linear_default_1, sum_1)
return (add)
""",
        )


def test_json_is_a_list_of_rows_and_equals_the_files(tmp_path):
    report = explained(dump=str(tmp_path))
    rows = report.to_json()
    assert {"module", "shape", "taken", "why", "fprop", "dgrad", "wgrad"} <= set(rows[0])
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(rows))
    assert (tmp_path / "report.txt").read_text() == f"{report}\n"
    assert [row["taken"] for row in rows] == [True, False, False, True, False]
    assert all(row["why"] for row in rows if not row["taken"])


def test_kernels_are_named():
    row = explained().rows[0]
    assert row.kernels == {
        "fprop": "quantize rowwise: cpp, gemm: cpp",
        "dgrad": "quantize rowwise: cpp, requantize columnwise: cpp, gemm: cpp",
        # its few rows are one group
        "wgrad": (
            "quantize columnwise grouped: cpp, requantize columnwise grouped: cpp, gemm: cpp"
        ),
    }


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_every_stage_is_written(tmp_path, inner):
    model = torch.compile(
        Net(), backend="quartet2", options={"inner": inner, "dump": str(tmp_path)}
    )
    model(torch.randn(5, 32)).sum().backward()
    stages = {p.name for p in (tmp_path / "graph_0").iterdir()}
    expected = {
        "0_dynamo.txt",
        "1_rewritten.txt",
        "2_forward.txt",
        "3_backward.txt",
        "4_after_passes_forward.txt",
        "4_after_passes_backward.txt",
        "passes.json",
        "nodes.json",
    }
    code = {"5_output_code_forward.py", "5_output_code_backward.py"}
    assert stages == expected | (code if inner == "inductor" else set())
    if inner == "inductor":
        source = (tmp_path / "graph_0" / "5_output_code_backward.py").read_text()
        assert "q2.requantize" in source
    passes = json.loads((tmp_path / "graph_0" / "passes.json").read_text())
    grouped = [p for p in passes if p["name"] == "group_launches"]  # of what lowerings launch
    assert [(p["graph"], p["matches"]) for p in grouped] == (
        [("forward", 0), ("backward", 0)] if inner == "inductor" else []
    )
    assert [(p["graph"], p["name"], p["matches"]) for p in passes if p not in grouped] == [
        ("joint", "anchor_seeds", 0),
        ("joint", "gather_scattered", 0),
        ("joint", "quantize_shards", 0),
        ("joint", "quantize_rows_once", 0),
        ("joint", "swizzle_saved_scales", 0),
        ("joint", "recompute_mask", 0),
        ("joint", "recompute_weights", 2),
        ("forward", "gather_scattered", 0),
        ("forward", "quantize_rows_once", 0),
        ("forward", "share_operands", 0),
        ("forward", "quantize_shards", 0),
        ("forward", "merge_seeds", 0),
        ("forward", "pair_directions", 0),
        ("forward", "share_rotations", 0),
        ("forward", "swizzle_scales", 0),
        ("forward", "dequantize_operands", 0),
        ("forward", "unrotate_in_gemm", 0),
        ("forward", "sum_columns", 0),
        ("forward", "amax_in_quantizer", 0),
        ("forward", "gather_quantizers", 0),
        ("forward", "tabulate", 0),
        ("backward", "gather_scattered", 0),
        ("backward", "quantize_rows_once", 0),
        ("backward", "share_operands", 0),
        ("backward", "quantize_shards", 0),
        ("backward", "merge_seeds", 3),  # up has no dgrad: x needs no gradient
        ("backward", "pair_directions", 1),
        ("backward", "share_rotations", 0),
        ("backward", "swizzle_scales", 0),
        ("backward", "dequantize_operands", 0),
        ("backward", "unrotate_in_gemm", 0),
        ("backward", "sum_columns", 0),
        ("backward", "amax_in_quantizer", 0),
        ("backward", "gather_quantizers", 1),
        ("backward", "tabulate", 0),
    ]


def test_a_graph_each_has_its_folder(tmp_path):
    options = {**EAGER, "dump": str(tmp_path)}
    for width in (32, 64):
        torch.compile(nn.Linear(width, 32), backend="quartet2", options=options)(
            torch.randn(2, width)
        )
    assert sorted(p.name for p in tmp_path.glob("graph_*")) == ["graph_0", "graph_1"]
    rows = json.loads((tmp_path / "report.json").read_text())
    assert [row["graph"] for row in rows] == [0, 1]


def test_a_new_run_replaces_old_dumps_and_nothing_else(tmp_path):
    folder = tmp_path / "graphs"
    explained(dump=str(folder))
    (folder / "graph_7").mkdir()
    (folder / "mine.txt").write_text("kept")
    forget_dump_folders()
    torch._dynamo.reset()
    explained(dump=str(folder))
    assert not (folder / "graph_7").exists() and (folder / "mine.txt").exists()


def test_a_folder_that_is_not_ours_keeps_what_it_has(tmp_path):
    (tmp_path / "graph_7").mkdir()
    explained(dump=str(tmp_path))
    assert (tmp_path / "graph_7").exists()


def test_html_is_escaped_and_complete(tmp_path):
    report = explained(dump=str(tmp_path))
    page = report.to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == page
    data = data_of(page)
    assert [row["module"] for row in data["rows"]] == [row.module for row in report.rows]
    before_scripts = page.partition("<script>")[0]
    assert "<matmul" not in before_scripts  # the name of a matmul without a weight
    stages = {"0_dynamo.txt", "1_rewritten.txt", "2_forward.txt", "4_after_passes_forward.txt"}
    assert [set(graph["texts"]) for graph in data["graphs"]] == [stages]


def test_the_command_line_makes_a_page_of_a_dump(tmp_path, capsys):
    explained(dump=str(tmp_path))
    assert cli.main(["report", str(tmp_path)]) == 0
    path = capsys.readouterr().out.strip()
    assert path == str(tmp_path / "report.html")
    (graph,) = data_of((tmp_path / "report.html").read_text())["graphs"]
    for stage in ("0_dynamo", "1_rewritten", "2_forward", "4_after_passes_forward"):
        written = (tmp_path / "graph_0" / f"{stage}.txt").read_text()
        assert graph["texts"][f"{stage}.txt"] == written


def test_the_command_line_says_what_is_wrong(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "this folder holds neither a dump" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["reprot", str(tmp_path)])


def test_the_console_script_is_installed():
    done = subprocess.run(
        [sys.executable, "-m", "q2compile.tools.cli", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "report" in done.stdout


def test_a_row_is_a_line_whatever_its_module_is_called():
    line = table([Row("new\nline\t\u202eü×", (4, 32, 32))]).splitlines()[2:]
    assert line == [r"new\nline\t\u202eü×  4×32×32  no"]


def test_an_empty_report_prints():
    assert "0 of 0 matmuls" in str(RunReport())
    assert RunReport().to_json() == []


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8"])
def test_saved_codes_count_as_the_elements_that_they_stand_for(recipe):
    """Two 4-bit codes are a byte. nvfp4 saves w's codes transposed."""
    model = nn.Sequential(nn.Linear(64, 48, bias=False), nn.Linear(48, 64, bias=False))
    options = {**EAGER, "recipe": recipe, "recompute_weights": False}
    x = torch.randn(32, 64, requires_grad=True)
    rows = q2compile.explain(model, x, options=options).rows
    assert [row.saved_elements for row in rows] == [32 * 64 + 48 * 64, 32 * 48 + 64 * 48]
