"""Write what a trace found, layer by layer: no rank holds more than the layers that a loader fuses,
and a file's tensors on rank 0.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from q2compile.capture.module_names import plain_name, site_name
from q2compile.errors import ConfigError
from q2compile.report.announce import LOG
from q2compile.tools.export.codes import (
    Codes,
    InexactError,
    as_nvfp4,
    codes_of,
    with_common_scale,
)
from q2compile.tools.export.formats import (
    STATIC,
    Format,
    compressed_tensors_config,
    input_scale,
    modelopt_configs,
)
from q2compile.tools.export.names import (
    checkpoint_tensors,
    is_hugging_face,
    module_name,
    siblings,
)
from q2compile.tools.export.places import stacked
from q2compile.tools.export.shards import Shards, new_folder, write_json
from q2compile.tools.export.traced import Trace
from q2compile.version import __version__

RECORD = "q2compile_export.json"
_ADAPTERS = ("lora_A", "lora_B", "lora_a", "lora_b")
_NO_MATMUL = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, nn.modules.conv._ConvNd)


@dataclass(frozen=True)
class Job:
    """What to write; see `export.export`. amax: site -> of its activations."""

    model: nn.Module
    path: Path
    fmt: Format
    activations: str
    found: Trace
    amax: dict[str, Tensor]
    leaves: bool
    tokenizer: Any
    limit: int

    @cached_property
    def state(self) -> dict[str, Tensor]:
        """The model's state by plain names; parameters are themselves, so tied ones are known."""
        state = self.model.state_dict(keep_vars=True)
        return {plain_name(n): t for n, t in state.items() if isinstance(t, Tensor)}


