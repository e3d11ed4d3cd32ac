# SPDX-License-Identifier: Apache-2.0
"""README, CONTRIBUTING and the guides: every block and every command in them is run, or checked as
far as that is possible here. `BLOCKS` and `PROGRAMS` say how, kind by kind; a kind that is in
neither fails."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import re
import shlex
import subprocess
import sys
import textwrap
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from q2compile.config import CONFIG_FILE_VARIABLE, Config
from q2compile.report import announce
from q2compile.runtime_kernels import registry
from q2compile.runtime_kernels.kernel_states import KNOWN
from q2compile.tools import cli
from tests.support.guide_model import prepared
from tests.support.markdown import Block, blocks, broken_links, prose
from tests.support.new_process import restart_clock
from tests.support.tracked import tracked

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "examples" / "guides"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(GUIDES.glob("*.md"))]
PAGES += [GUIDES.parent / name / "README.md" for name in ("benchmarks", "pretraining")]


TRACKED = tracked(ROOT)
DOCUMENTS = [path for path in TRACKED if path.suffix == ".md"]
# Programs that a command may start without a path: those of the reader.
READERS_OWN = {"train.py"}
# Pages whose blocks compile and call another model than `model`.
RUN_THEIR_OWN = {"limits.md"}


class Page:
    """The state that the blocks of one page share: names, a folder, and the output so far."""

    def __init__(self, path: Path, folder: Path, log: io.StringIO) -> None:
        self.path, self.folder = path, folder
        self.names = prepared()
        self.printed = log

    def shown(self) -> str:
        """All that was printed, logged or written."""
        texts = [self.printed.getvalue()]
        for path in sorted(self.folder.rglob("*")):
            if path.suffix in (".txt", ".json", ".jsonl", ".csv", ".py", ".toml"):
                texts.append(path.read_text(encoding="utf-8"))
        return "\n".join(texts)


# ---- blocks -------------------------------------------------------------------------------------


def run_python(page: Page, block: Block) -> None:
    """Runs the block, and one training step of the model that it compiles. A block that starts with
    `# name.py` is a file of the reader, which commands may name."""
    file = re.match(r"# (\w+\.py)\n", block.text)
    if file:
        (page.folder / file[1]).write_text(block.text, encoding="utf-8")
    # Empty lines before the block make an error name the line of the page.
    code = compile("\n" * (block.line - 1) + block.text, str(page.path), "exec")
    before = {name: page.names.get(name) for name in ("model", "options")}
    with contextlib.redirect_stdout(page.printed):
        exec(code, page.names)
    if "options" in page.names and page.names["options"] is not before["options"]:
        Config.from_options(page.names["options"])
    if re.search(r"\bmodel\b.*compile\(", block.text) and page.path.name not in RUN_THEIR_OWN:
        train_a_step(page.names)


def train_a_step(names: dict[str, Any]) -> None:
    """torch.compile compiles at the first call."""
    loss = names["model"](**names["batches"][0]).loss
    loss.backward()
    names["optimizer"].step()
    names["optimizer"].zero_grad()


def is_options(page: Page, block: Block) -> None:
    """The file of Q2COMPILE_CONFIG: every option in it is one."""
    if block.kind == "toml":
        Config.from_options(tomllib.loads(block.text))
    else:
        Config.from_options(json.loads(block.text))


def was_shown(page: Page, block: Block) -> None:
    """Output: its lines were printed or written by the blocks before; ... stands for anything."""
    shown = "\n".join(" ".join(line.split()) for line in page.shown().splitlines())
    for line in block.text.splitlines():
        parts = [re.escape(" ".join(part.split())) for part in line.split("...")]
        assert re.search("[^\n]*".join(parts), shown), f"nothing has shown {line!r}"


def names_exist(page: Page, block: Block) -> None:
    """A drawing of the tree: each path in it is one, from the top or from within a folder."""
    listed = [path.relative_to(ROOT).as_posix() for path in TRACKED]
    paths = re.findall(r"[\w/]+/[\w./]*|\b\w+\.(?:py|cu|md)\b", block.text)
    assert paths
    for path in paths:
        assert any(f"/{path}" in f"/{name}" for name in listed), path


def applies(page: Page, block: Block) -> None:
    """A diff: the lines that it leaves and removes stand in each file, one below the other."""
    files = re.split(r"^--- a/\S+\n\+\+\+ b/(\S+)\n", block.text, flags=re.MULTILINE)
    assert len(files) > 1 and not files[0]
    for name, text in zip(files[1::2], files[2::2], strict=True):
        source = (ROOT / name).read_text(encoding="utf-8")
        for hunk in re.split(r"^@@.*\n", text, flags=re.MULTILINE)[1:]:
            before = "".join(line[1:] + "\n" for line in hunk.splitlines() if line[0] != "+")
            assert before and before in source, f"{name} has not\n{before}"


def run_commands(page: Page, block: Block) -> None:
    """Every line is a command; see PROGRAMS."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            command(page, words)


