# SPDX-License-Identifier: Apache-2.0
"""Calls of our kernels in generated code: buffers of Inductor's, and launches into them past the
dispatcher. The kernels run on a CPU (tests/support/emulation) for an H200 that is not there."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch._inductor.lowering import lowerings

from q2compile import lowering
from q2compile.lowering import launches
from q2compile.runtime_kernels import choice, registry
from q2compile.runtime_kernels.choice import choose
from q2compile.runtime_kernels.cuda.call_site import CallSite, SiteCall
from q2compile.runtime_kernels.cuda.gemm import scaled_mm
from q2compile.runtime_kernels.cuda.jit.launch import Launch, LaunchError
from q2compile.runtime_kernels.cuda.quantize.grouped_check import GROUP
from q2compile.runtime_kernels.numerics.column_sums import column_sums
from q2compile.runtime_kernels.registry import KernelWarning
from tests.support.emulation.inductor import INDUCTOR_OPTIONS, emulate, serve_as_on
from tests.support.emulation.on_cpu import launches_on_cpu
from tests.support.warned import texts

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]
WIDTH = 64
RTN = "nvfp4_46_pow2"


@pytest.fixture
def capability() -> int:
    return 90


@pytest.fixture
def pretended(monkeypatch, capability) -> Iterator[list[str]]:
    """Generated code is that for an H200, and its sites launch in the emulation. The sources of the
    graphs that are compiled."""
    enqueue = CallSite.enqueue
    sources = emulate(monkeypatch, capability)
    serve_as_on(monkeypatch, capability)
    monkeypatch.setattr(CallSite, "enqueue", enqueue)
    launches_on_cpu(monkeypatch, "sm_90a" if capability == 90 else "sm_100a")
    with inductor_config.patch(INDUCTOR_OPTIONS):
        yield sources


def step_of(
    recipe: str, bias: bool = False, inner: str = "inductor", **how: Any
) -> Callable[..., list[torch.Tensor]]:
    """y, dw and dx of a linear of bf16, for an x and always the same weights and random bits."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH, bias=bias, dtype=torch.bfloat16)
    options = {"recipe": recipe, "inner": inner}
    compiled = torch.compile(layer, backend="quartet2", options=options, **how)

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        layer.zero_grad()
        x = x.detach().requires_grad_()
        torch.manual_seed(1)
        with inductor_config.patch(fx_graph_cache=False):
            y = compiled(x)
            y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
        return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]

    return step


# Row counts that form no group (linear/autograd.py). Otherwise a Triton kernel, which is only a
# stub here, writes where a group ends.
def rows(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=generator).bfloat16()


# The reference's results, computed before the process pretends to have a GPU, and op by op, which
# takes a tenth of the time that Inductor does.
def wanted(recipe: str, bias: bool = False, count: int = 100) -> list[torch.Tensor]:
    return step_of(recipe, bias, "eager")(rows(count))


def dbias(count: int) -> torch.Tensor:
    """dbias as the op defines it."""
    dy = torch.linspace(-1, 1, count * WIDTH).view(count, WIDTH).bfloat16()
    return column_sums(dy, torch.bfloat16)


@pytest.mark.parametrize("bias", [False, True])
def test_the_bits_are_the_reference_s(bias, request) -> None:
    """dbias is added up in the order that its op is defined with, where the reference's graph
    leaves it to Inductor."""
    want = wanted("quartet2", bias)
    want[3:] = [dbias(100)] * bias
    sources = request.getfixturevalue("pretended")
    step = step_of("quartet2", bias)
    for _ in range(2):  # the second time with addresses alone
        got = step(rows(100))
        assert len(got) == len(want) and all(map(torch.equal, got, want))
    assert len(sources) == 2 and not any("torch.ops.q2." in s for s in sources)


