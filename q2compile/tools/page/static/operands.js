// SPDX-License-Identifier: Apache-2.0
// Telemetry: a heat map of the error of each operand over that of Gaussian data, modules folded as
// in the tree; the curves of the operand that was clicked.

const OPERANDS = ["fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x"];
const ABOUT = {
  amax: "Largest magnitude of the operand, before any rotation.",
  relative_error: "Norm of the rounding error over the norm of the operand.",
  cosine: "Cosine of the operand and the dequantized operand: 1 is aligned.",
  zero: "Share of the elements that were rounded to zero.",
  saturated: "Share of the elements beyond the largest value that their block can represent.",
  scale_zero: "Share of the block scales that are 0: blocks of zeros, or too small for any scale.",
  scale_subnormal:
    "Share of the block scales among the subnormals, which have fewer bits; of MXFP4, more than " +
    "2^14 below the largest, whose blocks FP8 GEMMs round.",
  scale_largest: "Share of the block scales at the largest that the scheme aims for.",
  changed: "For weights: share of the codes that changed since the last record.",
};
const MEANING =
  "Relative error divided by that of the same scheme on Gaussian data, in the last record that has one. At 1 it is the error of the scheme itself; outliers increase it. A click opens the curves.";

class Operands {
  constructor(data) {
    this.telemetry = data.telemetry;
    for (const operand of this.telemetry.operands) {
      const { last, gaussian } = operand;
      operand.name = `${operand.gemm}.${operand.operand}`;
      operand.words = `${operand.operand} of ${operand.gemm}`;
      operand.ratio = last === null || !gaussian ? -1 : last.relative_error / gaussian;
    }
    this.modules = heatModules(data);
    this.match = null;
    this.rank = data.telemetry.ranks[0];
    this.heat = h("div.panel.scroll-x");
    this.detail = h("div.panel.curves", { "aria-live": "polite", hidden: true });
    byId("operands-view").append(
      ...data.telemetry.nonfinite.map((bad) => h("p.notice.bad", nonfiniteText(bad))),
      h("p.about", MEANING),
      this.rankSelect(data.telemetry.ranks),
      this.heat,
      this.detail,
    );
    this.update();
  }

  rankSelect(ranks) {
    if (ranks.length < 2) return "";
    const onChange = (event) => {
      this.rank = Number(event.target.value);
      this.detail.hidden = true;
      this.update();
    };
    const options = ranks.map((rank) => h("option", { value: rank }, String(rank)));
    const select = h("select", { id: "rank", onChange }, options);
    return h("div.filter-row", h("label", h("span", "Rank"), select));
  }

  // Shows only modules with a row for which match(row) holds; null shows all.
  narrow(match) {
    this.match = match;
    this.update();
  }

  update() {
    const here = this.telemetry.operands.filter(({ rank }) => rank === this.rank);
    this.byModule = Map.groupBy(here, ({ module }) => module);
    this.names = OPERANDS.filter((name) => here.some((operand) => operand.name === name));
    const rows = this.modules.filter(
      (row) => this.byModule.has(row.module) && (!this.match || this.match(row)),
    );
    const groups = [...Map.groupBy(rows, (row) => row.groupPath)];
    const words = this.names.map((name) => here.find((one) => one.name === name).words);
    const head = ["Module", ...words].map((name) => h("th", name));
    const none = "No module is recorded, or none matches the search.";
    const bodies = groups.map(([path, group]) => {
      const modules = group.map(({ module }) => module);
      return h("tbody", this.line(modules.length === 1 ? modules[0] : path, modules));
    });
    const caption = groups.length ? null : h("caption", none);
    this.heat.replaceChildren(h("table.heat", caption, h("thead", h("tr", head)), bodies));
  }