BLOCKS: dict[str, Callable[[Page, Block], None]] = {
    "python": run_python,
    "toml": is_options,
    "json": is_options,
    "text": was_shown,
    "text layout": names_exist,
    "diff": applies,
    "": run_commands,  # indented
}


# ---- commands -----------------------------------------------------------------------------------


def command(page: Page, words: list[str]) -> None:
    """Variables of the environment, a program, its arguments."""
    while found := re.fullmatch(r"([A-Z_0-9]+)=(.*)", words[0]):
        assert found[1] in VARIABLES, f"{found[1]}: nobody knows this variable"
        VARIABLES[found[1]](page, found[2])
        words = words[1:]
    program = Path(words[0]).name if words[0].startswith(".venv/bin/") else words[0]
    assert program in PROGRAMS, f"{words}: say in PROGRAMS how this is checked"
    PROGRAMS[program](page, words[1:])


def makes(page: Page, words: list[str]) -> None:
    """The target and its variables exist, and so do the files and tests that a variable names."""
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, is_variable, value = word.partition("=")
        if not is_variable:
            assert re.search(rf"^{name}:", makefile, re.MULTILINE), f"make has no {name}"
            continue
        assert re.search(rf"\(({name}|notdir \$\({name}\))\)", makefile), f"make reads no {name}"
        if name == "TESTS":
            assert all((ROOT / path).exists() for path in value.split())


def installs(page: Page, words: list[str]) -> None:
    """`pip install` of this folder with extras it has, or of packages named in pyproject.toml."""
    assert words[0] == "install"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    known = {re.split(r"[^\w-]", name)[0] for extra in extras.values() for name in extra}
    known |= {"tensorboard", "tlparse"}  # programs of others, which read what ours write
    for word in words[1:]:
        own = re.fullmatch(r"\.(?:\[([\w,]+)\])?", word)
        if own:
            assert set((own[1] or "").split(",")) <= {"", *extras}, word
        else:
            assert word in known, word


def accepts(page: Page, words: list[str]) -> None:
    """`python FILE ...`: the file is one of ours, and its parser takes the arguments. The guides'
    own examples run in test_guide_examples."""
    if words[:2] == ["-m", "pytest"]:
        return collects(page, words[2:])
    if words[0] in READERS_OWN:
        return None
    if words[0] == "-m":
        path = ROOT.joinpath(*words[1].split(".")).with_suffix(".py")
        words = words[1:]
    else:
        path = ROOT / words[0]
    assert path.is_file(), f"{path}: no such program"
    parse_only(path, words[1:])


class Parsed(BaseException):
    """The arguments were taken. No Exception: programs catch those."""


