# SPDX-License-Identifier: Apache-2.0
"""The formats, as data: which tensors stand for a layer, under which names, and what the
configuration says of them.

    compressed-tensors   nvfp4-pack-quantized, or mxfp4-pack-quantized where all 4-bit codes are
                         MXFP4; float-quantized for FP8
    modelopt             NVIDIA ModelOpt's NVFP4, hf_quant_config.json
    safetensors          every scheme and rotation, one entry per parameter in q2compile_export.json

Sources: compressed-tensors 0.20 (`compressors/`), nvidia-modelopt 0.47 (`torch/export`), and
vLLM's loaders of both (`quantization/compressed_tensors`, `modelopt.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from q2compile.runtime_kernels.numerics.nvfp4 import pow2_global_scale
from q2compile.runtime_kernels.numerics.schemes import E2M1_MAX, E4M3_MAX, SCHEMES
from q2compile.tools.export.codes import Codes, InexactError, is_power_of_two

WEIGHT_ONLY, DYNAMIC, STATIC = ACTIVATIONS = ("weight-only", "dynamic", "static")


@dataclass(frozen=True)
class Scalar:
    """How a format stores a global scale: its name, its shape, and as itself or as 1 / scale."""

    name: str
    shape: tuple[int, ...] = ()
    reciprocal: bool = False

    def of(self, scale: Tensor) -> Tensor:
        return (1.0 / scale if self.reciprocal else scale).float().reshape(self.shape)


@dataclass(frozen=True)
class Format:
    """One way to write a layer.

    name, variant   as the user gives it; as the format's own configuration names it
    separator       between a module's or parameter's name and what follows
    of_modules      names begin with the module's name; False: with the parameter's
    codes, scales   names of the tensors; scale_dtype: stored as; block_format: of the codes, None
                    for all. FP8 has no scales
    global_scale    of the weight; None where the format has none, so it must be 1
    input_scale     of static activations; None where there are none
    activations     what the format can say of activations
    fuses           its loaders keep one global scale for fused layers: powers of two, common ones
    rotates         can say that codes are of rotated weights
    pads            its readers cut the zeros off with which codes fill the last block of a row
    """

    name: str
    variant: str
    codes: str
    scales: str
    block_format: str | None
    scale_dtype: torch.dtype | None
    global_scale: Scalar | None
    input_scale: Scalar | None
    activations: tuple[str, ...]
    of_modules: bool = True
    fuses: bool = True
    rotates: bool = False
    pads: bool = False

    def check(self, codes: Codes) -> None:
        """Raises InexactError for codes that this format can't hold as they are."""
        if codes.block_format == "fp8" and self.block_format not in ("fp8", None):
            raise InexactError(
                f"its codes are FP8, and {self.name} is written with NVFP4 only; use "
                "format='compressed-tensors'"
            )
        if codes.is_padded and not self.pads:
            raise InexactError(
                f"its {codes.columns} columns are not whole blocks of "
                f"{SCHEMES[codes.operand.scheme].width}. Training pads them with zeros, and "
                f"{self.name} loaders can't; format='safetensors' holds the padded codes"
            )
        if codes.operand.transform != "none" and not self.rotates:
            raise InexactError(
                f"its codes are of the weight rotated by {codes.operand.transform}, and "
                f"{self.name} loaders don't rotate the activations; format='safetensors' names "
                "the transform in its JSON"
            )
        if self.fuses and not is_power_of_two(codes.global_scale):
            raise InexactError(
                f"its global scale, {float(codes.global_scale):g}, is no power of two "
                "(global_scale='exact', or a scheme that shrinks); loaders of "
                f"{self.name} round what they fuse by it. Train with global_scale='pow2', or use "
                "format='safetensors'"
            )
        if self.global_scale is None and float(codes.global_scale) != 1.0:
            raise InexactError(f"{self.variant} has no global scale")

    def tensors(self, codes: Codes, input_scale: Tensor | None) -> dict[str, Tensor]:
        """The tensors of one matrix: {name after the module's: tensor}."""
        scales = codes.scales if self.scale_dtype is None else codes.scales.view(self.scale_dtype)
        named = {self.codes: scales if codes.codes is None else codes.codes}
        if codes.codes is not None:
            named[self.scales] = scales
        if self.global_scale is not None:
            named[self.global_scale.name] = self.global_scale.of(codes.global_scale)
        if input_scale is not None and self.input_scale is not None:
            named[self.input_scale.name] = self.input_scale.of(input_scale)
        return named


