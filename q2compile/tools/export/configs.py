# SPDX-License-Identifier: Apache-2.0
"""The JSON files beside the tensors: what loaders read of a folder, and a record of the export."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from q2compile import __version__
from q2compile.capture.module_names import plain_name, site_name
from q2compile.report.announce import LOG
from q2compile.tools.export.formats import (
    FLOAT_QUANTIZED,
    NVFP4_PACKED,
    Format,
    compressed_tensors_config,
    modelopt_configs,
)
from q2compile.tools.export.job import Job
from q2compile.tools.export.names import module_name, siblings, untied
from q2compile.tools.export.shards import write_json

RECORD = "q2compile_export.json"
_NO_MATMUL = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, nn.modules.conv._ConvNd)


def write_configs(job: Job, folder: Path) -> None:
    """The record of the export, and the configurations that loaders read."""
    done = job.done
    ignore = _ignored(job)
    done.notes += _notes(job)
    for note in done.notes:
        LOG.warning("q2compile: export: %s", note)
    write_json(folder / RECORD, {"q2compile": __version__, **asdict(done), "folder": ""})
    quantization, own = None, None
    if done.format == "compressed-tensors":
        groups = _groups(job)
        quantization = compressed_tensors_config(done.variant, groups, done.activations, ignore)
    elif done.format == "modelopt":
        quantization, own = modelopt_configs(done.activations, ignore, __version__)
    if own is not None:
        write_json(folder / "hf_quant_config.json", own)
    if job.is_hugging_face:
        _write_hugging_face(job, folder, quantization)
    elif quantization is not None:
        write_json(folder / "config.json", {"quantization_config": quantization})
    if job.tokenizer is not None:
        job.tokenizer.save_pretrained(folder)


def _groups(job: Job) -> list[tuple[Format, Sequence[str]]]:
    """Each format that is used, with the modules in it by their names in the file. The first is
    that of the experts, which transformers 5.23 takes for all of them."""
    done = job.done
    found: dict[str, list[str]] = {}
    for name, layer in done.layers.items():
        keys = job.named(name, torch.empty(layer["shape"], device="meta"))
        found.setdefault(layer["format"], []).extend(module_name(key) for key in keys)
    formats = {fmt.variant: fmt for fmt in job.formats.values()}
    if len(found) == 1:
        return [(formats[variant], ["Linear"]) for variant in found]
    experts_first = sorted(found, key=lambda v: not any("experts" in name for name in found[v]))
    return [(formats[variant], found[variant]) for variant in experts_first]


def _notes(job: Job) -> list[str]:
    """Notes on layers that known loaders can't read."""
    done = job.done
    notes = list(job.found.unmatched)
    taken = [name for name in job.state if name in done.layers]
    stacks = [name for name in taken if len(done.layers[name]["shape"]) > 2]
    transposed = [name for name in taken if done.layers[name]["transposed"] and name not in stacks]
    if job.is_hugging_face and done.format == "compressed-tensors":
        in_nvfp4 = [n for n in stacks if done.layers[n]["format"] == NVFP4_PACKED.variant]
        if in_nvfp4:
            notes.append(
                f"transformers (seen in 5.23) ignores the global scale of experts, so their values "
                f"are wrong, without an error: {in_nvfp4[0]} and {len(in_nvfp4) - 1} more"
            )
        if transposed:
            notes.append(
                "transformers (seen in 5.23) does not load codes into Conv1D, whose weight stays "
                f"random: {transposed[0]} and {len(transposed) - 1} more"
            )
    rounded = []
    for group in siblings(list(job.state)) if job.fmt.of_modules else ():
        layers = [done.layers.get(name) for name in group]
        formats = {layer["format"] if layer else "high precision" for layer in layers}
        scales = {layer["global_scale"] for layer in layers if layer}
        if len(formats) > 1:
            notes.append(
                f"{', '.join(group)} are in {' and '.join(sorted(formats))}: vLLM fuses them and "
                "rejects that. Give them one policy"
            )
        elif formats == {FLOAT_QUANTIZED.variant} and len(scales) > 1:
            rounded.append(", ".join(group))
    if rounded:
        notes.append(
            f"vLLM fuses layers to the largest of their FP8 scales, which rounds small values: "
            f"{rounded[0]} and {len(rounded) - 1} more groups"
        )
    return notes


def _ignored(job: Job) -> Sequence[str]:
    """The modules that hold a matrix that is not quantized, by their names in the file: heads and
    routers among them. Embeddings, norms and convolutions are no matmuls of a loader."""
    done = job.done
    modules = {plain_name(name): module for name, module in job.model.named_modules()}
    found: dict[str, None] = {}
    for name, tensor in job.state.items():
        owner = modules.get(name.rpartition(".")[0])
        if name in done.layers or tensor.ndim < 2 or isinstance(owner, _NO_MATMUL):
            continue
        if 1 in tensor.shape[-2:] and not isinstance(owner, nn.Linear):  # a token, a bias
            continue
        if name.removesuffix("_bias") in done.layers:  # of experts, one row each
            continue
        shape = torch.empty(tensor.shape, device="meta")
        site = site_name(name)
        if not {name, site} & done.left.keys():
            row = job.found.not_seen.get(site)
            why = "not seen: no matmul of it came to the backend in this forward"
            done.left[site] = row.why if row else why
        for key in job.left_tensors(name, shape):
            found[module_name(key)] = None
    return list(found)


def _write_hugging_face(job: Job, folder: Path, quantization: dict[str, Any] | None) -> None:
    """config.json and generation_config.json, as save_pretrained writes them."""
    done = job.done
    model: Any = job.model
    in_codes = {id(job.state[name]) for name in done.layers}
    tied = any(id(t) in in_codes and n not in done.layers for n, t in job.state.items())
    # A tied head may be quantized, and its embedding not.
    config = untied(model.config) if tied else copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.dtype = next(iter(job.found.uses.values()))[0].dtype
    if quantization is not None:
        config.quantization_config = quantization
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
