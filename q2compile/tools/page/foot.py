# SPDX-License-Identifier: Apache-2.0
"""The foot of a page: what the run was that it shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

_FACTS = ("versions", "commit", "device", "date", "command", "options")


def foot(run: Mapping[str, Any]) -> str:
    """The foot as HTML; "" if nothing is known of the run."""
    facts = [(name, _text(run[name])) for name in _FACTS if run.get(name)]
    if not facts:
        return ""
    pairs = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    return f'<footer id="run"><dl class="facts">{pairs}</dl></footer>'


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {version}" for name, version in value.items())
    if isinstance(value, list):
        return "; ".join(json.dumps(options, ensure_ascii=False) for options in value)
    return str(value)
