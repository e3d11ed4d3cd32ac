# SPDX-License-Identifier: Apache-2.0
"""The code generated around the GEMMs for a Blackwell, without one (emulation/inductor.py)."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from itertools import product

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn

from q2compile.runtime_kernels.cuda.gemm import triton_fp4
from tests.support.emulation.inductor import INDUCTOR_OPTIONS, emulate, serve_as_on

CAPABILITIES = [100, 103, 120, 121]
_GEMM = re.compile(
    r"torch\.ops\.q2\.gemm(?:_masked_unrotate)?\.default"
    r"\((.*), '(\S+)', '((?!h32')\S+)',(?: 'h32',)? (torch\.\w+)\)"
)
_GROUPED_GEMM = re.compile(
    r"torch\.ops\.q2\.grouped_gemm\.default\(.*, '(\S+)', '(\S+)', '(\w+)', (torch\.\w+)\)"
)
_CALL = re.compile(
    r"= torch\.ops\.((?!aten\.view)\w+\.\w+)\.|\b(triton)_\w+\.run\(|(extern_kernels\.\w+)"
)


@cache
def sources(recipe: str, biased: bool, capability: int, dtype: torch.dtype = torch.bfloat16):
    """The code of a linear's forward and backward; T, N and K are whole tiles."""
    with pytest.MonkeyPatch.context() as patch, inductor_config.patch(INDUCTOR_OPTIONS):
        written = emulate(patch, capability)
        serve_as_on(patch, capability)
        patch.setattr(triton_fp4, "triton_version", lambda: (3, 8))
        torch._dynamo.reset()
        linear = nn.Linear(256, 256, bias=biased, dtype=dtype)
        x = torch.randn(256, 256, dtype=dtype, requires_grad=True)
        torch.compile(linear, backend="quartet2", options={"recipe": recipe})(x).sum().backward()
    return list(written)


def calls(source: str) -> Counter[str]:
    body = source[source.index("def call(") :]
    lines = [line for line in body.splitlines() if not line.lstrip().startswith("#")]
    found = (match for line in lines for match in _CALL.finditer(line))
    return Counter(next(filter(None, match.groups())) for match in found)


@pytest.mark.parametrize(
    "recipe, capability",
    [
        *product(["quartet2"], [100, 120]),
        *(("nvfp4", 100), ("quartet", 120), ("tetrajet2", 100)),
    ],
)
def test_a_bias_adds_no_kernel(recipe, capability) -> None:
    """It is an argument of the GEMM, which adds it before its one rounding. In the backward the
    quantizer of the gradient sums its columns, too."""
    without, with_ = (sources(recipe, biased, capability) for biased in (False, True))
    assert calls(with_[0]) == calls(without[0])
    assert calls(with_[1]) == calls(without[1])
    assert "dbias=torch.bfloat16" in with_[1]
    (gemm,) = _GEMM.findall(with_[0])
    assert gemm[0].endswith("primals_2") and gemm[3] == "torch.bfloat16"


@pytest.mark.parametrize(
    "recipe, capability",
    [
        *product(["quartet2"], CAPABILITIES),
        *(("quartet", 100), ("quartet", 120), ("tetrajet2", 100), ("mxfp4", 120)),
    ],
)
def test_gemms_get_codes_with_swizzled_scales_and_write_bf16(recipe, capability) -> None:
    """The GEMMs apply alpha, and no separate kernel pads, cuts, dequantizes or swizzles."""
    gemms = [
        gemm for source in sources(recipe, False, capability) for gemm in _GEMM.findall(source)
    ]
    assert len(gemms) == (2 if recipe == "mxfp4" else 3)
    for _, a_scheme, b_scheme, dtype in gemms:
        assert a_scheme.endswith("@32x4x4") and b_scheme.endswith("@32x4x4")
        assert dtype == "torch.bfloat16"
    for source in sources(recipe, False, capability):
        assert set(calls(source)) <= {
            *("q2.gemm", "q2.quantize", "q2.requantize", "aten.randint", "extern_kernels.mm"),
            *("q2.split_scales", "q2.gemm_masked_unrotate", "triton"),
        }


@pytest.mark.parametrize("capability", [100, 120])
def test_quest_is_undone_by_the_gemm(capability) -> None:
    forward, backward = sources("quartet", False, capability)
    assert calls(forward)["q2.gemm"] == 1
    assert calls(backward)["q2.gemm_masked_unrotate"] == 2
    assert "masked_unrotate" not in backward.replace("gemm_masked_unrotate", "")


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 256, 128, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, self.w.mT)


@cache
def code_of_experts(recipe: str, capability: int) -> str:
    with pytest.MonkeyPatch.context() as patch, inductor_config.patch(INDUCTOR_OPTIONS):
        written = emulate(patch, capability)
        serve_as_on(patch, capability)
        patch.setattr(triton_fp4, "triton_version", lambda: (3, 8))
        torch._dynamo.reset()
        x = torch.randn(4, 64, 128, dtype=torch.bfloat16, requires_grad=True)
        torch.compile(Experts(), backend="quartet2", options={"recipe": recipe})(x).sum().backward()
    return "".join(written)


@pytest.mark.parametrize(
    "recipe, capability",
    [
        *product(["quartet2"], [100, 120, 110, 90]),
        *(("nvfp4", 100), ("nvfp4", 90), ("quartet", 120), ("quartet", 90)),
    ],
)
def test_grouped_gemms_get_codes_where_there_are_fp4_tensor_cores(recipe, capability) -> None:
    """GEMMs get codes with plain scales, one node each, and write bf16. Elsewhere they are torch's
    grouped GEMMs of dequantized operands that include the global scale. One launch computes the
    ends of the groups."""
    code = code_of_experts(recipe, capability)
    found = _GROUPED_GEMM.findall(code)
    if capability != 90:
        assert [gemm for *_, gemm, _ in found] == ["fprop", "dgrad", "wgrad"]
        assert not any("@" in scheme for a, b, *_ in found for scheme in (a, b))
    else:
        backward = ["dgrad", "wgrad"] if recipe == "quartet" else []
        assert [gemm for *_, gemm, _ in found] == backward
        assert all(scheme.endswith("@bf16") for a, b, *_ in found for scheme in (a, b))
        assert code.count("= torch.ops.q2.grouped_mm.default(") == 3 - len(backward)
    assert {dtype for *_, dtype in found} <= {"torch.bfloat16"}
    graphs = 2 if recipe == "nvfp4" else 1  # it quantizes wgrad's x in the forward
    assert code.count("torch.ops.q2.padded_ends.default(") == graphs


def test_a_gpu_that_nobody_knows_has_operands_dequantized() -> None:
    """GEMMs are those of bf16; quantizers are kernels, or Inductor kernels."""
    forward, backward = sources("quartet2", False, 130)
    assert all(not s.endswith("@32x4x4") for s in re.findall(r"'(\S+)'", forward + backward))
    for _, a_scheme, b_scheme, _ in _GEMM.findall(backward):
        assert a_scheme.endswith("@bf16") and b_scheme.endswith("@bf16")
