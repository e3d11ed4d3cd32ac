"""q2compile: trains unmodified PyTorch models with their linear layers in NVFP4.

model = torch.compile(model, backend="quartet2")        # nothing to import

q2compile.Config      the backend's options as a frozen dataclass
q2compile.explain     what the backend does with a model: one row per matmul
q2compile.compare     which modules a recipe's error comes from, and the policy that follows
q2compile.quantize    the quantizers, on any device
q2compile.export      a trained model as an inference checkpoint, by the codes of its forward
q2compile.forget_weights  under cache_weights: a weight was changed behind autograd's back
q2compile.get_rng_state, set_rng_state  under the option seed: how far its counters have come
q2compile.gather_codes    FSDP2 gathers weights as 4-bit codes
q2compile.telemetry   step() and flush(), for the option telemetry
"""

from typing import TYPE_CHECKING, Any

from q2compile.version import __version__

if TYPE_CHECKING:
    from q2compile import telemetry as telemetry
    from q2compile.config import Config as Config
    from q2compile.tools.compare.measure import compare as compare
    from q2compile.tools.explain import explain as explain
    from q2compile.tools.export.export import export as export
    from q2compile.tools.quantize import QuantizedTensor as QuantizedTensor
    from q2compile.tools.quantize import quantize as quantize
    from q2compile.tools.rng_state import get_rng_state as get_rng_state
    from q2compile.tools.rng_state import set_rng_state as set_rng_state
    from q2compile.weight_cache.cache import forget_weights as forget_weights
    from q2compile.weight_cache.gather_codes import gather_codes as gather_codes

__all__ = [
    "Config",
    "QuantizedTensor",
    "__version__",
    "compare",
    "explain",
    "export",
    "forget_weights",
    "gather_codes",
    "get_rng_state",
    "quantize",
    "set_rng_state",
    "telemetry",
]

_HOMES = {
    "Config": "q2compile.config",
    "compare": "q2compile.tools.compare.measure",
    "explain": "q2compile.tools.explain",
    "export": "q2compile.tools.export.export",
    "forget_weights": "q2compile.weight_cache.cache",
    "get_rng_state": "q2compile.tools.rng_state",
    "set_rng_state": "q2compile.tools.rng_state",
    "gather_codes": "q2compile.weight_cache.gather_codes",
    "quantize": "q2compile.tools.quantize",
    "QuantizedTensor": "q2compile.tools.quantize",
}


def __getattr__(name: str) -> Any:
    """Load on first use: the public names stand on torch._dynamo, which takes a second to
    import.
    """
    from importlib import import_module

    if name == "telemetry":
        return import_module("q2compile.telemetry")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_HOMES[name])
    return getattr(module, name)
