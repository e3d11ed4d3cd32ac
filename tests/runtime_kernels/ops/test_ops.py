# SPDX-License-Identifier: Apache-2.0
"""The ops of namespace q2: fakes agree with real outputs, shapes may be symbolic, errors say what
to do."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import opcheck

import q2compile.runtime_kernels  # noqa: F401
from q2compile import quantize
from q2compile.runtime_kernels import registry
from q2compile.runtime_kernels.numerics.schemes import SCHEMES
from q2compile.runtime_kernels.ops.table import QuantizerCall
from tests.support import quantizer_calls as calls
from tests.support.oracle import relative_error
from tests.support.pairwise import pairwise

q2 = torch.ops.q2
SEED = torch.tensor(5)
ENDS = torch.tensor([4], dtype=torch.int32)
ONE_ROW = [name for name, s in SCHEMES.items() if s.block[0] == 1]
# opcheck's test_schema compares inputs with allclose, which float8 does not have.
CHECKS = ("test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")


def quantized(scheme: str, rows: int = 24, columns: int = 40):
    x = torch.randn(rows, columns)
    spec = SCHEMES[scheme]
    amax = q2.amax(x) if spec.takes_amax else None
    return q2.quantize(
        x,
        scheme=scheme,
        rowwise=True,
        columnwise=False,
        amax=amax,
        rowwise_seed=SEED if spec.stochastic else None,
    )


def check(call: QuantizerCall) -> None:
    args, kwargs = call.written()
    opcheck(call.spec.overload, args, kwargs, test_utils=CHECKS)


def test_both_directions():
    for dbias, recorded in pairwise([None, torch.bfloat16], [False, True]):
        x = torch.randn(24, 40)
        how = {"recorded": recorded, "dbias": dbias}
        check(calls.both(x, SEED, SEED + 1, "nvfp4_ms_eden_pow2", "rht128", **how))


def test_an_amax_that_is_not_given_is_found():
    for scheme in [name for name, s in SCHEMES.items() if s.takes_amax]:
        x = torch.randn(24, 40)
        seed = SEED if SCHEMES[scheme].stochastic else None
        found, given = (calls.plain(x, amax, seed, scheme)() for amax in (None, q2.amax(x)))
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, given, strict=True))


# Shapes of results depend on the format and on the blocks, not on the rounding.
EACH_BLOCK = ("nvfp4_46_pow2", "nvfp4_16x16", "mxfp4_rtn", "mxfp4_rceil_32x32", "fp8")


def test_quantize():
    for scheme, shape in product((*EACH_BLOCK, "nvfp4_sr"), [(24, 40), (0, 16), (3, 1)]):
        x = torch.randn(shape)
        spec = SCHEMES[scheme]
        amax = q2.amax(x) if spec.takes_amax else None
        seed = SEED if spec.stochastic else None
        check(calls.plain(x, amax, seed, scheme))


def test_rht_quantize():
    for transpose, transform, scheme in pairwise(
        [False, True],
        ["none", "h32", "rht128"],
        ["nvfp4", "nvfp4_ms_eden_pow2", "mxfp4_sr", "mxfp4_quest"],
    ):
        for shape in ((24, 40), (0, 16))[: 2 if transform == "h32" else 1]:
            check(calls.one(torch.randn(shape), SEED, scheme, transform, transpose, 1))


def test_requantize():
    for source in ["nvfp4_46_pow2", "nvfp4_16x16", "mxfp4_quest"]:
        parts = quantized(source)
        check(calls.again(*parts, SEED, source, "nvfp4_ms_eden_pow2", "rht128", 40, 1))


@pytest.mark.parametrize("scale", ["", "_pow2"])
def test_requantize_is_the_long_way_or_as_good(scale):
    """The long way is to quantize the transposed dequantized matrix with the same seed. Where the
    source's global scale is a power of two, that is the same numbers. Any other is applied after
    the block scales are cut to 4 bits, so other codes are as good; 2000 blocks scatter by 1%."""
    source, scheme, seed = f"nvfp4_46{scale}", f"nvfp4_ms_eden{scale}", torch.tensor(0)
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    q = quantize(x, source)
    values = q.dequantize()
    long_way = quantize(values, scheme, transform="rht128", transpose=True, seed=seed)
    found = torch.ops.q2.requantize(
        *(q.codes, q.scales, q.global_scale),
        source_scheme=source,
        scheme=scheme,
        transform="rht128",
        rows=512,
        columnwise_seed=seed,
    )
    short = replace(long_way, codes=found[0], scales=found[1], global_scale=found[2])
    if scale:
        assert torch.equal(short.dequantize(), long_way.dequantize())
    one, other = (relative_error(t.dequantize(), values) for t in (short, long_way))
    assert one == pytest.approx(other, rel=0.02)


def test_quantize_masked_and_masked_unrotate():
    check(calls.masked(torch.randn(9, 40), "mxfp4_quest", "h32"))
    mask = torch.randint(0, 256, (9, 8), dtype=torch.uint8)
    opcheck(q2.masked_unrotate.default, (torch.randn(9, 64), mask, "h32"), test_utils=CHECKS)


def test_gemm_masked_unrotate():
    a, b = (quantized("mxfp4_rtn", rows, 40) for rows in (9, 64))
    mask = torch.randint(0, 256, (9, 8), dtype=torch.uint8)
    schemes = ("mxfp4_rtn", "mxfp4_rtn", "h32", torch.bfloat16)
    opcheck(q2.gemm_masked_unrotate.default, (*a, *b, mask, *schemes), test_utils=CHECKS)
    apart = q2.masked_unrotate(q2.gemm(*a, *b, None, *schemes[:2], torch.bfloat16), mask, "h32")
    assert torch.equal(q2.gemm_masked_unrotate(*a, *b, mask, *schemes), apart)


@pytest.mark.parametrize("columns", [40, 48])
def test_transpose(columns):
    codes, scales, _ = quantized("nvfp4_16x16", 24, columns)
    for args in (
        (codes, scales, "nvfp4_16x16", columns),
        (codes, scales, "nvfp4_16x16", columns, True),
    ):
        opcheck(q2.transpose.default, args, test_utils=CHECKS)


@pytest.mark.parametrize("shape", [(24, 40), (150, 72), (1, 1)])
def test_turned_scales_for_each_row_are_the_same_numbers(shape):
    codes, scales, unit = quantized("nvfp4_16x16_46_pow2", *shape)
    args = codes, scales, "nvfp4_16x16_46_pow2", shape[1]
    plain = (*q2.transpose(*args), unit, args[2])
    copied = (*q2.transpose(*args, True), unit, "nvfp4_46_pow2@32x4x4")
    want, got = (q2.dequantize(*t, 2 * t[0].shape[1], torch.float32) for t in (plain, copied))
    assert torch.equal(got, want)
    assert torch.equal(
        got[:, : shape[0]], q2.dequantize(codes, scales, unit, args[2], shape[1], torch.float32).t()
    )


@pytest.mark.parametrize("scheme", ["nvfp4", "nvfp4_16x16_46_pow2", "mxfp4_sr"])
def test_dequantize_and_gemm(scheme):
    parts = quantized(scheme)
    args = (*parts, scheme, 40, torch.bfloat16)
    opcheck(q2.dequantize.default, args, test_utils=CHECKS)
    for bias in (None, torch.randn(24)):
        args = (*parts, *parts, bias, scheme, scheme, torch.bfloat16)
        opcheck(q2.gemm.default, args, test_utils=CHECKS)


def test_seed():
    opcheck(q2.seed.default, (torch.randn(4), 3), test_utils=("test_schema", "test_faketensor"))
    torch.manual_seed(1)
    first = [q2.seed(torch.ones(()), 0).item() for _ in range(4)]
    assert len(set(first)) == 4, "each call is a new draw"
    torch.manual_seed(1)
    assert first == [q2.seed(torch.ones(()), seed_index).item() for seed_index in range(4)]
    assert torch.Tag.nondeterministic_seeded in q2.seed.default.tags


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_amax_values(dtype):
    x = torch.tensor([1.0, -3.0, 2.0], dtype=dtype)
    assert q2.amax(x) == 3 and q2.amax(x).dtype == torch.float32
    assert q2.amax(x[:0]) == 0
    for other in (torch.nan, -torch.inf):  # of the finite elements
        assert q2.amax(torch.tensor([1.0, other], dtype=dtype)) == 1


def test_no_guard_on_divisibility():
    """A batch of any size runs the same code: the padding is arithmetic, not a branch."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    with mode:
        source = torch._dynamo.source.ConstantSource("x")
        dims = torch.fx.experimental.symbolic_shapes.StatelessSymbolicContext(
            dynamic_sizes=[torch.fx.experimental.symbolic_shapes.DimDynamic.DYNAMIC] * 2
        )
    x = mode.from_tensor(torch.randn(37, 70), source=source, symbolic_context=dims)
    with mode:
        seed = torch.zeros((), dtype=torch.int64)
        qx = q2.quantize(x, scheme="nvfp4_46_pow2", rowwise=True, columnwise=False)
        a = q2.quantize(
            x,
            scheme="nvfp4_ms_eden_pow2",
            transform="rht128",
            rowwise=False,
            columnwise=True,
            columnwise_seed=seed,
        )
        e = ("nvfp4_46_pow2", "nvfp4_ms_eden_pow2")
        b = calls.again(*qx, seed, *e, "rht128", x.shape[1], 1)()
        out = q2.gemm(*a, *b, None, e[1], e[1], torch.bfloat16)
        quantized_16x16 = q2.quantize(x, scheme="nvfp4_16x16_pow2", rowwise=True, columnwise=False)
        q2.transpose(*quantized_16x16[:2], "nvfp4_16x16_pow2", x.shape[1])
        q2.quantize(
            x, scheme="mxfp4_quest", transform="h32", rowwise=True, columnwise=False, mask=True
        )
    assert out.shape == (x.shape[1], x.shape[1])
    assert not env.guards, [str(g.expr) for g in env.guards]


