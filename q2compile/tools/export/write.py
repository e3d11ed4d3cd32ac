# SPDX-License-Identifier: Apache-2.0
"""Write what a trace found, layer by layer: no rank holds more than the layers that a loader fuses,
and a file's tensors on the rank that writes. Beside them are the JSON files that loaders read of a
folder, and a record of the export.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from q2compile import __version__
from q2compile.capture.module_names import plain_name, site_name
from q2compile.errors import ConfigError
from q2compile.report.announce import LOG
from q2compile.runtime_kernels.numerics.schemes import SCHEMES
from q2compile.tools.export.codes import (
    Codes,
    InexactError,
    as_nvfp4,
    codes_of,
    with_common_scale,
)
from q2compile.tools.export.formats import (
    FLOAT_QUANTIZED,
    NVFP4_PACKED,
    STATIC,
    Format,
    compressed_tensors_config,
    input_scale,
    modelopt_configs,
)
from q2compile.tools.export.names import (
    always_tied,
    checkpoint_tensors,
    is_hugging_face,
    module_name,
    siblings,
    untied,
)
from q2compile.tools.export.places import stacked
from q2compile.tools.export.ranks import Ranks
from q2compile.tools.export.shards import Shards, new_folder, write_json
from q2compile.tools.export.traced import Trace, WeightUse

RECORD = "q2compile_export.json"
_NO_MATMUL = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, nn.modules.conv._ConvNd)
_ADAPTERS = ("lora_A", "lora_B", "lora_a", "lora_b")


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


@dataclass
class Writer:
    """An export's settings, see `export.export`, and what writes its files.

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

    def write(self) -> Exported:
        """Every rank gets the result, or the error of the rank that writes."""
        groups = siblings(list(self.state))
        gathered = ((group, [_whole(self.state[name]) for name in group]) for group in groups)

        def gather_the_rest() -> None:
            for _ in gathered:
                pass

        return self.ranks.on_first(lambda: self._write(gathered), gather_the_rest)

    @torch.no_grad()
    def _write(self, gathered: Iterator[tuple[tuple[str, ...], list[Tensor]]]) -> Exported:
        done = self.done
        with new_folder(Path(done.folder)) as folder:
            shards = Shards(folder, self.limit)
            written: dict[int, str] = {}  # of tensors that are written as they are
            for names, tensors in gathered:
                whole = dict(zip(names, tensors, strict=True))
                for name, codes in self._codes(whole).items():
                    self._add_codes(shards, name, codes, whole[name].shape)
                for name in names:
                    key = id(self.state[name])
                    if name in done.layers:
                        continue
                    if key in written and not self.tied_heads:  # loaders tie all or nothing
                        done.tied[name] = written[key]
                        continue
                    written[key] = name
                    for key_name, tensor in self.left_tensors(name, whole[name]).items():
                        shards.add(key_name, tensor)
            if not done.layers:
                first = "; ".join(f"{n}: {why}" for n, why in list(done.left.items())[:3])
                raise ConfigError(f"export: no layer can be written: {first}")
            shards.close()
            variants = {layer["format"] for layer in done.layers.values()}
            done.variant = variants.pop() if len(variants) == 1 else "mixed-precision"
            write_configs(self, folder)
        return done

    def _codes(self, whole: dict[str, Tensor]) -> dict[str, Codes]:
        """The codes of the tensors of one group. If the format can't hold one of them, the whole
        group is left with the reason, or the error is raised."""
        found, at = {}, ""
        taken = {name: self.found.uses[name] for name in whole if name in self.found.uses}
        for name in [name for name in taken if _is_adapter(name)]:
            self.done.left[name] = "a LoRA adapter, which loaders take in high precision"
            del taken[name]
        try:
            for at, uses in taken.items():
                found[at] = self._codes_of(at, whole[at], uses)
            at = ""
            fused = {n: codes for n, codes in found.items() if self.format_of(codes).fuses}
            return found | with_common_scale(fused)
        except InexactError as error:
            if not self.leaves:
                where = f"export: {at}" if at else "export"
                raise ConfigError(
                    f"{where}: {error}. Or give inexact='leave', which leaves this layer and those "
                    f"that loaders fuse with it ({', '.join(taken)}) in the precision of their "
                    "parameters"
                ) from None
            self.done.left |= dict.fromkeys(taken, str(error))
            return {}

    def _codes_of(self, name: str, tensor: Tensor, uses: Sequence[WeightUse]) -> Codes:
        """The codes of a parameter, as its format holds them. Raises InexactError if it can't."""
        codes, transposed = codes_of(tensor, uses), uses[0].place.transposed
        fmt = self.format_of(codes)
        fmt.check(codes)
        if name in self.tied_heads and fmt.of_modules and always_tied(self.model):
            raise InexactError(
                "it is tied to an embedding, and transformers ties the two again when it loads a "
                f"{type(self.model).__name__}, whatever is in the files; give it 'bf16' in the "
                "policy"
            )
        codes = as_nvfp4(codes) if fmt.block_format == "nvfp4" else codes
        if fmt.codes == "weight" and transposed and tensor.ndim == 2:
            raise InexactError(
                f"it is stored transposed, and loaders transpose every 'weight', which "
                f"{fmt.variant} calls its codes; use format='safetensors'"
            )
        self._module_tensors(name, codes.scales, tensor.shape, transposed)
        return codes

    def _add_codes(self, shards: Shards, name: str, codes: Codes, shape: torch.Size) -> None:
        """Write one parameter's codes, and note it."""
        use, fmt = self.found.uses[name][0], self.format_of(codes)
        scale = self._input_scale(name, codes.block_format)
        layer = self.done.layers[name] = {
            "site": use.site,
            "scheme": codes.operand.scheme,
            "transform": codes.operand.transform,
            "format": fmt.variant,
            "activations": str(use.fprop.a),
            "dtype": str(use.dtype).removeprefix("torch."),
            "shape": list(shape),
            "transposed": use.place.transposed,
            "global_scale": float(codes.global_scale),
        }
        if scale is not None:
            layer["input_scale"] = float(scale)
        for tensor_name, tensor in fmt.tensors(codes, scale).items():
            is_scalar = tensor.ndim < 2  # of all modules in the parameter
            rows = codes.scales if is_scalar else tensor
            split = self._module_tensors(name, rows, shape, use.place.transposed)
            for prefix, part in split.items():
                shards.add(f"{prefix}.{tensor_name}", tensor if is_scalar else part)

    def _input_scale(self, name: str, block_format: str) -> Tensor | None:
        """The static scale of a layer's activations, the largest of the layers fused with it."""
        if self.done.activations != STATIC:
            return None
        group = next(g for g in siblings(list(self.found.uses)) if name in g)
        sites = [use.site for member in group for use in self.found.uses[member]]
        if missing := [site for site in sites if site not in self.amax]:
            raise ConfigError(
                f"export: no activations of {missing[0]!r} were recorded; give more calibration "
                "batches, or record all modules (telemetry's key modules)"
            )
        return input_scale(torch.tensor(max(self.amax[site] for site in sites)), block_format)

    def _module_tensors(
        self, name: str, rows: Tensor, shape: torch.Size, transposed: bool
    ) -> dict[str, Tensor]:
        """Per-row values of a parameter, [R, ...], by the prefix of its name in the file: one
        module's, or one per expert. Raises InexactError where there is no such name."""
        whole = stacked(rows, shape, transposed)
        if not self.fmt.of_modules:
            return {name: whole}
        parts = self.named(name, whole)
        if self.is_hugging_face and not transposed:
            expected = self.named(name, torch.empty(shape, device="meta"))
            for key, part in parts.items():
                if expected[key].shape != (*part.shape[:-1], shape[-1]):
                    raise InexactError("its checkpoint has it in another order than its rows")
        if any(part.ndim != rows.ndim for part in parts.values()):
            raise InexactError(
                "it is a stack of matrices, and no loader's names for its parts are known; "
                "format='safetensors' writes the stack"
            )
        if other := [key for key in parts if key.rpartition(".")[2] != "weight"]:
            raise InexactError(
                f"loaders look for the codes of modules, and {other[0]!r} is not the 'weight' of "
                "one; format='safetensors' writes the codes of parameters"
            )
        return {module_name(key): part for key, part in parts.items()}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _is_adapter(name: str) -> bool:
    return any(part in _ADAPTERS for part in name.split("."))


def write_configs(job: Writer, folder: Path) -> None:
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


def _groups(job: Writer) -> list[tuple[Format, Sequence[str]]]:
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


def _notes(job: Writer) -> list[str]:
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


def _ignored(job: Writer) -> Sequence[str]:
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


def _write_hugging_face(job: Writer, folder: Path, quantization: dict[str, Any] | None) -> None:
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
