# SPDX-License-Identifier: Apache-2.0
"""q2compile, a torch.compile backend for 4-bit training of unmodified PyTorch models.

    model = torch.compile(model, backend="quartet2")        # nothing to import

Public names; whatever else can be imported may change in any version.

    Config            the backend's options as a frozen dataclass
    explain           what the backend does with a model: one row per matmul
    compare           which modules a recipe's error comes from, and the policy that follows
    quantize          the quantizers, on any device
    export            a trained model as an inference checkpoint, by the codes of its forward
    forget_weights    for cache_weights: call it after changing a weight behind autograd's back
    get_rng_state, set_rng_state    save and restore the counters of the option seed
    gather_codes      have FSDP2 gather weights as 4-bit codes
    telemetry         step() and flush(), for the option telemetry
    expect            an error if a model trains without a matmul in 4 bits

Results: Report and its Row (explain), Comparison and its ModuleError (compare), Exported (export),
QuantizedTensor (quantize).

Exceptions: ConfigError, NotTakenError, StageError, DeviceLostError. Warnings: FaultWarning,
KernelWarning, UntestedTorchWarning, telemetry.TelemetryWarning.

For type checkers: Options, the type of a dict of options, and the types of its values: RecipeName,
RecipeChange, PolicyValue, Mode and TelemetryMapping.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"  # pyproject.toml reads it without importing the package

if TYPE_CHECKING:
    from q2compile import telemetry as telemetry
    from q2compile.config import Config as Config
    from q2compile.config import Mode as Mode
    from q2compile.config import Options as Options
    from q2compile.errors import ConfigError as ConfigError
    from q2compile.errors import NotTakenError as NotTakenError
    from q2compile.errors import StageError as StageError
    from q2compile.failures.stage_error import FaultWarning as FaultWarning
    from q2compile.recipes.option_types import PolicyValue as PolicyValue
    from q2compile.recipes.option_types import RecipeChange as RecipeChange
    from q2compile.recipes.option_types import RecipeName as RecipeName
    from q2compile.report.expect import expect as expect
    from q2compile.report.row import Row as Row
    from q2compile.runtime_kernels.kernel_states import DeviceLostError as DeviceLostError
    from q2compile.runtime_kernels.registry import KernelWarning as KernelWarning
    from q2compile.telemetry.options import TelemetryMapping as TelemetryMapping
    from q2compile.tools.compare.measure import compare as compare
    from q2compile.tools.compare.measurements import Comparison as Comparison
    from q2compile.tools.compare.measurements import ModuleError as ModuleError
    from q2compile.tools.explain import Report as Report
    from q2compile.tools.explain import explain as explain
    from q2compile.tools.export.export import export as export
    from q2compile.tools.export.write import Exported as Exported
    from q2compile.tools.quantize import QuantizedTensor as QuantizedTensor
    from q2compile.tools.quantize import quantize as quantize
    from q2compile.tools.rng_state import get_rng_state as get_rng_state
    from q2compile.tools.rng_state import set_rng_state as set_rng_state
    from q2compile.torch_internals.tested_versions import (
        UntestedTorchWarning as UntestedTorchWarning,
    )
    from q2compile.weight_cache.cache import forget_weights as forget_weights
    from q2compile.weight_cache.gather_codes import gather_codes as gather_codes

_HOMES = {
    "Config": "config",
    "Mode": "config",
    "Options": "config",
    "ConfigError": "errors",
    "NotTakenError": "errors",
    "StageError": "errors",
    "FaultWarning": "failures.stage_error",
    "PolicyValue": "recipes.option_types",
    "RecipeChange": "recipes.option_types",
    "RecipeName": "recipes.option_types",
    "expect": "report.expect",
    "Report": "tools.explain",
    "Row": "report.row",
    "DeviceLostError": "runtime_kernels.kernel_states",
    "KernelWarning": "runtime_kernels.registry",
    "TelemetryMapping": "telemetry.options",
    "Comparison": "tools.compare.measurements",
    "compare": "tools.compare.measure",
    "ModuleError": "tools.compare.measurements",
    "explain": "tools.explain",
    "export": "tools.export.export",
    "Exported": "tools.export.write",
    "QuantizedTensor": "tools.quantize",
    "quantize": "tools.quantize",
    "get_rng_state": "tools.rng_state",
    "set_rng_state": "tools.rng_state",
    "UntestedTorchWarning": "torch_internals.tested_versions",
    "forget_weights": "weight_cache.cache",
    "gather_codes": "weight_cache.gather_codes",
}

__all__ = [*_HOMES, "__version__", "telemetry"]


if not TYPE_CHECKING:  # a checker would take any name for one that this finds

    def __getattr__(name: str) -> Any:
        """Load on first use: the public names need torch._dynamo, a second of imports."""
        from importlib import import_module

        if name == "telemetry":
            return import_module("q2compile.telemetry")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"q2compile.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
