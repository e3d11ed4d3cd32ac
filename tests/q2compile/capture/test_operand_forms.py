# SPDX-License-Identifier: Apache-2.0
"""Every product that capture knows, with its arguments by place and by name, and with every size of
its operands that broadcasts: every form that torch accepts is taken, or left with a reason, and has
the same values, dtypes and gradients.

The forms of a test are one model, which is compiled once.
"""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.rewritten import rewritten

aten = torch.ops.aten
T, K, N, E = 24, 32, 48, 3

# Name -> (function, torch's names of its tensors, "" for those that have none; their shapes; the
# weight's place among them).
PRODUCTS = {
    "F.linear": (F.linear, ("input", "weight", "bias"), ((T, K), (N, K), (N,)), 1),
    "F.linear, 3-D": (F.linear, ("input", "weight", "bias"), ((2, T, K), (N, K), (N,)), 1),
    "matmul": (torch.matmul, ("input", "other"), ((T, K), (K, N)), 1),
    "matmul, 3-D": (torch.matmul, ("input", "other"), ((2, T, K), (K, N)), 1),
    "matmul, weight first": (torch.matmul, ("input", "other"), ((N, K), (2, K, T)), 0),
    "matmul of a stack": (torch.matmul, ("input", "other"), ((E, T, K), (E, K, N)), 1),
    "linalg.matmul": (torch.linalg.matmul, ("input", "other"), ((T, K), (K, N)), 1),
    "mm": (torch.mm, ("input", "mat2"), ((T, K), (K, N)), 1),
    "x.mm": (lambda x, *a, **k: x.mm(*a, **k), ("", "mat2"), ((T, K), (K, N)), 1),
    "x.matmul": (lambda x, *a, **k: x.matmul(*a, **k), ("", "other"), ((T, K), (K, N)), 1),
    "addmm": (torch.addmm, ("input", "mat1", "mat2"), ((N,), (T, K), (K, N)), 2),
    "b.addmm": (
        lambda b, *a, **k: b.addmm(*a, **k),
        ("", "mat1", "mat2"),
        ((N,), (T, K), (K, N)),
        2,
    ),
    "addmm, weight first": (torch.addmm, ("input", "mat1", "mat2"), ((T,), (N, K), (K, T)), 1),
    "bmm": (torch.bmm, ("input", "mat2"), ((E, T, K), (E, K, N)), 1),
    "baddbmm": (torch.baddbmm, ("input", "batch1", "batch2"), ((N,), (E, T, K), (E, K, N)), 2),
    "aten.linear": (aten.linear, ("input", "weight", "bias"), ((T, K), (N, K), (N,)), 1),
    "aten.mm": (aten.mm, ("self", "mat2"), ((T, K), (K, N)), 1),
    "aten.mm.default": (aten.mm.default, ("self", "mat2"), ((T, K), (K, N)), 1),
    "aten.matmul": (aten.matmul.default, ("self", "other"), ((T, K), (K, N)), 1),
    "aten.addmm": (aten.addmm.default, ("self", "mat1", "mat2"), ((N,), (T, K), (K, N)), 2),
    "aten.bmm": (aten.bmm.default, ("self", "mat2"), ((E, T, K), (E, K, N)), 1),
    "aten.baddbmm": (
        aten.baddbmm.default,
        ("self", "batch1", "batch2"),
        ((N,), (E, T, K), (E, K, N)),
        2,
    ),
} | {
    f"einsum {equation}": (partial(torch.einsum, equation), ("", ""), shapes, place)
    for equation, shapes, place in (
        ("tk,nk->tn", ((T, K), (N, K)), 1),
        ("tk,kn->tn", ((T, K), (K, N)), 1),
        ("tk,kn->nt", ((T, K), (K, N)), 1),
        ("...k,nk->...n", ((2, T, K), (N, K)), 1),
        ("k...,kn->n...", ((K, 2, T), (K, N)), 1),
        ("kn,tk->tn", ((K, N), (T, K)), 0),
        ("etk,enk->etn", ((E, T, K), (E, N, K)), 1),
        ("etk,ekn->ten", ((E, T, K), (E, K, N)), 1),
        ("gech,ehd->gecd", ((2, E, T, K), (E, K, N)), 1),
        ("...etk,ekn->...etn", ((2, E, T, K), (E, K, N)), 1),
        ("tk,knh->htn", ((T, K), (K, N, 2)), 1),
        ("thk,nkh->tn", ((T, 2, K), (N, K, 2)), 1),
    )
}
SUMMANDS = ((), (1,), (N,), (1, N), (T, 1), (T, N), (1, T, N), (E, 1, N))


def summand_of(names):
    return names.index("bias") if "bias" in names else 0


