"""Inductor's Triton code for CUDA, made and compiled on a machine without a GPU.

Inductor believes that Triton has a CPU backend, and Triton that there is a GPU of some
architecture. Kernels are stubs; what comes back is their source.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
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
from q2compile.lowering import fp32
from q2compile.runtime_kernels.cuda import sass

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

    def compiled(self, capability: int, folder: Any) -> sass.Code:
        """Its machine code with the tile that is fixed in it."""
        fixed = re.search(r"config=(\{.*?\})", self.config)
        assert fixed, "no fixed tile"
        tile = eval(fixed.group(1))
        signature = eval(re.search(r"'signature': (\{.*?\})", self.source).group(1))  # type: ignore[union-attr]
        path = folder / f"{self.name}.py"
        path.write_text(
            _DECORATOR.sub("", self.source).replace("triton_helpers.set_driver_to_gpu()", "")
        )
        scope: dict[str, Any] = {}
        exec(compile(path.read_text(), str(path), "exec"), scope)
        names = list(signature)
        # What Inductor says of pointers it has allocated.
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if signature[name].startswith("*")
        }
        constants = {(names.index("XBLOCK"),): tile["XBLOCK"]}
        source = ASTSource(scope[self.name], signature, constexprs=constants, attrs=aligned)
        target = GPUTarget("cuda", capability, 32)
        built = triton.compile(source, target=target, options={"num_warps": tile["num_warps"]})
        return sass.disassemble(built.asm["cubin"])


def lower_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quantising ops become loops on a CPU as well."""
    why_not = lowering.why_not_lowered
    cuda = torch.device("cuda")
    monkeypatch.setattr(lowering, "why_not_lowered", lambda device, *names: why_not(cuda, *names))
    lowering.register()


def triton_kernels(
    monkeypatch: pytest.MonkeyPatch, capability: int, function: Callable, *args: Any
) -> list[Kernel]:
    """The kernels that torch.compile(function) launches for CUDA, in order of definition."""
    from torch._inductor.graph import GraphLowering

    lower_on_cpu(monkeypatch)
    sources: list[str] = []

    def init(self: fp32.Fp32, device: torch.device) -> None:
        self.ptx, self.converts_e2m1 = True, capability >= 100

    monkeypatch.setattr(fp32.Fp32, "__init__", init)
    monkeypatch.setattr(driver, "_active", _Driver(capability))
    monkeypatch.setattr(AsyncCompile, "triton", lambda self, *args, **kwargs: _Stub())
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(sources.append))
    torch._dynamo.reset()
    with inductor_config.patch(cpu_backend="triton", force_disable_caches=True):
        torch.compile(function)(*args)
    return [
        Kernel(name, code)
        for source in sources
        for name, code in re.findall(
            r"^(\w+) = async_compile\.triton\('\w+', '''\n(.*?)'''", source, re.S | re.M
        )
    ]