@dataclass
class Exported:
    """What was written.

    layers  name of a parameter -> {"site", "scheme", "transform", "dtype", "shape", "transposed",
            "global_scale", and "input_scale" with static activations}
    left    name of a parameter, or a site -> why it keeps its precision
    tied    name of a parameter -> the name that the same tensor is written under
    notes   what a reader should know before loading the folder with a loader named in them
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
            f"{len(self.layers)} weights in 4 bits ({self.variant}, {self.activations}) in "
            f"{self.folder}"
        ]
        lines += [f"left: {name}: {why}" for name, why in self.left.items()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def write(job: Job) -> Exported:
    """Carry out a job; every rank gets the result, or the error of rank 0."""
    groups = siblings(list(job.state))
    gathered = ((group, [_whole(job.state[name]) for name in group]) for group in groups)
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks == 1:
        return _write(job, gathered)
    outcome: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = _write(job, gathered)
        except Exception as error:
            outcome[0] = error
    for _ in gathered:  # what rank 0 reads, and what it leaves unread after an error
        pass
    own = outcome[0]
    if isinstance(own, Exception):
        outcome[0] = str(own)
    dist.broadcast_object_list(outcome)
    if isinstance(own, Exception):
        raise own
    if isinstance(outcome[0], str):
        raise ConfigError(f"on rank 0: {outcome[0]}")
    return outcome[0]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _write(job: Job, gathered: Iterator[tuple[tuple[str, ...], list[Tensor]]]) -> Exported:
    done = Exported(str(job.path), job.fmt.name, job.fmt.variant, job.activations)
    done.left |= job.found.left
    with new_folder(job.path) as folder:
        shards = Shards(folder, job.limit)
        written: dict[int, str] = {}  # of tensors that are written as they are
        for names, tensors in gathered:
            whole = dict(zip(names, tensors, strict=True))
            for name, codes in _codes(job, whole, done).items():
                _add_codes(job, shards, done, name, codes, whole[name].shape)
            for name in names:
                key = id(job.state[name])
                if name in done.layers:
                    continue
                if key in written:
                    done.tied[name] = written[key]
                    continue
                written[key] = name
                for key_name, tensor in _left_tensors(job, done, name, whole[name]).items():
                    shards.add(key_name, tensor)
        if not done.layers:
            first = "; ".join(f"{n}: {why}" for n, why in list(done.left.items())[:3])
            raise ConfigError(f"export: no layer can be written in 4 bits: {first}")
        shards.close()
        _write_configs(job, folder, done)
    return done


def _codes(job: Job, whole: dict[str, Tensor], done: Exported) -> dict[str, Codes]:
    """The codes of those tensors of one group that are taken. Those that the format can't hold are
    left, the whole group, with the reason; or raise."""
    found, at = {}, ""
    taken = {name: job.found.uses[name] for name in whole if name in job.found.uses}
    for name in [name for name in taken if _is_adapter(name)]:
        done.left[name] = "a LoRA adapter, which loaders take in high precision"
        del taken[name]
    try:
        for at, uses in taken.items():
            codes = codes_of(whole[at], uses)
            codes = as_nvfp4(codes, at) if job.fmt.block_format == "nvfp4" else codes
            job.fmt.refuse(codes)
            if job.fmt.codes == "weight" and uses[0].place.transposed and whole[at].ndim == 2:
                raise InexactError(
                    f"it is stored transposed, and loaders transpose every 'weight', which "
                    f"{job.fmt.name} calls its codes; use format='compressed-tensors'"
                )
            _module_tensors(job, at, codes.codes, whole[at].shape, uses[0].place.transposed)
            found[at] = codes
        return with_common_scale(found) if job.fmt.fuses else found
    except InexactError as error:
        if not job.leaves:
            raise ConfigError(
                f"export: {at}: {error}. Or give inexact='leave', which leaves this layer and "
                f"those that loaders fuse with it ({', '.join(taken)}) in the precision of their "
                "parameters"
            ) from None
        done.left |= dict.fromkeys(taken, str(error))
        return {}


def _is_adapter(name: str) -> bool:
    return any(part in _ADAPTERS for part in name.split("."))


def _add_codes(
    job: Job, shards: Shards, done: Exported, name: str, codes: Codes, shape: torch.Size
) -> None:
    """Write one parameter's codes, and note it."""
    use = job.found.uses[name][0]
    scale = _input_scale(job, name)
    done.layers[name] = {
        "site": use.site,
        "scheme": codes.operand.scheme,
        "transform": codes.operand.transform,
        "activations": str(use.fprop.a),
        "dtype": str(use.dtype).removeprefix("torch."),
        "shape": list(shape),
        "transposed": use.place.transposed,
        "global_scale": float(codes.global_scale),
    }
    if scale is not None:
        done.layers[name]["input_scale"] = float(scale)
    for tensor_name, tensor in job.fmt.tensors(codes, scale).items():
        if tensor.ndim < 2:
            continue
        split = _module_tensors(job, name, tensor, shape, use.place.transposed)
        for prefix, part in split.items():
            shards.add(f"{prefix}.{tensor_name}", part)
    prefixes = _module_tensors(job, name, codes.codes, shape, use.place.transposed)
    for tensor_name, tensor in job.fmt.tensors(codes, scale).items():
        for prefix in prefixes if tensor.ndim < 2 else ():
            shards.add(f"{prefix}.{tensor_name}", tensor)


def _input_scale(job: Job, name: str) -> Tensor | None:
    """The static scale of a layer's activations, the largest of the layers fused with it."""
    if job.activations != STATIC:
        return None
    group = next(g for g in siblings(list(job.found.uses)) if name in g)
    sites = [use.site for member in group for use in job.found.uses[member]]
    if missing := [site for site in sites if site not in job.amax]:
        raise ConfigError(
            f"export: no activations of {missing[0]!r} were recorded; give more calibration "
            "batches, or record all modules (telemetry's key modules)"
        )
    return input_scale(torch.stack([job.amax[site].cpu() for site in sites]).amax())


def _module_tensors(
    job: Job, name: str, rows: Tensor, shape: torch.Size, transposed: bool
) -> dict[str, Tensor]:
    """What there is of each row of a parameter, [R, ...], by what its name in the file begins with:
    one module's, or one of each expert's. Raises InexactError where there is no such name."""
    whole = stacked(rows, shape, transposed)
    if not job.fmt.of_modules:
        return {name: whole}
    parts = {name: whole}
    if is_hugging_face(job.model):
        parts = checkpoint_tensors(job.model, name, whole)
        if not transposed:
            weight = torch.empty(shape, device="meta")
            expected = checkpoint_tensors(job.model, name, weight)
            for key, part in parts.items():
                if expected[key].shape != (*part.shape[:-1], shape[-1]):
                    raise InexactError("its checkpoint has it in another order than its rows")
    if any(part.ndim != rows.ndim for part in parts.values()):
        raise InexactError(
            "it is a stack of matrices, and no loader's names for its parts are known; "
            "format='safetensors' writes the stack"
        )
    return {module_name(key): part for key, part in parts.items()}


