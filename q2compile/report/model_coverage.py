# SPDX-License-Identifier: Apache-2.0
"""Which parts of a model have reached the backend."""

from __future__ import annotations

import difflib
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from q2compile.capture.module_names import (
    Names,
    expected_sites,
    loose_weights,
    site_name,
    site_names,
)
from q2compile.capture.module_tree import module_at, named_parameters
from q2compile.config import Config, resolved_policy, telemetry_options
from q2compile.errors import ConfigError, NotTakenError
from q2compile.recipes.policy import compiled_pattern
from q2compile.report.row import Row
from q2compile.torch_internals.dynamo import is_at_recompile_limit, recompile_limit
from q2compile.torch_internals.fsdp1 import UNSUPPORTED, is_flattened


@dataclass(frozen=True)
class _Cause:
    """Why a linear is not in the report's graphs; ``what`` it did, and the advice, in an error."""

    why: str
    what: str
    advice: str


_BREAK = _Cause(
    "no compiled graph holds it so far; a graph break in a Python loop, torch.compiler.disable, a "
    "branch not taken or Dynamo's recompile limit keeps code from the backend",
    "never reached the backend",
    "Look for graph breaks (TORCH_LOGS=graph_breaks)",
)
_HELD = _Cause(
    "a compiled graph holds its weight, and none of its matmuls could be traced to the weight",
    "are not among the matmuls of the graphs that hold their weights",
    "Look for matmuls without a name in q2compile.explain(model, ...)",
)
_LOOP = (
    "; a loop over the experts that got tokens breaks it: transformers' "
    "set_experts_implementation('grouped_mm') has none"
)


def _at_limit(name: str) -> _Cause:
    limit = recompile_limit()
    return _Cause(
        f"Dynamo has compiled {name}.forward {limit} times, which is its limit, and runs further "
        "calls without compiling them; raise torch._dynamo.config.recompile_limit",
        f"never reached the backend because Dynamo compiles {name}.forward {limit} times at most",
        "Raise torch._dynamo.config.recompile_limit to the number of blocks with options of their "
        "own",
    )


