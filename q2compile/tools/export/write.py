# SPDX-License-Identifier: Apache-2.0
"""Write what a trace found, layer by layer: no rank holds more than the layers that a loader fuses,
and a file's tensors on the rank that writes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from q2compile.errors import ConfigError
from q2compile.tools.export.codes import (
    Codes,
    InexactError,
    as_nvfp4,
    codes_of,
    with_common_scale,
)
from q2compile.tools.export.configs import write_configs
from q2compile.tools.export.formats import STATIC, input_scale
from q2compile.tools.export.job import Exported, Job
from q2compile.tools.export.names import (
    always_tied,
    checkpoint_tensors,
    module_name,
    siblings,
)
from q2compile.tools.export.places import stacked
from q2compile.tools.export.shards import Shards, new_folder

_ADAPTERS = ("lora_A", "lora_B", "lora_a", "lora_b")


def write(job: Job) -> Exported:
    """Carry out a job; every rank gets the result, or the error of the rank that writes."""
    groups = siblings(list(job.state))
    gathered = ((group, [_whole(job.state[name]) for name in group]) for group in groups)

    def gather_the_rest() -> None:
        for _ in gathered:
            pass

    return job.ranks.on_first(lambda: _write(job, gathered), gather_the_rest)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _write(job: Job, gathered: Iterator[tuple[tuple[str, ...], list[Tensor]]]) -> Exported:
    done = Exported(str(job.path), job.fmt.name, "", job.activations)
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
                if key in written and not job.tied_heads:  # loaders tie all or nothing
                    done.tied[name] = written[key]
                    continue
                written[key] = name
                for key_name, tensor in job.left_tensors(done, name, whole[name]).items():
                    shards.add(key_name, tensor)
        if not done.layers:
            first = "; ".join(f"{n}: {why}" for n, why in list(done.left.items())[:3])
            raise ConfigError(f"export: no layer can be written: {first}")
        shards.close()
        variants = {layer["format"] for layer in done.layers.values()}
        done.variant = variants.pop() if len(variants) == 1 else "mixed-precision"
        write_configs(job, folder, done)
    return done


def _codes(job: Job, whole: dict[str, Tensor], done: Exported) -> dict[str, Codes]:
    """The codes of the tensors of one group. If the format can't hold one of them, the whole group
    is left with the reason, or the error is raised."""
    found, at = {}, ""
    taken = {name: job.found.uses[name] for name in whole if name in job.found.uses}
    for name in [name for name in taken if _is_adapter(name)]:
        done.left[name] = "a LoRA adapter, which loaders take in high precision"
        del taken[name]
    try:
        for at, uses in taken.items():
            codes = codes_of(whole[at], uses)
            fmt = job.format_of(codes)
            fmt.check(codes)
            if at in job.tied_heads and fmt.of_modules and always_tied(job.model):
                raise InexactError(
                    "it is tied to an embedding, and transformers ties the two again when it loads "
                    f"a {type(job.model).__name__}, whatever is in the files; give it 'bf16' in "
                    "the policy"
                )
            codes = as_nvfp4(codes) if fmt.block_format == "nvfp4" else codes
            if fmt.codes == "weight" and uses[0].place.transposed and whole[at].ndim == 2:
                raise InexactError(
                    f"it is stored transposed, and loaders transpose every 'weight', which "
                    f"{fmt.variant} calls its codes; use format='safetensors'"
                )
            _module_tensors(job, at, codes.scales, whole[at].shape, uses[0].place.transposed)
            found[at] = codes
        at = ""
        fused = {n: codes for n, codes in found.items() if job.format_of(codes).fuses}
        return found | with_common_scale(fused)
    except InexactError as error:
        if not job.leaves:
            where = f"export: {at}" if at else "export"
            raise ConfigError(
                f"{where}: {error}. Or give inexact='leave', which leaves this layer and those "
                f"that loaders fuse with it ({', '.join(taken)}) in the precision of their "
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
    use, fmt = job.found.uses[name][0], job.format_of(codes)
    scale = _input_scale(job, name, codes.block_format)
    done.layers[name] = {
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
        done.layers[name]["input_scale"] = float(scale)
    for tensor_name, tensor in fmt.tensors(codes, scale).items():
        if tensor.ndim < 2:
            continue
        split = _module_tensors(job, name, tensor, shape, use.place.transposed)
        for prefix, part in split.items():
            shards.add(f"{prefix}.{tensor_name}", part)
    prefixes = _module_tensors(job, name, codes.scales, shape, use.place.transposed)
    for tensor_name, tensor in fmt.tensors(codes, scale).items():
        for prefix in prefixes if tensor.ndim < 2 else ():
            shards.add(f"{prefix}.{tensor_name}", tensor)


def _input_scale(job: Job, name: str, block_format: str) -> Tensor | None:
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
    return input_scale(torch.stack([job.amax[site].cpu() for site in sites]).amax(), block_format)


def _module_tensors(
    job: Job, name: str, rows: Tensor, shape: torch.Size, transposed: bool
) -> dict[str, Tensor]:
    """Per-row values of a parameter, [R, ...], by the prefix of its name in the file: one module's,
    or one per expert. Raises InexactError where there is no such name."""
    whole = stacked(rows, shape, transposed)
    if not job.fmt.of_modules:
        return {name: whole}
    parts = {name: whole}
    if job.is_hugging_face:
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
    if other := [key for key in parts if key.rpartition(".")[2] != "weight"]:
        raise InexactError(
            f"loaders look for the codes of modules, and {other[0]!r} is not the 'weight' of one; "
            "format='safetensors' writes the codes of parameters"
        )
    return {module_name(key): part for key, part in parts.items()}
