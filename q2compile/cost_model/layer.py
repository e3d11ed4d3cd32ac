# SPDX-License-Identifier: Apache-2.0
"""A linear layer, and the graphs that the passes make of it for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from q2compile.graph.nodes import GEMM_OPS, choice_of, is_q2
from q2compile.graph.quantizers import quantizers
from q2compile.linear.autograd import LinearFunction
from q2compile.linear.dense import quantize_weight
from q2compile.lowering.inductor_kernels import rows  # noqa: F401  registers Inductor kernels
from q2compile.lowering.inductor_kernels.fusion_gain import ComputedOperand
from q2compile.passes import PassConditions, passes_over
from q2compile.recipes.recipe import GEMMS, Recipe
from q2compile.runtime_kernels.choice import InGraph
from q2compile.runtime_kernels.kernel_states import assumed_gpu
from q2compile.runtime_kernels.ops.table import GROUPED_MM
from q2compile.runtime_kernels.registry import INDUCTOR
from q2compile.torch_internals.dynamo import compiling_apart
from q2compile.torch_internals.partitioner import MinCut
from q2compile.torch_internals.private_names import FakeTensorMode

# The result of each GEMM.
RESULT = {"fprop": "y", "dgrad": "x", "wgrad": "w"}
_OF_OPERANDS = {operands: name for name, operands in GEMMS.items()}
# Where their factors are among the arguments.
_MATMULS: dict[Any, tuple[int, int]] = {
    torch.ops.aten.mm.default: (0, 1),
    torch.ops.aten.addmm.default: (1, 2),
}
_GPU = torch.device("cuda")
# T, N, K and experts of the layer that is traced. Its T is of whole chunks, and above the size from
# which on no chunk is filled up (`linear.autograd.of_rows`).
_T, _N, _K, _EXPERTS = 1024, 512, 256, 2
# Major compute capabilities. The former also stands for what is older.
HOPPER, BLACKWELL = 9, 10


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer, how many matmuls share its x, and how often fprop's codes of w are computed
    in a forward and backward.

    grouped: its GEMMs are grouped ones.  x_fuses: something computes x, that its quantizer may be
    part of.  capability: major, of the GPU."""

    t: Any
    n: Any
    k: Any
    experts: int = 1
    x_users: int = 1
    w_quantized: int = 1
    grouped: bool = False
    bias: bool = False
    x_fuses: bool = True
    capability: int = BLACKWELL

    @property
    def emulated(self) -> bool:
        """True if the GPU has no fp4 tensor cores, so that GEMMs multiply dequantized operands."""
        return self.capability < BLACKWELL

    def elements(self, role: str) -> Any:
        """Elements of x, w, dy, or y."""
        n, k, t = self.n, self.k, self.t
        return {"x": t * k, "w": self.experts * n * k, "dy": t * n, "y": t * n}[role]

    def users(self, role: str) -> int:
        return self.x_users if role == "x" else 1

    @property
    def flops(self) -> Any:
        return 2 * self.t * self.n * self.k


class TracedGraph(NamedTuple):
    """A forward or a backward after all passes. roles: "x", "w", "dy" or "y" for each node that
    holds the values or the codes of one. fused: quantizers that Inductor fuses into what computes
    their operand, if something does."""

    graph: fx.Graph
    roles: dict[fx.Node, str]
    fused: set[fx.Node]


