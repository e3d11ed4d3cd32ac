# SPDX-License-Identifier: Apache-2.0
"""Inductor's Triton code for CUDA, generated and compiled on a machine without a GPU.

Inductor believes that Triton has a CPU backend, and Triton that there is a GPU of some
architecture. Kernels are stubs; functions return their source.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import triton
from torch._inductor.async_compile import AsyncCompile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from q2compile import lowering
from q2compile.lowering.inductor_kernels import fp32, rows
from q2compile.runtime_kernels import choice, registry
from q2compile.runtime_kernels.cuda import (
    calls,
)
from q2compile.runtime_kernels.cuda.call_site import CallSite
from q2compile.runtime_kernels.cuda.gemm import (
    scaled_mm,
)
from q2compile.runtime_kernels.kernel_states import KNOWN
from q2compile.torch_internals.patches import patched
from tests.support import disassemble

_DECORATOR = re.compile(r"@triton_heuristics\.\w+\(.*?\n\s*\)\n(?=\s*@triton.jit)", re.S)


class _Driver:
    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target


class _Stub:
    def run(self, *args: Any, **kwargs: Any) -> None:
        pass


@dataclass(frozen=True)
class Kernel:
    """One kernel of the generated code."""

    name: str
    source: str

    @property
    def config(self) -> str:
        """The arguments of its heuristics."""
        found = _DECORATOR.search(self.source)
        assert found
        return found.group()

    @property
    def tile(self) -> dict[str, int]:
        """The tile that is fixed in the kernel: XBLOCK, num_warps, and so on."""
        fixed = re.search(r"config=(\{.*?\})", self.config)
        assert fixed, "no fixed tile"
        return eval(fixed.group(1))

    @property
    def arguments(self) -> list[str]:
        """Names of the pointers and sizes that a launch gives, in order."""
        return [name for name, kind in self._signature.items() if kind != "constexpr"]

    @property
    def _signature(self) -> dict[str, str]:
        return eval(re.search(r"'signature': (\{.*?\})", self.source).group(1))  # type: ignore[union-attr]

    def compiled(self, capability: int, folder: Any) -> disassemble.Code:
        """The kernel's machine code with its tile."""
        return disassemble.disassemble(self.built(capability, folder).asm["cubin"])

    def built(self, capability: int, folder: Any) -> triton.compiler.CompiledKernel:
        """The kernel as Triton compiles it, with its tile."""
        tile, signature = self.tile, self._signature
        path = folder / f"{self.name}.py"
        path.write_text(
            _DECORATOR.sub("", self.source).replace("triton_helpers.set_driver_to_gpu()", "")
        )
        scope: dict[str, Any] = {}
        exec(compile(path.read_text(), str(path), "exec"), scope)
        names = list(signature)
        # Inductor's assumptions about pointers that it has allocated.
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if signature[name].startswith("*")
        }
        constants = {(names.index(n),): size for n, size in tile.items() if n in names}
        source = ASTSource(scope[self.name], signature, constexprs=constants, attrs=aligned)
        target = GPUTarget("cuda", capability, 32)
        return triton.compile(source, target=target, options={"num_warps": tile["num_warps"]})


def lower_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quantizing ops become Inductor kernels on a CPU as well."""
    why_not = rows.why_not_generated
    cuda = torch.device("cuda")
    monkeypatch.setattr(rows, "why_not_generated", lambda device, call: why_not(cuda, call))
    KNOWN.choices.clear()
    lowering.register()


def emulate(monkeypatch: pytest.MonkeyPatch, capability: int) -> list[str]:
    """Lets Inductor write for a GPU of this compute capability (90: 9.0). Returns a list to which
    the source of each graph it compiles is added. To be used with INDUCTOR_OPTIONS."""
    from torch._inductor.graph import GraphLowering

    lower_on_cpu(monkeypatch)
    sources: list[str] = []

    def init(self: fp32.Fp32, device: torch.device) -> None:
        self.ptx, self.converts_e2m1 = True, capability >= 100

    monkeypatch.setattr(fp32.Fp32, "__init__", init)
    monkeypatch.setattr(driver, "_active", _Driver(capability))
    monkeypatch.setattr(AsyncCompile, "triton", lambda self, *args, **kwargs: _Stub())
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(sources.append))
    return sources


INDUCTOR_OPTIONS = {"cpu_backend": "triton", "force_disable_caches": True}


def triton_kernels(
    monkeypatch: pytest.MonkeyPatch, capability: int, function: Callable, *args: Any
) -> list[Kernel]:
    """The kernels that torch.compile(function) launches for CUDA, in order of definition, compiled
    with our patches."""
    sources = emulate(monkeypatch, capability)
    torch._dynamo.reset()
    with inductor_config.patch(INDUCTOR_OPTIONS), patched():
        torch.compile(function)(*args)
    return [
        Kernel(name, code)
        for source in sources
        for name, code in re.findall(
            r"^(\w+) = async_compile\.triton\('\w+', '''\n(.*?)'''", source, re.S | re.M
        )
    ]


def serve_as_on(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    """Passes and lowerings see the kernels of such a GPU. Executed ops still run on the CPU, by the
    reference."""

    def why_not(kernel: choice.Kernel, *args: Any, graph: Any = None) -> str | None:
        if kernel.device_type in (None, "cuda"):
            unchecked = replace(kernel, device_type=None, check=choice.nothing)
            return ask(unchecked, *args, graph=graph)
        return "not of CUDA"

    def run_on_cpu(chosen: choice.Choice, args: tuple, failed: tuple = ()) -> Any:
        own = next(k for k in choice.kernels(chosen.kernel.op) if ask(k, *args) is None)
        return run(choice.Choice(own, {}), args, failed)

    run, ask = registry.run_chosen, choice.Kernel.why_not
    monkeypatch.setattr(registry, "run_chosen", run_on_cpu)
    KNOWN.choices.clear()
    monkeypatch.setattr(choice.Kernel, "why_not", why_not)
    monkeypatch.setattr(CallSite, "enqueue", lambda site, given: None)
    monkeypatch.setattr(calls, "unsupported", lambda index: None)
    monkeypatch.setattr(scaled_mm, "unsupported", lambda index: None)
    found = divmod(capability, 10)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: found)
