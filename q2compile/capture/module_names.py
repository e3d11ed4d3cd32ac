# SPDX-License-Identifier: Apache-2.0
"""Absolute module names for the matmuls of a Dynamo graph, by parameter identity.

Dynamo names modules relative to the frame it compiles: after a graph break, with FSDP2 or per-block
compile, "layers.0." is gone. The parameter itself is the same object everywhere, so its name comes
from ``named_parameters`` of the outermost module on the Python stack.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from q2compile.capture.callers import compiled_callable, models_of
from q2compile.capture.frames import Running, running
from q2compile.capture.module_tree import (
    named_modules,
    named_parameters,
    own_parameters,
    under,
)
from q2compile.capture.same_graph import same_graph
from q2compile.torch_internals.aot_autograd import in_compiled_autograd
from q2compile.torch_internals.dynamo import parameter_of, source_text

# Components that wrappers put into names and that the user never wrote.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def plain_name(name: str) -> str:
    """``name`` without the components that wrappers (torch.compile, checkpointing, FSDP) put in."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def site_name(parameter_name: str) -> str:
    """The name a policy sees: the module's for ``weight``, else the parameter's without "_weight".

    "mlp.up.weight" -> "mlp.up"; "attn.in_proj_weight" -> "attn.in_proj"; "head.table" ->
    "head.table"; "up.parametrizations.weight.original1" -> "up".
    """
    parts = plain_name(parameter_name).split(".")
    if len(parts) > 2 and parts[-3] == "parametrizations":
        parts[-3:] = [parts[-2]]
    if parts[-1] == "weight" and len(parts) > 1:
        parts.pop()
    else:
        parts[-1] = parts[-1].removesuffix("_weight")
    return ".".join(parts)


@dataclass
class Names:
    """Names of one graph's parameters.

    root      the outermost module on the stack that owns one of them, or the outermost at all for a
              graph without parameters; None for a compiled function
    by_id     id(parameter) -> every name it has (more than one when tied)
    held      the parameters that the graph holds
    prefix    where the compiled frame's own module is in root ("" for the whole model, None
              when the frame's parameters show no common place)
    label     the prefix of names of root's parameters: "teacher", where a function runs more than
              one model (see `callers`), else ""
    sites     every name that a policy could match, in all models of the function; [] if not known
    models    the models that the function runs, or root, by the labels of their names
    served    id(parameter) -> sites of equal layers that Dynamo will run with the same graph
    failure   the error that was raised while the model was searched; names are then relative to the
              compiled frame
    places    id(parameter) -> which of the graph's inputs it is
    taken     the parameters whose matmuls were rewritten
    """

    root: nn.Module | None = None
    by_id: dict[int, list[str]] = field(default_factory=dict)
    held: list[nn.Parameter] = field(default_factory=list)
    prefix: str | None = ""
    label: str = ""
    sites: list[str] = field(default_factory=list)
    models: Mapping[str, nn.Module] = field(default_factory=dict)
    served: dict[int, list[str]] = field(default_factory=dict)
    failure: Exception | None = None
    places: dict[int, int] = field(default_factory=dict)
    taken: list[nn.Parameter] = field(default_factory=list)

    @classmethod
    def of_graph(cls, gm: fx.GraphModule) -> Names:
        """Names for the parameters among the inputs and constants of a Dynamo graph, found at
        compile time.
        """
        sources: dict[int, str] = {}
        held, places = [], {}
        nodes = gm.graph.find_nodes
        inputs = nodes(op="placeholder")
        for place, node in enumerate((*inputs, *nodes(op="get_attr"))):
            parameter = parameter_of(node)
            if parameter is not None:
                sources[id(parameter)] = _path_in_frame(node)
                held.append(parameter)
                if place < len(inputs):
                    places[id(parameter)] = place
        try:
            # Compiled autograd runs a module of its own making: no user's module is in its frame.
            names = cls._found([] if in_compiled_autograd() else running(), held, sources)
        except Exception as error:
            by_path = {key: [path] for key, path in sources.items()}
            names = cls(None, by_path, held, prefix=None, failure=error)
        names.places = places
        return names

    @classmethod
    def _found(
        cls, frames: Sequence[Running], held: list[nn.Parameter], sources: dict[int, str]
    ) -> Names:
        modules = [f.module for f in reversed(frames) if f.module is not None]
        given = compiled_callable() if frames else None
        if isinstance(given, nn.Module):
            modules.append(given)
        if modules and not sources:  # what is left of a model whose linears Dynamo skipped
            return cls(modules[0], prefix=None)
        for root in modules:
            if any(id(p) in sources for _, p in named_parameters(root)):
                return cls._in_model(root, held, sources, models_of(frames, root))
        models = models_of(frames, None) if frames else {}
        names = {key: [path] for key, path in sources.items()}
        by_id = _names_by_id(models)
        sites = _sites(models) if names.keys() <= by_id.keys() else []
        return cls(None, names | by_id, held, None, sites=sites, models=models)

    @classmethod
    def _in_model(
        cls,
        root: nn.Module,
        held: list[nn.Parameter],
        sources: dict[int, str],
        models: dict[str, nn.Module],
    ) -> Names:
        label = _label(root, models)
        if not label:
            models = {"": root}
        by_id = _names_by_id({label: root})
        prefix = _common_prefix(sources, by_id, label)
        names = cls(root, by_id, held, prefix, label, _sites(models), models)
        # A whole model has a graph of its own, unless a function runs another one of its class.
        if prefix or prefix == "" and label:
            names.served = {
                id(p): [
                    site_name(name) for name in same_graph(p, by_id, root, label, prefix, models)
                ]
                for p in held
            }
        return names

    @property
    def place(self) -> str:
        """Where the compiled frame's own module is, as the name that its sites begin with."""
        return under(self.label, plain_name(self.prefix or ""))

    @property
    def trained(self) -> int:
        """How many parameters the model trains, if this graph holds them all; else 0."""
        held = {id(p) for p in self.held}
        named = () if self.root is None else named_parameters(self.root)
        trained = {id(p) for _, p in named if p.requires_grad}
        return len(trained) if trained <= held else 0

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

    def linear(self, node: fx.Node) -> str:
        """The site of the nn.Linear whose code made the node; "" for any other node. It names a
        matmul whose weight is not a parameter: another library has replaced the parameter.
        """
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        return self.scope(node) if stack and _is_class_of_linear(stack[-1][1]) else ""

    def scope(self, node: fx.Node) -> str:
        """The module whose code made the node; "" where Dynamo does not say."""
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        return under(self.place, _strip_root(stack[-1][0])) if stack else self.place

    def served_too(self, parameter: nn.Parameter) -> list[str]:
        """Sites of equal layers that Dynamo will run with the graph compiled for this one."""
        return self.served.get(id(parameter), [])