def test_errors():
    """Those that a call of q2compile.quantize can cause are ValueErrors (test_quantize.py)."""
    for call, said in [
        (
            lambda x: q2.quantize(x, scheme="nvfp4_5", rowwise=True, columnwise=False),
            "Did you mean",
        ),
        (
            lambda x: q2.quantize(x, scheme="nvfp4", rowwise=False, columnwise=False),
            "has no output",
        ),
        (
            lambda x: q2.quantize(
                x, scheme="nvfp4_pow2", rowwise=True, columnwise=False, amax=q2.amax(x)
            ),
            "takes no amax",
        ),
        (
            lambda x: q2.quantize(x, scheme="mxfp4_sr", rowwise=True, columnwise=False),
            "give it a seed",
        ),
        (
            lambda x: q2.quantize(
                x, scheme="mxfp4_sr", rowwise=True, columnwise=False, rowwise_seed=SEED.int()
            ),
            "int64 scalar, got torch.int32",
        ),
        (
            lambda x: q2.quantize(x[0], scheme="mxfp4_rtn", rowwise=True, columnwise=False),
            "takes a matrix, got 1",
        ),
        (
            lambda x: q2.quantize(x.double(), scheme="mxfp4_rtn", rowwise=True, columnwise=False),
            "got torch.float64",
        ),
        (
            lambda x: q2.quantize(
                x, scheme="mxfp4_rtn", transform="rht32", rowwise=True, columnwise=False
            ),
            "rht32 draws random bits",
        ),
        (
            lambda x: q2.quantize(
                x,
                scheme="nvfp4_16x16_pow2",
                transform="rht16",
                rowwise=True,
                columnwise=False,
                rowwise_seed=SEED,
            ),
            "one row per block",
        ),
        (
            lambda x: q2.quantize(
                x, scheme="mxfp4_rtn", transform="h32", rowwise=True, columnwise=False, mask=True
            ),
            "there is no mask of .* by mxfp4_rtn",
        ),
        (
            lambda x: q2.quantize(
                x,
                scheme="mxfp4_quest",
                transform="rht32",
                rowwise=True,
                columnwise=False,
                mask=True,
            ),
            "give it a seed",
        ),
        (
            lambda x: q2.transpose(x.byte(), x, "nvfp4", 4),
            "takes scales that serve rowwise and columnwise",
        ),
        (lambda x: q2.masked_unrotate(x, x, "h32"), "packed mask"),
        (lambda x: q2.masked_unrotate(x, x.byte(), "rht32"), "has no seed"),
        (lambda x: q2.masked_unrotate(x, x.byte(), "h32"), "with a mask of"),
        (lambda x: q2.dequantize(x, x, SEED, "nvfp4", 4, x.dtype), "codes are torch.uint8"),
    ]:
        with pytest.raises((ValueError, AssertionError), match=said):
            call(torch.randn(4, 32))


