# SPDX-License-Identifier: Apache-2.0
"""The kernels' branch for Blackwell on a GPU of another architecture, with software in place of its
FP4 conversions: zeros that keep their signs, swizzled scales, batched and grouped launches. Small
operands are compared with the reference, large ones with the GPU's own branch.

One test on a CPU runs in the PTX interpreter. For races on a GPU:

    compute-sanitizer --tool racecheck python -m pytest -q -m gpu -k small \\
        tests/runtime_kernels/cuda/test_blackwell_branch.py
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from q2compile.runtime_kernels.cuda.calls import BoundCall, tensors_of
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.runtime_kernels.cuda.quantize import quantizers
from q2compile.runtime_kernels.cuda.quantize.grouped_launch import grouped_plan
from q2compile.runtime_kernels.numerics.schemes import SWIZZLED, get_scheme
from q2compile.runtime_kernels.ops.table import QuantizerCall
from tests.support import ptx
from tests.support import quantizer_calls as calls
from tests.support.blackwell_branch import blackwell_branch, with_software_fp4
from tests.support.emulation.on_cpu import assert_same_bits, matrix, pretend_device
from tests.support.quantizer_calls import SEEDS

q2 = torch.ops.q2
EDEN, FORWARD, QUEST = "nvfp4_ms_eden_pow2", "nvfp4_46_pow2", "mxfp4_quest"
BOTH = [
    (EDEN, "rht128"),
    (EDEN + SWIZZLED, "rht128"),
    ("nvfp4_ms_eden" + SWIZZLED, "rht128"),
    ("nvfp4_sr_pow2" + SWIZZLED, "rht128"),
    ("nvfp4_sr" + SWIZZLED, "rht16"),
    ("nvfp4" + SWIZZLED, "rht16"),
    ("mxfp4_sr" + SWIZZLED, "rht64"),
    ("mxfp4_rtn34" + SWIZZLED, "rht32"),
]
FORWARDS = (FORWARD, FORWARD + SWIZZLED, "nvfp4_46" + SWIZZLED, "nvfp4_sr", "mxfp4_rtn")
SOURCES = [
    (FORWARD + SWIZZLED, EDEN + SWIZZLED, "rht128"),
    (FORWARD, "nvfp4_sr_pow2" + SWIZZLED, "rht128"),
    ("nvfp4_16x16", "nvfp4_ms_eden", "rht128"),
    ("mxfp4_rtn" + SWIZZLED, "mxfp4_rtn34" + SWIZZLED, "rht32"),
]


def on_device(call: QuantizerCall, device: str) -> QuantizerCall:
    moved = {name: a.to(device) for name, a in call.args.items() if isinstance(a, torch.Tensor)}
    return call.replace(**moved)


def every_call(x: torch.Tensor) -> Iterator[QuantizerCall]:
    """Quantizer calls of x, on its device, with the schemes and forms above."""
    seeds = [seed.to(x.device) for seed in SEEDS]
    amax = q2.amax(x)
    for scheme, transform in BOTH:
        yield calls.both(x, *seeds, scheme, transform, 3)
    yield calls.both(x, *seeds, EDEN + SWIZZLED, "rht128", 3, dbias=torch.bfloat16)
    yield calls.one(x, seeds[0], EDEN + SWIZZLED, "rht128", True, 1)
    for scheme in FORWARDS:
        yield calls.plain(x, amax if get_scheme(scheme).takes_amax else None, seeds[0], scheme)
    yield calls.masked(x, QUEST + SWIZZLED, "h32")
    for source, scheme, transform in SOURCES:
        packed = calls.plain(x, amax if get_scheme(source).takes_amax else None, None, source)()
        yield calls.again(*packed, seeds[0], source, scheme, transform, x.shape[1], 1)
    scales = calls.plain(x, None, None, FORWARD + SWIZZLED)()[1:]
    how = seeds[0], FORWARD + SWIZZLED, EDEN + SWIZZLED, "rht128", 1
    yield calls.by_scales(x.bfloat16(), *scales, *how)
    rows = x.shape[0]
    offs = torch.tensor([3, 20, 20, rows // 2, rows - 5], dtype=torch.int32, device=x.device)
    groups = offs, q2.padded_ends(offs)
    yield calls.grouped_both(x, *groups, *seeds, EDEN, "rht128", 3)
    yield calls.grouped_both(x, *groups, *seeds, "mxfp4_sr", "rht64", 3)


def launched(call: QuantizerCall) -> list[torch.Tensor]:
    return [t.cpu() for t in calls.launched(call)]


def assert_agree(call: QuantizerCall, got, want) -> None:
    try:
        assert_same_bits(got, want)
    except AssertionError as error:
        raise AssertionError(f"{call.label} {call.args['scheme']}: {error}") from None


@pytest.fixture
def with_fp8() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs the FP8 conversions of compute capability 8.9")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_small_operands(dtype, with_fp8) -> None:
    """Against the reference on the CPU."""
    for shape in ((300, 264), (33, 517)):
        for call in every_call(matrix(*shape, dtype)):
            with blackwell_branch():
                got = launched(on_device(call, "cuda"))
            assert_agree(call, got, call())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 4096), (4100, 14336)])
def test_large_operands(shape, with_fp8) -> None:
    """Compared with the GPU's own branch. Thread blocks loop over tiles."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(shape, generator=generator, device="cuda")
    x *= torch.exp(2 * torch.randn((1, shape[1]), generator=generator, device="cuda"))
    for call in every_call(x.bfloat16()):
        want = launched(call)
        with blackwell_branch():
            got = launched(call)
        assert_agree(call, got, want)


