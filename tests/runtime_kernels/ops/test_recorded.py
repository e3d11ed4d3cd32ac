# SPDX-License-Identifier: Apache-2.0
"""The recorded quantizers: the bits of the plain op; statistics, compared with those from
`q2compile.quantize`; samples of large tensors; the number of launches."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import q2compile
from q2compile.runtime_kernels.choice import kernels
from q2compile.runtime_kernels.numerics import constants
from q2compile.runtime_kernels.numerics.layout import Tiling
from q2compile.runtime_kernels.numerics.quantize_tiles import rotate_tiles
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SWIZZLED
from q2compile.runtime_kernels.numerics.statistics import (
    CODES_SAMPLE,
    FIELDS,
    GROUP,
    SAMPLE,
    sample_of,
    statistics,
)
from q2compile.runtime_kernels.numerics.transforms import TRANSFORMS, get_transform
from q2compile.runtime_kernels.ops.table import rowwise_call
from q2compile.runtime_kernels.registry import REFERENCE
from tests.support import quantizer_calls as made
from tests.support.pairwise import pairwise

q2 = torch.ops.q2
EDEN = "nvfp4_ms_eden_pow2"


def matrix(rows=64, columns=96):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator)
    x[1] *= 1e-3
    x[2, :48] = 0
    return x.bfloat16()


def seed():
    return torch.tensor(11)


def calls(suffix=""):
    """name -> (the call, the same quantization of each operand through q2compile.quantize)"""
    x = matrix()
    source = q2compile.quantize(x, "nvfp4_46_pow2")
    parts = (source.codes, source.scales, source.global_scale)
    eden = {"transform": "rht128", "seed": seed()}
    columnwise = {**eden, "transpose": True}
    saved = [(source.dequantize(), EDEN, {**columnwise, "stream": 1})]
    how = seed(), EDEN + suffix, "rht128"
    one, both = made.one(x, *how, True), made.both(x, seed(), *how)
    again = seed(), "nvfp4_46_pow2", EDEN + suffix, "rht128"
    directions = [(x, EDEN, eden), (x, EDEN, columnwise)]
    return {
        "rowwise": (made.plain(x, None, None, "nvfp4_46_pow2"), [(x, "nvfp4_46_pow2", {})]),
        "masked": (
            made.masked(x, "mxfp4_quest", "h32"),
            [(x, "mxfp4_quest", {"transform": "h32"})],
        ),
        "columnwise": (one, directions[1:]),
        "both": (both, directions),
        "columnwise with dbias": (one.replace(dbias=torch.bfloat16), directions[1:]),
        "both with dbias": (both.replace(dbias=torch.bfloat16), directions),
        "again": (made.again(*parts, *again, 96, 1), saved),
        "by scales": (made.by_scales(x, *parts[1:], *again, 1), saved),
    }


def recorded_call(x, scheme):
    return made.plain(x, None, None, scheme).replace(recorded=True)()


def named(sums):
    return dict(zip(FIELDS, statistics(sums).tolist(), strict=True))


def measured(x, scheme, options):
    """The statistics, in fp64. The rounded operand is recovered by rotating x as the quantizer
    does."""
    q = q2compile.quantize(x, scheme, **options)
    rounded = q.dequantize(torch.float64, rotate_back=False)
    exact = x.double().t() if q.transpose else x.double()
    size = {"none": 1, "h32": 32, "rht128": 128}[q.transform]
    if size > 1:
        exact = torch.nn.functional.pad(exact, (0, -exact.shape[1] % size))
        eye = torch.eye(size)
        # Its rows as a quantizer rotates them: signs, then Hadamard.
        tiling = Tiling.of(eye, size, transpose=False)
        turn = tiling.join(rotate_tiles(tiling.cut(eye), get_transform(q.transform), q.seed))
        exact = (exact.view(-1, size) @ turn.double() / size**0.5).view(exact.shape)
    rounded = rounded[:, : exact.shape[1]]
    width = 16 if scheme.startswith("nvfp4") else 32
    largest = 6 * q.scales.double().repeat_interleave(width, 1) * q.global_scale
    scales = q.scales.double()
    nvfp4 = scheme.startswith("nvfp4")
    zero, least = (0.0, 2**-6) if nvfp4 else (2.0**-127, scales.max() * 2**-14)
    return {
        "amax": x.double().abs().max(),
        "relative_error": (rounded - exact).norm() / exact.norm(),
        "cosine": torch.cosine_similarity(rounded.flatten(), exact.flatten(), 0),
        "zero": ((rounded == 0) & (exact.abs() > 1e-30)).double().mean(),
        "saturated": (exact.abs() > largest[:, : exact.shape[1]] * (1 + 1e-6)).double().mean(),
        "scale_zero": (scales == zero).double().mean(),
        "scale_subnormal": ((scales > zero) & (scales < least)).double().mean(),
    }


def test_outputs_and_statistics():
    for op, suffix in pairwise(calls(), ["", SWIZZLED, DEQUANTIZED]):
        call, operands = calls(suffix)[op]
        wanted, found = call(), call.replace(recorded=True)()
        for one, other in zip(found, wanted, strict=False):
            assert torch.equal(
                one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
            )
        assert len(found) == len(wanted) + len(operands)
        for sums, operand in zip(found[len(wanted) :], operands, strict=True):
            values = named(sums)
            for name, value in measured(*operand).items():
                # Counts: an element in a tie of fp32 and fp64 may go either way.
                tolerance = (
                    {"rel": 1e-5, "abs": 1e-6} if name not in ("zero", "saturated") else None
                )
                near = pytest.approx(value.item(), **(tolerance or {"abs": 2e-3}))
                assert values[name] == near, name


@pytest.mark.parametrize("scheme", ["nvfp4_46_pow2", "nvfp4_16x16_pow2", "mxfp4_rtn"])
def test_of_a_large_tensor_a_sample(scheme):
    """Whole groups of rows, spread over the tensor. The statistics are close to those
    of all rows."""
    x = matrix(8192, 512)
    rows = sample_of(*x.shape).of(torch.arange(8192)).flatten()
    assert rows.numel() == SAMPLE // 512 and rows[0] == 0 and rows[-1] >= 8192 - 16 * GROUP
    *_, found = recorded_call(x, scheme)
    wanted = measured_plainly(x, scheme)
    assert named(found)["amax"] == x.abs().max()
    assert named(found)["relative_error"] == pytest.approx(wanted, rel=0.02)
    codes = q2.sampled_codes(q2.quantize(x, scheme=scheme, rowwise=True, columnwise=False)[0])
    assert codes.numel() == CODES_SAMPLE // 2


def test_of_large_saved_codes_a_sample():
    """requantize reads columns of its source."""
    parts = q2.quantize(matrix(8192, 512), scheme="nvfp4_46_pow2", rowwise=True, columnwise=False)
    call = made.again(*parts, seed(), "nvfp4_46_pow2", EDEN, "rht128", 512, 1)
    found = named(call.replace(recorded=True)()[-1])
    assert 0.09 < found["relative_error"] < 0.105 and found["cosine"] > 0.99


def measured_plainly(x, scheme):
    rounded = q2compile.quantize(x, scheme).dequantize(torch.float64)
    return ((rounded - x).norm() / x.double().norm()).item()


@pytest.mark.parametrize("rows, columns", [(64, 96), (8192, 512)])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_is_not_finite(number, rows, columns):
    """Wherever it is: of the large one, row 20 is not looked at."""
    x = matrix(rows, columns)
    x[20, 5] = number
    *_, scale, found = recorded_call(x, "nvfp4_46_pow2")
    found = statistics(found)
    assert scale.isfinite() and not found[0].isfinite() and found[1:].isnan().all()


def test_zeros_and_nothing():
    zeros = recorded_call(torch.zeros(32, 32), "nvfp4_46_pow2")[-1]
    values = named(zeros)
    assert (values["amax"], values["relative_error"], values["cosine"]) == (0, 0, 1)
    assert values["scale_zero"] == 1 and values["zero"] == values["saturated"] == 0
    assert recorded_call(torch.zeros(0, 32), "nvfp4_46_pow2")[-1][0] == 0


def test_of_no_rows():
    x = torch.zeros(0, 32)
    parts = q2.quantize(x, scheme="nvfp4_46_pow2", rowwise=True, columnwise=False)
    found = [
        q2.statistics_of_codes(*parts, "nvfp4_46_pow2"),
        made.one(x, seed(), EDEN, "rht128", True, recorded=True)()[-1],
        made.again(*parts, seed(), "nvfp4_46_pow2", EDEN, "rht128", 32, recorded=True)()[-1],
    ]
    for sums in found:
        values = named(sums)
        assert values["amax"] == 0 and math.isnan(values["zero"] + values["scale_zero"])


class Launches(TorchDispatchMode):
    """Counts ops that would launch a kernel on a GPU, not views or allocations."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        views = any(r.alias_info and not r.alias_info.is_write for r in function._schema.returns)
        self.number += not (views or "empty" in function.name())
        return function(*args, **(kwargs or {}))