def test_groups_of_codes_are_checked():
    codes, scales = torch.randn(4, 32).byte(), torch.randn(4, 2)
    both, alike = "groups of fp8 with both of their ends", r"int32 \[E\], alike in each tensor"
    for scheme, offs, padded_offs, said in (
        ("nvfp4_16x16", ENDS, ENDS, both),
        ("fp8", ENDS, None, both),
        ("fp8", None, ENDS, both),
        ("fp8", ENDS.long(), ENDS, alike),
        ("fp8", ENDS, ENDS.repeat(2), alike),
    ):
        with pytest.raises(AssertionError, match=said):
            q2.transpose(codes, scales, scheme, 4, False, offs, padded_offs)


def test_a_named_kernel_is_that_kernel_or_an_error():
    x = torch.randn(4, 32)
    call = calls.plain(x, None, None, "mxfp4_rtn")
    args = call.positional
    reference = registry.select("quantize", args, "reference")
    assert torch.equal(reference(*args)[0], call()[0])
    with pytest.raises(ValueError, match="has no kernel 'triton'.*it has .*reference"):
        registry.select("quantize", args, "triton")
    with pytest.raises(ValueError, match="q2 has no op 'quantized'; it has"):
        registry.kernels("quantized")


def test_the_reference_is_behind_every_op():
    for op in registry.KERNELS:
        last = registry.kernels(op)[-1]
        assert (last.name, last.device_type) == (registry.REFERENCE, None)
