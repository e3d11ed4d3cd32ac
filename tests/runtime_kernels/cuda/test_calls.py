# SPDX-License-Identifier: Apache-2.0
"""Calls: the outputs that they declare, and errors before a launch. test_cuda_emulated.py and
tests/lowering/test_launches.py show that they launch the right kernels."""

from __future__ import annotations

import ctypes
import re
import struct
from pathlib import Path

import pytest
import torch

from q2compile.runtime_kernels.cuda.calls import (
    BoundCall,
    BufferSlot,
    Launching,
    LaunchPlan,
    LaunchStep,
    OperandLayout,
    Output,
)
from q2compile.runtime_kernels.cuda.jit import launch
from q2compile.runtime_kernels.cuda.jit.launch import Launch
from q2compile.runtime_kernels.cuda.quantize import plan, quantizers
from q2compile.runtime_kernels.cuda.quantize.plan import OperandSlots, quantizer_plan
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import SOURCES, RotatingKernel
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.numerics.transforms import FIXED_SIGN_SEED, get_transform
from q2compile.torch_internals.private_names import FakeTensorMode
from tests.support.emulation import serve

BF16 = SOURCES[torch.bfloat16]
SR, EDEN = "nvfp4_sr_pow2", "nvfp4_ms_eden_pow2"


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4)])
def test_outputs_are_contiguous(shape) -> None:
    output = Output(shape, torch.float32)
    like = torch.empty(shape)
    assert output.strides == like.stride() and output.bytes == like.nbytes


@pytest.fixture
def launched(monkeypatch) -> list[tuple[int, ...]]:
    """The fields of each launch; addresses are real ones of the CPU."""
    serve(monkeypatch, "sm_90a")
    seen: list[tuple[int, ...]] = []

    def bind(launch, index, grid, values, slots):
        return lambda stream, addresses: seen.append(
            tuple(addresses[slots[v]] if v in slots else v for v in values)
        )

    monkeypatch.setattr(Launch, "bind", bind)
    return seen


def step(*values) -> LaunchStep:
    return LaunchStep(Launch(None, "", 32), (1, 1), values)  # type: ignore[arg-type]


def test_an_output_that_nobody_wants_lies_in_the_workspace(launched) -> None:
    """After the workspace of the steps, aligned to 16 bytes. The given buffers keep their order."""
    outputs = (Output((3,), torch.uint8), Output((4,), torch.float32), Output((), torch.float32))
    call = LaunchPlan(
        1,
        outputs,
        20,
        (
            step(
                BufferSlot(0),
                BufferSlot(1),
                BufferSlot(2, 4),
                BufferSlot(3),
                BufferSlot(4),
                BufferSlot(4, 8),
                7,
            ),
        ),
    )
    x, codes, unit = torch.empty(9), torch.empty(3, dtype=torch.uint8), torch.empty(())
    BoundCall(call, 0, (True, False, True))([x, codes, unit])
    ((at_x, at_codes, at_scales, at_unit, workspace, further, number),) = launched
    assert at_x == x.data_ptr() and at_codes == codes.data_ptr()
    assert at_unit == unit.data_ptr() and further == workspace + 8 and number == 7
    assert at_scales == workspace + 32 + 4


def test_what_the_driver_is_given(monkeypatch) -> None:
    """The parameter struct as C lays it out, with the addresses of each launch, on its stream."""
    layout, seen = "iPPqbP", []

    def enqueue(config, function, parameters, extra) -> int:
        fields = ctypes.string_at(parameters[0], struct.calcsize("@" + layout))
        seen.append((config[0].stream, function, *struct.unpack("@" + layout, fields)))
        return 0

    arguments = (
        *(ctypes.POINTER(launch._Config), ctypes.c_void_p),
        *(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p),
    )
    driver = ctypes.CDLL(None)
    driver.cuLaunchKernelEx = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(enqueue)  # type: ignore[attr-defined]
    monkeypatch.setattr(launch, "libcuda", lambda: driver)
    of = Launch(None, layout, 32, loaded={0: launch._Loaded(77, None, True)})  # type: ignore[arg-type]
    highest = 2**64 - 1
    bound = of.bind(
        0,
        (1, 1),
        (-3, BufferSlot(0), BufferSlot(2), 2**40, 5, BufferSlot(0)),
        {BufferSlot(0): 2, BufferSlot(2): 0},
    )
    bound(9, (1, 2, highest))
    bound(9, (3, 2, 4))
    bound(0, (3, 2, 5))
    assert seen == [
        (9, 77, -3, highest, 1, 2**40, 5, highest),
        (9, 77, -3, 4, 3, 2**40, 5, 4),
        (None, 77, -3, 5, 3, 2**40, 5, 5),  # ctypes' word for stream 0
    ]


