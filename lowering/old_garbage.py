"""Python's collections of old garbage, put off while a graph is compiled.

A compilation makes millions of objects and keeps most of them to its end, so each time that there
are a quarter more Python goes through all of them again and finds little: 9.7 of the 57.9 seconds
of a Llama of 32 layers, 2.4 of 50.3 with this (the sample of examples/benchmarks/first_step.py,
torch 2.13, Python 3.11, one core, 2026-11-23). It costs memory of the host, 950 MiB and not 835
with 16 layers. Young garbage, as what is timed for max_autotune may be, is collected as ever: with
50,000 objects at a time and not 700 that took twice as long.

Torch 2.15 does this itself (gc_gen2_threshold_during_compile of torch._dynamo.config); here it is
for those before.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NEVER = 2**31 - 1
_lock = threading.Lock()
_inside = 0
_usual = _NEVER


@functools.cache
def torch_leaves_it() -> bool:
    """Whether this torch does all of this."""
    from torch._dynamo import utils

    return hasattr(utils, "deferred_full_gc")


@contextmanager
def old_garbage_left() -> Iterator[None]:
    """Inside, in all threads, old objects are not looked through. Python 3.14, which goes through
    them by and by, has no such setting and ignores it."""
    global _inside, _usual
    if torch_leaves_it():
        yield
        return
    with _lock:
        if _inside == 0:
            first, second, _usual = gc.get_threshold()
            gc.set_threshold(first, second, _NEVER)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                gc.set_threshold(*gc.get_threshold()[:2], _usual)


@functools.cache
def register() -> None:
    """For what Inductor compiles later than the rest of its graph, a backward: each graph with ops
    of q2compile. An Inductor that is not built so works as it does."""
    if torch_leaves_it():
        return
    try:
        from torch._inductor.compile_fx import _InProcessFxCompile

        compile_one = _InProcessFxCompile.codegen_and_compile
    except (ImportError, AttributeError):
        return

    @functools.wraps(compile_one)
    def compile_one_of_ours(self: Any, gm: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(getattr(node.target, "namespace", None) == "q2" for node in gm.graph.nodes):
            return compile_one(self, gm, *args, **kwargs)
        with old_garbage_left():
            return compile_one(self, gm, *args, **kwargs)

    _InProcessFxCompile.codegen_and_compile = compile_one_of_ours  # type: ignore[method-assign]
