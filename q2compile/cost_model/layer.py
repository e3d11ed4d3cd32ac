# SPDX-License-Identifier: Apache-2.0
"""A linear layer, and the graphs that the passes make of it for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from q2compile.linear.autograd import LinearFunction, forward_parts
from q2compile.linear.experts import GroupedLinearFunction
from q2compile.passes import PassConditions, passes_over
from q2compile.passes.graph_queries import GEMM_OPS, is_q2
from q2compile.recipes.recipe import GEMMS, Recipe
from q2compile.runtime_kernels.kernel_states import assumed_gpu
from q2compile.runtime_kernels.ops.table import GROUPED_MM
from q2compile.torch_internals.dynamo import compiling_apart
from q2compile.torch_internals.partitioner import MinCut
from q2compile.torch_internals.private_names import FakeTensorMode

# The result of each GEMM.
RESULT = {"fprop": "y", "dgrad": "x", "wgrad": "w"}
_OF_OPERANDS = {operands: name for name, operands in GEMMS.items()}
_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
# T, N, K and experts of the layer that is traced. Its T is of whole chunks, and above the size from
# which on no chunk is filled up (`linear.autograd.of_rows`).
_T, _N, _K, _EXPERTS = 1024, 512, 256, 2
# The GPUs that stand for those with fp4 tensor cores, and without.
_BLACKWELL, _HOPPER = (10, 0), (9, 0)


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer, how many matmuls share its x, and how often fprop's codes of w are computed
    in a forward and backward.

    grouped: its GEMMs are grouped ones.  x_fuses: something computes x, that its quantizer may be
    part of.  emulated: the GPU has no fp4 tensor cores, so GEMMs multiply dequantized operands."""

    t: Any
    n: Any
    k: Any
    experts: int = 1
    x_users: int = 1
    w_quantized: int = 1
    grouped: bool = False
    bias: bool = False
    x_fuses: bool = True
    emulated: bool = False

    def elements(self, role: str) -> Any:
        """Elements of x, w, dy, or y."""
        n, k, t = self.n, self.k, self.t
        return {"x": t * k, "w": self.experts * n * k, "dy": t * n, "y": t * n}[role]

    def users(self, role: str) -> int:
        return self.x_users if role == "x" else 1

    @property
    def flops(self) -> Any:
        return 2 * self.t * self.n * self.k


@dataclass(frozen=True)
class TracedGraph:
    """A forward or a backward after all passes. roles: "x", "w", "dy" or "y" for each node that
    holds the values or the codes of one."""

    graph: fx.Graph
    roles: dict[fx.Node, str]

    def gemm(self, node: fx.Node) -> str:
        return _gemm_of(node, self.roles)


class _Context:
    """The part of autograd's context that our functions use."""

    def __init__(self, *needs: bool) -> None:
        self.needs_input_grad = needs
        self.saved_tensors: tuple[torch.Tensor, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


@lru_cache(maxsize=256)
def traced(
    recipe: Recipe, gemms: tuple[str, ...], grouped: bool, bias: bool, cached: bool, emulated: bool
) -> tuple[TracedGraph, ...]:
    """The forward of a layer, and its backward if one is wanted, after the passes of training or
    of inference. cached: the codes of w are an input."""
    with assumed_gpu(_HOPPER if emulated else _BLACKWELL), compiling_apart():
        joint, known = _joint(recipe, gemms, grouped, bias, cached)
        wanted = PassConditions(recipe.random_forward, False, False, fuse_rotations=False)
        graphs = [joint]
        if len(gemms) > 1:
            _run_passes("joint", joint.graph, wanted)
            joint.recompile()
            known |= {node.name: role for node, role in _roles(joint.graph, known).items()}
            graphs = [*MinCut()(joint, [], num_fwd_outputs=1)]
        for module in graphs:
            _run_passes("post_grad", module.graph, wanted)
        return tuple(TracedGraph(gm.graph, _roles(gm.graph, known)) for gm in graphs)


def _joint(
    recipe: Recipe, gemms: tuple[str, ...], grouped: bool, bias: bool, cached: bool
) -> tuple[fx.GraphModule, dict[str, str]]:
    """Forward and backward in one graph, as AOTAutograd makes it, and the roles of its inputs."""
    experts = _EXPERTS if grouped else 1
    shapes = {"x": (_T, _K), "w": (experts * _N, _K), "dy": (_T, _N)}
    with FakeTensorMode(), torch.no_grad():
        inputs = {
            role: torch.empty(shape, device="cuda", dtype=torch.bfloat16)
            for role, shape in shapes.items()
        }
        third = None
        if grouped:
            third = torch.empty(experts, device="cuda", dtype=torch.int32)
        elif bias:
            third = torch.empty(_N, device="cuda", dtype=torch.bfloat16)
        is_held = cached and recipe.fprop is not None
        codes = forward_parts(inputs["w"], recipe.fprop.b) if is_held and recipe.fprop else ()
        held = {f"w_codes_{i}": part for i, part in enumerate(codes)}
        dy = {"dy": inputs.pop("dy")} if len(gemms) > 1 else {}
        given = {**inputs, **({} if third is None else {"third": third}), **held, **dy}

        def joint(*tensors: torch.Tensor) -> list[torch.Tensor]:
            of = dict(zip(given, tensors, strict=True))
            function = GroupedLinearFunction if grouped else LinearFunction
            parts = [of[name] for name in held]
            ctx: Any = _Context("dgrad" in gemms, "wgrad" in gemms, bias and "wgrad" in gemms)
            y = function.forward(ctx, of["x"], of["w"], of.get("third"), recipe, 0, *parts)
            grads = function.backward(ctx, of["dy"]) if dy else ()
            return [y, *(grad for grad in grads if grad is not None)]

        module = make_fx(joint)(*given.values())
    known: dict[str, str] = {}
    for name, node in zip(given, module.graph.find_nodes(op="placeholder"), strict=True):
        node.name = node.target = ("tangents_" if name == "dy" else "primals_") + name
        known[node.name] = name.partition("_")[0]
    return module, known


def _run_passes(kind: Any, graph: fx.Graph, wanted: PassConditions) -> None:
    for row in passes_over(kind):
        if row.when(wanted):
            row.run(graph, *row.takes(wanted))


def _roles(graph: fx.Graph, known: dict[str, str]) -> dict[fx.Node, str]:
    """known: by the names of placeholders."""
    roles: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            role: str | None = known.get(node.name)
        elif multiplies(node):
            role = RESULT[_gemm_of(node, roles)]
        else:
            role = next((roles[read] for read in node.all_input_nodes if read in roles), None)
        if role is not None:
            roles[node] = role
    return roles


def multiplies(node: fx.Node) -> bool:
    """Whether it is a GEMM."""
    return is_q2(node, *GEMM_OPS, GROUPED_MM) or node.target in _MATMULS


def _gemm_of(node: fx.Node, roles: dict[fx.Node, str]) -> str:
    factors: Iterable[Any] = node.args[:2]
    if is_q2(node, *GEMM_OPS):
        factors = node.args[0], node.args[3]
    elif node.target is torch.ops.aten.addmm.default:
        factors = node.args[1:3]
    a, b = (roles[factor] for factor in factors)
    return _OF_OPERANDS[a, b]
