# SPDX-License-Identifier: Apache-2.0
"""q2::grouped_gemm of fp8 operands by torch._scaled_grouped_mm: operands by torch's own rules, the
values of the reference, and on a Hopper the products themselves."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._meta_registrations import meta_scaled_grouped_mm
from torch._subclasses.fake_tensor import FakeTensorMode

from q2compile.runtime_kernels.choice import choose
from q2compile.runtime_kernels.cuda.gemm import scaled_mm as kernel
from q2compile.runtime_kernels.kernel_states import assumed_gpu
from q2compile.runtime_kernels.registry import REFERENCE, SCALED_GROUPED_MM, select
from tests.support.pairwise import pairwise

q2 = torch.ops.q2
BF16 = torch.bfloat16
GEMMS = ("fprop", "dgrad", "wgrad")
ROUTINGS = {
    "an empty group": (3, 0, 130, 40),
    "empty groups at both ends": (0, 128, 5, 0),
    "rows of no group": (16, 32, 1, 7, -20),
    "equal groups": (128, 128),
    "one row": (0, 0, 1),
}
N, K = 48, 80


def codes(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(q2.quantize(x, scheme="fp8", rowwise=True, columnwise=False, amax=q2.amax(x))[:3])


def columnwise(x: torch.Tensor, offs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    made = q2.quantize(
        x, scheme="fp8", rowwise=False, columnwise=True, amax=q2.amax(x),
        offs=offs, padded_offs=q2.padded_ends(offs, True),
    )  # fmt: skip
    return tuple(made[:3])


def arguments(gemm: str, routing: str, n: int = N, k: int = K, dtype: torch.dtype = BF16) -> list:
    """The arguments of a GEMM of experts w [E, n, k], as `q2compile.linear.experts` makes them."""
    sizes = [size for size in ROUTINGS[routing] if size >= 0]
    rows = sum(map(abs, ROUTINGS[routing]))
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    generator = torch.Generator().manual_seed(1)
    x, dy, w = (
        torch.randn(shape, generator=generator).to(BF16)
        for shape in ((rows, k), (rows, n), (len(sizes) * n, k))
    )
    if gemm == "fprop":
        a, b = codes(x), codes(w)
    elif gemm == "dgrad":
        a, b = codes(dy), codes(w.unflatten(0, (-1, n)).permute(2, 0, 1).flatten(1).contiguous())
    else:
        a, b, offs = columnwise(dy, offs), columnwise(x, offs), q2.padded_ends(offs, True)
    return [*a, *b, offs, "fp8", "fp8", gemm, dtype]


def exact(args: list) -> torch.Tensor:
    """The product in fp64, of the operands' own values."""
    *operands, offs, _, _, gemm, _ = args
    a, b = (operands[i].double() * operands[i + 2].double() for i in (0, 3))
    ends, groups = [0, *offs.tolist()], offs.shape[0]
    spans = itertools.pairwise(ends)
    if gemm == "wgrad":
        return torch.cat([a[:, s:e] @ b[:, s:e].t() for s, e in spans])
    weights = (
        b.unflatten(0, (groups, -1)).mT if gemm == "fprop" else b.t().unflatten(0, (groups, -1))
    )
    out = a.new_zeros(a.shape[0], weights.shape[-1])
    for (s, e), w in zip(spans, weights, strict=True):
        out[s:e] = a[s:e] @ w
    return out


def close(got: torch.Tensor, args: list) -> None:
    """One rounding to bf16, and one to fp32 for each product that is added, each of at most the sum
    of magnitudes."""
    magnitudes = exact([t.abs() if t.is_floating_point() else t for t in args[:7]] + args[7:])
    contraction = args[0].shape[1]
    bound = exact(args).abs() * 2.0**-8 + magnitudes * contraction * 2.0**-24
    assert ((got.double() - exact(args)).abs() <= bound).all()


