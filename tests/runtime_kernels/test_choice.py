# SPDX-License-Identifier: Apache-2.0
"""`choose`: the first kernel without a reason, with the reasons of those before it, and how long a
choice holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from q2compile.runtime_kernels import registry
from q2compile.runtime_kernels.choice import InGraph, choose, generated_kernel
from q2compile.runtime_kernels.kernel_states import AWAITED, KNOWN, Result, awaited_in, disable
from q2compile.runtime_kernels.registry import CPP, KERNELS, KernelWarning
from tests.support import forked
from tests.support.checked_forms import arguments_of

ARGS = arguments_of("gemm", "nvfp4_46_pow2")


def chosen(**how: Any) -> str:
    return choose("gemm", ARGS, **how).name


def test_the_first_without_a_reason_and_the_others_reasons(candidate) -> None:
    candidate("gemm", None, "second", unsupported=lambda *args: "too large")
    candidate("gemm", None, "first")
    disable(["gemm.first"], "option")
    found = choose("gemm", ARGS)
    assert found.name == CPP and found.kernel.function is not None
    reasons = dict(found.why_not)
    assert reasons.pop("second") == "too large" and reasons.pop("first") == "disabled by option"
    assert set(reasons.values()) <= {"it runs on cuda, the operands are on cpu"}


def test_generated_kernels_serve_only_calls_that_inductor_lowers() -> None:
    try:
        generated_kernel("gemm", "of a graph")(
            lambda graph, *args: None if graph.computed else "nothing to fuse"
        )
        assert chosen() == CPP and "of a graph" not in choose("gemm", ARGS).why_not
        assert chosen(graph=InGraph((6.0, 2.0))) == "of a graph"
        assert choose("gemm", ARGS, InGraph()).why_not["of a graph"] == "nothing to fuse"
    finally:
        KERNELS["gemm"][:] = [k for k in KERNELS["gemm"] if k.name != "of a graph"]
        KNOWN.choices.clear()


def test_a_choice_holds_until_something_is_known(candidate) -> None:
    """One question for each kind of call; a rejection, a disabled kernel or a result ends it."""
    asked = []
    candidate("gemm", None, unsupported=lambda *args: asked.append(args))
    for _ in range(3):
        assert choose("gemm", [a.clone() if isinstance(a, torch.Tensor) else a for a in ARGS])
    assert len(asked) == 1 and choose("gemm", ARGS) is choose("gemm", ARGS)
    KNOWN.checks["gemm", "another", torch.device("cpu")] = Result(None)
    assert chosen() == "broken" and len(asked) == 2
    with pytest.warns(KernelWarning):
        registry.reject(KERNELS["gemm"][0], ARGS, RuntimeError("it trapped"))
    assert chosen() == CPP and len(asked) == 2
    other = *ARGS[:-1], torch.float32
    assert choose("gemm", other).name == "broken"
    disable(["broken"], "option")
    assert choose("gemm", other).name == CPP


def test_a_choice_that_awaits_a_check_is_not_kept(candidate) -> None:
    def unsupported(*args: Any) -> str | None:
        begun = AWAITED.get()
        return "rejected" if begun is None else begun.update(check=args)

    candidate("gemm", None, unsupported=unsupported)
    with awaited_in({}):
        assert chosen() == "broken"
    assert chosen() == CPP


def test_sizes_that_are_symbols_have_no_kind(candidate) -> None:
    """Equal names mean other sizes in another graph."""
    asked = []
    candidate("gemm", None, unsupported=lambda *args: asked.append(args))
    symbolic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        codes = mode.from_tensor(ARGS[0], symbolic_context=symbolic)
        for _ in range(2):
            assert choose("gemm", (codes, *ARGS[1:])).name == "broken"
    assert len(asked) == 2


def test_a_process_that_compiles_has_the_generated_kernels() -> None:
    """In a process of its own, since tests import more than lowerings do."""
    code = (
        "from q2compile import lowering; lowering.register()\n"
        "from q2compile.runtime_kernels.choice import KERNELS\n"
        "print([k.name for k in KERNELS['quantize']], KERNELS['amax'][0].name)"
    )
    done = forked.run(code)
    found = "['fused', 'inductor', 'cuda', 'cpp', 'reference'] inductor\n"
    assert (done.returncode, done.stdout) == (0, found), done.stderr
