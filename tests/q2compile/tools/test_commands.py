# SPDX-License-Identifier: Apache-2.0
"""Commands name an invalid argument in one line, and exit with status 2."""

import io
import json
import re
import signal
import subprocess
import sys
from contextlib import redirect_stdout

import pytest
import torch
from torch import nn

from q2compile import __version__, explain
from q2compile.cost_model.devices import DEVICES
from q2compile.recipes.published import RECIPES
from q2compile.recipes.resolve import resolve
from q2compile.runtime_kernels import check_results
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.runtime_kernels.numerics.schemes import SCHEMES
from q2compile.runtime_kernels.numerics.transforms import TRANSFORMS
from q2compile.tools import arguments, cli
from q2compile.tools.bench.measurements import GROUPS
from q2compile.tools.export.formats import ACTIVATIONS, FORMATS
from tests.support import forked
from tests.support.page_data import data_of

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    torch._dynamo.reset()
    explain(nn.Linear(32, 32), torch.randn(4, 32), options={"inner": "eager", "dump": str(folder)})
    return folder


@pytest.fixture
def dump(dumped, tmp_path):
    """A dump folder to spoil."""
    for path in dumped.rglob("*"):
        copy = tmp_path / path.relative_to(dumped)
        copy.mkdir() if path.is_dir() else copy.write_bytes(path.read_bytes())
    return tmp_path


def refused(capsys, *arguments):
    """The one line that a command prints."""
    assert cli.main(list(map(str, arguments))) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def spoil(name, content):
    def spoiled(folder):
        path = folder / name
        if content is None:
            path.unlink()
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content(path.read_text()) if callable(content) else content)
        return str(path)

    return spoiled