def expected_sites(root: nn.Module, label: str = "") -> dict[str, torch.Size]:
    """The matmuls that the modules of ``root`` are known to do: {site name: weight's shape}.

    nn.Linear and its subclasses, Hugging Face's Conv1D, the projections of nn.MultiheadAttention,
    and nn.LSTM, nn.GRU and nn.RNN, each by its first weight. ``label``: see `Names`.
    """
    found = {}
    for name, module in named_modules(root):
        is_linear = _is_linear(module)
        parameters = own_parameters(module)
        for leaf in ("weight",) if is_linear else ("in_proj_weight", "weight_ih_l0"):
            if leaf in parameters and parameters[leaf].ndim == 2:
                found[site_name(under(label, under(name, leaf)))] = parameters[leaf].shape
    return found


def loose_weights(root: nn.Module, label: str = "") -> dict[str, torch.Size]:
    """The weights outside torch's own modules: {site name: shape}. Experts are such, one 3-D
    parameter for all; whether they are multiplied, only a graph that holds them can tell. So is
    what an nn.Linear computes its ``weight`` from.
    """
    others = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, nn.modules.conv._ConvNd)
    return {
        site_name(under(label, under(name, leaf))): parameter.shape
        for name, module in named_modules(root)
        if not issubclass(type(module), (nn.RNNBase, *others))
        for leaf, parameter in own_parameters(module).items()
        if parameter.ndim >= 2 and not (_is_linear(module) and leaf == "weight")
    }


def _is_linear(module: nn.Module) -> bool:
    return _is_class_of_linear(type(module))


def _is_class_of_linear(cls: Any) -> bool:
    """Whether it is nn.Linear, a subclass, or Hugging Face's Conv1D, told by its name."""
    return isinstance(cls, type) and (issubclass(cls, nn.Linear) or cls.__name__ == "Conv1D")


def site_names(root: nn.Module, label: str = "") -> list[str]:
    """Every name that a matmul with a parameter of ``root`` could have."""
    return [site_name(under(label, name)) for name, p in named_parameters(root) if p.ndim >= 2]


def _label(root: nn.Module, models: Mapping[str, nn.Module]) -> str:
    """The function's name for ``root``, a model of its or a part of one; "" if it has one model."""
    if len(models) > 1:
        for label, model in models.items():
            for name, module in named_modules(model):
                if module is root:
                    return under(label, name)
    return ""


def _names_by_id(models: Mapping[str, nn.Module]) -> dict[int, list[str]]:
    by_id: dict[int, list[str]] = {}
    for label, model in models.items():
        for name, parameter in named_parameters(model):
            by_id.setdefault(id(parameter), []).append(under(label, name))
    return by_id


def _sites(models: Mapping[str, nn.Module]) -> list[str]:
    return [site for label, model in models.items() for site in site_names(model, label)]


def _path_in_frame(node: fx.Node) -> str:
    """L['self']._modules['a']._modules['0']._parameters['weight'] -> "a.0.weight".

    In a module with a __getattr__ of its own it is L['self'].__dict__['_modules']['a'] and so on.
    """
    if node.op == "get_attr":  # Dynamo has made a name of the path
        return str(node.target)
    text = source_text(node.meta["grapharg"])
    parts = [a or b or c for a, b, c in re.findall(r"\['(.*?)'\]|\.(\w+)|\[(\d+)\]", text)]
    inner = ("__dict__", "_modules", "_parameters")
    return ".".join(p for p in parts[1:] if p not in inner) or node.name


def _strip_root(path: str) -> str:
    """nn_module_stack's "L['self'].model.lm_head" -> "model.lm_head"."""
    return path.split("].", 1)[1] if "]." in path else ""


def _common_prefix(sources: dict[int, str], by_id: dict[int, list[str]], label: str) -> str | None:
    """Where the frame's module is in the model called ``label``: the prefix of the absolute names
    before the frame's path."""
    prefixes: set[str] | None = None
    for key, path in sources.items():
        here = {
            name[len(label) : len(name) - len(path)].strip(".")
            for name in by_id.get(key, [])
            if name == path or name.endswith("." + path)
        }
        if here:
            prefixes = here if prefixes is None else prefixes & here
    return min(prefixes, key=len) if prefixes else None
