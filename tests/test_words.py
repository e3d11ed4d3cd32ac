# SPDX-License-Identifier: Apache-2.0
"""The field's terms, one word for one thing: where the field has a word, no name, comment or
document has one of this project's own. Names in comments and docstrings exist."""

from __future__ import annotations

import builtins
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.tracked import tracked

ROOT = Path(__file__).resolve().parents[1]


class Term(NamedTuple):
    """A word of this project's own.

    pattern: how it is found.
    use: the field's term.
    allowed: files, or folders, where the word means something else -> what.
    """

    pattern: str
    use: str
    allowed: dict[str, str] = {}


_STREAMS = "CUDA streams"
# Identifiers of Python code, whole.
NAMES = (
    Term(r"(\w*_)?(coins?|COINS?)(_\w*)?", "random bits"),
    Term(r"\w*worths", "raw scales"),
    Term(r"(un)?turned\w*", "transposed"),
    Term(r"_?folds", "has_pow2_scale"),
    Term(r"lies|LINES", "is_in_layout, Layout"),
    Term(r"LOOPS", "INDUCTOR"),
    Term(r"Producer|\w*produced|Produced", "PrologueExpression, prologue"),
    Term(r"Ready|pasts|READY_CALLS", "BoundCall, byte_offsets"),
    Term(r"At|FusedSite|Together", "BufferSlot, CallSite"),
    Term(r"several_launch|\w*last_launch|Ending", "batched launch, tail kernel"),
    Term(r"settled?|mend|mended", "finalize, fix up"),
    Term(r"law|kin|verdicts?|agreements", "reference semantics, variants, self-check result"),
    Term(r"_?refuses\w*|_?declines|refusal|Declined", "unsupported, rejected, disabled"),
    Term(r"put_in", "insert"),
    Term(r"_?[Ss]ummed|_SUMMED", "dbias"),
    Term(r"_?MOST_SIDES|_?Side", "operands"),
    Term(
        r"stream",
        "rng_offset",
        {
            "q2compile/tools": "CUDA streams, and the public argument of q2compile.quantize",
            "runtime_kernels/cuda/calls.py": _STREAMS,
            "runtime_kernels/cuda/jit/launch.py": _STREAMS,
            "runtime_kernels/selfcheck.py": _STREAMS,
            "tests/runtime_kernels/cuda": _STREAMS,
            "tests/runtime_kernels/numerics/test_schemes.py": "argument of q2compile.quantize",
            "tests/support/emulation/__init__.py": _STREAMS,
            "tests/support/launch_counts.py": _STREAMS,
        },
    ),
)
# In comments, docstrings, messages and documents.
PHRASES = (
    Term(r"\bcoins?\b", "random bits"),
    Term(r"\bworths\b", "raw scales"),
    Term(r"\b(un)?turned (codes|scales|operand|weight|matri)", "transposed"),
    Term(
        r"\b(bf16|BF16|dequantized) numbers\b|\bnumbers instead of codes\b", "dequantized operand"
    ),
    Term(r"\bkin\b|\bthe law for\b|\bverdicts?\b", "variants, reference semantics, result"),
    Term(r"\bgiven up\b", "rejected, disabled"),
    Term(r"\bInductor'?s? loops\b|\bloops of Inductor", "Inductor kernels"),
    Term(r"\bbits? an? (element|number|parameter)\b", "bits per element"),
    Term(r"\b(both|either) directions\b", "rowwise and columnwise, both operands"),
    Term(r"\b(made|computed) again\b", "recomputed"),
    Term(r"\bkept for (the )?backward", "saved for the backward"),
)


class Word(NamedTuple):
    """An identifier, or a line of text, and where it is."""

    file: str
    line: int
    text: str


@cache
def files(*suffixes: str) -> tuple[str, ...]:
    this = Path(__file__).relative_to(ROOT).as_posix()
    names = (p.relative_to(ROOT).as_posix() for p in tracked(ROOT) if p.suffix in suffixes)
    return tuple(name for name in names if name not in (this, "CHANGELOG.md"))


