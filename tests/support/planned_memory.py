# SPDX-License-Identifier: Apache-2.0
"""The memory that a training step holds by Inductor's generated code: the code run on tensors
without data, with kernels that do nothing.

A buffer is alive while Python refers to it, as on a GPU. Workspaces of calls are counted, too.
Inductor's own estimate includes neither `buf = extern_kernels.f(...)` nor these workspaces. Not
counted: memory that torch's kernels allocate inside, and rounding by the caching allocator.
"""

from __future__ import annotations

import ast
import re
import sys
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._inductor.graph import GraphLowering
from torch._inductor.select_algorithm import extern_kernels
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import SCALED_AFTERWARDS, ScaleRule
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops import grouped_gemm
from q2compile.runtime_kernels.ops.table import SPECS
from tests.support.emulation.inductor import INDUCTOR_OPTIONS, emulate, serve_as_on

MIB = 2**20
_FILE = "<generated code>"


@dataclass
class Peak:
    """
    bytes   alive at the peak
    at      the line of generated code that runs then
    alive   the line that made it -> bytes
    """

    bytes: int = 0
    at: str = ""
    alive: dict[str, int] = field(default_factory=dict)

    def table(self, least: int = MIB) -> str:
        """Buffers alive at the peak, from ``least`` bytes on, in MiB, largest first."""
        rows = sorted(self.alive.items(), key=lambda row: -row[1])
        return "\n".join(f"{n / MIB:9.1f}  {line}" for line, n in rows if n >= least)


class _Enough(BaseException):
    """Both graphs are written, and need not run."""


def generated_step(capability: int, compiled: Any, **inputs: Any) -> tuple[str, str]:
    """The sources that Inductor writes of a compiled model's forward and backward for a GPU of this
    compute capability (90: 9.0). Neither is run.
    """
    sources: list[str] = []

    def written(source: str) -> None:
        sources.append(source)
        if len(sources) == 2:
            raise _Enough

    torch._dynamo.reset()
    ahead = {"force_non_lazy_backward_lowering": True}
    with (
        pytest.MonkeyPatch.context() as patch,
        inductor_config.patch(INDUCTOR_OPTIONS),
        functorch_config.patch(ahead),
        pytest.raises(_Enough),
    ):
        emulate(patch, capability)
        serve_as_on(patch, capability)
        patch.setattr(GraphLowering, "save_output_code", staticmethod(written))
        compiled(**inputs)
    forward, backward = sources
    return forward, backward


def peaks_of_step(forward: str, backward: str) -> tuple[Peak, Peak]:
    """The peaks of a training step's two generated graphs, by their sources.

    The parameters are alive all the time, and so are the incoming gradients in the backward, which
    autograd holds. The saved tensors of the forward are passed on; its other results are dropped
    before the backward, as by `model(...).loss.backward()`.
    """
    counted = _Allocations()
    with counted:
        first, second = _Code(forward, counted), _Code(backward, counted)
        inputs = {name: counted.made(name, *like) for name, like in first.inputs.items()}
        results = first.run([inputs[name] for name in first.names])
        before, counted.peak = counted.peak, Peak()
        tangents = [name for name in second.names if name.startswith("tangents")]
        saved = len(second.names) - len(tangents)
        args = list(results[len(results) - saved :])
        del results
        for name, arg in zip(second.names, args, strict=False):
            assert tuple(arg.shape) == second.inputs[name][0], name
        held = [counted.made(name, *second.inputs[name]) for name in tangents]
        second.run([*_emptied(args), *held])
    return before, counted.peak


def _emptied(args: list[Any]) -> list[Any]:
    """The same objects in a new list, so that who empties that holds them alone."""
    moved = list(args)
    args.clear()
    return moved


