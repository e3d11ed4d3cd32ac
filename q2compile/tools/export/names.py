# SPDX-License-Identifier: Apache-2.0
"""The names and forms that loaders of Hugging Face models expect.

transformers 5 keeps the experts of a layer in one parameter; checkpoints, and the loaders that read
them, have a module for each expert and projection. Which becomes which is transformers' own table,
and its code splits codes and scales as it splits weights: along the experts and the rows. gpt-oss
has no entry there; its own is `_STACKS`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

# Layers that a loader fuses to one, and keeps one global scale for: the last part of their names.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)

_WHOLE, _EVEN, _ODD = slice(None), slice(0, None, 2), slice(1, None, 2)
# model_type -> end of a stacked parameter's name -> the modules in it and the rows of each. Rows of
# gate and up take turns in gpt-oss.
_STACKS = {
    "gpt_oss": {
        ".experts.gate_up_proj": (("gate_proj", _EVEN), ("up_proj", _ODD)),
        ".experts.down_proj": (("down_proj", _WHOLE),),
    }
}


def is_hugging_face(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def untied(config: Any) -> Any:
    """A copy of a model's config that says that no head is tied to an embedding."""
    config = copy.deepcopy(config)
    config.tie_word_embeddings = False
    config.get_text_config().tie_word_embeddings = False
    return config


def always_tied(model: Any) -> bool:
    """Whether transformers ties the heads of such a model to embeddings whatever its config says,
    as it does for T5."""
    return bool(type(model.config).from_dict(untied(model.config).to_dict()).tie_word_embeddings)


def siblings(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The names in groups that loaders fuse, in order; of one name where they don't. Names end in
    the parameter's, "mlp.up_proj.weight"."""
    done: set[str] = set()
    for name in names:
        if name in done:
            continue
        parts = name.split(".")
        at = len(parts) - (2 if parts[-1] == "weight" and len(parts) > 1 else 1)
        group = next((g for g in FUSED if parts[at] in g), (parts[at],))
        every = (".".join([*parts[:at], part, *parts[at + 1 :]]) for part in group)
        found = tuple(n for n in every if n in names and n not in done)
        done.update(found)
        yield found


def checkpoint_tensors(
    model: nn.Module, name: str, tensor: Tensor, *, stacks: bool = True
) -> dict[str, Tensor]:
    """A tensor of a Hugging Face model's state dict under the names of its checkpoints, split as
    they split it; ``stacks``: also by `_STACKS`. Codes and scales are split by rows, not by
    columns."""
    from transformers.core_model_loading import revert_weight_conversion

    plain = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    found = revert_weight_conversion(cast(Any, model), {name: plain})
    if stacks and len(found) == 1 and tensor.ndim >= 2:
        found = _split(model, *next(iter(found.items()))) or found
    return {key: value.view(tensor.dtype) for key, value in found.items()}


def _split(model: nn.Module, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A stack [E, N, ...] by `_STACKS`, or the biases [E, N] beside it; {} if it has none."""
    table = _STACKS.get(cast(Any, model).config.model_type, {})
    stem, leaf = (name[: -len("_bias")], "bias") if name.endswith("_bias") else (name, "weight")
    for end, modules in table.items():
        if stem.endswith(end):
            prefix = stem[: -len(end)] + ".experts"
            return {
                f"{prefix}.{expert}.{module}.{leaf}": tensor[expert, rows]
                for expert in range(tensor.shape[0])
                for module, rows in modules
            }
    return {}


def module_name(checkpoint_name: str) -> str:
    """The module of a weight in a checkpoint: "a.b" of "a.b.weight"."""
    return checkpoint_name.removesuffix(".weight")
