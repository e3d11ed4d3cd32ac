# SPDX-License-Identifier: Apache-2.0
"""Measure the tables of the papers that need no training, and print the papers' figures beside.

    python examples/paper_tables.py [--full] [--device cuda] [--global-scale exact] [--out FOLDER]

schemes         what each 4-bit scheme does to N(0,1): relative quadratic error, effective bits
                (-log2(error) / 2), alignment <x, Q(x)> / <x, x> (1 if unbiased), stored bits
layer           one linear layer with each recipe: effective bits of y, dx and dw
concentration   the mean gradient over many draws: effective bits for each weight of an MLP

The tables are also written as CSV, as tables.json and, if matplotlib is installed, as a plot.
"Quartet II" is arXiv 2601.22813 v2 with its released code, and "Quartet" is 2505.14669 v4.

The gradients of a recipe are compared with the gradient of its own quantized forward, which is
dy Q(w) if dgrad uses the codes that fprop saved, and dy w if it quantizes w. If a recipe is
unbiased, its mean over draws converges to that gradient (Quartet II, appendix A and figure 9).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import q2compile

# Scheme -> error x 1e-3. NVFP4: Quartet II, table 1. MXFP4: Quartet, table 2.
ERRORS = {
    "nvfp4": 9.0,
    "nvfp4_46": 7.6,
    "nvfp4_16x16": 12.4,
    "nvfp4_16x16_46": 12.4,
    "nvfp4_sr": 23.5,
    "nvfp4_sr_46": 17.5,
    "nvfp4_ms_eden": 9.4,
    "mxfp4_sr": 27.7,
    "mxfp4_rtn34": 13.7,
    "mxfp4_quest": 13.2,
}
# Scheme -> effective bits, where the notebooks of Quartet II's released code print them.
BITS = {
    "nvfp4": 3.394,
    "nvfp4_46": 3.524,
    "nvfp4_16x16": 3.167,
    "nvfp4_16x16_46": 3.168,
    "nvfp4_sr": 2.705,
}
OTHER_SCHEMES = ("nvfp4_search", "mxfp4_rtn", "mxfp4_rceil", "mxfp4_rceil_32x32", "fp8")
SCHEMES = [*ERRORS, *OTHER_SCHEMES]
SCHEMES += [f"{name}_pow2" for name in SCHEMES if name.startswith("nvfp4")]
# Minimum effective bits in the tests of Quartet II's released kernels (kernels/test).
SCHEME_FLOORS = {"nvfp4": 3.38, "nvfp4_46": 3.52, "nvfp4_ms_eden": 3.32}
FORWARD_FLOOR = 2.8  # a linear layer's output against BF16
# Draws -> floors for the gradients of W1, W2, W3 of a 3-layer MLP of width 256.
CONCENTRATION_FLOORS = {
    1: (1.9, 2.5, 3.8),
    16: (3.9, 4.5, 6.4),
    256: (5.9, 6.5, 8.1),
    4096: (7.6, 8.2, 8.9),
}
RECIPES = (
    *("quartet2", "quartet2_search", "nvfp4", "quartet", "mxfp4", "mxfp4_2d", "tetrajet2"),
    *("fp8", "quartet2_fp8"),
)
_BACKWARD = {"dgrad": ("dy", "w"), "wgrad": ("dy", "x")}


def _changed(base: str, **change: str) -> dict[str, Any]:
    """Return a recipe with both operands of both backward GEMMs changed."""
    gemms = {gemm: dict.fromkeys(roles, change) for gemm, roles in _BACKWARD.items()}
    return {"base": base, **gemms}


# Beside the published recipes, two with one of their choices undone.
VARIANTS: dict[str, Any] = {
    **{name: name for name in RECIPES},
    "quartet2, fixed signs": _changed("quartet2", transform="rht128_fixed"),
    "tetrajet2, 4/6 in backward": _changed("tetrajet2", scheme="nvfp4_sr_46"),
}
WIDTH = 256  # of the MLP, and its tokens
LAYERS = 3
OCTAVE = 8  # tensor scales within an octave, for schemes whose scales are powers of two

Row = dict[str, Any]


def effective_bits(error: float) -> float:
    """Return -log2(error) / 2, so that each bit halves the amplitude of the error."""
    return -math.log2(error) / 2 if error else math.inf


def relative_error(estimate: Tensor, truth: Tensor) -> float:
    truth = truth.double()
    return ((estimate.double() - truth).square().sum() / truth.square().sum()).item()


# ---------------------------------------------------------------------------------------- schemes


def measure_scheme(scheme: str, size: int, device: str, seed: int = 0) -> Row:
    """Measure one scheme on ``size`` x ``size`` samples of N(0,1).

    The papers' figures are for the exact global scale, and the row of a "_pow2" scheme has the same
    ones. MXFP4's error depends on where the tensor's scale is between two powers of two, so its
    rows average over one octave, log-uniformly.
    """
    octave = OCTAVE if scheme.startswith("mxfp4") else 1
    generator = torch.Generator(device).manual_seed(seed)
    error = alignment = stored = 0.0
    for i in range(octave):
        x = torch.randn(size // octave, size, generator=generator, device=device)
        x *= 2 ** ((i + 0.5) / octave)
        q = q2compile.quantize(x, scheme, seed=seed + i)
        values = q.dequantize()
        error += relative_error(values, x) / octave
        products = (values * x).sum(dtype=torch.float64), x.square().sum(dtype=torch.float64)
        alignment += (products[0] / products[1]).item() / octave
        stored = (q.nbytes - q.global_scale.nbytes) * 8 / x.numel()
    published = scheme.removesuffix("_pow2")
    return {
        "scheme": scheme,
        "error x 1e-3": 1e3 * error,
        "paper": ERRORS.get(published),
        "bits": effective_bits(error),
        "paper bits": BITS.get(published),
        "floor (code)": SCHEME_FLOORS.get(published),
        "alignment": alignment,
        "stored bits": stored,
    }


# ---------------------------------------------------------------------------------------- recipes


class Operand(NamedTuple):
    """An operand of a GEMM, as reports write it: "requantize>rht128>nvfp4_ms_eden_pow2"."""

    source: str
    transform: str
    scheme: str

    @classmethod
    def parse(cls, text: str) -> Operand:
        *steps, scheme = text.split(">")
        rotations = [step for step in steps if step.startswith(("rht", "h32"))]
        sources = [step for step in steps if step not in rotations]
        return cls("".join(sources) or "fresh", "".join(rotations) or "none", scheme)


class Recipe:
    """A recipe, or a variant of one, as torch.compile runs it.

    operands: those of fprop, dgrad and wgrad, from the report; None for a GEMM in BF16
    """

    def __init__(self, spec: Any, global_scale: str) -> None:
        self.options = {"recipe": spec, "global_scale": global_scale, "inner": "eager"}
        model, x = nn.Linear(64, 64, bias=False), torch.zeros(64, 64)
        (row,) = q2compile.explain(model, x, options=self.options).to_json()
        self.operands = {
            gemm: None if row[gemm] == "bf16" else [*map(Operand.parse, row[gemm].split(" @ "))]
            for gemm in ("fprop", "dgrad", "wgrad")
        }

    def compiled(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        torch._dynamo.reset()
        return torch.compile(model, backend="quartet2", options={**self.options, "strict": True})

    def output(self, x: Tensor, w: Tensor) -> Tensor:
        """Return x wᵀ of the quantized operands."""
        if self.operands["fprop"] is None:
            return x @ w.t()
        qx, qw = self._quantized(x, w)
        return qx.dequantize() @ qw.dequantize().t()

    def exact_gradients(self, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """Return dx and dw of the quantized forward. The gradient passes its rounding unchanged,
        except for a trust mask."""
        if self.operands["fprop"] is None:
            return dy @ w, dy.t() @ x
        qx, qw = self._quantized(x, w)
        dx = _exact(dy, w, qw, self.operands["dgrad"], qx.mask)
        return dx, _exact(dy.t(), x, qx, self.operands["wgrad"], qw.mask)

    def _quantized(self, x: Tensor, w: Tensor) -> list[q2compile.QuantizedTensor]:
        both = zip((x, w), self.operands["fprop"] or (), strict=True)
        return [q2compile.quantize(t, of.scheme, transform=of.transform) for t, of in both]


def _exact(
    dy: Tensor,
    other: Tensor,
    codes: q2compile.QuantizedTensor,
    operands: list[Operand] | None,
    mask: Tensor | None,
) -> Tensor:
    """Return dy times the tensor that the GEMM's second operand quantizes, masked if there is a
    trust mask."""
    if operands is None or operands[1].source in ("fresh", "forward"):
        return dy @ other
    if mask is None:
        return dy @ codes.dequantize()
    rotated = dy @ codes.dequantize(rotate_back=False)
    bits = mask.unsqueeze(-1) >> torch.arange(8, device=mask.device, dtype=torch.uint8) & 1
    return (_hadamard(rotated * bits.flatten(1)))[:, : other.shape[1]]


def _hadamard(x: Tensor) -> Tensor:
    """Return x H in chunks of 32, without signs: QuEST's rotation, which is its own inverse."""
    matrix = torch.ones(1, 1, device=x.device)
    for _ in range(5):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (x.view(-1, 32) @ (matrix / 32**0.5)).view_as(x)