class Experts(nn.Module):
    """Three of them, [E, N, K], whose N needs no padding: stubs of Triton's would not pad."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(3, 128, WIDTH).bfloat16())

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, self.w.mT, offs=offs)


def steps_of_experts(recipe: str, *counts: int, inner: str = "inductor") -> list[torch.Tensor]:
    """y, dx and dw for each of these numbers of rows, the last of which belong to no expert. One
    graph serves all of them."""
    torch._dynamo.reset()
    experts = Experts()
    options = {"recipe": recipe, "policy": {"*": recipe}, "inner": inner}
    compiled = torch.compile(experts, backend="quartet2", options=options)
    made = []
    for count in counts:
        x = rows(count).requires_grad_()
        if len(counts) > 1:
            torch._dynamo.mark_dynamic(x, 0)
        torch.manual_seed(1)
        experts.zero_grad()
        with inductor_config.patch(fx_graph_cache=False):
            y = compiled(x, torch.tensor([7, 150, count - 10], dtype=torch.int32))
            y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
        made += [y.detach(), x.grad, experts.w.grad]
    return made


@pytest.mark.parametrize(
    "recipe, ops, counts",
    [
        ("quartet2", 0, [200]),
        ("quartet2", 0, [200, 333]),
        ("tetrajet2", 0, [200]),
        ("quartet", 2, [200]),
    ],
)
def test_grouped_gemms_are_torch_s_of_numbers(recipe, ops, counts, request) -> None:
    """In place of an op that dequantizes first. If operands are dequantized without their global
    scale, as those of quartet's backward, it stays that op."""
    want = steps_of_experts(recipe, *counts, inner="eager")
    sources = request.getfixturevalue("pretended")
    assert all(map(torch.equal, steps_of_experts(recipe, *counts), want))
    assert len(sources) == 2
    code = "".join(sources)
    assert code.count("= torch.ops.q2.grouped_gemm.default(") == ops
    assert code.count("= torch.ops.q2.grouped_mm.default(") == 3 - ops


@pytest.mark.parametrize("capability", [100])
@pytest.mark.parametrize("recipe", ["quartet2", "tetrajet2"])
def test_products_of_global_scales_come_with_them(recipe, request, capability) -> None:
    """They are the reference's, as y and the gradients show: their GEMMs get no other scale."""
    want = wanted(recipe, bias=True)
    sources = request.getfixturevalue("pretended")
    step = step_of(recipe, bias=True)
    for _ in range(2):
        assert all(map(torch.equal, step(rows(100))[:3], want[:3]))
    code = "\n".join(sources)
    gemms = re.findall(r"torch\.ops\.q2\.gemm\.default\((.*?), 'nvfp4", code)
    # The second global scale; the bias is fprop's alone.
    assert [args.split(", ")[-2] for args in gemms] == 3 * ["None"]
    assert [args.split(", ")[-1] for args in gemms] == ["primals_2", "None", "None"]
    # x with w; dy with w; and the other operand of dy with x.
    names: dict[str, Any] = {"q2_Call": lambda *args, **how: args}
    names["torch"] = torch
    names["q2_CallSite"] = lambda *calls, fixed, products=(), others=0: (products, others)
    made = [of for line in re.findall(r"= (q2_CallSite\(.*)", code) if (of := eval(line, names))[0]]
    assert made == [((((0, 2), (1, 2)),), 0), ((((0, 2), (1, 2)), ((0, 5), (2, 2))), 0)]


@pytest.mark.parametrize("capability", [100])
def test_products_where_launches_fail(request, monkeypatch, capability) -> None:
    """Each by itself then, and the products by torch."""
    want = wanted("quartet2")
    request.getfixturevalue("pretended")

    def failing(launch, *args):
        raise LaunchError("cannot launch: CUDA_ERROR_INVALID_IMAGE")

    monkeypatch.setattr(Launch, "bind", failing)
    step = step_of("quartet2")
    with pytest.warns(KernelWarning):
        assert all(map(torch.equal, step(rows(100)), want))
    assert all(map(torch.equal, step(rows(100)), want))


def test_of_what_gemms_of_bf16_do_not_read_there_are_no_buffers(pretended) -> None:
    step_of("quartet2")(rows(100))
    forward, backward = pretended
    of_sites = re.findall(r"q2_Call\('(\w+)', .*?, \(([01, ]+),\)[,)]", backward)
    assert of_sites == [
        ("quantize", "1, 0, 0, 1, 0, 0"),
        ("requantize", "1, 0, 0"),
        ("requantize", "1, 0, 0"),
    ]
    assert forward.count("q2_Call('dequantize'") == 2 and "extern_kernels.mm(" in forward
    assert backward.count("extern_kernels.mm(") == 2


def test_scales_without_elements_have_no_buffers(pretended) -> None:
    """fp8 has one scale per operand, and the tensor of block scales is empty: one per graph is
    saved. A scale is a tensor without dimensions, and not a view of one."""
    step_of("fp8")(rows(128))
    forward, backward = pretended
    assert [code.count("empty_strided_cpu((0, 0)") for code in pretended] == [1, 0]
    sites = re.findall(r"q2_Call\('(\w+)', .*?, \(([01, ]+),\)[,)]", forward + backward)
    assert sorted(sites) == [
        ("quantize", "1, 0, 1"),
        ("quantize", "1, 0, 1"),
        ("quantize", "1, 0, 1, 1, 0, 1"),
        ("transpose", "1, 0"),
        ("transpose", "1, 0"),
    ]
    assert not re.search(r"reinterpret_tensor\(\w+, \(\), \(\)", forward + backward)


