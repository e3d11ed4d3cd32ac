"""Absolute module names for the matmuls of a Dynamo graph, by parameter identity.

Dynamo names modules relative to the frame it compiles: after a graph break, with FSDP2 or per-block
compile, "layers.0." is gone. The parameter itself is the same object everywhere, so its name comes
from ``named_parameters`` of the outermost module on the Python stack.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from q2compile.compat import in_compiled_autograd, parameter_of, source_text

# Components that wrappers put into names and that the user never wrote.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def site_name(parameter_name: str) -> str:
    """The name a policy sees: the module's for ``weight``, else the parameter's without "_weight".

    "mlp.up.weight" -> "mlp.up"; "attn.in_proj_weight" -> "attn.in_proj"; "head.table" ->
    "head.table"; "up.parametrizations.weight.original1" -> "up".
    """
    parts = [p for p in parameter_name.split(".") if p not in _WRAPPERS]
    if len(parts) > 2 and parts[-3] == "parametrizations":
        parts[-3:] = [parts[-2]]
    if parts[-1] == "weight" and len(parts) > 1:
        parts.pop()
    else:
        parts[-1] = parts[-1].removesuffix("_weight")
    return ".".join(parts)


def modules_on_stack() -> Iterator[nn.Module]:
    """The modules whose methods are on the Python stack, outermost first."""
    found: list[nn.Module] = []
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and not any(owner is m for m in found):
            found.append(owner)
        frame = frame.f_back  # type: ignore[assignment]
    return reversed(found)


def _unwrapped(module: nn.Module) -> nn.Module:
    """The user's module inside torch.compile's and DistributedDataParallel's wrappers."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel):
            inner = module.module
        if inner is None:
            return module
        module = inner


@dataclass
class Names:
    """Names of one graph's parameters.

    root      the outermost module on the stack that owns one of them, or the outermost at all for a
              graph without parameters; None for a compiled function
    by_id     id(parameter) -> every name it has (several when tied)
    held      the parameters that the graph holds
    prefix    where the compiled frame's own module stands in root ("" for the whole model, None
              when the frame's parameters show no common place)
    """

    root: nn.Module | None = None
    by_id: dict[int, list[str]] = field(default_factory=dict)
    held: list[nn.Parameter] = field(default_factory=list)
    prefix: str | None = ""

    @classmethod
    def of_graph(cls, gm: fx.GraphModule) -> Names:
        """Names for the parameters among the placeholders of a Dynamo graph, found at compile
        time.
        """
        sources: dict[int, str] = {}
        held = []
        for node in gm.graph.find_nodes(op="placeholder"):
            parameter = parameter_of(node)
            if parameter is not None:
                sources[id(parameter)] = _path_in_frame(node)
                held.append(parameter)
        # Compiled autograd runs a module of its own making, whose frame has no user's module in it.
        modules = [] if in_compiled_autograd() else [_unwrapped(m) for m in modules_on_stack()]
        if modules and not sources:  # what is left of a model whose linears Dynamo skipped
            return cls(modules[0], prefix=None)
        for root in modules:
            by_id: dict[int, list[str]] = {}
            for name, parameter in root.named_parameters(remove_duplicate=False):
                by_id.setdefault(id(parameter), []).append(name)
            if any(key in by_id for key in sources):
                return cls(root, by_id, held, _common_prefix(sources, by_id))
        return cls(None, {key: [path] for key, path in sources.items()}, held, None)

    def of(self, parameter: nn.Parameter, node: fx.Node) -> str:
        """The site's name: of a tied parameter's names, the one that the calling module ends in."""
        names = [site_name(n) for n in self.by_id.get(id(parameter), [])]
        if not names:
            return f"<{node.name}>"
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        if stack and len(names) > 1:
            tail = "." + _strip_root(stack[-1][0])
            for name in names:
                if ("." + name).endswith(tail):
                    return name
        return names[0]

    def served_too(self, parameter: nn.Parameter) -> list[str]:
        """Sites of equal layers that Dynamo will run with the graph compiled for this one.

        When the compiled frame is not the whole model's, Dynamo takes parameters as inputs and runs
        every module of the same class with the same code: those whose parameter of the same path
        has the same shape.
        """
        if self.root is None or not self.prefix:
            return []
        own = self.root.get_submodule(self.prefix)
        dot = self.prefix + "."
        tails = [n[len(dot) :] for n in self.by_id.get(id(parameter), []) if n.startswith(dot)]
        found = []
        for name, module in self.root.named_modules():
            if type(module) is not type(own) or module is own:
                continue
            found += [
                site_name(f"{name}.{tail}")
                for tail in tails
                if _shape_at(module, tail) == parameter.shape
            ]
        return found


