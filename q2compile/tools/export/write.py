# SPDX-License-Identifier: Apache-2.0
"""Write what a trace found, layer by layer: no rank holds more than the layers that a loader fuses,
and a file's tensors on the rank that writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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
from q2compile.tools.export.names import always_tied, module_name, siblings
from q2compile.tools.export.places import stacked
from q2compile.tools.export.shards import Shards, new_folder
from q2compile.tools.export.traced import WeightUse

_ADAPTERS = ("lora_A", "lora_B", "lora_a", "lora_b")


@dataclass
class Writer(Job):
    """Writes a job's files."""

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