def by_torchs_rules(seen: list[str]):
    """In place of torch._scaled_grouped_mm: its checks, those of its C++ code and of its device
    code, and its product in fp32. Rows that it does not write are NaN."""

    def product(a, b, scale_a, scale_b, *, offs, out_dtype, use_fast_accum):
        out = meta_scaled_grouped_mm(
            a, b, scale_a, scale_b, offs, None, None, out_dtype, use_fast_accum
        )
        assert use_fast_accum and a.shape[-1] % 16 == 0
        assert b.shape[-2] % 16 == b.shape[-1] % 16 == 0
        spans = list(itertools.pairwise([0, *offs.tolist()]))
        out = torch.full(out.shape, torch.nan, dtype=out_dtype)
        for e, (start, end) in enumerate(spans):
            if b.dim() == 2:
                assert end > start and (end - start) % 16 == 0 and end <= a.shape[1]
                scale = scale_a.view(-1, a.shape[0])[e, :, None] * scale_b.view(-1, b.shape[1])[e]
                out[e] = (a[:, start:end].float() @ b[start:end].float() * scale).to(out_dtype)
            else:
                scale = scale_a[start:end, None] * scale_b[e]
                out[start:end] = (a[start:end].float() @ b[e].float() * scale).to(out_dtype)
        seen.append(f"{a.dim()}D {b.dim()}D")
        return out

    return product


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("gemm", GEMMS)
def test_operands_by_the_rules_of_torch(gemm, routing, monkeypatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch, "_scaled_grouped_mm", by_torchs_rules(seen))
    monkeypatch.setattr(kernel, "zero_rows", lambda out, offs: out[int(offs[-1]) :].zero_())
    args = arguments(gemm, routing)
    got = kernel.scaled_grouped_mm(*args)
    assert seen == ["2D 2D" if gemm == "wgrad" else "2D 3D"] and got.is_contiguous()
    want = select("grouped_gemm", args, REFERENCE)(*args)
    assert got.shape == want.shape and got.dtype == want.dtype
    close(got, args)
    close(want, args)
    empty = [e for e, size in enumerate(s for s in ROUTINGS[routing] if s >= 0) if not size]
    assert gemm != "wgrad" or not any(got.unflatten(0, (-1, N))[e].any() for e in empty)


def test_the_bound_is_tight_enough_to_see_a_wrong_expert() -> None:
    args = arguments("fprop", "equal groups")
    shifted = [*args[:6], args[6] - torch.tensor([1, 0], dtype=torch.int32), *args[7:]]
    with pytest.raises(AssertionError):
        close(exact(shifted), args)


def served(args: list, capability: tuple[int, int]) -> tuple[str, str | None]:
    """The kernel of a call on a GPU, and why this one is not it."""
    with FakeTensorMode(), assumed_gpu(capability):
        fakes = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
            if isinstance(x, torch.Tensor)
            else x
            for x in args
        ]
        choice = choose("grouped_gemm", fakes)
    return choice.name, choice.why_not.get(SCALED_GROUPED_MM)


@pytest.mark.parametrize("gemm", GEMMS)
def test_a_hopper_is_served(gemm) -> None:
    assert served(arguments(gemm, "an empty group"), (9, 0)) == (SCALED_GROUPED_MM, None)


LEFT = {
    "8.9": (("fprop", "equal groups"), (8, 9), "for compute capability 9.0, this is 8.9"),
    "10.0": (("fprop", "equal groups"), (10, 0), "for compute capability 9.0, this is 10.0"),
    "fp32": (("wgrad", "equal groups", N, K, torch.float32), (9, 0), "bfloat16, not torch.float32"),
    "8 odd columns": (("fprop", "equal groups", 40), (9, 0), "multiples of 16, not 40"),
    "odd rows of w": (("dgrad", "equal groups", N, 72), (9, 0), "multiples of 16, not 72"),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_is_left_to_the_reference_has_its_reason(what) -> None:
    call, capability, why = LEFT[what]
    name, reason = served(arguments(*call), capability)
    assert name == REFERENCE and reason is not None and why in reason


@pytest.mark.gpu
@pytest.mark.parametrize("gemm, size, routing", pairwise(GEMMS, [(N, K), (768, 2048)], ROUTINGS))
def test_a_hopper_multiplies_them(gemm, size, routing) -> None:
    """The error of rounding a result to bf16 once is .00166 of its norm, and .0017 to .0021 with
    fast accumulation (KERNEL_LOG.md). The smallest results have 48 elements, so a fifth more is
    allowed. Nothing is left in gradients of empty groups and in rows of no group."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch has the kernel for compute capability 9.0")
    args = arguments(gemm, routing, *size)
    on_gpu = [x.to("cuda") if isinstance(x, torch.Tensor) else x for x in args]
    got = select("grouped_gemm", on_gpu, SCALED_GROUPED_MM)(*on_gpu).cpu()
    want = exact(args)
    assert (got.double() - want).norm() / want.norm() < 0.0025
    sizes = [size for size in ROUTINGS[routing] if size >= 0]
    if gemm == "wgrad":
        experts = zip(sizes, got.unflatten(0, (len(sizes), -1)), strict=True)
        assert not any(gradient.any() for size, gradient in experts if not size)
    else:
        assert not got[int(args[6][-1]) :].any()
    assert choose("grouped_gemm", on_gpu).name == SCALED_GROUPED_MM
