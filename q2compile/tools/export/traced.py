# SPDX-License-Identifier: Apache-2.0
"""Which weights the backend takes, and how its forward quantizes each: asked of the code that
compiles (`rewrite.planned`), in a forward of the model that quantizes nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from q2compile.capture.inline_attention import inline_attention
from q2compile.capture.matmul import Matmul, NotTaken
from q2compile.capture.module_names import Names, plain_name, site_name
from q2compile.config import Config, resolved_policy
from q2compile.errors import BackendError, ConfigError
from q2compile.graph.views import example
from q2compile.recipes.recipe import Gemm
from q2compile.report.graph_log import raise_on_missed
from q2compile.report.model_coverage import Coverage
from q2compile.report.row import Row
from q2compile.rewrite.rewrite_graph import planned
from q2compile.rewrite.shared_bodies import own_bodies
from q2compile.tools.as_it_was import as_it_was
from q2compile.tools.export.names import is_hugging_face
from q2compile.tools.export.places import Place, place_of
from q2compile.tools.given import all_batches, arguments_of
from q2compile.torch_internals.dynamo import (
    called_graphs,
    compiled_apart,
    not_compiled,
    restore_arguments,
)


@dataclass(frozen=True)
class WeightUse:
    """A matmul of a taken weight: what its forward does.

    site    the name that the policy sees
    fprop   the recipe's forward; its second operand is w
    dtype   that the forward quantizes w in: the parameter's, or autocast's
    place   the rows of the parameter that it multiplies
    """

    site: str
    fprop: Gemm
    dtype: torch.dtype
    place: Place


@dataclass
class Trace:
    """Matmuls found in one or more forwards.

    uses    name of a parameter -> its matmuls
    left    site -> why a matmul of it is not taken
    amax    site -> largest |x| of its activations, 0-dim, in the batches that ran
    unmatched  a sentence for each pattern of the policy that matches nothing
    not_seen   site -> its row, if the policy wants it and no forward has reached it
    """

    uses: dict[str, list[WeightUse]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    amax: dict[str, Tensor] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)
    not_seen: dict[str, Row] = field(default_factory=dict)

    def add(self, found: Matmul | NotTaken, names: Names, gemm: str, why: str, site: str) -> None:
        """Note one matmul with a parameter. gemm: the text of its forward; "" if not taken."""
        fprop = Gemm.parse(gemm) if gemm else None
        if not isinstance(found, Matmul) or fprop is None:
            self.left.setdefault(site, why or "the recipe's forward is bf16: there are no codes")
            return
        place = place_of(found)
        if isinstance(place, str):
            self.left.setdefault(site, place)
            return
        use = WeightUse(site, fprop, example(found.node).dtype, place)
        own = [plain_name(name) for name in names.by_id.get(id(found.parameter), [])]
        served = names.served_too(found.parameter)
        named = [name for name in own if site_name(name) == site] or own[:1]
        for name in named:
            self._note(name, use)
        for name, _ in names.root.named_parameters() if served and names.root else ():
            if site_name(name) in served:  # an equal layer, which the same graph computes
                self._note(plain_name(name), WeightUse(site_name(name), fprop, use.dtype, place))

    def _note(self, name: str, use: WeightUse) -> None:
        uses = self.uses.setdefault(name, [])
        if use not in uses:
            uses.append(use)

    def leave_outside_of(self, parts: Sequence[str]) -> None:
        """Leave the weights that none of these modules holds."""
        for name in [n for n in self.uses if not any(n.startswith(f"{p}.") for p in parts)]:
            for use in self.uses.pop(name):
                self.left[use.site] = "it is in no module that was compiled"

    def see(self, x: Tensor, sites: Sequence[str], dtype: torch.dtype) -> None:
        """Note the activations of a matmul."""
        with torch.no_grad():
            x = x.values() if x.is_nested else x
            x = x.full_tensor() if isinstance(x, DTensor) else x
            if not x.numel():  # an expert without tokens
                return
            amax = x.detach().to(dtype).abs().amax().float()
            for site in sites:
                self.amax[site] = torch.maximum(self.amax.get(site, amax), amax)


def trace(
    model: nn.Module,
    config: Config,
    batches: Iterable[Any],
    autocast: torch.dtype | None,
    *,
    activations: bool,
) -> Trace:
    """Run ``model`` forward on each of ``batches``, in the precision of its tensors, and note what
    the backend would take of it under ``config``.

    The model is in eval mode meanwhile, so without dropout. Afterwards it is what it was (see
    `as_it_was`): buffers that its forward updates have their values of before, and a training that
    goes on draws what it would have drawn. Under ``strict`` raises what the backend raises.

    batches: of keyword arguments (mappings), positional arguments (tuples), or one argument each.
    autocast: the dtype to run under; None leaves autocast as it is. activations: note their amax.
    """
    found, coverage, rows = Trace(), Coverage(model, config), list[Row]()

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        restore_arguments(gm, example_inputs)
        names = Names.of_graph(gm)
        inline_attention(gm)
        own_bodies(gm)
        of_graph = []
        for matmul, row, recipe in planned(gm, config, names):
            row.taken = recipe.quantizes
            of_graph.append(row)
            if matmul.parameter is None:
                continue
            gemm = str(recipe.fprop) if recipe.fprop else ""
            found.add(matmul, names, gemm, row.why, row.module)
            if activations and gemm and isinstance(matmul, Matmul):
                sites = (row.module, *names.served_too(matmul.parameter))
                with matmul.gm.graph.inserting_before(matmul.node):
                    noted = (matmul.x, sites, example(matmul.node).dtype)
                    matmul.gm.graph.call_function(found.see, noted)
        for graph in called_graphs(gm):
            graph.recompile()
        coverage.add(of_graph, names)
        rows.extend(of_graph)
        return gm

    device = next(model.parameters()).device
    with ExitStack() as stack:
        stack.enter_context(as_it_was(model))
        model.eval()
        stack.enter_context(torch.enable_grad())  # "auto" predicts all GEMMs of a training step
        for module in model.modules():
            stack.enter_context(not_compiled(module))
        if autocast is not None:
            on = autocast != torch.float32
            stack.enter_context(torch.autocast(device.type, autocast if on else None, enabled=on))
        compiled = stack.enter_context(compiled_apart(model, backend))
        for batch in batches:
            args, kwargs = arguments_of(batch)
            compiled(*args, **kwargs)
    if config.strict:
        coverage.raise_on_unmatched_patterns()
        raise_on_missed(rows)
        coverage.raise_on_unseen()
    found.unmatched = coverage.unmatched()
    found.not_seen = {row.module: row for row in coverage.not_seen() if row.wanted}
    return found


_ADVICE = (
    "pass example_inputs=, the inputs of the model: a mapping of keyword arguments or a tuple (the "
    "command takes them from FILE.py:FUNCTION)"
)


def traced(
    model: nn.Module,
    config: Config,
    example_inputs: Any,
    calibration: Iterable[Any] | None,
    autocast: torch.dtype | None,
) -> Trace:
    """`trace` with the inputs of the user, or with made-up ones, which have to reach every layer
    that the policy wants."""
    batches = () if calibration is None else all_batches(calibration, "export: calibration")
    calibrates = calibration is not None
    if isinstance(example_inputs, Iterator | DataLoader):
        raise ConfigError(
            f"export: example_inputs: got a {type(example_inputs).__name__}; allowed: one batch, "
            "such as next(iter(...)) of it"
        )
    if example_inputs is not None:
        batches = chain([example_inputs], batches)
    if calibrates or example_inputs is not None:
        return trace(model, config, batches, autocast, activations=calibrates)
    made_up = _made_up(model)
    policy = resolved_policy(config)
    if any(rule.recipe.auto for rule in policy.rules):
        raise ConfigError(
            "export: 'auto' in the policy decides by the sizes of a training batch, which are not "
            f"known; {_ADVICE}"
        )
    try:
        found = trace(model, config, [made_up], autocast, activations=False)
    except BackendError:
        raise
    except Exception as error:  # of the model's code
        text = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"export: {type(model).__name__} can't be called with made-up {', '.join(made_up)} "
            f"({type(error).__name__}: {text}); {_ADVICE}"
        ) from error
    # Weights smaller than a block would have no codes.
    missed = [site for site, row in found.not_seen.items() if min(row.shape[-2:]) >= 16]
    if missed:
        raise ConfigError(
            f"export: made-up inputs ({', '.join(made_up)}) do not reach {len(missed)} "
            f"layer(s) that the policy quantizes, {missed[0]!r} first; {_ADVICE}"
        )
    return found


def _made_up(model: Any) -> dict[str, Tensor]:
    """Tokens and pictures for the forward of a Hugging Face model: one of each, since a classifier
    of sequences may have no padding token. Raises ConfigError for models that take others."""
    found: dict[str, Tensor] = {}
    if is_hugging_face(model):
        takes = inspect.signature(model.forward).parameters
        tokens = {name: t[:1] for name, t in model.dummy_inputs.items() if name in takes}
        if "decoder_input_ids" in takes:
            tokens.setdefault("decoder_input_ids", cast(Tensor, tokens.get("input_ids")))
        found = {name: t for name, t in tokens.items() if t is not None}
        picture = getattr(model.config, "vision_config", model.config)
        size = getattr(picture, "image_size", None)
        if "pixel_values" in takes and isinstance(size, int):
            shape = (1, getattr(picture, "num_channels", 3), size, size)
            found["pixel_values"] = torch.zeros(shape, dtype=model.dtype)
    if not found or model.main_input_name not in found:
        raise ConfigError(
            f"export: a forward must show which layers the backend takes, and what "
            f"{type(model).__name__} is called with is not known; {_ADVICE}"
        )
    device = next(model.parameters()).device
    return {name: t.to(device) for name, t in found.items()}
