# SPDX-License-Identifier: Apache-2.0
"""The linear layers of the branched runs' arms: what they compute, and what their theory says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from pretraining.linears import (  # noqa: E402
    LINEARS,
    FeedbackLinear,
    FixedBalanceLinear,
    OneOperandLinear,
    QuantizedLinear,
    XInFP8Linear,
    feed_back,
    measure_balances,
    replace_linears,
)
from pretraining.scale_rules import errors, table  # noqa: E402

import q2compile  # noqa: E402

OPTIONS = {"recipe": "quartet2_search"}
SCHEME = "nvfp4_search_pow2"  # of w in its forward
TOKENS, K, N = 256, 64, 48


def made(name: str, dtype: torch.dtype = torch.float32) -> nn.Linear:
    """A linear layer of that kind, with weights of seed 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N, dtype=dtype))
    replace_linears(model, name, OPTIONS)
    assert isinstance(model[0], nn.Linear)
    return model[0]


def uneven(dtype: torch.dtype = torch.float32) -> Tensor:
    """x whose columns have standard deviations from 1/4 to 4, and a mean of 3."""
    factors = torch.exp2(torch.linspace(-2, 2, K)[torch.randperm(K)])
    return ((torch.randn(2, TOKENS // 2, K) * factors) + 3).to(dtype)


ROUNDING = (OneOperandLinear, XInFP8Linear)  # round what they multiply in BF16
EXACT = sorted(n for n, kind in LINEARS.items() if not issubclass(kind, ROUNDING))


@pytest.mark.parametrize("name", EXACT)
def test_the_result_and_the_gradients_are_those_of_a_linear(name: str) -> None:
    linear = made(name, torch.float64)
    if isinstance(linear, QuantizedLinear):
        linear.texts = ("bf16", "bf16", "bf16")
    x = uneven(torch.float64).requires_grad_()
    measure_balances(linear, lambda: linear(x))
    dy = torch.randn(2, TOKENS // 2, N, dtype=torch.float64)
    plain = nn.Linear.forward(linear, x)
    wanted = [plain, *torch.autograd.grad(plain, [x, linear.weight], dy)]
    y = linear(x)
    found = [y, *torch.autograd.grad(y, [x, linear.weight], dy)]
    for one, other in zip(found, wanted, strict=True):
        # mean_split's mean and balanced's x / d are fp32: 2^-24 of values up to 20, in sums of 256.
        torch.testing.assert_close(one, other, rtol=0, atol=256 * 20 * 2.0**-24)


def multiplied(linear: nn.Linear, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The operands x and w of the product that is quantized."""
    operands: list[Tensor] = []

    def product(x: Tensor, w: Tensor, *_bias: Tensor) -> Tensor:
        operands.extend((x.detach().flatten(0, -2), w.detach()))
        return x @ w.t()

    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "linear", product)
        if isinstance(linear, QuantizedLinear):
            patch.setattr(linear, "multiply", product)
        linear(x)
    return operands


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "quartet2"])
@pytest.mark.parametrize("name, rounded", [("x_alone", "x"), ("w_alone", "w")])
def test_one_rounded_operand(name: str, rounded: str, backend: str) -> None:
    """The product with quantized values of one, and the gradients of the product without."""
    linear, x = made(name), uneven().requires_grad_()
    operands = {"x": x.detach().bfloat16(), "w": linear.weight.detach().bfloat16()}
    values = q2compile.quantize(operands[rounded].flatten(0, -2), SCHEME).dequantize().bfloat16()
    changed = {**operands, rounded: values.view_as(operands[rounded])}
    assert linear.bias is not None
    want = nn.functional.linear(changed["x"], changed["w"], linear.bias.bfloat16())
    dy = torch.randn(2, TOKENS // 2, N).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.compile(linear, backend=backend)(x)
    found = torch.autograd.grad(y, [x, linear.weight], dy)
    torch.testing.assert_close(y, want, rtol=2.0**-7, atol=2.0**-7)  # an ulp or two of bf16
    dw = dy.flatten(0, -2).t() @ operands["x"].flatten(0, -2)
    for one, other in zip(found, [dy @ operands["w"], dw], strict=True):
        error = (one - other.float()).norm() / other.float().norm()
        assert error < 2.0**-8  # both are rounded to bf16


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "quartet2"])
def test_x_in_fp8(backend: str) -> None:
    """The product of e4m3's x and the recipe's w, and a backward that is the recipe's of these."""
    linear, x = made("x_in_fp8"), uneven().requires_grad_()
    w = linear.weight.detach().bfloat16()
    x_values = q2compile.quantize(x.detach().bfloat16().flatten(0, -2), "fp8").dequantize()
    values = x_values.view_as(x).bfloat16(), q2compile.quantize(w, SCHEME).dequantize().bfloat16()
    assert linear.bias is not None
    want = nn.functional.linear(*values, linear.bias.bfloat16())
    dy = torch.randn(2, TOKENS // 2, N).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.compile(linear, backend=backend)(x)
    found = torch.autograd.grad(y, [x, linear.weight], dy)
    torch.testing.assert_close(y, want, rtol=2.0**-7, atol=2.0**-7)  # an ulp or two of bf16
    dw = dy.flatten(0, -2).t().float() @ x_values.view(-1, x.shape[-1]).float()
    for one, other in zip(found, [dy.float() @ values[1].float(), dw], strict=True):
        error = (one.float() - other).norm() / other.norm()
        assert 0.05 < error < 0.2  # MS-EDEN's of both operands, .1 each and more in short blocks


def test_the_mean_is_split_off(monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = multiplied(made("mean_split"), uneven(), monkeypatch)
    assert x.mean(0).abs().max() < 1e-5


# --------------------------------------------------------------------------------------- balanced


def relative_error(x: Tensor, w: Tensor) -> float:
    """The relative squared error of x wᵀ with both rounded."""
    rounded = [q2compile.quantize(t, SCHEME).dequantize() for t in (x, w)]
    wanted = x @ w.t()
    return float((rounded[0] @ rounded[1].t() - wanted).square().sum() / wanted.square().sum())


def test_balance_lowers_the_error_of_uneven_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard deviations of x from 1/4 to 4, evenly in their logarithm, in random order.

    If all elements of a block had the same error, it would fall to (sum sqrt(ab))² / (sum a sum b)
    in the mean over blocks, .64. It falls to .79: e2m1 is a floating format, and smaller elements
    have smaller errors.
    """
    linear, x = made("balanced"), uneven()
    x = x - x.mean((0, 1))
    a = x.square().mean((0, 1)).view(-1, 16)
    b = linear.weight.detach().square().mean(0).view(-1, 16)
    least = float((a * b).sqrt().sum(1).square().sum() / (a.sum(1) * b.sum(1)).sum())
    before = relative_error(x.flatten(0, -2), linear.weight.detach())
    after = relative_error(*multiplied(linear, x, monkeypatch))
    assert least == pytest.approx(0.64, abs=0.02)
    assert after / before == pytest.approx(0.79, abs=0.03)


def test_a_balance_rarely_changes() -> None:
    """d is a power of the fourth root of 2, equal for two batches in nine of ten columns."""
    linear = made("balanced")
    batches = [torch.randn(4096, K) for _ in range(2)]
    first, second = (linear.balance(x) for x in batches)  # type: ignore[operator]
    quarters = 4 * first.log2()
    torch.testing.assert_close(quarters, quarters.round(), rtol=0, atol=1e-5)
    assert (first == second).float().mean() > 0.9
    zeros = torch.zeros(8, K)
    assert linear.balance(zeros).eq(1).all()  # type: ignore[operator]


def test_a_fixed_balance_is_that_of_the_first_batch() -> None:
    linear, x = made("fixed_balance"), uneven()
    assert isinstance(linear, FixedBalanceLinear) and not linear.d.any()
    measure_balances(linear, lambda: linear(x))
    assert torch.equal(linear.d, linear.balance(x)) and linear.d.unique().numel() > 2
    measure_balances(linear, lambda: linear(x * x))
    assert torch.equal(linear.d, linear.balance(x))
    linear.load_state_dict({"weight": linear.weight, "bias": linear.bias})  # a stem's
    assert not linear.d.any()


# --------------------------------------------------------------------------------------- feedback


def stepped(linear: nn.Linear, steps: int) -> list[Tensor]:
    """The dequantized weights that each of so many steps multiplies; the weights stay."""
    assert isinstance(linear, FeedbackLinear)
    found = []
    for _ in range(steps):
        wanted = (linear.weight + linear.offset).detach().bfloat16()
        found.append(q2compile.quantize(wanted, SCHEME).dequantize())
        feed_back(linear)
    return found


def test_fed_back_errors_leave_the_mean() -> None:
    """The mean's error is the last offset over the number of steps, 1/32 of a rounding error."""
    linear = made("error_feedback")
    weights = stepped(linear, 32)
    first, mean = weights[0] - linear.weight, torch.stack(weights).mean(0) - linear.weight
    torch.testing.assert_close(mean, -linear.offset / 32, rtol=0, atol=1e-6)
    assert mean.norm() < first.norm() / 16


def test_sticky_weights_keep_their_codes_longer() -> None:
    """Weights that move up and down by 5% of their size change fewer codes than plain ones."""
    changed = {}
    for name in ("sticky", "error_feedback"):
        linear = made(name)
        start = linear.weight.detach().clone()
        assert isinstance(linear, FeedbackLinear)
        if name == "error_feedback":
            linear.gain = 0.0  # a plain linear
        codes = []
        for step in range(20):
            with torch.no_grad():
                linear.weight.copy_(start * (1 + 0.05 * (-1) ** step * (start > 0)))
            wanted = (linear.weight + linear.offset).detach().bfloat16()
            codes.append(q2compile.quantize(wanted, SCHEME).codes)
            feed_back(linear)
        changed[name] = sum(
            int((a != b).sum()) for a, b in zip(codes[10:-1], codes[11:], strict=True)
        )
    assert 0 < changed["sticky"] < 0.7 * changed["error_feedback"]


def test_a_checkpoint_has_the_offset_and_a_stem_has_none() -> None:
    linear = made("error_feedback")
    stem = {key: value.clone() for key, value in linear.state_dict().items() if key != "offset"}
    feed_back(linear)
    kept = {key: value.clone() for key, value in linear.state_dict().items()}
    assert kept["offset"].abs().max() > 0
    linear.load_state_dict(stem)
    assert isinstance(linear, FeedbackLinear) and linear.offset.abs().max() == 0
    linear.load_state_dict(kept)
    assert torch.equal(linear.offset, kept["offset"])


def test_the_output_layer_stays_and_a_wrong_name_is_an_error() -> None:
    model = nn.ModuleDict({"o_proj": nn.Linear(K, N), "lm_head": nn.Linear(K, N)})
    options = {"recipe": "quartet2", "policy": {"*lm_head*": "bf16"}}
    replace_linears(model, "sticky", options)
    assert isinstance(model["o_proj"], FeedbackLinear) and type(model["lm_head"]) is nn.Linear
    assert model["o_proj"].texts[0] == "nvfp4_46_pow2 @ nvfp4_46_pow2"
    with pytest.raises(
        ValueError, match="linear 'balance': there is mean_split, x_alone, w_alone, x_in_fp8"
    ):
        replace_linears(model, "balance", options)


# ------------------------------------------------------------------------------------ scale rules


def test_the_search_is_near_the_bound_of_all_rules() -> None:
    """Errors are those of the schemes, of which the paper has two (9.0e-3 and 7.6e-3)."""
    torch.manual_seed(0)
    x = torch.randn(1 << 15, 16)
    found = {rule: 1e3 * error for rule, error in errors(x).items()}
    for rule, scheme in (("to nearest", "nvfp4"), ("4/6", "nvfp4_46"), ("search", "nvfp4_search")):
        values = q2compile.quantize(x.view(-1, 256), f"{scheme}_pow2").dequantize().view(-1, 16)
        own = 1e3 * float((values - x).square().sum() / x.square().sum())
        assert found[rule] == pytest.approx(own, rel=1e-5), rule
    assert found["to nearest"] == pytest.approx(9.05, abs=0.05)
    assert found["4/6"] == pytest.approx(7.56, abs=0.05)
    assert found["search"] == pytest.approx(6.70, abs=0.05)
    assert found["search over all scales"] == pytest.approx(6.60, abs=0.05) == min(found.values())
    for rule in list(found)[list(found).index("search") :]:
        assert 0 <= found["search"] - found[rule] < 0.8 / 1.7, rule  # .0008 nats, in 1e-3
    line = table({"search": 6.7e-3, "other": 6.6e-3}).splitlines()[2]
    assert line.split() == ["other", "6.60", "-0.00017"]