def parse_only(path: Path, arguments: list[str]) -> None:
    """Run the program's main() up to where its arguments have been parsed."""

    def parse(parser: ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        original(parser, args, namespace)
        raise Parsed

    original = ArgumentParser.parse_args
    shadowing = sys.modules.pop(path.stem, None)  # another folder may have a module of that name
    before, argv = set(sys.modules), sys.argv
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path), *arguments]
    ArgumentParser.parse_args = parse  # type: ignore[method-assign, assignment]
    try:
        module = importlib.import_module(path.stem)
        with pytest.raises(Parsed):
            module.main()
    finally:
        ArgumentParser.parse_args = original  # type: ignore[method-assign]
        sys.path.remove(str(path.parent))
        sys.argv = argv
        for name in set(sys.modules) - before:
            if str(ROOT / "examples") in (getattr(sys.modules[name], "__file__", "") or ""):
                del sys.modules[name]
        if shadowing is not None:
            sys.modules[path.stem] = shadowing


def collects(page: Page, words: list[str]) -> None:
    """The paths of a pytest command exist; `-k` selects something in them, by its words."""
    paths = [ROOT / word for word in words if word.startswith("tests")]
    assert paths and all(path.exists() for path in paths)
    if "-k" in words:
        wanted = words[words.index("-k") + 1]
        files = [f for path in paths for f in ([path] if path.is_file() else path.rglob("*.py"))]
        assert any(re.search(rf"def test_\w*{wanted}", f.read_text()) for f in files), wanted


