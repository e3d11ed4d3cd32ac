# SPDX-License-Identifier: Apache-2.0
"""Every replacement of a torch attribute that q2compile makes, in one table, and their scope.

A replacement is in force while a graph with q2 ops is compiled, in the thread that compiles it:

- Before and after, the attribute is torch's own object again.
- Meanwhile the attribute is a function that asks which thread calls it. In a thread that compiles
  no graph of ours it calls the original.
- Each replacement changes nothing for a graph without q2 ops, which a pass of the user may compile
  in the same thread.

Registrations under names of our own (the ops of namespace q2, their lowerings and fakes) replace
nothing, and are not in this table.
"""

from __future__ import annotations

import functools
import operator
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from q2compile.torch_internals.dynamo import called_graphs


@dataclass(frozen=True)
class Patch:
    """One replaced attribute.

    module, owner, key  where it is: an attribute of a class or of a module
    cause     what torch does without it
    upstream  the issue or pull request, or why there is none
    versions  the torch versions that need it
    benefit   what leaving it out costs, as measured
    """

    name: str
    module: str
    owner: str
    key: str
    cause: str
    upstream: str
    versions: str
    benefit: str

    def place(self) -> Any:
        """The class or module. Raises ImportError or AttributeError in a torch that has none."""
        return getattr(import_module(self.module), self.owner)

    def value(self) -> Any:
        """The current attribute."""
        return getattr(self.place(), self.key)


PATCHES = (
    Patch(
        name="nan_asserts",
        module="torch._inductor.codegen.wrapper",
        owner="PythonWrapperCodegen",
        key="generate",
        cause="Inductor's option nan_asserts writes isinf() for every tensor; torch has no isinf "
        "for float8, in which block scales are, so the generated code raises.",
        upstream="none filed; ends when torch.isinf takes float8_e4m3fn",
        versions="2.11 to 2.15",
        benefit="correctness: the option raises NotImplementedError without it",
    ),
    Patch(
        name="choices",
        module="torch._inductor.virtualized",
        owner="V",
        key="choices",
        cause="Inductor compiles and times four tiles for a quantizing loop, of which none is the "
        "best one (lowering/inductor_kernels/tile_config.py). There is one handler per thread, "
        "which is set, not replaced.",
        upstream="none: the handler is Inductor's way to choose from outside",
        versions="2.11 to 2.15",
        benefit="quantizing kernels take up to 1.29 times as long with another tile",
    ),
    Patch(
        name="dense",
        module="torch",
        owner="_prims_common",
        key="is_non_overlapping_and_dense_or_false",
        cause="Inductor asks whether each output of a graph is dense, and sorts its strides to "
        "find out. For scales with ceil(T / 16) columns that the forward saves, this is a guard "
        "on T > 16, which bounds of mark_dynamic contradict.",
        upstream="none filed; ends when it asks first whether the strides are contiguous for all "
        "sizes",
        versions="2.11 to 2.15",
        benefit="ConstraintViolationError with bounds, one more graph without them",
    ),
)

_REPLACEMENTS: dict[str, Callable[[Any], Any]] = {}


def replaces(name: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Decorator of what makes the replacement of a row from the original. A row whose module was
    not imported, such as one of lowering/ under inner="eager", is not in force.
    """
    assert name in {patch.name for patch in PATCHES}, name

    def register(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        _REPLACEMENTS[name] = make
        return make

    return register


class _Here(threading.local):
    depth = 0  # how many graphs of ours this thread is compiling, one inside the other


class _Installed:
    """An installed replacement. ``value`` asks the thread which function to call."""

    def __init__(self, patch: Patch) -> None:
        self.patch, self.original, self.live = patch, patch.value(), True
        original, replacement = self.original, _REPLACEMENTS[patch.name](self.original)

        @functools.wraps(original)
        def value(*args: Any, **kwargs: Any) -> Any:
            ours = self.live and _here.depth > 0
            return (replacement if ours else original)(*args, **kwargs)

        self.value = value
        setattr(patch.place(), patch.key, value)

    def remove(self) -> None:
        """Put the original back, unless somebody else has replaced the attribute since: whoever
        wraps ``value`` then goes on to call the original through it.
        """
        self.live = False
        if self.patch.value() is self.value:
            setattr(self.patch.place(), self.patch.key, self.original)


_here = _Here()
_lock = threading.Lock()
_compiling = 0  # graphs of ours, in all threads
_installed: list[_Installed] = []


@contextmanager
def patched() -> Iterator[None]:
    """Put all rows in force in this thread. May be nested, and be entered by several threads."""
    global _compiling
    with _lock:
        if _compiling == 0:
            _install()
        _compiling += 1
    outermost = _here.depth == 0
    _here.depth += 1
    try:
        with ExitStack() as handlers:
            if outermost and "choices" in _REPLACEMENTS:
                handlers.enter_context(_own_choices())
            yield
    finally:
        _here.depth -= 1
        with _lock:
            _compiling -= 1
            if _compiling == 0:
                while _installed:
                    _installed.pop().remove()


def _install() -> None:
    for patch in PATCHES:
        if patch.name in _REPLACEMENTS and patch.name != "choices":
            with suppress(ImportError, AttributeError):  # a torch that is built otherwise
                _installed.append(_Installed(patch))


@contextmanager
def _own_choices() -> Iterator[None]:
    """This thread's choices handler, the user's if there is one, inside of ours."""
    from torch._inductor.virtualized import V

    original = V.choices
    own = _REPLACEMENTS["choices"](original)
    V.set_choices_handler(own)  # the context that it returns would undo what others set meanwhile
    try:
        yield
    finally:
        if V.choices is own:
            V.set_choices_handler(original)


def _holds_q2_ops(gm: Any) -> bool:
    nodes = (node for graph in called_graphs(gm) for node in graph.graph.nodes)
    return any(getattr(node.target, "namespace", None) == "q2" for node in nodes)


_INFINITY = re.compile(r"assert not (\w+)\.isinf\(\)\.any\(\)\.item\(\)")


@replaces("nan_asserts")
def _ask_wide_types(generate: Any) -> Any:
    """float8_e4m3fn has no infinity to find and integers have none either, so of types of one byte
    only NaN is asked. Nothing else about the generated code changes.
    """
    from torch._inductor.virtualized import V

    def generate_asking_wide_types(self: Any, is_inference: bool) -> Any:
        code, kernels = generate(self, is_inference)
        if _holds_q2_ops(V.graph.module):
            code.value = _INFINITY.sub(
                r"assert \1.element_size() == 1 or not \1.isinf().any().item()", code.value
            )
        return code, kernels

    return generate_asking_wide_types


@replaces("dense")
def _dense_without_guards(is_dense: Any) -> Any:
    """Contiguous strides are dense whatever the sizes are, so nothing need be asked about these."""
    from torch._prims_common import make_contiguous_strides_for
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    def is_dense_without_guards(a: Any) -> Any:
        if a.layout is torch.strided:
            contiguous = make_contiguous_strides_for(a.shape)
            if all(map(statically_known_true, map(operator.eq, a.stride(), contiguous))):
                return True
        return is_dense(a)

    return is_dense_without_guards