# In all, the op itself and its second call among them: as it is, of swizzled scales (which are
# unswizzled by two), and @bf16. One an operand clears what 96 columns are padded with.
LAUNCHES = {
    "rowwise": (21, 21, 21),
    "masked": (28, 28, 28),  # also the largest of all scales, of MXFP4
    "columnwise": (26, 28, 27),
    "both": (50, 54, 51),  # of two operands
    "columnwise with dbias": (26, 28, 27),
    "both with dbias": (50, 54, 51),
    "again": (33, 35, 34),
}


def _reference(call):
    return next(k for k in kernels(call.spec.name) if k.name == REFERENCE)


def test_how_much_is_launched():
    """On a GPU launches are nearly all that statistics cost."""
    for op, (form, suffix) in pairwise(LAUNCHES, [(0, ""), (1, SWIZZLED), (2, DEQUANTIZED)]):
        constants.make(torch.device("cpu"))
        call, _ = calls(suffix)[op]
        with Launches() as counted:
            _reference(call).function(*call.replace(recorded=True).positional)
        assert counted.number <= LAUNCHES[op][form]


def test_constants_are_made_before_a_call_or_not_kept():
    """With them and without, the same bits: a call may stand in the warm-up of a CUDA graph, whose
    memory must not hold what outlives it."""
    call = calls()["both"][0].replace(recorded=True)
    cpu = torch.device("cpu")
    constants.make(cpu)
    assert constants.pairs_of_bytes(cpu) is constants.pairs_of_bytes(cpu)
    wanted = call()
    constants._PAIRS.clear()
    constants._ROTATIONS.clear()
    found = call()
    assert all(torch.equal(a, b) for a, b in zip(found[-2:], wanted[-2:], strict=True))
    with FakeTensorMode():
        constants.make(cpu)
    assert constants.pairs_of_bytes(cpu) is not constants.pairs_of_bytes(cpu)
    for transform in TRANSFORMS.values():
        one, other = (constants.rotation_matrix(transform, cpu) for _ in range(2))
        assert type(one) is torch.Tensor and one is not other


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=lambda t: t.name)
def test_a_rotation_as_a_matrix(transform):
    """The quantizers' reference on the same operand: sums of few bits, so the bits are equal."""
    x = torch.randint(-8, 8, (4, 2 * transform.size)).float()
    tiling = Tiling.of(x, transform.size, transpose=False)
    device = torch.device("cpu")
    drawn = seed() if transform.seeded else None
    turn = constants.rotation_matrix(transform, device)
    if transform.seeded:
        turn = turn * q2.signs(drawn, transform.name)[:, None]
    wanted = tiling.join(rotate_tiles(tiling.cut(x), transform, drawn))
    found = (x.double().view(-1, transform.size) @ turn).view(x.shape)
    assert torch.equal(found, wanted.double())