class _ExactBackward(torch.autograd.Function):
    """A recipe's forward with the exact gradient of that forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, recipe: Recipe) -> Tensor:
        ctx.recipe = recipe
        ctx.save_for_backward(x, w)
        return recipe.output(x, w)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        return *ctx.recipe.exact_gradients(x, w, dy), None


def measure_layer(name: str, global_scale: str, size: int, device: str, seed: int = 0) -> Row:
    """Measure one linear layer and one draw, with x, w and dy from N(0,1), ``size`` x ``size``.

    y is compared with x wᵀ, and the gradients with those of the quantized forward and of x wᵀ.
    """
    generator = torch.Generator(device).manual_seed(seed)
    x, w, dy = (torch.randn(size, size, generator=generator, device=device) for _ in range(3))
    recipe, model = Recipe(VARIANTS[name], global_scale), nn.Linear(size, size, bias=False)
    model.weight = nn.Parameter(w.clone())
    torch.manual_seed(seed)
    y = recipe.compiled(model)(x.requires_grad_())
    found = torch.autograd.grad(y, (x, model.weight), dy)
    x = x.detach()
    wanted = {"": recipe.exact_gradients(x, w, dy), " of xwᵀ": (dy @ w, dy.t() @ x)}
    return {
        "recipe": name,
        "y": effective_bits(relative_error(y.detach(), x @ w.t())),
        "floor": FORWARD_FLOOR if name == "quartet2" else None,
        **{
            f"{which}{of}": effective_bits(relative_error(*pair))
            for of, truths in wanted.items()
            for which, *pair in zip(("dx", "dw"), found, truths, strict=True)
        },
    }


def measure_concentration(
    name: str, global_scale: str, draws: int, device: str, seed: int = 0
) -> list[Row]:
    """Measure the mean gradient of 1, 4, 16, ... ``draws`` draws, one row each.

    The model is a 3-layer MLP of width 256 with ReLU, on 256 tokens of N(0,1), with the mean
    squared error to a random target. A draw is one forward and backward of the same batch. The
    error of a mean of n draws is averaged over all draws / n groups. Without bias it falls as 1/n,
    so that 4 times as many draws gain one bit.
    """
    generator = torch.Generator(device).manual_seed(seed)
    x, target = (torch.randn(WIDTH, WIDTH, generator=generator, device=device) for _ in range(2))
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(LAYERS)]
    weights = [layer.weight for layer in layers]
    for w in weights:
        nn.init.normal_(w, std=WIDTH**-0.5, generator=generator)
    recipe = Recipe(VARIANTS[name], global_scale)
    model = nn.Sequential(layers[0])
    h = _ExactBackward.apply(x, weights[0], recipe)
    for layer in layers[1:]:
        model.extend([nn.ReLU(), layer])
        h = _ExactBackward.apply(torch.relu(h), layer.weight, recipe)

    def gradients(y: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad((y - target).square().mean(), weights))

    means = Means(gradients(h), draws)
    compiled = recipe.compiled(model)
    torch.manual_seed(seed)
    for _ in range(draws):
        means.add(gradients(compiled(x)))
    rows = []
    for n, errors in means.errors().items():
        names = [f"W{i}" for i in range(1, LAYERS + 1)]
        bits = dict(zip(names, map(effective_bits, errors), strict=True))
        floors = CONCENTRATION_FLOORS.get(n) if name == "quartet2" else None
        written = "/".join(map(str, floors)) if floors else None
        rows.append({"recipe": name, "draws": n, **bits, "floors": written})
    return rows


class Means:
    """Accumulates the errors of means of 1, 4, 16, ... draws, over disjoint groups of draws."""

    def __init__(self, truth: list[Tensor], draws: int) -> None:
        self.truth = truth
        self.sizes = [4**i for i in range(draws.bit_length()) if 4**i <= draws]
        self.sums = {
            n: [torch.zeros_like(t, dtype=torch.float64) for t in truth] for n in self.sizes
        }
        self.totals = {n: [0.0] * len(truth) for n in self.sizes}
        self.count = 0

    def add(self, gradients: list[Tensor]) -> None:
        self.count += 1
        for n in self.sizes:
            for i, gradient in enumerate(gradients):
                self.sums[n][i] += gradient
                if self.count % n == 0:
                    self.totals[n][i] += relative_error(self.sums[n][i] / n, self.truth[i])
                    self.sums[n][i].zero_()

    def errors(self) -> dict[int, list[float]]:
        return {n: [t / (self.count // n) for t in self.totals[n]] for n in self.sizes}


# ----------------------------------------------------------------------------------------- output


def table(rows: list[Row]) -> str:
    """Format rows as a text table."""
    cells = [[*rows[0]], *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in cells]
    return "\n".join("  ".join(line) for line in aligned)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if math.isfinite(value) else "exact"
    return "" if value is None else str(value)


def write(folder: Path, tables: dict[str, list[Row]], about: dict[str, Any]) -> None:
    """Write one CSV per table, tables.json with all of them, and a plot."""
    for name, rows in tables.items():
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    finite = {
        name: [
            {k: None if v == math.inf else v for k, v in row.items()}  # JSON has no infinity
            for row in rows
        ]
        for name, rows in tables.items()
    }
    text = json.dumps({"about": about, **finite}, indent=1)
    (folder / "tables.json").write_text(text + "\n", encoding="utf-8")
    plot(folder / "concentration.png", tables["concentration"])


def plot(path: Path, rows: list[Row]) -> None:
    """Draw the concentration curves if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
        return
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    axes = figure.subplots(1, LAYERS, sharey=True)
    for i, axis in enumerate(axes, 1):
        for name in dict.fromkeys(row["recipe"] for row in rows):
            points = [(r["draws"], 4.0 ** -r[f"W{i}"]) for r in rows if r["recipe"] == name]
            style = "--" if "," in name else "-"
            axis.loglog(*zip(*points, strict=True), style, marker="o", markersize=3, label=name)
        axis.set_title(f"W{i}")
        axis.set_xlabel("draws averaged")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("relative quadratic error of the mean gradient")
    axes[-1].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    full = "4096 x 4096 samples and 4096 draws, as in the papers (an hour on two cores)"
    parser.add_argument("--full", action="store_true", help=f"{full}; by default 2048 and 256")
    parser.add_argument("--out", type=Path, default=Path("runs/tables"), help="default %(default)s")
    parser.add_argument("--device", type=torch.device, default="cpu", help="default %(default)s")
    parser.add_argument("--global-scale", choices=("pow2", "exact"), default="pow2")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None, samples: int = 2048, draws: int = 256) -> None:
    arguments = parse_args(argv)
    if arguments.full:
        samples, draws = 4096, 4096
    device, scale = str(arguments.device), arguments.global_scale
    arguments.out.mkdir(parents=True, exist_ok=True)  # fails early if it can't be written
    measures: dict[str, Iterable[Row]] = {
        "schemes": (measure_scheme(name, samples, device) for name in SCHEMES),
        "layer": (measure_layer(name, scale, samples // 4, device) for name in VARIANTS),
        "concentration": (
            row for name in VARIANTS for row in measure_concentration(name, scale, draws, device)
        ),
    }
    tables = {}
    for name, measured in measures.items():
        tables[name] = [*measured]
        print(f"{name}\n{table(tables[name])}\n", flush=True)
    about = {"samples": samples, "draws": draws, "global_scale": scale, "device": device}
    write(arguments.out, tables, {**about, "torch": torch.__version__})
    print(f"{arguments.out} written")


if __name__ == "__main__":
    main()
