# SPDX-License-Identifier: Apache-2.0
"""The pass that has quantizers write dequantized operands for bf16 GEMMs: its golden, the operands
that it leaves, and the ops' results for dequantized operands."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from expecttest import TestCase
from torch import fx

from q2compile.graph.quantizers import quantizers
from q2compile.passes.post_grad.dequantize_operands import dequantize_operands_pass
from q2compile.passes.verify import check_spec
from q2compile.report.graph_text import readable
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import not_served
from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, get_scheme
from q2compile.runtime_kernels.ops.table import SPECS, QuantizerCall
from tests.support import quantizer_calls as calls
from tests.support.graph_builder import EDEN, SOURCE, Builder, q2, run, traced
from tests.support.serving import serve_by


@pytest.fixture(autouse=True)
def hopper(monkeypatch) -> None:
    """The kernels that a GPU without fp4 tensor cores would be served by."""

    def serving(op, args):
        if op in ("gemm", "grouped_gemm"):
            return SimpleNamespace(name="cuda_bf16", launching=None)
        if op not in SPECS:
            return SimpleNamespace(name="cuda", launching=None)
        call = QuantizerCall.of(op, args)
        served = not_served(call.scheme.name, call.transform.name, masked=call.masked) is None
        return SimpleNamespace(name="cuda" if served else "reference", launching=None)

    serve_by(monkeypatch, serving)


class TestGolden(TestCase):
    def test_golden(self):
        gm, _ = traced()
        assert dequantize_operands_pass(gm.graph) == 3
        lines = readable(gm).replace("nvfp4_ms_eden_pow2", "EDEN").splitlines()
        self.assertExpectedInline(
            "\n".join(line for line in lines if "getitem" not in line.partition(":")[0]),
            """\