REPORTS = [
    spoil("report.json", lambda text: text[: len(text) // 2]),
    spoil("report.json", ""),
    spoil("report.json", "null"),
    spoil("report.json", "3"),
    spoil("report.json", '{"module": "x"}'),
    spoil("report.json", '[{"module": "x"}]'),
    spoil("report.json", '[{"module": "x", "shape": null}]'),
    spoil("report.json", '[{"module": "x", "shape": [1], "theirs": 3}]'),
    spoil("report.json", "[" * 10**5),
    spoil("report.json", b"\xff\xfe"),
    spoil("report.txt", None),
    spoil("report.txt", b"\xff"),
    spoil("graph_0/passes.json", lambda text: text[:-9]),
    spoil("graph_0/0_dynamo.txt", b"\xff"),
]


@pytest.mark.parametrize("spoiled", REPORTS)
def test_report_of_what_is_no_dump(dump, capsys, spoiled):
    path = spoiled(dump)
    assert path in refused(capsys, "report", dump)
    assert not (dump / "report.html").exists()


def test_report_leaves_what_is_not_of_the_dump(dump, capsys):
    (dump / "graph_old").mkdir()
    (dump / "graph_7.txt").touch()
    assert cli.main(["report", str(dump)]) == 0


def test_report_of_a_path_beside_the_dump_says_which_to_name(dump, capsys):
    assert "there is no such folder; name" in refused(capsys, "report", dump / "none")
    assert "is a file; name the folder" in refused(capsys, "report", dump / "report.json")
    assert f"it is inside a dump: name {dump}." in refused(capsys, "report", dump / "graph_0")


def test_help_does_not_import_torch():
    """No command's --help imports torch; nor do --version and unknown arguments."""
    asked = [["--help"], ["--version"], *([name, "--help"] for name in cli.COMMANDS)]
    wrong = [
        ["evry"],
        ["report"],
        ["compare", "x.py:f", "--of", "memory"],
        ["bench", "--limit", "x"],
    ]
    code = (
        "import sys; from q2compile.tools import cli\n"
        f"for words in {asked + wrong}:\n"
        "    try: cli.main(words)\n"
        "    except SystemExit as end: print('ended', 'torch' in sys.modules, end.code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    ended = [line for line in done.stdout.splitlines() if line.startswith("ended ")]
    assert ended == ["ended False 0"] * len(asked) + ["ended False 2"] * len(wrong), done.stderr


def test_without_a_command_the_help_is_printed(capsys):
    assert cli.main([]) == 0
    printed = capsys.readouterr().out
    assert all(f"    {name} " in printed for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("word", "near"), [("exporrt", "export"), ("docter", "doctor"), ("xyz", "")]
)
def test_a_misspelled_command_gets_the_nearest(capsys, word, near):
    with pytest.raises(SystemExit) as end:
        cli.main([word, "x"])
    printed = capsys.readouterr().err
    assert end.value.code == 2 and f"unknown command {word!r}" in printed
    assert (f"did you mean {near!r}?" in printed) == ("did you mean" in printed) == bool(near)
    assert "Allowed: report, explain," in printed


MODEL = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)), (torch.ones(4, 64) for _ in "ab")

def on_meta():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)), [torch.ones(4, 64)]
"""


@pytest.mark.parametrize("name", ["build", "on_meta"])
def test_explain_prints_what_is_done_with_each_matmul(tmp_path, capsys, name):
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "options.toml").write_text("inner = 'eager'\n[policy]\n'1' = 'bf16'\n")
    page = tmp_path / "page.html"
    words = ["explain", f"{tmp_path / 'mine.py'}:{name}", "--options", tmp_path / "options.toml"]
    if name == "on_meta":
        assert "torch has none on 'meta'" in refused(capsys, *words, "--autocast", "bfloat16")
    else:
        words += ["--autocast", "bfloat16"]
    assert cli.main([*map(str, words), "-o", str(page)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^0 +4.64.64 +yes +quartet2", printed, re.MULTILINE)
    assert re.search(r"^1 +4.32.64 +no .*policy: '1' says bf16$", printed, re.MULTILINE)
    assert printed.endswith(f"wrote {page}\n")
    assert [row["taken"] for row in data_of(page.read_text())["rows"]] == [True, False]
    assert "has no function 'nothing'" in refused(capsys, "explain", f"{tmp_path}/mine.py:nothing")
    assert "is a folder; allowed" in refused(capsys, *words, "-o", tmp_path)


def test_arguments_repeat_the_names_of_the_tables():
    assert tuple(GROUPS) == arguments.BENCH_GROUPS
    assert tuple(ACTIVATIONS) == arguments.EXPORT_ACTIVATIONS
    assert tuple(FORMATS) == arguments.EXPORT_FORMATS
    assert tuple(device.column for device in DEVICES) == arguments.PREDICTED_DEVICES


def test_recipes_lists_every_name(capsys):
    assert cli.main(["recipes"]) == 0
    printed = capsys.readouterr().out
    names = {line.split()[0] for line in printed.splitlines() if line.startswith("  ")}
    assert {*RECIPES, *SCHEMES, *TRANSFORMS} <= names
    assert all(f"  fprop  {resolve(name).texts()[0]}\n" in printed for name in RECIPES)
    assert cli.main(["recipes", "--global-scale", "exact"]) == 0
    assert "  fprop  nvfp4_46 @ nvfp4_46\n" in capsys.readouterr().out


def test_clear_cache_deletes_what_q2compile_wrote_there(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path))
    variant = nvrtc.KernelVariant("signs.cu", ())
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    own = [nvrtc._cache_path(variant, "sm_90a"), tmp_path / f"gemm-{24 * '0'}.json"]
    monkeypatch.setattr(check_results, "named", lambda device: ("a GPU", 9, 0))
    asked = check_results.Request(("quantize", "cuda", torch.device("cuda", 0), "nvfp4"), "", ())
    check_results.store(asked, check_results.Result(None))
    check_results.mark(asked)
    for path in own:
        path.write_bytes(bytes(1024))
    others = [tmp_path / "notes.json", tmp_path / "theirs.cubin", tmp_path / "folder"]
    for path in others[:2]:
        path.touch()
    others[2].mkdir()
    assert len(list(tmp_path.iterdir())) == 7
    assert cli.main(["doctor", "--clear-cache"]) == 0
    assert f"cache     4 files deleted in {tmp_path}, " in capsys.readouterr().out
    assert sorted(tmp_path.iterdir()) == sorted(others)
    assert cli.main(["doctor", "--clear-cache"]) == 0
    assert "0 files deleted" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_doctor_on_a_cpu_asks_for_no_compiler_of_kernels(monkeypatch, capsys):
    def absent():
        raise ImportError("pip install cuda-bindings nvidia-cuda-nvrtc")

    monkeypatch.setattr(nvrtc, "version", absent)
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed and "the rest runs as its torch reference" in printed
    assert not re.search("nvrtc|triton|cuda-bindings|compiler", printed, re.IGNORECASE)


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"q2compile {__version__}\n"


def test_report_to_where_nothing_can_be_written(dump, capsys):
    missing = dump / "none" / "page.html"
    assert f"{missing.parent} is not a folder" in refused(capsys, "report", dump, "-o", missing)
    assert "is a folder; allowed" in refused(capsys, "report", dump, "-o", dump)
    assert "too long" in refused(capsys, "report", dump, "-o", "x" * 5000)
    assert "too long" in refused(capsys, "report", "x" * 5000)


def test_a_command_that_moved_says_where(capsys):
    assert "python examples/paper_tables.py" in refused(capsys, "tables", "--full")


# Required arguments of each command.
NEEDED = {
    "report": ["folder"],
    "explain": ["x.py:build"],
    "compare": ["x.py:build"],
    "export": ["x.py:build", "folder"],
}


@pytest.mark.parametrize("command", ["report", "recipes", "doctor"])
def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch, capsys, command, ctrl_c):
    def interrupted(options):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(f"q2compile.tools.{cli.COMMANDS[command][0]}.run", interrupted)
    assert cli.main([command, *NEEDED.get(command, ())]) == 130
    assert capsys.readouterr().err == ""


LEFT_BY_ITS_READER = """
import os, sys
from q2compile.tools import cli