def _left_tensors(job: Job, done: Exported, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor that is written as it is, under its names in the file."""
    if not job.fmt.of_modules or not is_hugging_face(job.model):
        return {name: tensor}
    of_codes = name.removesuffix("_bias") in done.layers
    return checkpoint_tensors(job.model, name, tensor, stacks=of_codes)


def _write_configs(job: Job, folder: Path, done: Exported) -> None:
    ignore = _ignored(job, done)
    done.notes += _notes(job, done)
    for note in done.notes:
        LOG.warning("q2compile: export: %s", note)
    write_json(folder / RECORD, {"q2compile": __version__, **asdict(done), "folder": ""})
    quantization, own = None, None
    if job.fmt.name == "compressed-tensors":
        quantization = compressed_tensors_config(job.fmt, job.activations, ignore)
    elif job.fmt.name == "modelopt":
        quantization, own = modelopt_configs(job.activations, ignore, __version__)
    if own is not None:
        write_json(folder / "hf_quant_config.json", own)
    if is_hugging_face(job.model):
        _write_hugging_face(job, folder, done, quantization)
    elif quantization is not None:
        write_json(folder / "config.json", {"quantization_config": quantization})
    if job.tokenizer is not None:
        job.tokenizer.save_pretrained(folder)


def _notes(job: Job, done: Exported) -> list[str]:
    """What known loaders don't read as it is written."""
    notes = []
    taken = [name for name in job.state if name in done.layers]
    stacks = [name for name in taken if len(done.layers[name]["shape"]) > 2]
    turned = [name for name in taken if done.layers[name]["transposed"] and name not in stacks]
    if is_hugging_face(job.model) and job.fmt.name == "compressed-tensors":
        if stacks and job.fmt.global_scale is not None:
            notes.append(
                f"transformers (seen in 5.23) loads experts without their global scale, so wrongly "
                f"and in silence: {stacks[0]} and {len(stacks) - 1} more. vLLM reads them"
            )
        if turned:
            notes.append(
                "transformers (seen in 5.23) puts no codes into Conv1D and initializes it anew: "
                f"{turned[0]} and {len(turned) - 1} more"
            )
    for group in siblings(list(job.state)) if job.fmt.fuses else ():
        parts = [name for name in group if name in done.layers]
        if 0 < len(parts) < len(group):
            notes.append(
                f"of {', '.join(group)} only {', '.join(parts)} is in 4 bits: vLLM, which fuses "
                "them, refuses that. Give them one policy"
            )
    return notes


def _ignored(job: Job, done: Exported) -> Sequence[str]:
    """The modules that hold a matrix that is not in 4 bits, by their names in the file: heads and
    routers among them. Embeddings, norms and convolutions are no matmuls of a loader."""
    modules = {plain_name(name): module for name, module in job.model.named_modules()}
    found: dict[str, None] = {}
    for name, tensor in job.state.items():
        owner = modules.get(name.rpartition(".")[0])
        if name in done.layers or tensor.ndim < 2 or isinstance(owner, _NO_MATMUL):
            continue
        if name.removesuffix("_bias") in done.layers:  # of experts, one row each
            continue
        shape = torch.empty(tensor.shape, device="meta")
        site = site_name(name)
        if not {name, site} & done.left.keys():
            done.left[site] = "not seen: no matmul of it came to the backend in this forward"
        for key in _left_tensors(job, done, name, shape):
            found[module_name(key)] = None
    return list(found)


def _write_hugging_face(
    job: Job, folder: Path, done: Exported, quantization: dict[str, Any] | None
) -> None:
    """config.json and generation_config.json, as save_pretrained writes them."""
    model: Any = job.model
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.dtype = next(iter(job.found.uses.values()))[0].dtype
    if quantization is not None:
        config.quantization_config = quantization
    in_codes = {id(job.state[name]) for name in done.layers}
    if any(id(t) in in_codes and n not in done.layers for n, t in job.state.items()):
        # A tied head in 4 bits, of an embedding that is not.
        config.tie_word_embeddings = False
        config.get_text_config().tie_word_embeddings = False
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
