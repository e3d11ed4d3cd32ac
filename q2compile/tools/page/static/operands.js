// SPDX-License-Identifier: Apache-2.0
// Telemetry: a heat map of the error of each operand over that of Gaussian data, modules folded as
// in the tree; the curves of the module that was clicked; the worst operands.

const OPERANDS = ["fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x"];
const WORST = 10;
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

class Operands {
  constructor(data) {
    this.telemetry = data.telemetry;
    this.modules = heatModules(data);
    this.match = null;
    this.apart = new Set();
    this.chosen = null; // {module, name} whose curves are shown
    this.rank = data.telemetry.ranks[0];
    this.table = h("table", { class: "heat" });
    this.worst = h("div", {});
    this.detail = h("div", { class: "panel curves", "aria-live": "polite", hidden: true });
    byId("operands-view").append(
      ...data.telemetry.nonfinite.map((bad) => h("p", { class: "notice bad" }, nonfiniteText(bad))),
      h(
        "p",
        { class: "about" },
        "Relative error divided by that of the same scheme on Gaussian data, in the last record that has one. At 1 it is the error of the scheme itself; outliers increase it. A click opens the curves.",
      ),
      this.rankSelect(data.telemetry.ranks),
      h("div", { class: "panel scroll-x" }, this.table),
      this.detail,
      this.worst,
    );
    this.update();
  }

  rankSelect(ranks) {
    if (ranks.length < 2) return "";
    const onChange = (event) => {
      this.rank = Number(event.target.value);
      this.update();
    };
    const options = ranks.map((rank) => h("option", { value: rank }, String(rank)));
    const select = h("select", { id: "rank", onChange }, options);
    return h("div", { class: "filter-row" }, h("label", {}, h("span", {}, "Rank"), select));
  }

  // Shows only modules with a row for which match(row) holds; null shows all.
  narrow(match) {
    this.match = match;
    this.update();
  }

  update() {
    const here = this.telemetry.operands.filter(({ rank }) => rank === this.rank);
    this.byModule = new Map();
    for (const operand of here) {
      if (!this.byModule.has(operand.module)) this.byModule.set(operand.module, new Map());
      this.byModule.get(operand.module).set(`${operand.gemm}.${operand.operand}`, operand);
    }
    this.names = OPERANDS.filter((name) => here.some((o) => `${o.gemm}.${o.operand}` === name));
    const groups = new Map();
    for (const row of this.modules) {
      if (!this.byModule.has(row.module) || (this.match && !this.match(row))) continue;
      groups.set(row.groupPath, [...(groups.get(row.groupPath) || []), row.module]);
    }
    const lines = [...groups].flatMap(([path, modules]) => this.lines(path, modules));
    const head = ["Module", ...this.names.map(operandWords)].map((name) => h("th", {}, name));
    this.table.replaceChildren(
      h("thead", {}, h("tr", {}, head)),
      h("tbody", {}, lines),
      lines.length ? "" : h("caption", {}, "No module is recorded, or none matches the search."),
    );
    this.worst.replaceChildren(...this.worstElements(here));
    this.showCurves();
  }

  lines(path, modules) {
    if (modules.length === 1) return [this.line(modules[0], modules)];
    const open = this.apart.has(path);
    const toggle = () => {
      if (open) this.apart.delete(path);
      else this.apart.add(path);
      this.update();
    };
    const copies = h(
      "button",
      { class: "copies", type: "button", "aria-pressed": String(open), onClick: toggle },
      `×${modules.length}`,
    );
    const each = open ? modules.map((module) => this.line(module, [module], null, " one")) : [];
    return [this.line(path, modules, copies), ...each];
  }

  line(label, modules, copies = null, kind = "") {
    const name = h("th", { scope: "row", class: "mono" }, label, copies);
    const cells = this.names.map((operand) => this.cell(modules, operand));
    return h("tr", { class: `line${kind}` }, name, cells);
  }

  // The worst of the modules' operands of this name.
  cell(modules, name) {
    const found = modules
      .map((module) => this.byModule.get(module).get(name))
      .filter((operand) => operand);
    if (!found.length) return h("td", {});
    const operand = found.reduce((one, other) => (ratioOf(other) > ratioOf(one) ? other : one));
    const ratio = ratioOf(operand);
    const old = operand.last !== null && operand.last.step < this.telemetry.last;
    const { module } = operand;
    return h(
      "td",
      {},
      h(
        "button",
        {
          type: "button",
          class: `heat-cell${old ? " old" : ""}`,
          style: ratio < 0 ? {} : { "--heat": `${heat(ratio)}%` },
          "data-label": operandWords(name),
          title: operandTitle(operand, old),
          "aria-label": `${operandWords(name)} of ${module}: ${ratio < 0 ? "not known" : ratio.toFixed(2)}`,
          onClick: () => this.open(module, name),
        },
        ratio < 0 ? "–" : ratio.toFixed(2),
      ),
    );
  }

