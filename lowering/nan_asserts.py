"""Inductor's option nan_asserts, for graphs that hold scales in float8.

It writes ``assert not x.isinf().any().item()`` for every tensor that a graph is given, makes or
returns, and torch has no isinf for float8 (2.11 to 2.13, `_inductor/codegen/wrapper.py` and
`triton.py`). float8_e4m3fn, which block scales are in, has no infinity to find, and whole numbers
have none either: of numbers of one byte only NaN is asked.
"""

from __future__ import annotations

import functools
import re
from typing import Any

_INFINITY = re.compile(r"assert not (\w+)\.isinf\(\)\.any\(\)\.item\(\)")


@functools.cache
def register() -> None:
    """Let the wrappers that Inductor writes from now on ask so; nothing else about them changes."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    generate = PythonWrapperCodegen.generate

    @functools.wraps(generate)
    def generate_asking_wide_numbers(self: Any, is_inference: bool) -> Any:
        code, kernels = generate(self, is_inference)
        code.value = _INFINITY.sub(
            r"assert \1.element_size() == 1 or not \1.isinf().any().item()", code.value
        )
        return code, kernels

    PythonWrapperCodegen.generate = generate_asking_wide_numbers  # type: ignore[method-assign]
