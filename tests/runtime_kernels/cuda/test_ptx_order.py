# SPDX-License-Identifier: Apache-2.0
"""Launches that may begin before the one ahead of them has ended (programmatic dependent launch),
in the PTX interpreter (tests/support/ptx/order.py): the rules on small kernels by hand, then real
launches, as they are and with faults in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from q2compile.runtime_kernels.cuda import other_ops
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.runtime_kernels.cuda.quantize import plan
from q2compile.runtime_kernels.ops.table import QuantizerCall
from tests.support import ptx
from tests.support import quantizer_calls as calls
from tests.support.emulation.on_cpu import assert_same_bits, matrix, pretend_device
from tests.support.fault import Fault
from tests.support.faults_of_launches import OF_LAUNCHES
from tests.support.ptx import run_kernel
from tests.support.ptx.order import UNKNOWN, OrderedLaunch, OrderFault
from tests.support.quantizer_calls import SEEDS

q2 = torch.ops.q2
WAIT, TRIGGER = "griddepcontrol.wait;\n", "griddepcontrol.launch_dependents;\n"
LOAD, STORE = "ld.global.u32 %r2, [%rd3];\n", "st.global.u32 [%rd3], %r1;\n"
FIRST_HALF = "setp.lt.u32 %p1, %r1, 32;\n@%p1 griddepcontrol.wait;\n"
COPY = "mov.u32 %r3, place;\nmad.lo.s32 %r3, %r1, 16, %r3;\nmul.wide.u32 %rd2, %r1, 16;\n"
COPY += "add.s64 %rd4, %rd1, %rd2;\ncp.async.cg.shared.global [%r3], [%rd4], 16;\n"
COPY += "cp.async.commit_group;\n"
ARRIVE = "cp.async.wait_group 0;\n"
TOO_EARLY = r"second: byte 0x\w+ is {} before griddepcontrol\.wait, and first, .* {} it"


class SmallStream:
    """64 threads a launch, each with a word of `memory`, or of `other` memory."""

    def __init__(self) -> None:
        self.memory, self.other = np.zeros((2, 256), np.uint32)
        self.last = UNKNOWN

    def launch(self, name: str, body: str, *, overlaps: bool = True, other: bool = False) -> None:
        array = self.other if other else self.memory
        first = array.ctypes.data
        self.last = OrderedLaunch(name, self.last.before_next() if overlaps else ())
        kernel, windows = ptx.small_kernel(body), [(first, first + array.nbytes)]
        run_kernel(kernel, 64, (1, 1), first.to_bytes(8, "little"), 0, windows, self.last)


@pytest.mark.parametrize(
    "first, second, message",
    [
        (TRIGGER + STORE, WAIT + LOAD, None),
        (TRIGGER + LOAD, LOAD + WAIT, None),
        (TRIGGER + STORE, LOAD + WAIT, TOO_EARLY.format("read", "writes")),
        (STORE, LOAD + WAIT, TOO_EARLY.format("read", "writes")),
        (TRIGGER + STORE, STORE + WAIT, TOO_EARLY.format("written", "writes")),
        (TRIGGER + LOAD, STORE + WAIT, TOO_EARLY.format("written", "reads")),
        (TRIGGER + STORE, COPY + WAIT + ARRIVE, TOO_EARLY.format("read", "writes")),
        (TRIGGER + STORE, WAIT + COPY + ARRIVE, None),
        (TRIGGER + STORE, "", "second: 64 threads end without griddepcontrol.wait, and first"),
        (STORE, "", "second: 64 threads end without griddepcontrol.wait, and first"),
        (STORE, FIRST_HALF, "second: 32 threads end without griddepcontrol.wait"),
        (STORE, FIRST_HALF + LOAD + WAIT, TOO_EARLY.format("read", "writes")),
    ],
)
def test_two_launches(first, second, message) -> None:
    """A launch with the attribute behind one without; message None: no fault."""
    stream = SmallStream()
    stream.launch("first", first, overlaps=False)
    if message is None:
        return stream.launch("second", second)
    with pytest.raises(OrderFault, match=message):
        stream.launch("second", second)


def test_without_the_attribute_all_earlier_launches_have_ended() -> None:
    stream = SmallStream()
    stream.launch("first", TRIGGER + STORE, overlaps=False)
    stream.launch("second", LOAD + STORE, overlaps=False)


def test_other_memory_may_be_read_and_written_early() -> None:
    stream = SmallStream()
    stream.launch("first", TRIGGER + STORE, overlaps=False)
    stream.launch("second", LOAD + STORE + WAIT, other=True)


def test_what_is_ahead_of_a_call_may_have_written_anything() -> None:
    with pytest.raises(OrderFault, match="a kernel ahead of the call, .* may read or write it"):
        SmallStream().launch("second", LOAD + WAIT)
    SmallStream().launch("second", WAIT + LOAD)


def test_a_launch_behind_one_that_has_not_waited_yet() -> None:
    """If the second allows the third to begin before it has waited itself, the first may still run
    beside the third."""
    for second, is_fault in ((TRIGGER + WAIT, True), (WAIT + TRIGGER, False), (WAIT, False)):
        stream = SmallStream()
        stream.launch("first", TRIGGER + STORE, overlaps=False)
        stream.launch("second", second)
        if is_fault:
            with pytest.raises(OrderFault, match="third: .* is read .*, and first, .* writes it"):
                stream.launch("third", LOAD + WAIT)
        else:
            stream.launch("third", LOAD + WAIT)


# Launches of the package ----------------------------------------------------------------------


@pytest.fixture
def on_blackwell(monkeypatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings", exc_type=ImportError)
    ptx.serve(monkeypatch, "sm_100a")
    pretend_device(monkeypatch, room=228 * 1024, multiprocessors=1)


def exact() -> QuantizerCall:
    return calls.one(matrix(40, 64), SEEDS[0], "nvfp4_sr", "rht16", False)


def exact_with_amax() -> QuantizerCall:
    x = matrix(40, 72)
    return calls.plain(x, q2.amax(x), SEEDS[0], "nvfp4_46")


def aligned() -> QuantizerCall:
    return calls.one(matrix(40, 128), SEEDS[0], "nvfp4_ms_eden_pow2", "rht128", False)


def finalized() -> QuantizerCall:
    scheme = "nvfp4_ms_eden_pow2@bf16"
    return calls.both(matrix(40, 128), *SEEDS, scheme, "rht128", dbias=torch.float32)


ALL = (exact, exact_with_amax, aligned, finalized)


@pytest.mark.parametrize("call", ALL)
@pytest.mark.usefixtures("on_blackwell")
def test_quantizers_as_they_are(call) -> None:
    assert_same_bits(calls.launched(call()), call()())


@pytest.mark.parametrize("call", ALL)
def test_overlaps_that_no_kernel_expects(call, on_blackwell, monkeypatch) -> None:
    """All passes of a quantizer may begin early."""
    rotate = plan.rotate_launch
    monkeypatch.setattr(
        plan, "rotate_launch", lambda *a, **k: rotate(*a, **{**k, "overlaps": True})
    )
    with pytest.raises(OrderFault, match="rotate_quantize: .* a kernel ahead of the call"):
        calls.launched(call())


@pytest.mark.usefixtures("on_blackwell")
def test_split_scales() -> None:
    raw = torch.randn((40, 41), generator=torch.Generator().manual_seed(1)).exp()
    got = other_ops.split_scales(raw, "nvfp4_46_pow2")
    assert_same_bits(got, q2.split_scales(raw, "nvfp4_46_pow2"))


OF_KERNEL = {
    "rotate_quantize.cu": exact,
    "align_scales.cu": aligned,
    "finalize_dequantized.cu": finalized,
}
OF_HEADER = {"scales.cuh": finalized, "ptx.cuh": aligned}


@pytest.mark.parametrize(
    "fault",
    [f for f in OF_LAUNCHES if "/csrc/" in f.file and Path(__file__).name in f.tests[0]],
    ids=lambda fault: fault.name,
)
def test_faults_in_kernels_are_caught(
    fault: Fault, on_blackwell, monkeypatch, tmp_path: Path
) -> None:
    file, text = Path(fault.file).name, ptx.text
    headers, call, kernel = nvrtc.common_headers(), OF_KERNEL.get(file), Path(file).stem
    if call is None:
        call = OF_HEADER[file]
        kernel = next(Path(name).stem for name, each in OF_KERNEL.items() if each is call)
        planted = {**headers, file: fault.planted(headers[file])}
        monkeypatch.setattr(nvrtc, "common_headers", lambda: planted)
    else:
        (tmp_path / file).write_text(fault.planted((nvrtc.SOURCES / file).read_text()))

    def changed(variant: nvrtc.KernelVariant, architecture: str) -> str:
        if variant.file == file:
            variant = replace(variant, file=str(tmp_path / file))
        return text(variant, architecture)

    monkeypatch.setattr(ptx, "text", changed)
    ptx.compiled.cache_clear()
    try:
        with pytest.raises(OrderFault, match=f"{kernel}: .* griddepcontrol.wait"):
            calls.launched(call())
    finally:
        ptx.compiled.cache_clear()