def test_any_number_of_rows(request) -> None:
    """One graph; and sizes that are known are not taken for others."""
    want = {count: wanted("quartet2", True, count) for count in (1030, 1029, 1160)}
    for count in want:
        want[count][3] = dbias(count)
    sources = request.getfixturevalue("pretended")
    step = step_of("quartet2", bias=True, dynamic=True)
    for count in (1030, 1029, 1160, 1030):
        assert all(map(torch.equal, step(rows(count)), want[count]))
    assert len(sources) == 2 and "fixed=False" in sources[1]


def test_operands_that_lie_otherwise(request) -> None:
    """Off 16 bytes: other kernels, or a copy. One graph was compiled for operands on 16 bytes."""
    want = wanted("quartet2")
    request.getfixturevalue("pretended")
    step = step_of("quartet2")
    shifted = torch.empty(100 * WIDTH + 1, dtype=torch.bfloat16)[1:].view(100, WIDTH)
    for x in (rows(100), shifted.copy_(rows(100)), rows(100)):
        assert all(map(torch.equal, step(x), want))


def test_a_launch_that_fails_is_replaced_once_and_for_all(request, monkeypatch) -> None:
    want = wanted("quartet2")
    request.getfixturevalue("pretended")
    bind, refused = Launch.bind, []

    def failing(launch, *args):
        if launch.variant.file == "rotate_quantize.cu":
            refused.append(launch)
            raise LaunchError("cannot launch rotate_quantize.cu: CUDA_ERROR_INVALID_IMAGE")
        return bind(launch, *args)

    monkeypatch.setattr(Launch, "bind", failing)
    step = step_of("quartet2")
    with pytest.warns(KernelWarning, match="INVALID_IMAGE") as caught:
        got = step(rows(100))
    assert all(map(torch.equal, got, want))
    said = set(re.findall(r"of q2::(\w+) on cpu is", " ".join(texts(caught, KernelWarning))))
    assert said == {"quantize", "requantize"}
    tried = len(refused)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(map(torch.equal, step(rows(100)), want))
    assert len(refused) == tried


def test_where_only_the_launch_of_several_fails(request, monkeypatch) -> None:
    """Each has its own then, with the same bits, and no kernel is rejected."""
    want = wanted("quartet2")
    request.getfixturevalue("pretended")
    bind, bound = Launch.bind, []

    def failing(launch, *args):
        if dict(launch.variant.defines).get("Q2_BATCH"):
            raise LaunchError("cannot load rotate_quantize.cu: CUDA_ERROR_INVALID_IMAGE")
        bound.append(launch.variant.file)
        return bind(launch, *args)

    monkeypatch.setattr(Launch, "bind", failing)
    step = step_of("quartet2")
    with warnings.catch_warnings():
        warnings.simplefilter("error", KernelWarning)
        for _ in range(2):
            assert all(map(torch.equal, step(rows(100)), want))
    assert not registry.left_out() and bound.count("rotate_quantize.cu") >= 4


def test_the_check_of_what_is_launched_together_begins(pretended, monkeypatch) -> None:
    """x and w; dy, and w and x requantized."""
    asked: list[int] = []

    def noted(op, args):
        asked.extend([len(args[0])] * (op == GROUP))
        return choose(op, args)

    monkeypatch.setattr(launches, "choose", noted)
    step_of("quartet2")(rows(100))
    assert asked == [2, 3]


def test_want_of_memory_is_raised(request, monkeypatch) -> None:
    request.getfixturevalue("pretended")

    def failing(launch, *args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Launch, "bind", failing)
    with pytest.raises(torch.OutOfMemoryError):
        step_of("quartet2")(rows(100))
    assert not registry.left_out()


def test_a_site_where_another_kernel_serves() -> None:
    """Generated code may come from a cache that a process with a GPU filled."""
    x, seed = rows(100), torch.tensor([5, 7])
    how = {"scheme": "nvfp4_sr_pow2", "transform": "rht16", "rowwise": True, "columnwise": False}
    call = SiteCall("quantize", (...,), (1, 0, 1), **how, rowwise_seed=...)
    site = CallSite(call, fixed=True)
    want = torch.ops.q2.quantize(x, **how, rowwise_seed=seed[1])
    codes, unit = torch.empty_like(want[0]), torch.empty(1)
    site(x, seed[1], codes, unit)
    assert torch.equal(codes, want[0]) and unit == want[2]