def test_operands_are_brought_into_form(launched) -> None:
    seen = []

    def call(*args) -> LaunchPlan:
        seen.append(args)
        return LaunchPlan(2, (), 0, ())

    kernel = Launching(call, {0: OperandLayout.ROWS_OR_COLUMNS, 1: OperandLayout.ALIGNED})
    across, odd = torch.empty(8, 8).t(), torch.empty(65)[1:]
    for x in (across, torch.empty(8, 8, 2)[..., 0]):
        kernel(x, odd)
    (x, aligned), (copied, _) = seen
    assert x is across and aligned.data_ptr() % 16 == 0 and copied.is_contiguous()


def test_more_elements_than_are_counted(monkeypatch) -> None:
    monkeypatch.setattr(plan, "multiprocessors", lambda index: 1)

    def call(scheme: str, rows: int) -> None:
        spec, rotation = get_scheme(scheme), get_transform("rht128")
        extents = (1 << 17, rows, 1 << 17, 0, 0)
        along = (OperandSlots(BufferSlot(1), 0, 2), None)
        kernel = RotatingKernel(BF16, rotation, spec, True, False)
        quantizer_plan(0, kernel, extents, along, 2, x=(BufferSlot(0), 0, 0))

    for scheme, most in ((SR, 35), (EDEN, 36)):
        rows = 1 << (most - 17)
        call(scheme, rows)
        message = (
            rf"q2::quantize .* of {rows + 1} x {1 << 17} elements by {scheme}: "
            rf".* at most 2\^{most} elements\. Quantize it in parts"
        )
        with pytest.raises(ValueError, match=message):
            call(scheme, rows + 1)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("step, far", [((1 << 31) - 1, False), (1 << 31, True)])
def test_rows_that_lie_too_far_apart(dim, step, far) -> None:
    sizes, strides = ((2, 32), (step, 1)) if dim == 0 else ((32, 2), (1, step))
    with FakeTensorMode():
        x = torch.empty_strided(sizes, strides, dtype=torch.bfloat16)
    assert quantizers.rows_too_far_apart(x) == far


def test_fixed_signs_have_no_tensor(monkeypatch) -> None:
    """One made at a first use, in a CUDA graph's warm-up, would lie in the graph's memory."""
    monkeypatch.setattr(plan, "multiprocessors", lambda index: 1)
    kernel = RotatingKernel(BF16, get_transform("rht128_fixed"), get_scheme(EDEN), True, False)
    call = quantizer_plan(
        *(0, kernel, (128, 128, 128, 0, 0), (OperandSlots(BufferSlot(1), 0, 2), None), 2),
        x=(BufferSlot(0), 0, 0),
    )
    # Behind the operand's three: codes, raw scales, largest, global scale, and both seeds.
    signs, random_bits = call.steps[0].values[7:9]
    assert signs == 0 and random_bits == BufferSlot(1)
    source = Path(plan.__file__).parents[1] / "csrc" / "include" / "tile.cuh"
    fixed = re.search(r"kFixedSignSeed = (\d+);", source.read_text())
    assert fixed and int(fixed.group(1)) == FIXED_SIGN_SEED


@pytest.mark.gpu
def test_first_use_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver of CUDA 12.3 or later loads the kernel, whose launch is recorded. An older one gets
    an error that says what to do."""

    def fresh(number: int) -> launch.Launch:
        return launch.launch("zero_rows.cu", "PPqqi", 256, defines={"Q2_UNUSED": number})

    rows = torch.tensor([96], dtype=torch.int32, device="cuda")
    out, graph = torch.ones(128, 64, device="cuda"), torch.cuda.CUDAGraph()
    slots = {BufferSlot(0): 0, BufferSlot(1): 1}
    values = (*slots, out.nbytes, 256, 1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        bound = fresh(1).bind(0, (2, 1), values, slots)
        bound(torch.cuda.current_stream().cuda_stream, (out.data_ptr(), rows.data_ptr()))
    assert out.all()
    graph.replay()
    assert out[:96].all() and not out[96:].any()

    monkeypatch.setattr(launch, "driver_cuda", lambda: (12, 2))
    # Raised inside the capture, which then ends in an error of its own.
    with (
        pytest.raises(launch.LaunchError, match="run the model once with these sizes"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        fresh(2).bind(0, (2, 1), values, slots)
