# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML file out of static files and data; opening it loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

_FRAME = "q2compile.tools.page"


def static(name: str, package: str = _FRAME) -> str:
    """The text of a file of a package's static/."""
    return (files(package) / "static" / name).read_text(encoding="utf-8")


def assemble(
    title: str, styles: Sequence[str], scripts: Sequence[str], body: str, data: dict[str, Any]
) -> str:
    """A page: the frame with base.css and base.js, and what is this page's own.

    styles, scripts   texts, in order; the scripts share one scope, and may use each other's names
                      and those of base.js
    body              HTML, whose texts the caller has escaped
    data              what the scripts read, as JSON, from the element with the id "data"

    The page's own policy lets it run these scripts alone, and load nothing.
    """
    style = "".join([static("base.css"), *styles])
    script = '(() => {\n"use strict";\n' + "".join([static("base.js"), *scripts]) + "})();\n"
    parts = {
        "title": escape(title),
        "script-hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "style": style,
        "body": body,
        "data": script_json(data),
        "script": script,
    }
    page = static("frame.html")
    head, *rest = page.split("{{")
    filled = [head]
    for part in rest:  # one walk over the frame: inserted text is not searched
        name, after = part.split("}}", 1)
        filled += [parts[name], after]
    return "".join(filled)


def script_json(value: Any) -> str:
    """JSON that may be put into a script element, whatever is in its strings."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # Half of a pair of surrogates, which a name in a model may be, is no UTF-8.
    return text.encode("utf-8", "backslashreplace").decode()


def packed(text: str) -> str:
    """A long text as base64 of zlib's format, which browsers unpack (DecompressionStream)."""
    raw = zlib.compress(text.encode("utf-8", "backslashreplace"), 9)
    return base64.b64encode(raw).decode()
