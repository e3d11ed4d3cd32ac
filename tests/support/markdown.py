# SPDX-License-Identifier: Apache-2.0
"""The blocks, links, headings and tables of a Markdown page, as GitHub shows them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Block:
    """A code block. kind: the text after the fence; "" for an indented block. line: number of its
    first line of text."""

    kind: str
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    """Every fenced block, and every block indented by four columns that follows an empty line."""
    found: list[Block] = []
    lines = page.splitlines()
    i = 0
    while i < len(lines):
        fence = re.match(r"( *)(```+)(.*)", lines[i])
        if fence:
            start = i = i + 1
            while lines[i].strip() != fence[2]:  # a fence that is never closed is an IndexError
                i += 1
            text = "\n".join(line.removeprefix(fence[1]) for line in lines[start:i])
            found.append(Block(fence[3].strip(), text, start + 1))
        elif lines[i].startswith("    ") and (i == 0 or not lines[i - 1].strip()):
            start = i
            while i < len(lines) and (lines[i].startswith("    ") or not lines[i].strip()):
                i += 1
            text = "\n".join(line[4:] for line in lines[start:i]).rstrip()
            found.append(Block("", text, start + 1))
            continue
        i += 1
    return found


def prose(page: str) -> str:
    """The page without its blocks and without text in backquotes."""
    lines = page.splitlines()
    for block in blocks(page):
        for i in range(block.line - 1, block.line - 1 + len(block.text.splitlines())):
            lines[i] = ""
    return re.sub(r"`[^`]*`", "", "\n".join(lines))


def links(page: str) -> list[str]:
    """The targets of links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def anchors(page: str) -> set[str]:
    """The anchors of a page: GitHub's names of the headings."""
    return {_anchor(title) for title in _headings(page)}


def _headings(page: str) -> Iterator[str]:
    inside = {
        number
        for block in blocks(page)
        for number in range(block.line, block.line + len(block.text.splitlines()))
    }
    for number, line in enumerate(page.splitlines(), start=1):
        if number not in inside and (heading := re.match(r"#+ (.*)", line)):
            yield heading[1]


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def tables(text: str) -> Iterator[dict[str, str]]:
    """Every row of a Markdown page's tables: title of the column -> cell."""
    titles: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else []
        if cells and titles and not set(cells[0]) <= set("-: "):
            yield dict(zip(titles, cells, strict=True))
        titles = titles or cells if cells else []


def broken_links(document: Path) -> list[str]:
    """The links of a document to files that are not there, or to headings that they lack."""
    broken = []
    for link in links(document.read_text()):
        if re.match(r"\w+:", link):
            continue  # another site
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        lacks = anchor and (target.suffix != ".md" or anchor not in anchors(target.read_text()))
        if not target.exists() or lacks:
            broken.append(link)
    return broken