@pytest.mark.parametrize("rows", [64, 8192])
def test_operands_of_any_strides(rows):
    """Inductor may lay them out in another order."""
    x = matrix(rows, 512)
    operands = (x, *q2.quantize(x, scheme="nvfp4_16x16_pow2", rowwise=True, columnwise=False)[:2])
    scale = torch.ones(())
    transposed = [t.view(torch.uint8).t().contiguous().t().view(t.dtype) for t in operands[1:]]
    transposed = [x.t().contiguous().t(), *transposed]
    one, other = (
        q2.statistics_of_operand(*o, scale, "nvfp4_16x16_pow2") for o in (operands, transposed)
    )
    assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("op", calls())
def test_on_a_gpu_the_same_numbers_also_from_a_capture(op):
    """The codes are the same bits; fp64 sums in another order differ by less than 1e-12."""
    call, operands = calls()[op]
    call = call.replace(recorded=True)
    tensors = {n: a.cuda() for n, a in call.args.items() if isinstance(a, torch.Tensor)}
    constants.make(torch.device("cuda"))
    on_gpu = call.replace(**tensors)
    wanted = call()[-len(operands) :]
    found = [on_gpu()[-len(operands) :]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = on_gpu()
    graph.replay()
    found.append(captured[-len(operands) :])
    for sums in found:
        for own, reference in zip(sums, wanted, strict=True):
            torch.testing.assert_close(own.cpu(), reference, rtol=1e-12, atol=0, equal_nan=True)


def test_of_a_large_tensor_in_mxfp4_all_blocks_say_which_is_the_largest():
    """A single block that no sample has is 2^20 above the others, so FP8 GEMMs round them all but
    those of zeros, of which there is a quarter."""
    x = torch.randn(8192, 512, generator=torch.Generator().manual_seed(0))
    x[:, 128:256] = 0
    rows = sample_of(*x.shape).of(torch.arange(8192)).flatten()
    place = next(row for row in range(8192) if row not in set(rows.tolist()))
    x[place, 0] = 2**20 * x.abs().max()
    found = named(rowwise_call("mxfp4_rtn", x).replace(recorded=True)()[-1])
    assert (found["scale_zero"], found["scale_subnormal"]) == (0.25, 0.75)