dy_1: bf16[40, 40]
codes_1: u8[40, 40]
scales_1: f8e4m3fn[40, 5]
global_scale_1: f32[]
seed: i64[] = q2.seed(dy_1, 0)
seed_1: i64[] = q2.seed(dy_1, 1)
quantize: (bf16[40, 128], f8e4m3fn[0, 0], f32[], bf16[40, 128], f8e4m3fn[0, 0], f32[]) = q2.quantize(dy_1, scheme='EDEN@bf16', transform='rht128', rowwise=True, columnwise=True, rowwise_seed=seed, columnwise_seed=seed_1)
requantize: (bf16[72, 128], f8e4m3fn[0, 0], f32[]) = q2.requantize(codes_1, scales_1, global_scale_1, source_scheme='nvfp4_46_pow2', scheme='EDEN@bf16', transform='rht128', rows=72, columnwise_seed=seed, rng_offset=1)
requantize_1: (bf16[72, 128], f8e4m3fn[0, 0], f32[]) = q2.requantize(codes_1, scales_1, global_scale_1, source_scheme='nvfp4_46_pow2', scheme='EDEN@bf16', transform='rht128', rows=72, columnwise_seed=seed_1, rng_offset=1)
gemm: bf16[40, 72] = q2.gemm(getitem, getitem_1, getitem_2, getitem_6, getitem_7, getitem_8, None, 'EDEN@bf16', 'EDEN@bf16', torch.bfloat16)
gemm_1: bf16[40, 72] = q2.gemm(getitem_3, getitem_4, getitem_5, getitem_9, getitem_10, getitem_11, None, 'EDEN@bf16', 'EDEN@bf16', torch.bfloat16)
return (gemm, gemm_1)""",
        )


@pytest.mark.parametrize("tracing_mode", ["fake", "symbolic"])
def test_the_gradients_keep_their_bits(tracing_mode) -> None:
    gm, inputs = traced(tracing_mode=tracing_mode)
    before = run(gm, inputs)
    assert dequantize_operands_pass(gm.graph) == 3
    gm.recompile()
    check_spec(gm.graph, "backward", "test")
    assert all(torch.equal(a, b) for a, b in zip(run(gm, inputs), before, strict=True))
    assert dequantize_operands_pass(gm.graph) == 0


def test_the_graph_says_the_new_shapes() -> None:
    gm, _ = traced()
    dequantize_operands_pass(gm.graph)
    for node, _ in quantizers(gm.graph):
        values = [user.meta["val"] for user in node.users if user.args[1] % 3 == 0]
        assert values and all(v.dtype == torch.bfloat16 and v.shape[1] == 128 for v in values)


def test_what_others_read_keeps_its_codes() -> None:
    def function(dy, *_):
        read = q2.quantize(
            dy,
            scheme=EDEN,
            transform="rht128",
            rowwise=True,
            columnwise=False,
            rowwise_seed=q2.seed(dy, 0),
        )
        out = q2.gemm(*read, *read, None, EDEN, EDEN, torch.bfloat16)
        returned = q2.quantize(
            dy,
            scheme=EDEN,
            transform="rht128",
            rowwise=True,
            columnwise=False,
            rowwise_seed=q2.seed(dy, 1),
        )
        out_1 = q2.gemm(*returned, *returned, None, EDEN, EDEN, torch.bfloat16)
        return out, out_1, q2.dequantize(*read, EDEN, 40, torch.bfloat16), returned[1]

    gm, _ = traced(function)
    assert dequantize_operands_pass(gm.graph) == 0


def test_chunks_that_the_kernel_draws_no_random_bits_for_keep_their_codes() -> None:
    def function(dy, *_):
        q = q2.quantize(
            dy,
            scheme=EDEN,
            transform="rht64",
            rowwise=True,
            columnwise=False,
            rowwise_seed=q2.seed(dy, 0),
        )
        return q2.gemm(*q, *q, None, EDEN, EDEN, torch.bfloat16)

    gm, _ = traced(function)
    assert dequantize_operands_pass(gm.graph) == 0


def weight_of(*shape: int, computed: bool = False, kept: bool = False) -> tuple[Builder, fx.Node]:
    """A forward's graph: x and a weight [E, N, K] or [N, K], quantized, and their product."""
    builder = Builder()
    x = builder.placeholder("primals_1", 256, shape[-1])
    w = builder.placeholder("primals_2", *shape)
    if computed:
        w = builder.call(torch.ops.aten.mul.Tensor, w, 2.0)
    if len(shape) == 3:
        w = builder.call(torch.ops.aten.view.default, w, [-1, shape[-1]])
    a, b = (builder.outputs(builder.call(calls.plain(m, None, None, SOURCE, 0))) for m in (x, w))
    if len(shape) == 3:
        offs = builder.placeholder("primals_3", shape[0], dtype=torch.int32)
        schemes = (SOURCE, SOURCE, "fprop", torch.bfloat16)
        gemm = builder.call(q2.grouped_gemm.default, *a, *b, offs, *schemes)
    else:
        gemm = builder.call(q2.gemm.default, *a, *b, None, SOURCE, SOURCE, torch.bfloat16)
    builder.done(gemm, *(b if kept else ()))
    return builder, gemm


@pytest.mark.parametrize("shape", [(4096, 4096), (8, 2048, 1024)])
def test_of_a_large_weight_that_no_backward_reads_numbers_are_enough(shape) -> None:
    builder, gemm = weight_of(*shape)
    assert dequantize_operands_pass(builder.graph) == 1
    schemes = [arg for arg in gemm.args if isinstance(arg, str)]
    assert schemes[:2] == [SOURCE, SOURCE + DEQUANTIZED]
    assert gemm.args[3].meta["val"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "shape, how",
    [((4096, 4095), {}), ((4096, 4096), {"computed": True}), ((4096, 4096), {"kept": True})],
)
def test_other_weights_keep_their_codes(shape, how) -> None:
    """A weight that is small, that an Inductor kernel quantizes where it computes it, or whose
    codes are saved."""
    builder, _ = weight_of(*shape, **how)
    assert dequantize_operands_pass(builder.graph) == 0