def _shape_at(module: nn.Module, path: str) -> torch.Size | None:
    """The shape of the parameter at ``path``, as the module tree has it: a checkpoint wrapper's
    named_parameters leaves its own component out."""
    try:
        return module.get_parameter(path).shape
    except AttributeError:
        return None


def expected_sites(root: nn.Module) -> dict[str, torch.Size]:
    """The matmuls that the modules of ``root`` are known to do: {site name: weight's shape}.

    nn.Linear and its subclasses, Hugging Face's Conv1D, the projections of nn.MultiheadAttention,
    and nn.LSTM, nn.GRU and nn.RNN, each by its first weight.
    """
    found = {}
    for name, module in root.named_modules():
        is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        for leaf in ("weight",) if is_linear else ("in_proj_weight", "weight_ih_l0"):
            weight = getattr(module, leaf, None)
            if isinstance(weight, nn.Parameter) and weight.ndim == 2:
                found[site_name(f"{name}.{leaf}" if name else leaf)] = weight.shape
    return found


def loose_weights(root: nn.Module) -> dict[str, torch.Size]:
    """The weights outside torch's own modules: {site name: shape}. Experts are such, one 3-D
    parameter for all; whether they are multiplied, only a graph that holds them can tell.
    """
    no_matmul = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, nn.modules.conv._ConvNd)
    return {
        site_name(f"{name}.{leaf}" if name else leaf): parameter.shape
        for name, module in root.named_modules()
        if not isinstance(module, (nn.Linear, nn.RNNBase, *no_matmul))
        for leaf, parameter in module.named_parameters(recurse=False)
        if parameter.ndim >= 2
    }


def site_names(root: nn.Module) -> list[str]:
    """Every name that a matmul with a parameter of ``root`` could have."""
    named = root.named_parameters(remove_duplicate=False)
    return [site_name(name) for name, p in named if p.ndim >= 2]


def _path_in_frame(node: fx.Node) -> str:
    """L['self']._modules['a']._modules['0']._parameters['weight'] -> "a.0.weight".

    In a module with a __getattr__ of its own it is L['self'].__dict__['_modules']['a'] and so on.
    """
    text = source_text(node.meta["grapharg"])
    parts = [a or b or c for a, b, c in re.findall(r"\['(.*?)'\]|\.(\w+)|\[(\d+)\]", text)]
    inner = ("__dict__", "_modules", "_parameters")
    return ".".join(p for p in parts[1:] if p not in inner) or node.name


def _strip_root(path: str) -> str:
    """nn_module_stack's "L['self'].model.lm_head" -> "model.lm_head"."""
    return path.split("].", 1)[1] if "]." in path else ""


def _common_prefix(sources: dict[int, str], by_id: dict[int, list[str]]) -> str | None:
    """Where the frame's module stands: what is before the frame's path in the absolute names."""
    prefixes: set[str] | None = None
    for key, path in sources.items():
        here = {
            name[: len(name) - len(path)].rstrip(".")
            for name in by_id.get(key, [])
            if name == path or name.endswith("." + path)
        }
        if here:
            prefixes = here if prefixes is None else prefixes & here
    return min(prefixes, key=len) if prefixes else None