def torchruns(page: Page, words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(words)
    world = {"WORLD_SIZE": parsed.nproc_per_node, "RANK": "0", "LOCAL_RANK": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in world.items():
            patch.setenv(name, value)
        accepts(page, [parsed.training_script, *parsed.training_script_args])


def runs(page: Page, words: list[str]) -> None:
    """`q2compile COMMAND ...` for real; bench takes minutes, so of it only its arguments."""
    if words[0] == "bench":
        with pytest.raises(SystemExit) as done:
            cli.main([*words, "--help"])
        assert done.value.code == 0
        return
    with contextlib.redirect_stdout(page.printed):
        assert cli.main(words) == 0, words


def reads_folder(page: Page, words: list[str]) -> None:
    """A third-party program that reads the files that the page's blocks wrote."""
    folders = [page.folder / word for word in words if not word.startswith("-")]
    assert folders
    if "TORCH_TRACE" not in page.path.read_text():  # the log of a process that was not started
        assert all(any(folder.iterdir()) for folder in folders), words


def parses(page: Page, words: list[str]) -> None:
    """Programs that fetch from the network are not run. They must be valid bash and take one
    folder."""
    script = ROOT / "examples" / "pretraining" / "texts.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert len(words) == 1 and "usage: texts.sh FOLDER" in script.read_text()


PROGRAMS: dict[str, Callable[[Page, list[str]], None]] = {
    "make": makes,
    "pip": installs,
    "python": accepts,
    "torchrun": torchruns,
    "q2compile": runs,
    "tensorboard": reads_folder,
    "tlparse": reads_folder,
    "examples/pretraining/texts.sh": parses,
}


def sets_log_levels(page: Page, value: str) -> None:
    torch._logging._internal._parse_log_settings(value)


def anything(page: Page, value: str) -> None:
    pass


def is_a_file(page: Page, value: str) -> None:
    names = re.findall(rf"`({re.escape(value)})`", page.path.read_text())
    assert names or (page.folder / value).is_file(), f"the page does not say what is in {value}"


VARIABLES: dict[str, Callable[[Page, str], None]] = {
    "TORCH_LOGS": sets_log_levels,
    "TORCH_TRACE": anything,  # a folder to be made
    "EXPECTTEST_ACCEPT": anything,
    "Q2COMPILE_CONFIG": is_a_file,
}


# ---- the pages ----------------------------------------------------------------------------------


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture
def folder(tmp_path, monkeypatch, fresh_compiler) -> Path:
    """An empty folder to run in, in a process that has logged nothing yet. Blocks run without
    Inductor unless they choose it: options in the code override the file."""
    config = tmp_path / "config.json"
    config.write_text('{"inner": "eager"}')
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, str(config))
    monkeypatch.setattr(announce.First, "compiled", False)
    restart_clock()
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


@pytest.fixture(autouse=True)
def _kernels_of_a_page_are_forgotten() -> Iterator[None]:
    before = {op: list(kernels) for op, kernels in registry.KERNELS.items()}
    yield
    for op, kernels in before.items():
        registry.KERNELS[op][:] = kernels
    KNOWN.choices.clear()


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """The output of the pages, and q2compile's log."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    level = announce.LOG.level
    announce.LOG.addHandler(handler)
    announce.LOG.setLevel(logging.NOTSET)
    yield text
    announce.LOG.removeHandler(handler)
    announce.LOG.setLevel(level)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_block_of_a_page(path: Path, folder: Path, log: io.StringIO) -> None:
    page = Page(path, folder, log)
    for block in blocks(path.read_text(encoding="utf-8")):
        where = f"{name_of(path)}:{block.line}"
        assert block.kind in BLOCKS, f"{where}: say in BLOCKS what {block.kind!r} is"
        print(where)  # pytest shows it with an error
        BLOCKS[block.kind](page, block)


def test_every_link_leads_somewhere() -> None:
    for path in DOCUMENTS:
        assert broken_links(path) == []


RESULTS = ROOT / "examples" / "pretraining" / "results"


def plain(figure: str) -> str:
    """A figure without the zeros before its points: +0.0162 ± 0.0002 is +.0162 ± .0002."""
    return re.sub(r"(?<!\d)0\.", ".", figure)


def test_figures_are_those_that_were_recorded() -> None:
    """Every measured gap in a page, x ± y, is in the tables that are made of the recorded runs."""
    tables = (RESULTS / "tables.md", RESULTS / "branched.md")
    recorded = plain("".join(table.read_text() for table in tables))
    for path in DOCUMENTS:
        for figure in re.findall(r"[+-]?\.?\d[\d.]* ± [\d.]*\d", path.read_text()):
            assert plain(figure) in recorded, f"{name_of(path)}: {figure}"


# ---- the parser itself --------------------------------------------------------------------------


def test_blocks_of_a_page() -> None:
    page = textwrap.dedent(
        """\
        # A page

            make test  # [not](a-link)

        text `[nor](this)` [but](this.md#part)

        ```python
        x = 1

        y = 2
        ```
        - an item
          that goes on

              and a block in it
        """
    )
    assert blocks(page) == [
        Block("", "make test  # [not](a-link)", 3),
        Block("python", "x = 1\n\ny = 2", 8),
        Block("", "  and a block in it", 15),
    ]
    assert "(this.md#part)" in prose(page) and "a-link" not in prose(page)


@pytest.mark.parametrize(
    "text",
    [
        "```rust\nlet x;\n```",
        "```python\nraise ValueError('wrong')\n```",
        '```toml\nrecipee = "quartet2"\n```',
        "```text\nnobody has printed this\n```",
        "```text layout\nno_such_folder/\n```",
        "```diff\n--- a/README.md\n+++ b/README.md\n@@\n-nobody wrote this\n+line\n```",
        "x\n\n    make nonsense",
        "x\n\n    rm -r folder",
        "x\n\n    python examples/no_such_file.py",
        "x\n\n    python examples/train_llama.py --no-such-option",
        "x\n\n    torchrun --nproc-per-node 2 examples/train_llama.py --ddpp",
        "x\n\n    pip install '.[nothing]'",
        "x\n\n    q2compile report absent/",
        "x\n\n    NO_SUCH_VARIABLE=1 python train.py",
        "x\n\n    TORCH_LOGS=+q2compiler python train.py",
        "x\n\n    python -m pytest tests/no_such_test.py",
    ],
)
def test_what_is_wrong_is_found(
    text: str, folder: Path, log: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = blocks(text)
    with pytest.raises((Exception, SystemExit)):
        BLOCKS[block.kind](Page(folder / "page.md", folder, log), block)


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Some Title: `x`, y\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#some-title-x-y) [b](other.md#other) [c](absent.md) [d](https://pytorch.org)"
    )
    assert broken_links(page) == ["other.md#other", "absent.md"]
