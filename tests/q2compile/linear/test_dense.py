# SPDX-License-Identifier: Apache-2.0
"""`q2::linear` and its autograd: gradients of the quantized forward, what is saved, dtypes,
bias.
"""

import pytest
import torch
import torch.nn.functional as F

import q2compile.linear.dense  # noqa: F401  registers q2::linear
from q2compile import quantize
from q2compile.linear.autograd import of_rows
from q2compile.recipes.resolve import resolve

QUARTET2 = resolve("quartet2").texts()
q2 = torch.ops.q2


def operands(t=48, n=64, k=80, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    return draw(t, k).requires_grad_(), draw(n, k).requires_grad_(), draw(t, n)


def dequantized(x, scheme="nvfp4_46_pow2"):
    """A tensor as fprop reads it."""
    amax = q2.amax(x) if not scheme.endswith("pow2") else None
    return q2.dequantize(
        *q2.quantize(x, scheme=scheme, rowwise=True, columnwise=False, amax=amax),
        scheme,
        x.shape[1],
        torch.float32,
    )


def gradients(x, w, dy, recipe=QUARTET2, bias=None, seed_index=0):
    y = q2.linear(x, w, bias, *recipe, seed_index)
    inputs = [t for t in (x, w, bias) if t is not None and t.requires_grad]
    return y, torch.autograd.grad(y, inputs, dy)


def relative(error, reference):
    return (error.norm() / reference.norm()).item()


@pytest.mark.parametrize("global_scale", ["pow2", "exact"])
def test_forward_is_the_product_of_the_dequantized_operands(global_scale):
    """fp32 sums in another order: K = 80 terms, so sqrt(80) * 2**-24 = 5e-7 relative is
    expected.
    """
    x, w, _ = operands()
    recipe = resolve("quartet2", global_scale)
    y = q2.linear(x, w, None, *recipe.texts(), 0)
    expected = dequantized(x, recipe.fprop.a.scheme) @ dequantized(w, recipe.fprop.b.scheme).t()
    assert relative(y - expected, expected) < 2e-6


def mean_errors(recipe, expected, draws=(1, 16, 256)):
    """{B: relative squared errors of the mean of B draws of (dx, dw) against ``expected``}."""
    x, w, dy = operands(128, 128, 80)
    torch.manual_seed(1)
    sums = [torch.zeros_like(g) for g in expected]
    errors = {}
    for b in range(1, max(draws) + 1):
        _, grads = gradients(x, w, dy, resolve(recipe).texts())
        for total, grad in zip(sums, grads, strict=True):
            total += grad
        if b in draws:
            pairs = zip(sums, expected, strict=True)
            errors[b] = [relative(total / b - g, g) ** 2 for total, g in pairs]
    return errors


def quantized_gradients(x_scheme, w_scheme):
    """dx and dw of the forward that quantizes with these schemes; None: not quantized."""
    x, w, dy = (t.detach() for t in operands(128, 128, 80))
    x = x if x_scheme is None else dequantized(x, x_scheme)
    w = w if w_scheme is None else dequantized(w, w_scheme)
    return dy @ w, dy.t() @ x


UNBIASED = {
    "quartet2": ("nvfp4_46_pow2", "nvfp4_46_pow2"),
    "tetrajet2": ("nvfp4_pow2", "nvfp4_pow2"),
    "mxfp4": (None, None),
}


@pytest.mark.parametrize("recipe", UNBIASED)
def test_mean_gradient_is_that_of_the_quantized_forward_and_falls_as_one_over_b(recipe):
    """Traps 7, 8, 11: gradients are with respect to the *quantized* x and w, unbiased over draws.

    The squared error of a mean of B independent unbiased draws is 1/B of one draw's: over B = 1,
    16, 256 it must fall 16-fold each time. A ratio of two such means of 10000 entries scatters by a
    few percent; a bias of 1% of the gradient's norm would stop the last step at 9 instead of 16.
    """
    errors = mean_errors(recipe, quantized_gradients(*UNBIASED[recipe]))
    for b in (1, 16):
        for before, after in zip(errors[b], errors[16 * b], strict=True):
            assert 12 < before / after < 20
    if recipe == "quartet2":
        # One draw: MS-EDEN's error is 9.4e-3 of an operand's energy, and the two errors add.
        assert all(0.017 < e < 0.021 for e in errors[1])


@pytest.mark.parametrize("t", [1, 2, 5, 8, 12, 33])
def test_few_rows_give_an_unbiased_wgrad(t):
    """As in an expert's group (numerics/groups.py): the error of a mean of n draws is 1/sqrt(n) of
    one draw's, up to the variation of so few elements. With zeros in place of copies 2 rows would
    end at 0.058 of the gradient, 8 at 0.029; the means of 256 unbiased draws are off by 0.008."""
    n = 256
    x, w, dy = operands(t=t)
    y = q2.linear(x, w, None, *QUARTET2, 0)
    right, mean, squares = dy.t() @ dequantized(x.detach()), 0, 0
    for _ in range(n):
        error = torch.autograd.grad(y, w, dy, retain_graph=True)[0] - right
        mean, squares = mean + error / n, squares + error.square().sum() / n
    assert 0.01 < squares.sqrt() / right.norm() < 0.15
    assert mean.norm() * n**0.5 < (1.2 if t > 4 else 1.5) * squares.sqrt()


def test_which_rows_are_a_group_of_their_own():
    quartet2, tetrajet2 = resolve("quartet2"), resolve("tetrajet2")
    for t, recipe, few in (
        *((t, quartet2, True) for t in (1, 64, 129, 130, 960)),
        *((t, quartet2, False) for t in (0, 65, 128, 256, 1023, 1024, 1025, 4097)),
        (2, tetrajet2, False),
        (2, resolve({"base": "quartet2", "wgrad": "bf16"}), False),
    ):
        product = of_rows(torch.empty(t, 8), recipe)
        assert set(product.ends) == ({"offs", "padded_offs"} if few else set()), t
        if few:
            offs, padded_offs = product.ends["offs"], product.ends["padded_offs"]
            assert offs.tolist() == [t] and padded_offs.dtype == torch.int32
            assert torch.equal(padded_offs, q2.padded_ends(offs))


def test_four_over_six_with_sr_in_backward_is_biased():
    """Keeping the better of two random draws prefers those that moved less: the mean stops
    falling.
    """
    sr46 = {"scheme": "nvfp4_sr_46", "transform": "rht128"}
    recipe = {"base": "tetrajet2", "dgrad": {"dy": sr46, "w": sr46}}
    dx, dw = zip(
        *mean_errors(recipe, quantized_gradients("nvfp4_pow2", "nvfp4_pow2")).values(), strict=True
    )
    assert dx[1] / dx[2] < 8 and dw[1] / dw[2] > 12


def test_fixed_signs_stop_wgrad_of_nvfp4_where_signs_per_step_go_on():
    """x is rounded to nearest in the forward: with one sign vector for ever its error is the same
    in every step and stays in the mean; with signs drawn per step it is another one each time."""
    expected = quantized_gradients(None, "nvfp4_16x16_pow2")
    fixed = {"transform": "rht16_fixed"}
    recipe = {"base": "nvfp4", "wgrad": {"dy": fixed, "x": fixed}}
    per_step, one_vector = (mean_errors(r, expected) for r in ("nvfp4", recipe))
    assert one_vector[256][1] > 0.5 * one_vector[16][1]  # a plateau
    assert per_step[256][1] < 0.2 * one_vector[256][1]
    for errors in (per_step, one_vector):  # dgrad: SR of dy against one quantized w
        assert 12 < errors[16][0] / errors[256][0] < 20


def test_mxfp4_2d_is_its_formulas():
    """dx is unbiased with respect to Q32x32(w). dw is the product of two operands that are rounded
    to nearest in a rotated basis, without random bits."""
    x, w, dy = operands(128, 128, 80)
    qw = quantize(w.detach(), "mxfp4_rceil_32x32").dequantize()
    y, (_, dw) = gradients(x, w, dy, resolve("mxfp4_2d").texts())
    expected = quantize(x.detach(), "mxfp4_rceil").dequantize() @ qw.t()
    assert relative(y - expected, expected) < 2e-6
    of_wgrad = {"scheme": "mxfp4_rceil", "transform": "h32", "transpose": True}
    qdy, qx = (quantize(t.detach(), **of_wgrad).dequantize() for t in (dy, x))
    assert relative(dw - qdy.t() @ qx, dw) < 2e-6
    errors = mean_errors("mxfp4_2d", (dy @ qw, dw))
    assert 12 < errors[16][0] / errors[256][0] < 20
    assert errors[1][1] == errors[16][1] == 0


def test_same_seed_same_bits_next_step_different():
    x, w, dy = operands()
    torch.manual_seed(3)
    _, first = gradients(x, w, dy)
    _, second = gradients(x, w, dy)
    torch.manual_seed(3)
    _, again = gradients(x, w, dy)
    for a, b, c in zip(first, second, again, strict=True):
        assert torch.equal(a, c) and not torch.equal(a, b)


def test_dgrad_and_wgrad_take_their_own_seeds():
    """Trap 7: each GEMM has its signs; with one seed the two GEMMs of a square layer would
    share.
    """
    x, w, dy = operands(64, 64, 64)
    seeds = []
    with _recording(seeds):
        gradients(x, w, dy)
    assert len(seeds) == 2 and seeds[0] != seeds[1]


class _recording(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the value of every q2::seed that is drawn."""

    def __init__(self, seeds):
        super().__init__()
        self.seeds = seeds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is q2.seed.default:
            self.seeds.append(int(out))
        return out


def saved_tensors(run):
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return saved


def test_saved_for_backward_are_codes_scales_and_one_scalar_an_operand():
    """Nothing in high precision: 4.5 bits per element and one fp32 scalar per operand."""
    x, w, _ = operands(64, 64, 128, torch.bfloat16)
    saved = saved_tensors(lambda: q2.linear(x, w, None, *QUARTET2, 0))
    assert sorted((str(t.dtype), t.numel()) for t in saved) == sorted(
        2 * [("torch.uint8", 64 * 64), ("torch.float8_e4m3fn", 64 * 8), ("torch.float32", 1)]
    )
    size = sum(t.numel() * t.element_size() for t in saved)
    assert 8 * (size - 2 * 4) == 4.5 * (x.numel() + w.numel())


def test_a_frozen_weight_has_no_wgrad_and_saves_no_x():
    """Trap: needs_input_grad, LoRA's frozen base."""
    x, w, dy = operands(64, 64, 128)
    w.requires_grad_(False)
    saved = saved_tensors(lambda: q2.linear(x, w, None, *QUARTET2, 0))
    assert len(saved) == 3 and saved[0].shape == (64, 64)  # the codes of w [64, 128]
    seeds = []
    with _recording(seeds):
        _, (dx,) = gradients(x, w, dy)
    assert len(seeds) == 1 and dx.shape == x.shape


def test_input_without_gradient_has_no_dgrad():
    x, w, dy = operands(64, 64, 128)
    x.requires_grad_(False)
    assert len(saved_tensors(lambda: q2.linear(x, w, None, *QUARTET2, 0))) == 3
    _, (dw,) = gradients(x, w, dy)
    assert relative(dw - dy.t() @ dequantized(x), dw) < 0.2


def test_bias_is_added_in_high_precision_and_its_gradient_is_not_quantized():
    """Trap 13: the released kernels take a bias and drop it."""
    x, w, dy = operands(dtype=torch.bfloat16)
    bias = torch.randn(64, dtype=torch.bfloat16, requires_grad=True)
    y, (_, _, dbias) = gradients(x, w, dy, bias=bias)
    without = q2.linear(x.float(), w.float(), None, *QUARTET2, 0)
    assert torch.equal(y, (without + bias.float()).to(torch.bfloat16))
    assert torch.equal(dbias, dy.float().sum(0).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_come_back_as_they_went_in(dtype):
    x, w, dy = operands(dtype=dtype)
    y, (dx, dw) = gradients(x, w, dy)
    assert {t.dtype for t in (y, dx, dw)} == {dtype}


def test_autocast_casts_first_and_masters_get_their_own_dtype():
    """Trap: custom ops are not on autocast's lists; x and w are cast before quantizing."""
    x, w, _ = operands()
    with torch.autocast("cpu", torch.bfloat16):
        y = q2.linear(x, w, None, *QUARTET2, 0)
    plain = q2.linear(x.bfloat16(), w.bfloat16(), None, *QUARTET2, 0)
    assert y.dtype == torch.bfloat16 and torch.equal(y, plain)
    y.sum().backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32


def test_leading_dimensions_and_expanded_gradients():
    """Trap 13: y.sum() hands back a stride-0 gradient; x may have any leading dimensions."""
    x, w, _ = operands(60, 64, 80)
    shaped = x.detach().view(3, 4, 5, 80).requires_grad_()
    torch.manual_seed(0)
    y = q2.linear(shaped, w, None, *QUARTET2, 0)
    y.sum().backward()
    torch.manual_seed(0)
    _, (dx, dw) = gradients(x, w, torch.ones(60, 64))
    assert y.shape == (3, 4, 5, 64)
    assert torch.equal(shaped.grad.view(60, 80), dx) and torch.equal(w.grad, dw)


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_a_gemm_left_in_bf16_is_exact(gemm):
    recipe = resolve({"base": "quartet2", gemm: "bf16"}).texts()
    x, w, dy = operands()
    y, (dx, dw) = gradients(x, w, dy, recipe)
    exact = {"fprop": (y, x @ w.t()), "dgrad": (dx, dy @ w), "wgrad": (dw, dy.t() @ x)}
    for name, (got, want) in exact.items():
        assert (relative(got - want, want) < 1e-5) == (name == gemm)


def test_bf16_everywhere_is_torchs_own_linear():
    x, w, dy = operands()
    bias = torch.randn(64, requires_grad=True)
    y, grads = gradients(x, w, dy, ("bf16", "bf16", "bf16"), bias)
    own = F.linear(x, w, bias)
    assert torch.equal(y, own)
    for got, want in zip(grads, torch.autograd.grad(own, (x, w, bias), dy), strict=True):
        torch.testing.assert_close(got, want)


def test_second_derivatives_are_refused():
    x, w, dy = operands()
    y = q2.linear(x, w, None, *QUARTET2, 0)
    (dx,) = torch.autograd.grad(y, x, dy.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("where", ["x", "w", "dy"])
def test_nan_and_inf_reach_the_output(bad, where):
    """Trap 5: one Inf can silently zero every other block of its tensor, and a max may drop a NaN,
    which a GradScaler must see. It reaches the results of its contraction and no others."""
    x, w, dy = operands()
    with torch.no_grad():
        {"x": x, "w": w, "dy": dy}[where][3, 5] = BAD[bad]
    y, (dx, dw) = gradients(x, w, dy)

    def rows_of(result):
        bad = ~result.isfinite()
        assert torch.equal(bad.any(1), bad.all(1))
        return bad.all(1).nonzero().flatten().tolist()

    block = list(range(16))  # of x's codes, which wgrad requantizes
    wanted = {
        "x": {"y": [3], "dx": [], "dw.t": block},
        "w": {"y.t": [3], "dx.t": block, "dw": []},
        "dy": {"y": [], "dx": [3], "dw": [5]},
    }[where]
    results = {"y": y, "dx": dx, "dw": dw}
    for name, rows in wanted.items():
        result = results[name.removesuffix(".t")]
        assert rows_of(result.t() if name.endswith(".t") else result) == rows, name


@pytest.mark.parametrize("size", [1e-30, 1e-9, 1e30])
def test_tiny_and_huge_tensors_keep_their_direction(size):
    """Trap 2: a lower bound of the tensor scale ruined one vendor's gradients. The cosine of one
    MS-EDEN product is 1/sqrt(1 + 2 * 9.4e-3) = 0.991."""
    x, w, dy = operands()
    y, (dx, dw) = gradients(x, w, dy * size)
    for got, want in ((dx, dy @ w), (dw, dy.t() @ x)):
        got = got / size
        assert F.cosine_similarity(got.flatten(), want.flatten(), 0) > 0.98
        assert 0.9 < got.norm() / want.norm() < 1.1
    with torch.no_grad():
        x *= size
    y = q2.linear(x, w, None, *QUARTET2, 0) / size
    assert relative(y - x / size @ w.t(), y) < 0.15


@pytest.mark.parametrize(("t", "n", "k"), [(0, 32, 48), (1, 16, 16), (7, 17, 33), (129, 50, 130)])
def test_any_shape(t, n, k):
    """Traps 10 and 14: an expert without tokens, odd T, N and K that no block size divides."""
    x, w, dy = operands(t, n, k)
    y, (dx, dw) = gradients(x, w, dy)
    assert (y.shape, dx.shape, dw.shape) == ((t, n), (t, k), (n, k))
    if t == 0:
        assert dw.abs().max() == 0
    elif t > 1:
        for got, want in ((y, x @ w.t()), (dx, dy @ w), (dw, dy.t() @ x)):
            assert relative(got - want, want) < 0.25