NVFP4_PACKED = Format(
    name="compressed-tensors",
    variant="nvfp4-pack-quantized",
    codes="weight_packed",
    scales="weight_scale",
    block_format="nvfp4",
    scale_dtype=torch.float8_e4m3fn,
    global_scale=Scalar("weight_global_scale", (1,), reciprocal=True),
    input_scale=Scalar("input_global_scale", (1,), reciprocal=True),
    activations=(WEIGHT_ONLY, STATIC),
)
MXFP4_PACKED = Format(
    name="compressed-tensors",
    variant="mxfp4-pack-quantized",
    codes="weight_packed",
    scales="weight_scale",
    block_format="mxfp4",
    scale_dtype=torch.uint8,
    global_scale=None,
    input_scale=None,
    activations=(WEIGHT_ONLY, DYNAMIC),
)
FLOAT_QUANTIZED = Format(
    name="compressed-tensors",
    variant="float-quantized",
    codes="weight",
    scales="",
    block_format="fp8",
    scale_dtype=None,
    global_scale=Scalar("weight_scale", (1,)),
    input_scale=Scalar("input_scale", (1,)),
    activations=ACTIVATIONS,
    fuses=False,
)
MODELOPT = Format(
    name="modelopt",
    variant="NVFP4",
    codes="weight",
    scales="weight_scale",
    block_format="nvfp4",
    scale_dtype=torch.float8_e4m3fn,
    global_scale=Scalar("weight_scale_2"),
    input_scale=Scalar("input_scale"),
    activations=(WEIGHT_ONLY, STATIC),
)
SAFETENSORS = Format(
    name="safetensors",
    variant="q2compile",
    codes="codes",
    scales="scales",
    block_format=None,
    scale_dtype=None,
    global_scale=Scalar("global_scale"),
    input_scale=Scalar("input_global_scale"),
    activations=ACTIVATIONS,
    of_modules=False,
    fuses=False,
    rotates=True,
    pads=True,
)
FORMATS: dict[str, tuple[Format, ...]] = {  # the first that holds the codes as they are is used
    "compressed-tensors": (FLOAT_QUANTIZED, MXFP4_PACKED, NVFP4_PACKED),
    "modelopt": (MODELOPT,),
    "safetensors": (SAFETENSORS,),
}


def formats_for(name: str, schemes: Iterable[str]) -> dict[str, Format]:
    """The format of each of these schemes -> the variant that holds its codes: MXFP4 has its own
    unless some are NVFP4."""
    *others, last = FORMATS[name]
    kinds = {SCHEMES[scheme].format for scheme in schemes}
    own = {fmt.block_format: fmt for fmt in others}
    if "nvfp4" in kinds:
        own.pop("mxfp4", None)
    return {kind: own.get(kind, last) for kind in kinds}


def input_scale(amax: Tensor, block_format: str) -> Tensor:
    """The static global scale of activations: the least power of two with amax / 6 / scale <= 448,
    for FP8 amax / scale. A power of two has an exact reciprocal, which some formats store."""
    return pow2_global_scale(amax / (1.0 if block_format == "fp8" else E2M1_MAX), E4M3_MAX)


_WEIGHTS: dict[str, tuple[str, dict[str, Any]]] = {
    "nvfp4": ("tensor_group", {"group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}),
    "mxfp4": ("group", {"group_size": 32, "scale_dtype": "torch.uint8"}),
    "fp8": ("tensor", {"num_bits": 8}),
}


def _scheme(fmt: Format, activations: str, targets: Sequence[str]) -> Any:
    """The entry of ``config_groups`` for one format."""
    strategy, more = _WEIGHTS[str(fmt.block_format)]
    shared = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, **more}
    # For NVFP4 activations the global scale is stored; block scales are computed at run time.
    dynamic = {"nvfp4": "local", "mxfp4": True, "fp8": activations == DYNAMIC}
    inputs = {**shared, "dynamic": dynamic[str(fmt.block_format)]}
    return {
        "targets": list(targets),
        "weights": {**shared, "dynamic": False},
        "input_activations": None if activations == WEIGHT_ONLY else inputs,
        "output_activations": None,
        "format": fmt.variant,
    }


def compressed_tensors_config(
    variant: str,
    groups: Iterable[tuple[Format, Sequence[str]]],
    activations: str,
    ignore: Sequence[str],
) -> Any:
    """``quantization_config`` of config.json. groups: each format, with the modules in it."""
    schemes = [_scheme(fmt, activations, targets) for fmt, targets in groups]
    return {
        "quant_method": "compressed-tensors",
        "format": variant,
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": scheme for i, scheme in enumerate(schemes)},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def modelopt_configs(activations: str, ignore: Sequence[str], version: str) -> tuple[Any, Any]:
    """``quantization_config`` of config.json, and hf_quant_config.json."""
    algorithm = "W4A16_NVFP4" if activations == WEIGHT_ONLY else "NVFP4"
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group: dict[str, Any] = {"weights": weights, "targets": ["Linear"]}
    if activations != WEIGHT_ONLY:
        group["input_activations"] = dict(weights)
    producer = {"name": "q2compile", "version": version}
    config = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "producer": producer,
    }
    quantization = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": list(ignore),
    }
    return config, {"producer": producer, "quantization": quantization}