  worstElements(here) {
    const known = here.filter((operand) => ratioOf(operand) >= 0);
    const worst = known.sort((one, other) => ratioOf(other) - ratioOf(one)).slice(0, WORST);
    if (!worst.length) return [];
    const head = ["Over Gaussian's", "Error", "Gaussian data", "Step"];
    const line = (operand) => {
      const name = `${operand.gemm}.${operand.operand}`;
      const onClick = () => this.open(operand.module, name);
      return h(
        "tr",
        {},
        h(
          "td",
          {},
          h(
            "button",
            { class: "link", type: "button", onClick },
            `${operandWords(name)} of ${operand.module}`,
          ),
        ),
        [
          ratioOf(operand).toFixed(2),
          written(operand.last.relative_error),
          written(operand.gaussian),
          operand.last.step,
        ].map((text, i) => h("td", { class: "number", "data-label": head[i] }, text)),
      );
    };
    return [
      h("h3", {}, worst.length < WORST ? "The worst" : `The ${WORST} worst`),
      h(
        "div",
        { class: "panel scroll-x" },
        h(
          "table",
          { class: "worst" },
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              h("th", {}, "Operand"),
              head.map((name) => h("th", { class: "number" }, name)),
            ),
          ),
          h("tbody", {}, worst.map(line)),
        ),
      ),
    ];
  }

  open(module, name) {
    this.chosen = { module, name };
    this.showCurves();
    this.detail.scrollIntoView({ block: "nearest" });
  }

  showCurves() {
    const operands = this.chosen && this.byModule.get(this.chosen.module);
    this.detail.hidden = !operands;
    if (!operands) return;
    const { module, name } = this.chosen;
    const rows = this.names.filter((one) => operands.has(one));
    const shown = rows.map((one) => ({ name: one, row: operands.get(one) }));
    const close = () => {
      this.chosen = null;
      this.showCurves();
    };
    const choose = (one) =>
      h(
        "button",
        {
          type: "button",
          style: tint(one),
          "aria-pressed": String(one === name),
          onClick: () => this.open(module, one),
        },
        operandWords(one),
      );
    const row = operands.get(name) || shown[0].row;
    this.detail.replaceChildren(
      h(
        "header",
        {},
        h("h3", { class: "mono" }, module),
        h("button", { type: "button", onClick: close }, "Close"),
      ),
      h("div", { class: "operand-choice" }, rows.map(choose)),
      h("p", { class: "muted" }, `${operandWords(name)}: ${row.format}`),
      h(
        "div",
        { class: "curve-grid" },
        this.telemetry.statistics
          .filter((statistic) => row.curves[statistic] !== null)
          .map((statistic) => this.figure(statistic, name, row)),
      ),
    );
  }

  figure(statistic, name, row) {
    const reference = statistic === "relative_error" ? row.gaussian : null;
    const bad = this.telemetry.nonfinite.filter(({ module }) => module === row.module);
    const curve = new Curve(this.telemetry.steps, row.curves[statistic], name, reference, bad);
    return h(
      "figure",
      {},
      h("figcaption", { title: ABOUT[statistic] }, statistic.replaceAll("_", " ")),
      curve.elements(statistic),
    );
  }
}

// The modules of the records, each a row with a groupPath: the report's, or one made of its name.
function heatModules(data) {
  const known = new Map(data.rows.map((row) => [row.module, row]));
  const names = [...new Set(data.telemetry.operands.map(({ module }) => module))];
  const formats = (name) => data.telemetry.operands.filter(({ module }) => module === name);
  const made = names
    .filter((name) => !known.has(name))
    .map((module) => ({
      ...{ module, path: module.split("."), recipe: null, state: "", spelling: "", dtype: "" },
      ...{
        why: "",
        shapeText: formats(module)
          .map(({ format }) => format)
          .join(),
      },
    }));
  foldRows(made);
  for (const row of made) known.set(row.module, row);
  return names.map((name) => known.get(name));
}

function ratioOf({ last, gaussian }) {
  return last === null || !gaussian ? -1 : last.relative_error / gaussian;
}

// How much of the color a cell has: none up to 1, all of it from twice Gaussian data's error on.
function heat(ratio) {
  return Math.round(85 * Math.min(1, Math.max(0, Math.log2(ratio))));
}

function operandWords(name) {
  const [gemm, operand] = name.split(".");
  return `${operand} of ${gemm}`;
}

function operandTitle({ module, gemm, operand, last, gaussian }, old) {
  if (last === null) return `${operand} of ${gemm} of ${module}: no error is known`;
  const numbers = `${written(last.relative_error)}, Gaussian data ${written(gaussian)}`;
  const stays = old ? ", the last finite record" : "";
  return `${operand} of ${gemm} of ${module}: ${numbers}, step ${last.step}${stays}`;
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