class _Allocations(TorchDispatchMode):
    """Counts storages from their first use until no reference is left."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = Peak()
        self._alive: dict[int, tuple[str, int, Any]] = {}  # who made it, bytes, its weak reference
        self._now = 0

    def made(self, by: str, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        with _disable_current_modes():
            tensor = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        self._add(tensor, by)
        return tensor

    def _add(self, tensor: torch.Tensor, by: str) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return
        self._alive[key] = by, size, weakref.ref(storage, lambda _: self._gone(key))
        self._now += size
        if self._now > self.peak.bytes:
            alive: dict[str, int] = {}
            for name, n, _ in self._alive.values():
                alive[name] = alive.get(name, 0) + n
            self.peak = Peak(self._now, _line(), alive)

    def _gone(self, key: int) -> None:
        self._now -= self._alive.pop(key)[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0
        if func is torch.ops.q2.grouped_gemm.default:
            with self:  # sees what it allocates for itself
                return grouped_gemm.grouped_gemm(*args)
        if func is torch.ops.aten._scaled_mm.out:
            return kwargs["out"]  # which has no kernel for tensors without data
        if "device" in kwargs:
            kwargs["device"] = "meta"
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor, _line())
        return out


class _Code:
    """One graph's generated code.

    names   of the arguments, in order
    inputs  their sizes, strides and dtypes, as the code's own benchmark makes them
    """

    def __init__(self, source: str, counted: _Allocations) -> None:
        tree = ast.parse(source)
        functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
        call = next(function for function in functions if function.name == "call")
        unpacked = call.body[0]
        assert isinstance(unpacked, ast.Assign) and isinstance(unpacked.targets[0], ast.Tuple)
        self.names = [name.id for name in unpacked.targets[0].elts if isinstance(name, ast.Name)]
        self.inputs = {
            name: (eval(size), eval(stride), getattr(torch, dtype))
            for name, size, stride, dtype in re.findall(
                r"^ +(\w+) = rand_strided\((\(.*?\)), (\(.*?\)), .*dtype=torch\.(\w+)\)",
                source,
                re.M,
            )
        }
        scope = {**_names(call), "torch": torch, "extern_kernels": extern_kernels}
        scope["_lines"] = source.splitlines()
        for device in ("cpu", "cuda"):
            scope[f"empty_strided_{device}"] = lambda *like: counted.made(_line(), *like)
        for text in re.findall(r"^q2_site_\d+ = .*$", source, re.M):
            sites = {
                "q2_Call": _Call,
                "q2_CallSite": _Site,
                "torch": torch,
            }
            name, _, value = text.partition(" = ")
            scope[name] = eval(value, sites)
            scope[name].counted = counted
        exec(compile(ast.Module([call], []), _FILE, "exec"), scope)
        self._call = scope["call"]

    def run(self, args: list[Any]) -> Any:
        """The graph's results. Empties ``args``, as generated code does."""
        return self._call(None, args)


class _Nothing:
    """A kernel, or a check: called, it does nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass

    run = __call__


class _Call:
    """A call of a q2 op, which holds a workspace while it is enqueued: four bytes for each block of
    16 whose scale has to wait for the largest (runtime_kernels/cuda/quantize/plan.py).
    """

    def __init__(
        self, op: str, args: tuple[Any, ...], wanted: tuple[int, ...], **named: Any
    ) -> None:
        given = (*args, *named.values())
        self.open = sum(arg is ... for arg in given)
        self.wanted, self.scheme = wanted, named.get("scheme")
        self.quantizes = op in SPECS
        self.operands = named.get("rowwise", False) + named.get("columnwise", True)

    def workspace(self, buffers: list[torch.Tensor]) -> int:
        if not self.quantizes:
            return 0
        spec = get_scheme(str(self.scheme))
        given = iter(buffers)
        outputs = [next(given) if wanted else None for wanted in self.wanted]
        codes = [o for o in outputs[: 3 * self.operands : 3] if o is not None]
        numbers = sum(output.numel() * (1 if spec.dequantized else 2) for output in codes)
        return numbers // 4 if ScaleRule.of(spec) in SCALED_AFTERWARDS else 0


class _Site:
    """Calls that end in one launch."""

    def __init__(self, *sites: Any, fixed: bool, products: Any = (), others: int = 0) -> None:
        self.sites, self.others = sites, others

    def __call__(self, *given: torch.Tensor) -> None:
        buffers = list(given[sum(site.open for site in self.sites) + self.others :])
        total = 0
        for site in self.sites:
            total += site.workspace(buffers[: sum(site.wanted)])
            buffers = buffers[sum(site.wanted) :]
        self.counted.made(_line(), (total,), (1,), torch.uint8)


def _names(call: ast.FunctionDef) -> dict[str, Any]:
    """Names that the code uses without assigning them: kernels, and all checks but two."""
    found: dict[str, Any] = {
        n.id: _Nothing()
        for n in ast.walk(call)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
    }
    found["device"] = torch.device
    found["reinterpret_tensor"] = torch._C._dynamo.guards._reinterpret_tensor
    return found


def _line() -> str:
    """The line of generated code that runs."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_filename != _FILE:
        frame = frame.f_back
    return frame.f_globals["_lines"][frame.f_lineno - 1].strip() if frame else "an argument"