@pytest.mark.parametrize("gemm", ["cublaslt_fp4", "reference"])
def test_other_gemms_read_codes(gemm, monkeypatch) -> None:
    gm, _ = traced()
    serve_by(monkeypatch, lambda *a: SimpleNamespace(name=gemm, launching=None))
    assert dequantize_operands_pass(gm.graph) == 0


@pytest.mark.parametrize("scheme", [EDEN, "nvfp4_ms_eden", "nvfp4_sr", "mxfp4_sr", "mxfp4_rtn"])
def test_dequantized_times_its_global_scale_is_what_the_codes_stand_for(scheme) -> None:
    """A power-of-two global scale is included in the dequantized operand, and its own value is then
    1."""
    x, seed = torch.randn(40, 200).bfloat16(), torch.tensor(3)
    values, scales, global_scale = q2.quantize(
        x,
        scheme=scheme + DEQUANTIZED,
        transform="rht64",
        rowwise=True,
        columnwise=False,
        rowwise_seed=seed,
    )
    packed = q2.quantize(
        x, scheme=scheme, transform="rht64", rowwise=True, columnwise=False, rowwise_seed=seed
    )
    assert scales.numel() == 0 and values.shape == (40, 256)
    assert global_scale == (1 if get_scheme(scheme).has_pow2_scale else packed[2])
    want = q2.dequantize(*packed, scheme, 256, torch.float32)
    assert torch.equal(values.float() * global_scale, want)


def test_one_dequantized_operand_is_enough() -> None:
    """The other, a saved weight say, may still be codes; its global scale may be any number."""
    seed = torch.tensor(3)
    a, b = torch.randn(24, 200).bfloat16(), torch.randn(16, 200).bfloat16()
    for scheme in (EDEN, "nvfp4_ms_eden"):
        of_a = q2.quantize(
            a, scheme=EDEN, transform="rht128", rowwise=True, columnwise=False, rowwise_seed=seed
        )
        of_b = q2.quantize(
            b,
            scheme=scheme,
            transform="rht128",
            rowwise=True,
            columnwise=False,
            rng_offset=1,
            rowwise_seed=seed,
        )
        dequantized = q2.quantize(
            a,
            scheme=EDEN + DEQUANTIZED,
            transform="rht128",
            rowwise=True,
            columnwise=False,
            rowwise_seed=seed,
        )
        for dtype in (torch.bfloat16, torch.float32):
            want = q2.gemm(*of_a, *of_b, None, EDEN, scheme, dtype)
            got = q2.gemm(*dequantized, *of_b, None, EDEN + DEQUANTIZED, scheme, dtype)
            assert torch.equal(got, want)


def test_errors_say_what_came() -> None:
    packed = q2.quantize(torch.randn(8, 32), scheme=SOURCE, rowwise=True, columnwise=False)
    with pytest.raises(AssertionError, match="codes are torch.bfloat16 .* got torch.uint8"):
        q2.gemm(*packed, *packed, None, SOURCE + DEQUANTIZED, SOURCE, torch.bfloat16)


def test_inductor_takes_dequantized_operands_as_they_are() -> None:
    """Trap: Inductor gave them the strides that codes had in tracing, so elements overlapped."""

    def gradient(options) -> torch.Tensor:
        torch.manual_seed(0)
        torch._dynamo.reset()
        layer = torch.nn.Linear(96, 80, dtype=torch.bfloat16)
        x, dy = torch.randn(160, 96).bfloat16(), torch.randn(160, 80).bfloat16()
        with torch._inductor.config.patch(fx_graph_cache=False):
            torch.compile(layer, backend="quartet2", options=options)(x).backward(dy)
        return layer.weight.grad

    assert torch.equal(gradient({}), gradient({"disable_passes": ["dequantize_operands"]}))
