# SPDX-License-Identifier: Apache-2.0
"""Tensors that a graph saves for its backward, by module, read from the texts of its dump."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod

_NODE = re.compile(r"(\w+)(?:: ((?:\([^=]*?\))|(?:\w+\[[^\]]*\])))?(?: = (.*))?")
_TENSOR = re.compile(r"(\w+)\[([^\]]*)\]")
_QUANTIZED = ("q2.quantize", "q2.transpose")


def saved_tensors(files: Mapping[str, str]) -> list[list[str | int | None]] | None:
    """[module, node, type, bytes, kind] of every tensor that the backward takes from the forward;
    None where no backward was compiled.

    kind   "quantized": a part of a quantized operand; "input": a parameter or an input of the
           graph, which exists anyway; "other": the rest
    bytes  None where a size is a symbol
    """
    forward, backward = files.get("2_forward.txt"), files.get("3_backward.txt")
    if forward is None or backward is None:
        return None
    made = {name: (module, type_, call) for module, name, type_, call in _nodes(forward)}
    saved: list[list[str | int | None]] = []
    for _, name, type_, call in _nodes(backward):
        if call or name not in made:
            if call:
                break  # inputs come first
            continue
        module, _, call = made[name]
        saved.append([module, name, type_, _bytes(type_), _kind(call, made)])
    return saved


def _nodes(text: str) -> Iterator[tuple[str, str, str, str]]:
    """(module, name, type, call) of each node of a graph, without the graphs that it calls; an
    input has no call."""
    module = ""
    for line in text.splitlines():
        if line.startswith("return "):
            return
        if line.startswith("# "):
            module = line[2:]
        elif match := _NODE.fullmatch(line):
            yield module, match[1], match[2] or "", match[3] or ""


def _kind(call: str, made: Mapping[str, tuple[str, str, str]]) -> str:
    if not call:
        return "input"
    if call.startswith("getitem("):
        call = made.get(call[len("getitem(") :].partition(",")[0], ("", "", ""))[2]
    return "quantized" if call.partition("(")[0] in _QUANTIZED else "other"


def _bytes(type_: str) -> int | None:
    match = _TENSOR.fullmatch(type_)
    if match is None:
        return None
    sizes = [size.strip() for size in match[2].split(",") if size.strip()]
    if not all(size.isdigit() for size in sizes):
        return None
    return prod(map(int, sizes)) * _item_size(match[1])


def _item_size(dtype: str) -> int:
    """Bytes of a number, by torch's short name of its type: bf16, f8e4m3fn, i64, b8."""
    return max(1, int((re.search(r"\d+", dtype) or ["8"])[0]) // 8)