class Coverage:
    """The parts of one model, as one Config wants them, that have reached the backend so far. Parts
    that were compiled with other options count, too."""

    # By identity: a model may define __eq__, and have no hash then.
    _by_root: Any = WeakIdKeyDictionary()  # model -> {(Config, label): Coverage}
    _seen_without: Any = WeakIdKeyDictionary()  # Config -> sites in graphs whose models are unknown

    def __init__(self, root: nn.Module | None, config: Config, label: str = "") -> None:
        self.config = config
        self.root = weakref.ref(root) if root is not None else lambda: None
        self.label = label  # what the names of root's sites begin with
        self.sites: set[str] = set()  # of all models that one function runs
        self.seen: set[str] = set()  # sites of matmuls
        self.held: set[str] = set()  # and of all parameters, whatever is done with them
        self._said = False  # that telemetry records nothing
        self.shared: dict[str, dict[str, None]] = {}  # frame -> sites of equal modules, in order

    @classmethod
    def of(
        cls, root: nn.Module | None, config: Config, label: str = "", by_root: Any = None
    ) -> Coverage:
        """by_root: those of a report that is made apart from the training, which has its own."""
        if root is None:
            coverage = cls(None, config)
            coverage.seen = cls._seen_without.setdefault(config, set())
            return coverage
        known = (cls._by_root if by_root is None else by_root).setdefault(root, {})
        if (config, label) not in known:
            coverage = cls(root, config, label)
            for other in known.values():
                if other.label == label:
                    coverage.seen, coverage.held = other.seen, other.held
            known[config, label] = coverage
        found: Coverage = known[config, label]
        return found

    def add(self, rows: list[Row], names: Names) -> None:
        self.sites.update(names.sites)
        self.seen.update(row.module for row in rows if row.has_parameter)
        for parameter in names.held:
            own = {site_name(name) for name in names.by_id.get(id(parameter), [])}
            served = names.served_too(parameter)
            self.held.update(own, served)
            if served and own & self.seen:
                self.seen.update(served)
                self.shared.setdefault(names.place, {}).update(dict.fromkeys(served))

    def not_seen(self) -> list[Row]:
        """Rows for the linears and loose weights of the model that no graph has held so far."""
        root = self.root()
        if root is None:
            return []
        policy = resolved_policy(self.config)
        loose = {n: s for n, s in loose_weights(root, self.label).items() if n not in self.held}
        return [
            Row(
                name,
                (*shape[:-2], "T", *shape[-2:]),
                why=f"not seen: {self._cause(root, name).why}" + _LOOP * (len(shape) > 2),
                wanted=policy.resolve(name)[0].quantizes,
            )
            for name, shape in {**loose, **expected_sites(root, self.label)}.items()
            if name not in self.seen
        ]

    def _cause(self, root: nn.Module, name: str) -> _Cause:
        if name in self.held:
            return _HELD
        if self.label:
            name = name.removeprefix(f"{self.label}.")
        modules = [module_at(root, name[:end]) for end in _ends(name)]
        limited = next((m for m in modules if m is not None and is_at_recompile_limit(m)), None)
        return _BREAK if limited is None else _at_limit(type(limited).__name__)

    def notes(self) -> list[str]:
        """Notes for readers of the report, besides the rows."""
        root = self.root()
        is_fsdp1 = root is not None and any(is_flattened(p) for _, p in named_parameters(root))
        notes = [f"{UNSUPPORTED}: no layer of {type(root).__name__} is quantized"] * is_fsdp1
        notes += [
            f"the graph compiled for {prefix!r} also runs equal modules: {', '.join(served)}"
            for prefix, served in self.shared.items()
        ]
        return notes + self.unmatched()

    def unmatched(self) -> list[str]:
        """A sentence for each pattern that matches nothing."""
        return [
            f"{whose} pattern {pattern!r} matches no module with a weight" + self._hint([pattern])
            for whose, patterns in self._unmatched().items()
            for pattern in patterns
        ]

    def raise_on_unmatched_patterns(self) -> None:
        for whose, patterns in self._unmatched().items():
            if patterns:
                raise ConfigError(
                    f"strict: {whose} pattern(s) {', '.join(map(repr, patterns))} match no "
                    f"module with a weight{self._hint(patterns)}; {self._advice()}"
                )

    def _advice(self) -> str:
        if self._sites():
            return "print q2compile.explain(model, ...) for the names"
        names = ", ".join(map(repr, sorted(self.seen)[:8])) + ", ..." * (len(self.seen) > 8)
        return (
            "q2compile found no model behind what was compiled, so it knows only the names in its "
            f"graphs: {names}. Compile the model itself, or leave strict out"
        )

    def says_that_nothing_is_recorded(self) -> str:
        """A sentence, the first time, where telemetry's patterns match nothing at all; else ""."""
        options, patterns = telemetry_options(self.config), self._unmatched()["telemetry's"]
        if self._said or options is None or len(patterns) < len(options.modules):
            return ""
        self._said = True
        return (
            f"telemetry records nothing: its pattern(s) {', '.join(map(repr, patterns))} match no "
            f"module with a weight{self._hint(patterns)}"
        )

    def _unmatched(self) -> dict[str, list[str]]:
        """Whose patterns -> those of them that match nothing; none while no name is known. Where no
        model was found names are those in the graphs so far."""
        names = self._sites() | self.seen
        options = telemetry_options(self.config)
        return {
            "the policy's": resolved_policy(self.config).unmatched(names) if names else [],
            "telemetry's": options.unmatched(names) if names and options else [],
        }

    def _sites(self) -> set[str]:
        root = self.root()
        return self.sites.union(site_names(root, self.label) if root is not None else ())

    def _hint(self, patterns: list[str]) -> str:
        """The nearest patterns that would match, in brackets: of all modules of a name that differs
        in a letter or two, or else of one module."""
        names = sorted(self._sites() | self.seen)
        last = {name.rpartition(".")[2]: name for name in names}
        near = []
        for pattern in patterns:
            if found := difflib.get_close_matches(pattern.strip("*."), last, n=1, cutoff=0.8):
                near.append(_pattern_of(found[0], last[found[0]]))
            elif found := difflib.get_close_matches(pattern, names, n=1):
                near.append(_pattern_of(found[0], found[0]))
        return f" (did you mean {', '.join(map(repr, near))}?)" if near else ""

    def raise_on_unseen(self) -> None:
        """Raises NotTakenError for linears that the policy wanted and that have not come so far."""
        root = self.root()
        missing: dict[_Cause, list[str]] = {}
        for row in self.not_seen():
            if row.wanted and root is not None:
                missing.setdefault(self._cause(root, row.module), []).append(row.module)
        if missing:
            listed = "; ".join(
                f"{len(names)} linear(s) {cause.what}: {', '.join(names)}. {cause.advice}"
                for cause, names in missing.items()
            )
            raise NotTakenError(
                f"strict: {listed}, give them 'bf16' in the policy, or set strict=False"
            )

    def check_in_first_backward(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """``compiled`` that calls `raise_on_unseen` in its first backward.

        By then the whole forward has run, so what has not reached the backend never will; and no
        optimizer step has been taken.
        """
        checked = False

        def check(grad: torch.Tensor) -> torch.Tensor:
            nonlocal checked
            checked = True
            self.raise_on_unseen()
            return grad

        def call(*args: Any) -> Any:
            outputs = compiled(*args)
            if not checked:
                for out in outputs:
                    if isinstance(out, torch.Tensor) and out.requires_grad:
                        out.register_hook(check)
                        break
            return outputs

        return call


def _ends(name: str) -> list[int]:
    """The length of each path that leads to ``name``: to "a", "a.b" and "a.b.c" itself."""
    return [*(match.start() for match in re.finditer(r"\.", name)), len(name)]


def _pattern_of(leaf: str, name: str) -> str:
    """A pattern that matches ``name`` by its last component, or by all of it: a glob, unless the
    name has characters that mean something else in one, as that of ParameterDict()["x[0]"]."""
    glob = leaf if leaf == name else f"*.{leaf}"
    try:
        if compiled_pattern(glob).fullmatch(name):
            return glob
    except ConfigError:
        pass
    return f"re:{'' if leaf == name else '.*'}{re.escape(leaf)}"