  // The worst of each operand of equal layers.
  line(label, modules, kind = "") {
    const operands = modules.flatMap((module) => this.byModule.get(module));
    const cells = this.names.map((name) => {
      const own = operands.filter((operand) => operand.name === name);
      const worst = own.reduce((one, other) => (other.ratio > one.ratio ? other : one), own[0]);
      return h("td", worst ? this.cell(worst) : null);
    });
    const each = () => modules.map((module) => this.line(module, [module], ".one"));
    const copies = modules.length > 1 ? copiesButton(modules.length, each) : null;
    return h(`tr${kind}`, h("th.mono", { scope: "row" }, label, copies), cells);
  }

  cell(operand) {
    const { module, words, last, ratio, gaussian } = operand;
    const old = last !== null && last.step < this.telemetry.last;
    const stays = old ? ", the last finite record" : "";
    const title = last
      ? `${written(last.relative_error)}, Gaussian data ${written(gaussian)}, step ${last.step}${stays}`
      : "no error is known";
    const shown = ratio < 0 ? "–" : ratio.toFixed(2);
    return h(
      `button.heat-cell${old ? ".old" : ""}`,
      {
        style: ratio < 0 ? {} : { "--heat": `${heat(ratio)}%` },
        title: `${words} of ${module}: ${title}`,
        "aria-label": `${words} of ${module}: ${ratio < 0 ? "not known" : shown}`,
        onClick: () => this.open(operand),
      },
      shown,
    );
  }

  // Shows the curves of an operand, and buttons for the others of its module.
  open(operand) {
    const { module, words, format, curves } = operand;
    const close = () => (this.detail.hidden = true);
    const choose = (one) => {
      const attributes = { style: tint(one.name), "aria-pressed": String(one === operand) };
      return h("button", { ...attributes, onClick: () => this.open(one) }, one.words);
    };
    const known = (statistic) => curves[statistic].some((value) => value !== null);
    const statistics = this.telemetry.statistics.filter(known);
    this.detail.replaceChildren(
      h("header", h("h3.mono", module), h("button", { onClick: close }, "Close")),
      h("div.operand-choice", this.byModule.get(module).map(choose)),
      h("p.muted", `${words}: ${format}`),
      h(
        "div.curve-grid",
        statistics.map((statistic) => this.figure(statistic, operand)),
      ),
    );
    this.detail.hidden = false;
    this.detail.scrollIntoView({ block: "nearest" });
  }

  figure(statistic, { module, name, gaussian, curves }) {
    const reference = statistic === "relative_error" ? gaussian : null;
    const bad = this.telemetry.nonfinite.filter((one) => one.module === module);
    const caption = h("figcaption", { title: ABOUT[statistic] }, statistic.replaceAll("_", " "));
    const { steps } = this.telemetry;
    const picture = curve(statistic, steps, curves[statistic], tint(name), reference, bad);
    return h("figure", caption, picture);
  }
}

// The modules of the records, each a row with a groupPath: the report's, or one made of its name.
function heatModules({ rows, telemetry }) {
  const known = new Map(rows.map((row) => [row.module, row]));
  const recorded = Map.groupBy(telemetry.operands, ({ module }) => module);
  const made = [...recorded].map(([module, operands]) => {
    const shapeText = operands.map(({ format }) => format).join();
    const blank = { recipe: null, state: "", spelling: "", dtype: "", why: "" };
    return { module, path: module.split("."), shapeText, ...blank };
  });
  foldRows(made.filter(({ module }) => !known.has(module)));
  return made.map((row) => known.get(row.module) || row);
}

// How much of the color a cell has: none up to 1, all of it from twice Gaussian data's error on.
function heat(ratio) {
  return Math.round(85 * Math.min(1, Math.max(0, Math.log2(ratio))));
}

function nonfiniteText({ operand, gemm, module, step, rank }) {
  return `NaN or Inf first in ${operand} of ${gemm} of ${module}, at step ${step}, on rank ${rank}.`;
}

function tint(name) {
  return { "--tint": `var(--series-${OPERANDS.indexOf(name)})` };
}

function written(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}