class _Context:
    """The part of autograd's context that our functions use."""

    def __init__(self, *needs: bool) -> None:
        self.needs_input_grad = needs
        self.saved_tensors: tuple[torch.Tensor, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


@lru_cache(maxsize=256)
def traced(
    recipe: Recipe, gemms: tuple[str, ...], grouped: bool, bias: bool, cached: bool, capability: int
) -> list[TracedGraph]:
    """The forward of a layer, and its backward if one is wanted, after the passes of training or
    of inference. cached: the codes of w are an input. capability: major, of the GPU."""
    with assumed_gpu((max(capability, HOPPER), 0)):
        graphs, known = layer_graphs(recipe, gemms, grouped, bias, cached)
        return [TracedGraph(m.graph, _roles(m.graph, known), _fused(m.graph)) for m in graphs]


def layer_graphs(
    recipe: Recipe,
    gemms: tuple[str, ...],
    grouped: bool,
    bias: bool,
    cached: bool = False,
    *,
    device: torch.device = _GPU,
    decompositions: Mapping[Any, Callable] | None = None,
    fuses: bool = False,
) -> tuple[list[fx.GraphModule], dict[str, str]]:
    """These graphs, and the roles of their nodes by name. fuses: x and dy are computed in them."""
    wanted = PassConditions(recipe.random_forward, False, False, fuse_rotations=False)
    with compiling_apart(), torch.inference_mode(False):
        joint, known = _joint(
            *(recipe, gemms, grouped, bias, cached and recipe.fprop is not None),
            *(device, decompositions, torch.relu if fuses else lambda x: x),
        )
        if len(gemms) == 1:
            graphs = [joint]
        else:
            _run_passes("joint", joint.graph, wanted)
            known |= {node.name: role for node, role in _roles(joint.graph, known).items()}
            graphs = [*MinCut()(joint, [], num_fwd_outputs=1)]
        for module in graphs:
            _run_passes("post_grad", module.graph, wanted)
    return graphs, known


def _fused(graph: fx.Graph) -> set[fx.Node]:
    """The quantizers that Inductor fuses into the producer of their operand. Not if something else
    reads that, too."""
    found = dict(quantizers(graph))
    return {
        node
        for node, call in found.items()
        if sum(user in found for user in call.x.users) == 1
        and choice_of(call.spec.name, call.positional, InGraph(ComputedOperand())).name == INDUCTOR
    }


def _joint(
    recipe: Recipe,
    gemms: tuple[str, ...],
    grouped: bool,
    bias: bool,
    cached: bool,
    device: torch.device,
    decompositions: Mapping[Any, Callable] | None,
    computed: Callable[[Any], Any],
) -> tuple[fx.GraphModule, dict[str, str]]:
    """Forward and backward in one graph, as AOTAutograd makes it, and the roles of its inputs."""
    ctx = _Context("dgrad" in gemms, "wgrad" in gemms, bias and "wgrad" in gemms)
    is_trained, experts = len(gemms) > 1, _EXPERTS if grouped else 1

    def joint(x: Any, w: Any, third: Any, dy: Any, *codes: Any) -> list[torch.Tensor]:
        added, ends = (None, third) if grouped else (third, None)
        y = LinearFunction.forward(ctx, computed(x), w, added, ends, recipe, 0, *codes)
        grads = LinearFunction.backward(ctx, computed(dy)) if is_trained else ()
        return [y, *(grad for grad in grads if grad is not None)]

    with FakeTensorMode(), torch.no_grad():
        shapes = (_T, _K), (experts * _N, _K), (_T, _N), (_N,)
        x, w, dy, third = (torch.empty(s, device=device, dtype=torch.bfloat16) for s in shapes)
        if grouped:
            third = torch.empty(experts, device=device, dtype=torch.int32)
        both = is_trained and recipe.transposes_codes and not grouped
        fprop = recipe.fprop if cached else None
        codes = quantize_weight(w, str(fprop.b), w.dtype, both) if fprop else []
        module = make_fx(joint, decompositions)(
            x, w, third if grouped or bias else None, dy, *codes
        )
    known: dict[str, str] = {}
    roles = ("x", "w", "bias or ends", "dy", *("w" for _ in codes))
    for i, (role, node) in enumerate(
        zip(roles, module.graph.find_nodes(op="placeholder"), strict=True)
    ):
        node.name = node.target = f"tangents_{i}" if role == "dy" and is_trained else f"primals_{i}"
        known[node.name] = role
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
            role = RESULT[gemm_of(node, roles)]
        else:
            role = next((roles[read] for read in node.all_input_nodes if read in roles), None)
        if role is not None:
            roles[node] = role
    return roles


def multiplies(node: fx.Node) -> bool:
    """Whether it is a GEMM."""
    return is_q2(node, *GEMM_OPS, GROUPED_MM) or node.target in _MATMULS


def gemm_of(node: fx.Node, roles: dict[fx.Node, str]) -> str:
    """Which one a GEMM is."""
    a, b = (0, 3) if is_q2(node, *GEMM_OPS) else _MATMULS.get(node.target, (0, 1))
    factors: Any = node.args[a], node.args[b]
    return _OF_OPERANDS[roles[factors[0]], roles[factors[1]]]
