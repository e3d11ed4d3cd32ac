# SPDX-License-Identifier: Apache-2.0
"""The settings and the result of an export."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from q2compile.capture.module_names import plain_name
from q2compile.runtime_kernels.numerics.schemes import SCHEMES
from q2compile.tools.export.codes import Codes
from q2compile.tools.export.formats import Format
from q2compile.tools.export.names import checkpoint_tensors, is_hugging_face
from q2compile.tools.export.ranks import Ranks
from q2compile.tools.export.traced import Trace


@dataclass
class Job:
    """An export's settings; see `export.export`.

    done     what is written so far
    formats  by the format of a scheme
    amax     call site -> the largest of its activations
    """

    model: nn.Module
    done: Exported
    ranks: Ranks
    formats: dict[str, Format]
    found: Trace
    amax: dict[str, float]
    leaves: bool
    tokenizer: Any
    limit: int

    @cached_property
    def state(self) -> dict[str, Tensor]:
        """The model's state by plain names; parameters are themselves, so tied ones are known."""
        state = self.model.state_dict(keep_vars=True)
        return {plain_name(n): t for n, t in state.items() if isinstance(t, Tensor)}

    @property
    def fmt(self) -> Format:
        """One of the formats, for what all variants share: names and what loaders look for."""
        return next(iter(self.formats.values()))

    def format_of(self, codes: Codes) -> Format:
        return self.formats[SCHEMES[codes.operand.scheme].format]

    @cached_property
    def tied_heads(self) -> set[str]:
        """Parameters of a Hugging Face model that are to be quantized, but not under all of their
        names: heads that are tied to an embedding."""
        if not self.is_hugging_face:
            return set()
        others = {id(t) for name, t in self.state.items() if name not in self.found.uses}
        return {n for n, t in self.state.items() if n in self.found.uses and id(t) in others}

    @cached_property
    def is_hugging_face(self) -> bool:
        return is_hugging_face(self.model)

    def left_tensors(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """A tensor that is written as it is, under its names in the file."""
        return self.named(name, tensor, stacks=name.removesuffix("_bias") in self.done.layers)

    def named(self, name: str, tensor: Tensor, *, stacks: bool = True) -> dict[str, Tensor]:
        """A tensor of the model's state under its names in the file; see `checkpoint_tensors`."""
        if not self.fmt.of_modules or not self.is_hugging_face:
            return {name: tensor}
        return checkpoint_tensors(self.model, name, tensor, stacks=stacks)


@dataclass
class Exported:
    """The result of an export.

    variant what the format calls itself, "mixed-precision" for FP8 beside 4 bits
    layers  name of a parameter -> {"site", "scheme", "transform", "format", "dtype", "shape",
            "transposed", "global_scale", and "input_scale" with static activations}
    left    name of a parameter, or a site -> why it keeps its precision
    tied    name of a parameter -> the name that the same tensor is written under
    notes   what to know before one of the loaders that they name loads the folder
    """

    folder: str
    format: str
    variant: str
    activations: str
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"{len(self.layers)} quantized weights ({self.variant}, {self.activations}) in "
            f"{self.folder}"
        ]
        lines += [f"left: {name}: {why}" for name, why in self.left.items()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])