class Product(nn.Module):
    """One call of a product; the weight and a summand are parameters."""

    def __init__(self, function, names, shapes, place, by_place=None, autocast=False):
        super().__init__()
        self.function, self.names, self.autocast = function, names, autocast
        self.by_place = len(names) if by_place is None else by_place
        self.shapes = shapes
        self.tensors = nn.ParameterList(torch.randn(shape) / 4 for shape in shapes)
        summand = {summand_of(names)} if len(names) == 3 else set()
        (self.activation,) = {*range(len(names))} - {place} - summand

    def forward(self, x):
        tensors = [x if i == self.activation else t for i, t in enumerate(self.tensors)]
        named = dict(zip(self.names[self.by_place :], tensors[self.by_place :], strict=True))
        with torch.autocast("cpu", enabled=self.autocast):
            return self.function(*tensors[: self.by_place], **named)

    def extra_repr(self):
        return f"{self.shapes}, {self.by_place} by place"


class Products(nn.Module):
    """The products that torch accepts, each with an activation of its own."""

    def __init__(self, products):
        super().__init__()
        self.products = nn.ModuleList(product for product in products if accepts(product))
        self.activations = [
            p.tensors[p.activation].detach().clone().requires_grad_() for p in self.products
        ]

    def forward(self, *activations):
        return [product(x) for product, x in zip(self.products, activations, strict=True)]


def accepts(product):
    try:
        product(product.tensors[product.activation])
    except (RuntimeError, IndexError):
        return False
    return True


def run(call, model):
    """For each product its output, and the gradients of all there is."""
    results = []
    for product, x, y in zip(
        model.products, model.activations, call(*model.activations), strict=True
    ):
        inputs = [x, *product.parameters()]
        grads = torch.autograd.grad(y.float().square().sum(), inputs, allow_unused=True)
        results.append([y.detach(), *grads])
    return results


def rows_if_same(products):
    """A row for each product that torch accepts, and the product.

    fp32 sums over at most 144 terms in another order: torch's default tolerance for fp32. Under
    autocast one product of bf16 in another order, and its sum with a summand: 2^-7."""
    model, rows = Products(products), []

    def rewrite_and_call(*activations):
        ys, found = rewritten(model, *activations, policy={"*": "quartet2"})
        rows.extend(found)
        return ys

    expected, got = run(model, model), run(rewrite_and_call, model)
    assert len(rows) == len(model.products)
    for product, row, ours, own in zip(model.products, rows, got, expected, strict=True):
        what = f"{product}: {row}"
        assert row.taken or row.why, what
        for one, other in zip(ours, own, strict=True):
            assert (one is None) == (other is None), what
            if one is not None:
                assert one.shape == other.shape, what
                loose = {"rtol": 2**-7, "atol": 2**-7 * float(other.abs().max())}
                given = loose if product.autocast else {}
                torch.testing.assert_close(one, other, msg=lambda m, w=what: f"{w}: {m}", **given)
    return list(zip(rows, model.products, strict=True))


def test_arguments_by_place_and_by_name():
    for name in PRODUCTS:
        function, names, shapes, place = PRODUCTS[name]
        counts = range(names.count(""), len(names) + 1)
        found = rows_if_same(Product(function, names, shapes, place, count) for count in counts)
        assert len(found) == len(counts)
        for row, product in found:
            assert row.taken, f"{product}: {row.why}"


# Other names of one of these are read as it is, which the test above shows.
ALIASES = {"linalg.matmul", "x.mm", "x.matmul", "b.addmm"}
ALIASES |= {name for name in PRODUCTS if name.startswith("aten.")}


def test_operands_that_broadcast():
    """Each dimension of each operand in turn has one value, or is not there."""
    for name in [name for name in PRODUCTS if name not in ALIASES]:
        function, names, shapes, place = PRODUCTS[name]
        forms = [
            (*shapes[:operand], (*shape[:i], *smaller, *shape[i + 1 :]), *shapes[operand + 1 :])
            for operand, shape in enumerate(shapes)
            for i in range(len(shape))
            for smaller in ((1,), ())
        ]
        assert rows_if_same(Product(function, names, form, place) for form in forms)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "name", [n for n in PRODUCTS if n not in ALIASES and len(PRODUCTS[n][1]) == 3]
)
def test_summands(name, autocast):
    """A bias of one value, a column, a matrix, a stack: its gradient has its shape; and under
    autocast the result has torch's dtype."""
    function, names, shapes, place = PRODUCTS[name]
    bias = summand_of(names)
    forms = [(*shapes[:bias], shape, *shapes[bias + 1 :]) for shape in SUMMANDS]
    found = rows_if_same(Product(function, names, f, place, autocast=autocast) for f in forms)
    assert sum(row.taken for row, _ in found) >= 2


class Viewed(nn.Module):
    """x times a weight, [K, K] or a stack of them, seen through each of the views."""

    def __init__(self, views, stack=False):
        super().__init__()
        self.w = nn.Parameter(torch.randn((2, K, K) if stack else (K, K)) / 4)
        self.views = views

    def forward(self, x):
        return [F.linear(x, view(self.w)) for view in self.views]


