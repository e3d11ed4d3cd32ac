# SPDX-License-Identifier: Apache-2.0
"""The telemetry of one compiled graph: which of its two variants a call runs, and where its notes
go.

A graph is compiled twice: plain, with marks alone, and recording. The first training call of a
recorded step runs the recording one, all others the plain one. Both save the same tensors for the
backward, so a checkpointed region may be recomputed by the other.

On the device, notes are written to memory that the recorder owns, by launches on the graph's
stream; a CUDA graph captures them with the rest. On the host, a copy to pinned memory is started
after the call and after its backward; nothing waits for it. The copy is read some steps later, when
its event has passed (`folder`).

A graph that serves equal layers (per-block compile) identifies its calls by their parameters, and
backwards by a hook on the call's node in autograd's graph."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from q2compile.recipes.recipe import GEMMS, Recipe
from q2compile.runtime_kernels.numerics import constants
from q2compile.runtime_kernels.numerics.schemes import SCHEMES
from q2compile.runtime_kernels.numerics.statistics import SUMS
from q2compile.runtime_kernels.ops.note import SINKS
from q2compile.telemetry import clock
from q2compile.telemetry.copies import HostCopy
from q2compile.telemetry.folder import Folder, Record
from q2compile.telemetry.into_graph import NoteLayout, Place, insert_recording
from q2compile.telemetry.options import TelemetryOptions
from q2compile.telemetry.watch import STEPS, Finding
from q2compile.torch_internals.aot_autograd import (
    backward_node,
    calls_on_fakes,
    compiles_autograd,
    computes_again,
)
from q2compile.torch_internals.identity import identity_of

KINDS = ("forward", "backward")
_OPERANDS = 8  # of one linear, at most, in one graph
_MOST_LAYERS = 1024  # that a graph serves; where parameters are made anew in each call, more come
_MOST_SEARCHED = 64  # callers for whose optimizer all objects are searched
_NOBODY = (None, None, 0)


@dataclass(frozen=True)
class Site:
    """One linear of a graph.

    modules    its name, then those of equal layers that the graph serves, too
    recipe     of its GEMMs
    codes      bytes of its weight's codes that a record keeps
    """

    modules: tuple[str, ...]
    recipe: Recipe
    codes: int


@dataclass
class _Memory:
    """Buffers that one kind of graph writes to. Allocated before its first call, since a CUDA
    graph's warm-up must not allocate memory that outlives it.

    marks       fp32 [STEPS * calls, n]: a row for each of the last steps and each call in a step
    statistics  fp64 [operands, len(SUMS)] of the recorded call
    """

    marks: Tensor
    statistics: Tensor
    layout: NoteLayout | None = None


@dataclass
class _Training:
    """One model that calls the graph.

    layers    how many of its layers have called
    recorded  the layers that were recorded in this step
    codes     number of a layer -> the codes of its weights
    """

    trained: clock.Trained
    folder: Folder
    layers: int = 0
    recorded: set[int] = field(default_factory=set)
    codes: dict[int, Tensor] = field(default_factory=dict)
    step: int = -1


@dataclass(frozen=True)
class _Call:
    """A training call: of which model, of its layer of this number, in this step."""

    training: _Training
    number: int
    step: int


class Recorder:
    """See above.

    number      of the graph in this process, by which its notes find it
    sites       by seed index
    parameters  where they stand among the graph's inputs
    root        the model that the graph was compiled for; None if it is not known
    """

    def __init__(
        self,
        number: int,
        sites: dict[int, Site],
        parameters: Sequence[int],
        device: torch.device,
        options: TelemetryOptions,
        root: nn.Module | None,
    ) -> None:
        self.number, self.sites, self.device = number, sites, device
        self.options = options
        self._root = weakref.ref(root) if root is not None else lambda: None
        self._parameters = tuple(parameters)
        self._recipes = {seed_index: site.recipe for seed_index, site in sites.items()}
        self._wanted = {s for s, site in sites.items() if any(map(options.wants, site.modules))}
        self._capacity = max(len(site.modules) for site in sites.values())
        # The parameters of a layer -> the first that is trained, the model, the layer's number.
        self._callers: dict[tuple[int, ...], tuple[Any, _Training, int]] = {}
        self._trainings: dict[clock.Clock, _Training] = {}
        self._memory: dict[str, _Memory] = {}
        self._row = -1
        own = weakref.ref(self)
        for kind in KINDS:
            place = f"{number}.{kind}"
            SINKS[place] = partial(_noted, own, kind)
            weakref.finalize(self, SINKS.pop, place, None)

    def key(self, recording: bool) -> str:
        """Identifies the compiled graph, for caches."""
        wanted = sorted(self._wanted) if recording else None
        return f"telemetry {self.number} {wanted} {sorted(map(str, self._recipes.items()))}"

    def insert(self, graph: fx.Graph, kind: str, recording: bool) -> None:
        """Have a graph note what is to be known of it."""
        wanted = self._wanted if recording else None
        insert_recording(graph, kind, str(self.number), self._recipes, wanted)

    @property
    def records(self) -> bool:
        """Whether the pattern of modules wants any of this graph."""
        return bool(self._wanted)

    def choose(self, plain: Callable[..., Any], recording: Callable[..., Any]) -> Any:
        """The callable that Dynamo gets."""

        def call(*args: Any) -> Any:
            if calls_on_fakes():  # each of the two answers its own first call with fakes
                if self.records:
                    recording(*args)
                return plain(*args)
            if not torch.is_grad_enabled() or computes_again():
                return plain(*args)
            own = self._begin(args)
            records = own.step % self.options.every == 0
            if not (records and self.records) or own.number in own.training.recorded:
                outputs = plain(*args)
                if self._capacity > 1:
                    self._follow_backward(outputs, own, False)
                return outputs
            own.training.recorded.add(own.number)
            outputs = recording(*args)
            self._fetch("forward", own)
            self._follow_backward(outputs, own, True)
            return outputs

        return call

    def _begin(self, args: Sequence[Any]) -> _Call:
        """Prepare a training call. Its number is 0 for a graph of one layer's."""
        if not self._memory:
            self._allocate()
        w = next((args[i] for i in self._parameters if args[i].requires_grad), None)
        training, number = self._caller(args, w)
        step = clock.trains(training.trained, w if number == 0 else None)
        if step != training.step:
            training.step = step
            training.recorded.clear()
            training.folder.begin(step)
        self._point(step, number)
        return _Call(training, number, step)

    def _caller(self, args: Sequence[Any], w: Tensor | None) -> tuple[_Training, int]:
        """Which model calls, and which of its layers: 0 for the one that the graph was compiled
        for. w: a parameter of it that is trained."""
        key = tuple(id(args[i]) for i in self._parameters)
        known, training, number = self._callers.get(key, _NOBODY)
        own = None if w is None else identity_of(w)
        if training is None or known != own:  # an id may be that of a tensor that is gone
            training = self._training(w)
            number = min(training.layers, _MOST_LAYERS) if self._capacity > 1 else 0
            training.layers += 1
            if len(self._callers) < _MOST_LAYERS:
                self._callers[key] = own, training, number
        return training, number

    def _training(self, w: Tensor | None) -> _Training:
        """The model of a caller that is not known yet: the one whose optimizer holds ``w``. Dynamo
        runs a graph for every model of one class."""
        last = next(reversed(self._trainings.values()), None)
        if last is not None:
            # More come where parameters are made anew in each call.
            many = len(self._callers) >= _MOST_SEARCHED + 2 * self._capacity
            more_layers = last.layers < self._capacity and not last.trained.clock.seen
            if w is None or many or more_layers:
                return last
        own = clock.of_parameter(w) if last is not None else clock.of_model(self._root(), w)
        if own not in self._trainings:
            if last is not None:
                last.folder.flush()
                self.forget_marks()
            folder = Folder.get(self.options, own)
            folder.join(self)
            self._trainings[own] = _Training(clock.Trained(own, w), folder)
        return self._trainings[own]

    def _point(self, step: int, number: int) -> None:
        """Say on the device where marks go."""
        row = step % STEPS * self._capacity + min(number, self._capacity - 1)
        if row != self._row:
            self._row = row
            self._index.fill_(row)

    def _allocate(self) -> None:
        operands = _OPERANDS * len(self.sites)
        with torch.inference_mode(False), torch.no_grad():
            constants.make(self.device)
            for kind in KINDS:
                shape = (STEPS * self._capacity, operands)
                self._memory[kind] = _Memory(
                    torch.zeros(shape, dtype=torch.float32, device=self.device),
                    torch.full(
                        (operands, len(SUMS)), math.nan, dtype=torch.float64, device=self.device
                    ),
                )
            self._index = torch.zeros(1, dtype=torch.int64, device=self.device)
            size = sum(
                site.codes for seed_index, site in self.sites.items() if seed_index in self._wanted
            )
            self._codes = torch.zeros(size, dtype=torch.uint8, device=self.device)
        self._code_sizes: list[int] = []

    def noted(self, kind: str, tensors: Sequence[Tensor], text: str) -> None:
        """Called by the graph when it runs, or while it is captured."""
        if kind not in self._memory:
            return
        memory, layout = self._memory[kind], NoteLayout.parse(text)
        rest = list(tensors)
        if layout.marks:
            marks = rest.pop(0)
            own = memory.marks[:, : marks.shape[0]]
            own.index_add_(0, self._index, marks[None], alpha=0)  # 0 * NaN is NaN, and stays
        statistics, codes = rest[: layout.statistics], rest[layout.statistics :]
        if statistics:
            torch.stack(statistics, out=memory.statistics[: len(statistics)])
        if codes:
            self._code_sizes = [c.numel() for c in codes]
            own = self._codes[: sum(self._code_sizes)]
            torch.cat([c.flatten() for c in codes], out=own)
        if memory.layout is None or layout.rows or not memory.layout.rows:
            memory.layout = layout

    def _follow_backward(self, outputs: Any, own: _Call, records: bool) -> None:
        """Have autograd tell when the backward of this call begins, and when it has run."""
        node = None if compiles_autograd() else backward_node(outputs)
        if node is None:
            return
        if self._capacity > 1:
            node.register_prehook(lambda *_: self._point(own.step, own.number))
        if records:
            node.register_hook(lambda *_: self._fetch("backward", own))

    def _fetch(self, kind: str, own: _Call) -> None:
        """Start the copy of what a recorded call noted."""
        memory = self._memory[kind]
        if memory.layout is None or not memory.layout.rows:
            return
        layout = memory.layout
        found = [memory.statistics[: layout.statistics].flatten()]
        if kind == "forward" and layout.weights:
            found.append(self._changed(own, layout.weights))
        names = [self._named(place, own.number) for place, _ in layout.rows]
        record = Record(
            own.step,
            [(*name, index) for name, (_, index) in zip(names, layout.rows, strict=True)],
            layout.statistics,
            [self._named((w, "fprop", "w"), own.number)[0] for w in layout.weights],
            HostCopy.of(torch.cat(found) if len(found) > 1 else found[0]),
        )
        own.training.folder.add(record)

    def _changed(self, own: _Call, weights: Sequence[int]) -> Tensor:
        """The share of each weight's codes that are others than at this layer's last record."""
        sizes = self._code_sizes
        codes = self._codes[: sum(sizes)].clone()
        before = own.training.codes.get(own.number)
        own.training.codes[own.number] = codes
        if before is None:
            return torch.full((len(sizes),), math.nan, device=codes.device)
        differ = codes ^ before
        halves = (((differ & 15) != 0).float() + ((differ >> 4) != 0)) / 2  # of two 4-bit codes
        parts = zip(halves.split(sizes), weights, strict=True)
        return torch.stack([(h if self._packed(w) == 2 else h.ceil()).mean() for h, w in parts])

    def _packed(self, seed_index: int) -> int:
        """Codes in a byte of a weight's codes."""
        fprop = self.sites[seed_index].recipe.fprop
        return 2 if fprop is None else SCHEMES[fprop.b.scheme].packed

    def _named(self, place: Place, number: int) -> tuple[str, str, str, str]:
        """(module, gemm, operand, how it is quantized) of an operand in a call."""
        seed_index, gemm, role = place
        site = self.sites[seed_index]
        known = number < len(site.modules)
        module = site.modules[number] if known else f"{site.modules[0]} (call {number})"
        quantized: Any = getattr(site.recipe, gemm)
        operand = (quantized.a, quantized.b)[GEMMS[gemm].index(role)]
        return module, gemm, role, str(operand)

    def marks(self) -> dict[str, HostCopy]:
        """A copy of the marks of each kind, begun now."""
        noted = {k: m for k, m in self._memory.items() if m.layout and m.layout.marks}
        return {
            kind: HostCopy.of(memory.marks[:, : len(memory.layout.marks)])  # type: ignore[union-attr]
            for kind, memory in noted.items()
        }

    def findings(self, kind: str, marks: Tensor, before: int) -> list[Finding]:
        """The operands that were not finite in the steps up to ``before``, as `marks` gave them."""
        layout = self._memory[kind].layout
        assert layout is not None
        found = []
        for row, column in (~marks.isfinite()).nonzero().tolist():
            place, number = divmod(row, self._capacity)
            step = before - 1 - (before - 1 - place) % STEPS
            module, gemm, role, _ = self._named(layout.marks[column], number)
            turn = 1 if kind == "forward" else -1  # backward runs the last graph first
            order = (step, kind == "backward", turn * self.number, turn * number, column)
            found.append(Finding(order, step, module, gemm, role))
        return found

    def forget_marks(self) -> None:
        for memory in self._memory.values():
            memory.marks.zero_()


def _noted(
    recorder: weakref.ref[Recorder], kind: str, tensors: Sequence[Tensor], layout: str
) -> None:
    own = recorder()
    if own is not None:
        own.noted(kind, tensors, layout)