@cache
def text(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


@cache
def words(file: str) -> frozenset[str]:
    """Of the whole text, in code or not. It takes a hundredth of the time of its tokens."""
    return frozenset(re.findall(r"\w+", text(file)))


@cache
def tokens(file: str) -> tuple[tokenize.TokenInfo, ...]:
    return tuple(tokenize.generate_tokens(io.StringIO(text(file)).readline))


def identifiers(file: str) -> Iterator[Word]:
    for token in tokens(file):
        if token.type == tokenize.NAME:
            yield Word(file, token.start[0], token.string)


def prose(file: str) -> Iterator[Word]:
    """The lines of comments and strings of Python; all lines of other files."""
    if not file.endswith(".py"):
        yield from (
            Word(file, number, line) for number, line in enumerate(text(file).split("\n"), 1)
        )
        return
    for token in tokens(file):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for number, line in enumerate(token.string.splitlines(), token.start[0]):
                yield Word(file, number, line)


def any_of(terms: Iterable[Term]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{term.pattern})" for term in terms))


def found(words: Iterable[Word], terms: tuple[Term, ...], whole: bool) -> list[str]:
    """Where a word is one of the terms, or with `whole` unset contains one, and what to write."""
    patterns = [(re.compile(term.pattern), term) for term in terms]
    hits = []
    for word in words:
        for pattern, term in patterns:
            match = pattern.fullmatch(word.text) if whole else pattern.search(word.text)
            places = (
                word.file == place or word.file.startswith(f"{place}/") for place in term.allowed
            )
            if match and not any(places):
                hits.append(f"{word.file}:{word.line}: {match.group()!r}; the field's: {term.use}")
    return hits


def test_names_are_the_field_s() -> None:
    is_any = any_of(NAMES).fullmatch
    places = [file for file in files(".py") if any(map(is_any, words(file)))]
    assert found((w for file in places for w in identifiers(file)), NAMES, whole=True) == []


def test_prose_is_the_field_s() -> None:
    is_any = any_of(PHRASES).search
    places = [file for file in files(".py", ".md", ".cu", ".cuh") if is_any(text(file))]
    assert found((word for file in places for word in prose(file)), PHRASES, whole=False) == []


def test_no_comment_begins_with_of_or_what() -> None:
    """Such a comment leaves its subject to the line of code below it."""
    begins = re.compile(r"""\s*(#|//|"{3})\s?(Of|What)\b""")
    places = [f for f in files(".py", ".cu", ".cuh", ".h", ".cpp", ".js") if begins.search(text(f))]
    lines = (word for file in places for word in prose(file))
    assert [f"{word.file}:{word.line}" for word in lines if begins.match(word.text)] == []


def test_no_docstring_leans_on_the_line_above() -> None:
    """It names what it describes, so that it can be read by itself."""
    words = "The same of|Those|That|As in a|Its|Their|By|For|Not|Without|On|To|From|At|With|Under"
    begins = re.compile(rf'^ *"{{3}}(?:{words})\b', re.MULTILINE)
    packages = ("q2compile/", "lowering/", "runtime_kernels/")
    leaning = [
        f"{file}:{text(file).count(chr(10), 0, match.start()) + 1}: {match[0].strip()}"
        for file in files(".py")
        if file.startswith(packages)
        for match in begins.finditer(text(file))
    ]
    assert leaning == []


def test_every_exception_is_needed() -> None:
    """An allowed place without the word is removed from its list."""
    unneeded = []
    for terms, words in ((NAMES, identifiers), (PHRASES, prose)):
        for term in terms:
            bare = (term._replace(allowed={}),)
            for place in term.allowed:
                inside = [f for f in files(".py") if f == place or f.startswith(f"{place}/")]
                if not found((w for f in inside for w in words(f)), bare, whole=terms is NAMES):
                    unneeded.append((term.pattern, place))
    assert unneeded == []


@pytest.mark.parametrize(
    "text, expected",
    [
        ("random_coins", True),
        ("coincide", False),
        ("transposed", False),
        ("turned_scales", True),
        ("refuses_fp4", True),
        ("At", True),
        ("at", False),
        ("summed", True),
        ("put_in", True),
        ("input", False),
    ],
)
def test_which_names_are_found(text: str, expected: bool) -> None:
    assert bool(found([Word("lowering/x.py", 1, text)], NAMES, whole=True)) == expected


# ---- names that exist nowhere ----

# `name`, `name()` and name()
NAMED = re.compile(r"`([A-Za-z_][\w.]*)(?:\(\))?`|\b(\w+)\(\)")
FILE = re.compile(r"(?<![\w.*{}-])([a-z_][a-z0-9_]*\.(?:py|cuh?))\b")
# Names that no code here has, and whose they are.
FOREIGN = {
    "ParameterDict": "torch.nn",
    "merge_adapter": "PEFT",
    "unmerge_adapter": "PEFT",
    "prologue_expression.cuh": "written by quantize/prologue_source.py",
    "eval_frame.py": "torch",
    "partitioners.py": "torch",
    "modelopt.py": "vLLM",
}


def named(file: str) -> Iterator[Word]:
    """The names of code and of files in comments and strings."""
    for word in prose(file):
        names = [(match[1] or match[2]).rpartition(".")[2] for match in NAMED.finditer(word.text)]
        yield from (word._replace(text=name) for name in names + FILE.findall(word.text))


def in_code(file: str) -> Iterator[str]:
    """Identifiers, and the words of strings that are no docstrings."""
    docstring = True
    for token in tokens(file):
        if token.type == tokenize.NAME:
            yield token.string
        elif token.type == tokenize.STRING and not docstring:
            yield from re.findall(r"\w+", token.string)
        docstring = token.type in (tokenize.INDENT, tokenize.NEWLINE, tokenize.NL) or (
            docstring and token.type == tokenize.COMMENT
        )


def stale(names: Iterable[Word]) -> list[str]:
    """Those that nothing has: no code, file or folder, and that are no builtins."""
    names = list(names)
    left = {name.text for name in names} - {*dir(builtins), *FOREIGN}
    left -= {path.name for path in tracked(ROOT)}
    for path in tracked(ROOT):
        left.difference_update(re.findall(r"\w+", path.relative_to(ROOT).as_posix()))
    for file in files(".cu", ".cuh", ".cpp", ".h", ".js", ".toml", ".yml", ".json"):
        left -= words(file)
    for file in files(".py"):
        if not left.isdisjoint(words(file)):
            left.difference_update(in_code(file))
    return [f"{name.file}:{name.line}: {name.text}" for name in names if name.text in left]


def test_names_in_comments_exist() -> None:
    packages = [
        f for f in files(".py") if f.split("/")[0] in ("lowering", "q2compile", "runtime_kernels")
    ]
    assert stale(name for file in packages for name in named(file)) == []


def test_a_stale_name_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence is written in two parts here, so that it is not read as a comment's."""
    sentence = "# `QuantizerCall`, `gone" + "_name` and gone" + "_call() of gone" + ".py\n"
    (tmp_path / "module.py").write_text(sentence)
    with monkeypatch.context() as patch:
        patch.setattr(f"{__name__}.ROOT", tmp_path)
        names = list(named("module.py"))
    found = [name.rpartition(" ")[2] for name in stale(names)]
    assert found == ["gone_name", "gone_call", "gone.py"]