# Name -> (torch's names, values after the tensor, what is left to do; whether of a stack).
VIEWS = {
    "t": (("input",), (), None, False),
    "transpose": (("input", "dim0", "dim1"), (0, 1), None, False),
    "swapaxes": (("input", "axis0", "axis1"), (0, 1), None, False),
    "swapdims": (("input", "dim0", "dim1"), (-1, 0), None, False),
    "permute": (("input", "dims"), ((1, 0),), None, False),
    "movedim": (("input", "source", "destination"), (0, 1), None, False),
    "reshape": (("input", "shape"), ((K // 2, 2 * K),), lambda w: w.reshape(K, K), False),
    "flatten": (("input", "start_dim"), (0,), lambda w: w.view(K, K), False),
    "unflatten": (("input", "dim", "sizes"), (0, (2, K // 2)), lambda w: w.flatten(0, 1), False),
    "squeeze": (("input", "dim"), (0,), None, False),
    "unsqueeze": (("input", "dim"), (0,), lambda w: w[0], False),
    "narrow": (("input", "dim", "start", "length"), (0, 16, 16), None, False),
    "chunk": (("input", "chunks", "dim"), (2, 0), lambda w: w[1], False),
    "split": (("tensor", "split_size_or_sections", "dim"), (16, 0), lambda w: w[1], False),
    "unbind": (("input", "dim"), (0,), lambda w: w[1], True),
    "select": (("input", "dim", "index"), (0, 1), None, True),
    "detach": (("input",), (), None, False),
    "clone": (("input",), (), None, False),
}
METHOD_NAMES = {"split": ("", "split_size", "dim")}  # where torch's two names differ


@pytest.mark.parametrize("name", VIEWS)
def test_views_by_place_and_by_name(name):
    names, values, rest, stack = VIEWS[name]
    views = {}
    for kind, by_place in itertools.product(("function", "method"), range(len(names) + 1)):
        given = METHOD_NAMES.get(name, names) if kind == "method" else names
        if kind == "method" and by_place == 0:
            continue  # its tensor is the object

        def view(w, kind=kind, given=given, by_place=by_place):
            placed = (w, *values)[:by_place]
            named = dict(zip(given[by_place:], (w, *values)[by_place:], strict=True))
            if kind == "function":
                w = getattr(torch, name)(*placed, **named)
            else:
                w = getattr(w, name)(*placed[1:], **named)
            return w if rest is None else rest(w)

        views[f"{kind} {name}, {by_place} by place"] = view
    assert_taken(views, stack)


def assert_taken(views, stack=False):
    model, x = Viewed(list(views.values()), stack), torch.randn(T, K)
    ys, rows = rewritten(model, x, policy={"*": "quartet2"})
    for what, y, own, row in zip(views, ys, model(x), rows, strict=True):
        assert (row.module, row.taken) == ("w", True), f"{what}: {row.why}"
        torch.testing.assert_close(y, own, msg=what)


OTHERS = {
    "aten.t": lambda w: aten.t.default(self=w),
    "aten.t, any overload": lambda w: aten.t(w),
    "aten.transpose": lambda w: aten.transpose.int(self=w, dim0=0, dim1=1),
    "aten.permute": lambda w: aten.permute.default(w, dims=[1, 0]),
    "aten.reshape": lambda w: aten.reshape.default(w, shape=[K, K]),
}


def test_views_of_aten():
    assert_taken(OTHERS)


class LookedUp(nn.Module):
    """A weight for each row of x, looked up in a stack of four."""

    def __init__(self, index, look_up):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, N, K) / 4)
        self.index, self.look_up = torch.tensor(index), look_up

    def forward(self, x):
        return self.look_up(self.w, self.index) @ x.unsqueeze(-1)


LOOK_UPS = {
    "w[index]": lambda w, index: w[index],
    "by place": lambda w, index: torch.index_select(w, 0, index),
    "by name": lambda w, index: torch.index_select(input=w, dim=0, index=index),
    "method by name": lambda w, index: w.index_select(dim=0, index=index),
}


@pytest.mark.parametrize("name", LOOK_UPS)
@pytest.mark.parametrize(("rows", "index"), [(5, [0, 3, 1, 1, 2]), (1, [0, 3, 1]), (5, [2])])
def test_weights_that_are_looked_up(name, rows, index):
    """Trap: matmul broadcasts one row over all weights, and one weight over all rows."""
    model, x = LookedUp(index, LOOK_UPS[name]), torch.randn(rows, K)
    y, (row,) = rewritten(model, x, policy={"*": "quartet2"})
    assert row.taken == (rows == len(index))
    assert row.taken or "matmul broadcasts" in row.why
    torch.testing.assert_close(y, model(x))


OLD_FORMS = {
    "beta": lambda b, x, w: torch.addmm(1, b, x, w),
    "beta and alpha": lambda b, x, w: torch.addmm(1, b, 1, x, w),
    "in place": lambda b, x, w: b.expand(T, N).clone().addmm_(x, w),
}


def test_forms_that_are_left():
    """torch's deprecated forms of addmm, and the one in place, are left and reported."""
    shapes, names = ((N,), (T, K), (K, N)), ("input", "mat1", "mat2")
    found = rows_if_same(Product(form, names, shapes, 2) for form in OLD_FORMS.values())
    assert [(row.module, row.taken) for row, _ in found] == [
        (f"products.{i}.tensors.2", False) for i in range(len(OLD_FORMS))
    ]