reads, writes = os.pipe()
os.close(reads)
os.dup2(writes, sys.stdout.fileno())
sys.stdout.reconfigure(write_through=True)
sys.exit(cli.main(["doctor", "--no-check"]))
"""


def test_the_reader_of_a_pipe_may_leave():
    """q2compile doctor | head -0"""
    done = forked.run(LEFT_BY_ITS_READER)
    assert done.returncode == 1 and "Traceback" not in done.stderr


def printed_in_ascii(call):
    """The output of ``call`` if stdout can only encode ASCII: PYTHONIOENCODING=ascii, LC_ALL=C."""
    with redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="ascii")) as stdout:
        call()
        stdout.flush()
        return stdout.buffer.getvalue().decode("ascii")


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_commands_print_what_stdout_can_show(monkeypatch, command):
    words = [command, *NEEDED.get(command, ())]
    monkeypatch.setattr(
        f"q2compile.tools.{cli.COMMANDS[command][0]}.run", lambda _: print("16×32, x wᵀ, été")
    )
    assert printed_in_ascii(lambda: cli.main(words)) == "16x32, x w^T, \\xe9t\\xe9\n"


def test_a_report_prints_what_stdout_can_show(tmp_path):
    """The dump, the page and the rows are the same as with other encodings."""
    model = nn.ModuleDict({"été": nn.Linear(32, 32)})
    options = {"inner": "eager", "dump": str(tmp_path)}
    report = explain(lambda x: model["été"](x), torch.randn(4, 32), options=options)
    assert "\\xe9t\\xe9     4x32x32" in printed_in_ascii(lambda: print(report))
    assert "été     4×32×32" in str(report) == report.text()
    assert (tmp_path / "report.txt").read_text(encoding="utf-8") == report.text() + "\n"


def test_json_of_the_dump_is_read(dumped):
    """The dump that the test above damages is valid before."""
    assert len(json.loads((dumped / "report.json").read_text())) == 1
