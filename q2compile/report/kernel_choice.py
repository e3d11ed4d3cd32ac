# SPDX-License-Identifier: Apache-2.0
"""Which kernels a matmul's three GEMMs run on this device, found by a dry run on fake tensors."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

import q2compile.linear.dense
import q2compile.linear.experts  # noqa: F401  registers q2::linear and its variants
from q2compile.config import Config
from q2compile.graph.storages import hint_of
from q2compile.lowering.inductor_kernels import rows  # noqa: F401  registers Inductor's kernels
from q2compile.lowering.inductor_kernels.fusion_gain import ComputedOperand
from q2compile.recipes.recipe import GEMMS
from q2compile.report.row import Row
from q2compile.runtime_kernels.choice import InGraph, choose
from q2compile.runtime_kernels.kernel_states import awaited_in
from q2compile.runtime_kernels.ops.table import GEMM, SEED, SPECS, QuantizerCall
from q2compile.runtime_kernels.registry import SCALED_MM, bound
from q2compile.torch_internals.private_names import FakeTensorMode, TorchDispatchMode

_GRAPHS = InGraph(ComputedOperand()), InGraph()


class _Recorder(TorchDispatchMode):
    """Notes each q2 op that is called and the kernel that would serve it.

    lowers: Inductor compiles the graph, and may have a kernel of its own for an op: "inductor" if
    it is always used, "inductor or cuda" if it depends on the producer of the operand."""

    def __init__(self, lowers: bool) -> None:
        super().__init__()
        self.lowers = lowers
        self.used: dict[str, str] = {}
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, op = func.name().partition("::")
        if namespace == "q2" and op != SEED:
            all_args = bound(op, args, kwargs or {})
            label = QuantizerCall.of(op, all_args).label if op in SPECS else op
            names = [choose(op, all_args).name]
            if self.lowers:
                with awaited_in({}):  # a generated kernel that no graph uses need not be checked
                    names = [choose(op, all_args, graph).name for graph in _GRAPHS]
            self.used[label] = " or ".join(dict.fromkeys(names))
            self.calls[label] += 1
        return func(*args, **(kwargs or {}))


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


@lru_cache
def kernels_used(
    gemms: tuple[str, str, str],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    lowers: bool,
) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
    """{"fprop": "quantize rowwise: reference, gemm: reference", ...} and how often each op is
    called, {"fprop": {"quantize rowwise": 2, "gemm": 1}, ...}, for a linear of ``shape`` (T, N, K),
    or (E, T, N, K) for experts.

    gemms: the recipe's texts. A GEMM in bf16 is torch's own: "torch".
    lowers: Inductor compiles the graph.
    """
    *experts, t, n, k = shape
    used, calls = {}, {}
    # With gradients, whatever the mode of the call that is compiled; and with tensors saved as they
    # are, also inside of an eager checkpoint, which counts what is saved and computes it again.
    as_it_is = saved_tensors_hooks(_same, _same)
    with torch.inference_mode(False), torch.enable_grad(), as_it_is, FakeTensorMode():
        shapes = ((t, k), (*experts, n, k), (t, n))
        x, w, dy = (torch.empty(s, dtype=dtype, device=device) for s in shapes)
        offs = torch.empty(experts, dtype=torch.int32, device=device)
        for name, text in zip(GEMMS, gemms, strict=True):
            x.requires_grad_(name == "dgrad")
            w.requires_grad_(name == "wgrad")
            with _Recorder(lowers) as forward:
                y = (
                    torch.ops.q2.grouped_linear(x, w, offs, *gemms, 0)
                    if experts
                    else torch.ops.q2.linear(x, w, None, *gemms, 0)
                )
            recorder = forward
            if name != "fprop":
                with _Recorder(lowers) as recorder:
                    torch.autograd.grad(y, x if name == "dgrad" else w, dy)
            ops = ", ".join(f"{op}: {kernel}" for op, kernel in recorder.used.items())
            used[name] = ops if text != "bf16" else "torch"
            calls[name] = dict(recorder.calls) if text != "bf16" else {}
    return used, calls


def set_kernels(row: Row, config: Config) -> None:
    """Fill in `kernels_used` for a row that was taken."""
    # A size that data decide, such as an expert's tokens, has no hint: one row then.
    shape = tuple(hint_of(size, 1) for size in row.shape)
    gemms = (row.fprop, row.dgrad, row.wgrad)
    lowers = config.inner == "inductor"
    dtype = getattr(torch, row.dtype)
    row.kernels, row.calls = kernels_used(gemms, shape, dtype, row.device, lowers)
    in_e4m3 = [
        name
        for name, text in zip(GEMMS, gemms, strict=True)
        if f"{GEMM}: {SCALED_MM}" in row.kernels[name] and "mxfp4" in text
    ]
    if in_e4m3:
        row.rounded = (
            f"{', '.join(in_e4m3)} in e4m3, which rounds blocks over 2^14 below the largest of "
            "their operand"
        )