@pytest.mark.gpu
def test_small_batched_launches(with_fp8) -> None:
    """Operands of different sizes, in one launch for the codes and one for the scales."""
    seed = SEEDS[0].cuda()
    made: dict[str, list[QuantizerCall]] = {"forward": [], "requantize": []}
    for rows, cols in ((700, 520), (3, 64), (130, 200)):
        x = matrix(rows, cols).cuda()
        made["forward"].append(calls.plain(x, None, None, FORWARD + SWIZZLED))
        packed, how = calls.plain(x, None, None, FORWARD)(), (seed, FORWARD, EDEN + SWIZZLED)
        made["requantize"].append(calls.again(*packed, *how, "rht128", cols, 1))
    for members in made.values():
        ops = [getattr(quantizers, call.spec.name) for call in members]
        call = grouped_plan([op.plan(*c.positional) for op, c in zip(ops, members, strict=True)])
        assert [step.grid[1] for step in call.steps] == [3, 3]
        outputs = [torch.empty(o.shape, dtype=o.dtype, device="cuda") for o in call.outputs]
        with blackwell_branch():
            BoundCall(call, 0)([*(t for c in members for t in tensors_of(c.positional)), *outputs])
        want = [output for c in members for output in on_device(c, "cpu")()]
        assert_same_bits([t.cpu() for t in outputs], want)


@pytest.mark.gpu
def test_the_branch_is_the_one_that_runs(monkeypatch, with_fp8) -> None:
    """Two variants are compiled, and the second has the define."""
    compiled = []
    make = nvrtc.cubin
    monkeypatch.setattr(
        nvrtc, "cubin", lambda *how: compiled.append(nvrtc.compiler_options(*how)) or make(*how)
    )
    with blackwell_branch():
        launched(calls.plain(matrix(40, 48).cuda(), None, None, FORWARD))
    assert len(compiled) == 2
    assert all("-DQ2_HW_FP4=1" in options for options in compiled)


@pytest.mark.parametrize("scheme", [FORWARD, EDEN + SWIZZLED])
def test_software_for_the_conversions(scheme, monkeypatch) -> None:
    """In the PTX interpreter, as a Hopper would run it."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings", exc_type=ImportError)
    ptx.serve(monkeypatch, "sm_90a")
    pretend_device(monkeypatch, room=228 * 1024)
    with_software_fp4(monkeypatch)
    x = matrix(140, 136)
    ptx.compiled.cache_clear()
    try:
        if scheme == FORWARD:
            call = calls.plain(x, None, None, scheme)
        else:
            call = calls.both(x, *SEEDS, scheme, "rht128", 3)
        assert_same_bits(calls.launched(call), call())
    finally:
        ptx.compiled.cache_clear()
