# SPDX-License-Identifier: Apache-2.0
"""The self-check of grouped launches: the groups that training launches pass it, faults that the
calls by themselves do not have are found, and training goes on without a rejected group."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn

from q2compile.runtime_kernels import checks
from q2compile.runtime_kernels.choice import KERNELS, Choice, choose
from q2compile.runtime_kernels.cuda import call_site
from q2compile.runtime_kernels.cuda.call_site import CallSite
from q2compile.runtime_kernels.cuda.calls import MOST_OPERANDS
from q2compile.runtime_kernels.cuda.quantize import align_scales, grouped_check
from q2compile.runtime_kernels.cuda.quantize.grouped_check import Group
from q2compile.runtime_kernels.cuda.quantize.grouped_launch import ScaleProduct
from q2compile.runtime_kernels.registry import KernelWarning
from tests.support import emulation
from tests.support.checked_forms import BOTH, REQUANTIZED, ROWWISE, form
from tests.support.emulation.inductor import INDUCTOR_OPTIONS, emulate, serve_as_on
from tests.support.emulation.on_cpu import launches_on_cpu, matrix
from tests.support.faulty_checks import request as faulty
from tests.support.warned import texts

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
CPU = torch.device("cpu")
EDEN, RTN = "nvfp4_ms_eden_pow2", "nvfp4_46_pow2"
BATCHED = Group((form(ROWWISE, RTN),) * 2, (ScaleProduct((0, 2), (1, 2)),))
TAIL = Group(
    (form(BOTH, EDEN), form(REQUANTIZED, EDEN)),
    (ScaleProduct((0, 2), (1, 2)), ScaleProduct((0, 5), 0)),
    1,
)


# ---- the groups of training ----------------------------------------------------------------------


@pytest.fixture
def groups(monkeypatch, capability) -> Iterator[list[Group]]:
    """The groups in code generated for a GPU of this compute capability, which launches in the
    emulation."""
    found: list[Group] = []
    enqueue = CallSite.enqueue
    emulate(monkeypatch, capability)
    serve_as_on(monkeypatch, capability)
    monkeypatch.setattr(CallSite, "enqueue", enqueue)
    launches_on_cpu(monkeypatch, "sm_90a" if capability == 90 else "sm_100a")

    def noted(op, args):
        if op == grouped_check.GROUP:
            found.append(grouped_check.group_of(*args))
        return choose(op, args)

    monkeypatch.setattr(call_site, "choose", noted)
    with inductor_config.patch(INDUCTOR_OPTIONS):
        yield found


def step(recipe: str) -> list[torch.Tensor]:
    """y, dx and gradients of the parameters."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = nn.Linear(256, 256, dtype=torch.bfloat16)
    x = matrix(100, 256).requires_grad_()
    torch.manual_seed(1)
    y = torch.compile(layer, backend="quartet2", options={"recipe": recipe})(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize(
    "recipe, capability",
    [("quartet2", 90), ("quartet2", 100), ("nvfp4", 90), ("quartet", 100), ("quartet", 90)],
)
def test_groups_of_training_pass(recipe, capability, groups) -> None:
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("mm.dtype", lambda a, b, dtype: torch.zeros(len(a), b.shape[1]), "CPU")
        step(recipe)
    assert groups and max(len(group.calls) for group in groups) > 1
    for group in dict.fromkeys(groups):
        assert pickle.loads(pickle.dumps(group)) == group  # as it goes to the child process
        assert grouped_check.disagreement(CPU, group) is None, str(group)


# ---- faults --------------------------------------------------------------------------------------


def found(monkeypatch, group: Group, run: Callable) -> str | None:
    """The check's result for kernels that `run` launches."""
    launches_on_cpu(monkeypatch, "sm_90a")
    emulation.serve(monkeypatch, "sm_90a", run)

    def poisoned(size, stride, dtype):
        bytes_ = torch.full((*size, dtype.itemsize), 77, dtype=torch.uint8)
        return bytes_.view(dtype).view(size)

    monkeypatch.setattr("q2compile.runtime_kernels.cuda.calls.empty", poisoned)
    return grouped_check.disagreement(CPU, group)


@pytest.mark.parametrize("group", [BATCHED, TAIL], ids=str)
def test_right_launches_agree(monkeypatch, group) -> None:
    grids = []

    def run(launched, architecture, grid, *values):
        grids.append((launched.variant.file, grid[1]))
        emulation.emulate(launched, architecture, grid, *values)

    assert found(monkeypatch, group, run) is None
    batched = [y for file, y in grids if file == "rotate_quantize.cu"]
    assert batched == {BATCHED: [2, 2], TAIL: [1, 1, 1, 1]}[group]


def one_operand(launched, architecture, grid, *values):
    """A batched launch works on its first operand alone."""
    emulation.emulate(launched, architecture, (grid[0], 1), *values)


def first_twice(launched, architecture, grid, *values):
    """A faulty launch: it reads the first operand's parameters for all."""
    if grid[1] > 1:
        size = len(values) // MOST_OPERANDS
        values = values[:size] * MOST_OPERANDS
    emulation.emulate(launched, architecture, grid, *values)


def second_x_twice(launched, architecture, grid, *values):
    """A faulty launch: the first operand is made from the second x, and lies where it should."""
    if grid[1] > 1:
        values = (values[len(values) // MOST_OPERANDS], *values[1:])
    emulation.emulate(launched, architecture, grid, *values)


def test_a_wrong_batched_launch_is_found(monkeypatch) -> None:
    said = found(monkeypatch, BATCHED, one_operand)
    assert said is not None and "codes of call 2 differ from the reference" in said
    said = found(monkeypatch, BATCHED, first_twice)
    assert said is not None and "codes of call 2 differ from the reference" in said
    said = found(monkeypatch, BATCHED, second_x_twice)
    assert said is not None and "codes of call 1 differ from the reference" in said


FIELDS = len(align_scales.TailOperand._fields)


def test_a_wrong_tail_is_found(monkeypatch) -> None:
    """The tail of the last operand: its scales are not written, or its product is not."""

    def without(field: str) -> Callable:
        place = align_scales.TailOperand._fields.index(field)

        def run(launched, architecture, grid, *values):
            values = list(values)
            if launched.variant.file == "align_scales.cu":
                values[place] = 0 if field == "product" else values[place]
                if field == "of_raw_scales":
                    values[2 * FIELDS + place] = 0
            emulation.emulate(launched, architecture, grid, *values)

        return run

    said = found(monkeypatch, TAIL, without("of_raw_scales"))
    assert said is not None and " scales of call 2 differ" in said
    said = found(monkeypatch, TAIL, without("product"))
    assert said is not None and "products of the global scale of call 1 differ" in said


# ---- a rejected group ----------------------------------------------------------------------------


@pytest.mark.usefixtures("checked_here")
@pytest.mark.parametrize("capability", [90])
def test_training_goes_on_without_a_rejected_group(capability, groups, monkeypatch, tmp_path):
    """Its calls are launched one by one, with the same bits and one warning."""
    want, names = step("quartet2"), []
    run = emulation.emulate
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path))

    def chosen(op, args):
        if op != grouped_check.GROUP:
            return choose(op, args)
        asked = faulty("wrong", tmp_path, grouped_check.GROUPED, "quantize")
        assert checks.rejection(asked) is not None
        return Choice(KERNELS[op][-1], {})

    monkeypatch.setattr(call_site, "choose", chosen)

    def counted(launched, architecture, grid, *values):
        names.append(launched.variant.defines)
        run(launched, architecture, grid, *values)

    emulation.serve(monkeypatch, "sm_90a", counted)
    with pytest.warns(KernelWarning) as caught:
        got = step("quartet2")
    assert len(got) == len(want) and all(map(torch.equal, got, want))
    (said,) = texts(caught, KernelWarning)
    assert "kernel 'grouped_launch' of q2::quantize on cpu is rejected" in said
    assert names and not any(dict(defines).get("Q2_BATCH", 1) > 1 for defines in names)