def test_profiles_name_the_ops(request) -> None:
    request.getfixturevalue("pretended")
    step = step_of("quartet2")
    step(rows(100))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(rows(100))
    names = {event.key for event in profile.key_averages()}
    backward = "q2::quantize + q2::requantize + q2::requantize"
    forward = {"q2::quantize + q2::quantize", "q2::dequantize"}
    assert {*forward, backward} <= names


def of_one_x(x, *weights):
    """q, k and v."""
    a, *others = (
        torch.ops.q2.quantize(m, scheme=RTN, rowwise=True, columnwise=False) for m in (x, *weights)
    )
    return [torch.ops.q2.gemm(*a, *b, None, RTN, RTN, torch.bfloat16) for b in others]


def test_an_operand_of_several_products_is_dequantized_once(request) -> None:
    """To the values of the reference."""
    operands: list[Any] = [rows(48, seed=i) for i in range(4)]
    want = of_one_x(*operands)
    sources = request.getfixturevalue("pretended")
    torch.testing.assert_close(torch.compile(of_one_x)(*operands), want)
    (source,) = sources
    sites = [line for line in source.splitlines() if re.match(r"q2_site_\d+ = ", line)]
    assert [n for site in sites if (n := site.count("'dequantize'"))] == [1, 1, 1, 1]


def test_statistics_are_taken_of_what_is_written(pretended) -> None:
    """A recorded operand by Inductor kernels, whose scales would wait for the next quantizer."""

    def recorded(x):
        how = {"scheme": "nvfp4_46_pow2", "rowwise": True, "columnwise": False}
        return torch.ops.q2.quantize(x.sigmoid() * x, **how, recorded=True)

    torch.compile(recorded)(rows(48))
    (source,) = pretended
    assert "q2_Call('split_scales'" in source
    assert source.index(" q2_site_0(") < source.index("statistics_of_operand.default(")


def mixed_gemm(*tensors):
    """One dequantized operand includes its global scale; the other's, 4/3, is separate."""
    return torch.ops.q2.gemm(*tensors, None, "mxfp4_rtn", "mxfp4_rtn34", torch.bfloat16)


def mixed_operands() -> list[torch.Tensor]:
    a, b = rows(100), rows(48, seed=1)
    q2 = torch.ops.q2
    return [
        *q2.quantize(a, scheme="mxfp4_rtn", rowwise=True, columnwise=False),
        *q2.quantize(b, scheme="mxfp4_rtn34", rowwise=True, columnwise=False),
    ]


def test_a_global_scale_is_applied_once(pretended, monkeypatch) -> None:
    """One of two operands includes its global scale. Only the other's is multiplied afterwards.
    So it is in BF16, where no fp8 tensor cores multiply mxfp4."""
    monkeypatch.setattr(scaled_mm, "why_not_in_e4m3", lambda capability: "as on an Ampere")
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("mm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype), "CPU")
        torch.compile(mixed_gemm)(*mixed_operands())
    finally:
        library._destroy()
    (source,) = pretended
    shown = re.findall(r"q2_Call\('dequantize', \((.*?), '(\w+)'", source)
    assert shown == [("..., ..., ...", "mxfp4_rtn"), ("..., ..., None", "mxfp4_rtn34")]
    (read,) = re.findall(r"triton_poi_\w+\.run\((.*?), stream", source)
    assert "arg5_1" in read and "arg2_1" not in read


@pytest.mark.gpu
def test_a_global_scale_is_applied_once_on_a_gpu() -> None:
    lowering.register()
    operands = mixed_operands()
    want = mixed_gemm(*operands).float()
    got = torch.compile(mixed_gemm)(*(t.cuda() for t in operands)).cpu().float()
    # Both are rounded to bf16 once, and differ by the order of the fp32 sums.
    assert (got - want).norm() <= 2.0**-8 * want.norm()


def test_every_op_that_reads_an_operand_has_a_lowering() -> None:
    """Inductor stores the operands of an op without a lowering, from the second such op of a
    process on. Other kernels then read rounded values."""
    lowering.register()
    for name in choice.ops():
        if name in (
            *(
                "quantize",
                "requantize",
                "masked_unrotate",
                "dequantize",
                "split_scales",
                "gemm",
                "transpose",
            ),
            "gemm_masked_unrotate",
        ):
            assert getattr(torch.ops.q2, name).default in lowerings, name
