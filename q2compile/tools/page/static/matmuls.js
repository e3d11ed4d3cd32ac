// SPDX-License-Identifier: Apache-2.0
// Every matmul: filters, and a table in which equal layers are one line.

const STATES = ["taken", "left", "not seen", "no weight"];
// Columns that the table can be sorted by: of a line's rows the largest, or the sum.
const largestOf = (values) => Math.max(...values);
const sumOf = (values) => values.reduce((total, value) => total + value, 0);
const NO_FILTERS = { module: null, recipe: "", state: "", reason: "" };

class Matmuls {
  // links: {module(path), node(row)}: what a click on a module or on "graph" does.
  // onNarrow(match): called with a test for the rows that the search leaves, null for all.
  constructor(data, links, onNarrow) {
    Object.assign(this, { data, links, onNarrow, opened: new Set(), apart: new Set() });
    this.columns = tableColumns(data);
    this.sorted = { column: null, rising: false };
    this.products = false; // whether matmuls without a weight are shown although others are
    this.filters = { text: "", ...NO_FILTERS };
    this.controls = new Filters(data, this.filters, () => this.update());
    this.table = h("table", { class: "matmuls" });
    byId("filters").append(this.controls.element);
    byId("table").append(this.table);
    this.update();
  }

  matches(row) {
    const { text, module, recipe, state, reason } = this.filters;
    return (
      textMatches(row, text) &&
      (!module || module.rows.has(row)) &&
      (recipe === "" || String(row.recipe && row.recipe.place) === recipe) &&
      (state === "" || row.state === state) &&
      (reason === "" || row.reason === reason)
    );
  }

  update() {
    this.controls.show();
    this.rows = this.data.rows.filter((row) => this.matches(row));
    const groups = new Map();
    const folded = this.foldable(this.rows) && !this.products;
    for (const row of this.rows)
      if (!folded || row.has_parameter)
        groups.set(row.group, [...(groups.get(row.group) || []), row]);
    const [here, all] = [this.rows, this.data.rows].map(
      (rows) => new Set(rows.map((row) => row.layer)).size,
    );
    byId("shown").textContent =
      `${here} of ${countText(all, "matmul")}` +
      (groups.size < this.rows.length ? `, in ${countText(groups.size + folded, "line")}` : "");
    this.table.replaceChildren(this.head(), ...this.parts([...groups]));
    if (!this.rows.length) this.table.append(h("caption", {}, "No matmul matches these filters."));
    const { text } = this.filters;
    this.onNarrow(text ? (row) => textMatches(row, text) : null);
  }

  // The lines of the graphs that layers are counted by, then those of the same layers in others.
  parts(groups) {
    return PARTS.map((part, i) => {
      const own = groups.filter(([, [row]]) => row.part === part);
      const lines = this.ordered(own).flatMap(([key, rows]) => this.groupLines(key, rows));
      if (i === 0 && this.foldable(this.rows)) lines.push(this.productsLine());
      if (i > 0 && lines.length) lines.unshift(this.partLine(part));
      return h("tbody", {}, lines);
    });
  }

  partLine(part) {
    const text = `The same matmuls, compiled for ${part}`;
    return h("tr", { class: "part" }, h("td", { colspan: this.columns.length }, text));
  }

  // Products of activations, as attention has them, stand in one line while nobody asks for them.
  foldable(rows) {
    const { text, state, reason } = this.filters;
    const asked = text || state || reason;
    return !asked && rows.some((row) => row.has_parameter) && rows.some((r) => !r.has_parameter);
  }

  productsLine() {
    const count = layersOf(this.rows).filter((row) => !row.has_parameter).length;
    const label = `${countText(count, "product")} of activations, such as attention's, without a weight`;
    const toggle = () => {
      this.products = !this.products;
      this.update();
      this.table.querySelector(".products button").focus({ preventScroll: true });
    };
    return h(
      "tr",
      { class: "products" },
      h(
        "td",
        { colspan: this.columns.length },
        h(
          "button",
          {
            class: "link",
            type: "button",
            "aria-expanded": String(this.products),
            onClick: toggle,
          },
          h("span", { class: "twisty", "aria-hidden": "true" }, this.products ? "▾" : "▸"),
          label,
        ),
      ),
    );
  }

  // Groups [key, rows] in the order that was asked for; those without a figure last.
  ordered(groups) {
    const { column, rising } = this.sorted;
    if (!column) return groups;
    const keyed = groups.map((group) => [group, columnValue(column, group[1])]);
    const order = ([, one], [, other]) => (rising ? one - other : other - one);
    const known = keyed.filter(([, value]) => value !== null).sort(order);
    return [...known, ...keyed.filter(([, value]) => value === null)].map(([group]) => group);
  }

  sortBy(column) {
    const again = this.sorted.column === column;
    this.sorted = again && this.sorted.rising ? { column: null } : { column, rising: again };
    this.update();
    this.table.querySelector(`[data-sort="${column.id}"]`).focus({ preventScroll: true });
  }

  head() {
    return h(
      "thead",
      {},
      h(
        "tr",
        {},
        this.columns.map((column) => this.headCell(column)),
      ),
    );
  }

  headCell(column) {
    const { name, title, id, value } = column;
    if (!value) return h("th", { title }, name);
    const here = this.sorted.column === column;
    const direction = this.sorted.rising ? "ascending" : "descending";
    const mark = here ? (this.sorted.rising ? " ▲" : " ▼") : "";
    const onClick = () => this.sortBy(column);
    return h(
      "th",
      { class: "number", title, "aria-sort": here ? direction : null },
      h("button", { class: "link", type: "button", "data-sort": id, onClick }, name + mark),
    );
  }

  groupLines(key, rows) {
    const lines = [this.line(key, rows)];
    if (this.opened.has(key)) {
      lines.push(
        h(
          "tr",
          { class: "detail" },
          h("td", { colspan: this.columns.length }, details(this.data, rows[0], this.links)),
        ),
      );
    }
    if (rows.length > 1 && this.apart.has(key)) {
      const each = rows.flatMap((row) => this.groupLines(`${key}#${row.place}`, [row]));
      each.forEach((line) => line.classList.add("one"));
      lines.push(...each);
    }
    return lines;
  }

  line(key, rows) {
    const [first] = rows;
    const several = rows.length > 1;
    const saved = rows.reduce((sum, row) => sum + (row.saved_bytes || 0), 0);
    const open = this.opened.has(key);
    return h(
      "tr",
      {
        class: `row ${first.state.replace(" ", "-")}${open ? " open" : ""}`,
        "data-places": rows.map((row) => row.place).join(" "),
        onClick: (event) => {
          if (!event.target.closest("button, a")) this.toggle(this.opened, key);
        },
      },
      h(
        "td",
        { class: "module" },
        h(
          "button",
          {
            class: "link opener",
            type: "button",
            "aria-expanded": String(open),
            "data-key": key,
            onClick: () => this.toggle(this.opened, key),
          },
          h("span", { class: "twisty", "aria-hidden": "true" }, open ? "▾" : "▸"),
          h("code", {}, several ? first.groupPath : first.path.join(".")),
        ),
        several ? this.copiesButton(key, rows.length) : null,
      ),
      h("td", { class: "mono", "data-label": "shape" }, first.shapeText),
      h("td", { "data-label": "recipe" }, chip(first)),
      h(
        "td",
        { class: "number", "data-label": "saved" },
        first.saved_elements ? bytesText(saved) : "",
      ),
      errorCell(rows),
      shareCell(rows),
      first.taken
        ? this.data.devices.map(({ column, name }) => ratioCell(first.ratios[column], name))
        : h("td", { class: "reason", colspan: this.data.devices.length }, first.reason),
    );
  }

  copiesButton(key, copies) {
    return h(
      "button",
      {
        class: "copies",
        type: "button",
        "aria-pressed": String(this.apart.has(key)),
        title: "List them one by one",
        onClick: () => this.toggle(this.apart, key),
      },
      `×${copies}`,
    );
  }

  toggle(keys, key) {
    if (keys.has(key)) keys.delete(key);
    else keys.add(key);
    this.update();
    const openers = [...this.table.querySelectorAll(".opener")];
    openers.find((element) => element.dataset.key === key)?.focus({ preventScroll: true });
  }

  narrow(filters) {
    Object.assign(this.filters, NO_FILTERS, filters);
    this.update();
  }

  search(text) {
    this.filters.text = text.trim().toLowerCase();
    this.update();
  }
}

// Whether a matmul's names contain all words of a search.
function textMatches(row, text) {
  if (!text) return true;
  row.searched ||= [
    row.path.join("."),
    row.groupPath,
    row.module,
    row.shapeText,
    row.spelling,
    row.why,
    row.recipe ? row.recipe.name : "bf16",
  ]
    .join(" ")
    .toLowerCase();
  return text.split(/\s+/).every((word) => row.searched.includes(word));
}

// The selects and buttons over the table, which change ``state``.
class Filters {
  constructor(data, state, update) {
    Object.assign(this, { state, update });
    const same = (names) => names.map((name) => [name, name]);
    const states = STATES.filter((name) => data.rows.some((row) => row.state === name));
    const recipes = data.recipes.map((recipe) => [String(recipe.place), recipe.name]);
    const reasons = [...new Set(data.rows.map((row) => row.reason).filter(Boolean))];
    const button = (name, set) => {
      const onClick = () => this.change(set);
      return h("button", { type: "button", class: name, onClick });
    };
    this.module = button("module-filter", { module: null });
    this.clear = button("quiet", { text: "", ...NO_FILTERS });
    this.clear.append("Clear");
    this.element = h("div", { class: "filter-row" }, [
      this.select("state", "Which", same(states)),
      recipes.length ? this.select("recipe", "Recipe", recipes) : null,
      reasons.length ? this.select("reason", "Reason", same(reasons)) : null,
      this.module,
      this.clear,
    ]);
  }

  select(key, label, options) {
    const onChange = (event) => this.change({ [key]: event.target.value });
    const all = h("option", { value: "" }, "all");
    const each = options.map(([value, text]) => h("option", { value }, text));
    const box = h("select", { "data-filter": key, onChange }, all, each);
    return h("label", {}, h("span", {}, label), box);
  }

  change(values) {
    Object.assign(this.state, values);
    if (values.text === "") byId("search").value = "";
    this.update();
  }

  show() {
    const { text, module, recipe, state, reason } = this.state;
    for (const box of this.element.querySelectorAll("select")) {
      box.value = this.state[box.dataset.filter];
    }
    this.module.hidden = !module;
    this.module.textContent = module ? `in ${module.path} ✕` : "";
    this.module.setAttribute("aria-label", module ? `Only ${module.path}; show all modules` : "");
    this.clear.hidden = ![text, module, recipe, state, reason].some(Boolean);
  }
}

// [{name, title, id, value(row), of(values)}]: with value a column can be sorted.
function tableColumns(data) {
  return [
    { name: "Module" },
    {
      name: "Shape T×N×K",
      title: "T×N×K of y[T, N] = x[T, K] wᵀ; the output's shape where there is no weight",
    },
    { name: "Recipe" },
    {
      name: "Saved for backward",
      title: "Bytes of its quantized operands",
      id: "saved",
      value: (row) => (row.saved_elements ? row.saved_bytes : null),
      of: sumOf,
    },
    {
      name: "Error, Gaussian = 1",
      title:
        "Relative error divided by that of the same scheme on Gaussian data: the worst operand's, from telemetry, or else the worst GEMM's, from compare",
      id: "error",
      value: (row) => (row.error ? row.error.ratio : null),
      of: largestOf,
    },
    {
      name: "Share",
      title: "Share of the gradient's squared error, measured by q2compile compare",
      id: "share",
      value: shareOf,
      of: sumOf,
    },
    ...data.devices.map(({ column, name }) => ({
      name: `Time on ${name}, BF16 = 1`,
      title: `Predicted time on ${name} divided by BF16's, for its GEMMs and quantizers only`,
      id: column,
      value: (row) => (row.ratios[column] ? middleOf(row.ratios[column]) : null),
      of: largestOf,
    })),
  ];
}

// A line's value, from its rows; null if none has one.
function columnValue(column, rows) {
  const values = rows.map(column.value).filter((value) => value !== null);
  return values.length ? column.of(values) : null;
}

function errorCell(rows) {
  const known = rows.filter((row) => row.error).sort((a, b) => b.error.ratio - a.error.ratio);
  if (!known.length) return h("td", { class: "number error", "data-label": "error" });
  const { ratio, high, what, error, gaussian, step } = known[0].error;
  const at = step === null ? "by compare" : `step ${step}`;
  const title = `${what} of ${known[0].module}: ${error.toPrecision(3)}, Gaussian data ${gaussian.toPrecision(3)}, ${at}`;
  return h(
    "td",
    { class: `number error${high ? " slower" : ""}`, "data-label": "error", title },
    ratio.toFixed(2),
  );
}

// A module's share, once for several matmuls of it.
function shareOf(row, i, rows) {
  return rows.findIndex(({ module }) => module === row.module) === i ? row.share : null;
}

function shareCell(rows) {
  const known = rows.map(shareOf).filter((share) => share !== null);
  const text = known.length ? percentText(sumOf(known)) : "";
  return h("td", { class: "number", "data-label": "share" }, text);
}

function ratioCell(ratio, device) {
  if (ratio === undefined) return h("td", { class: "number ratio", "data-label": device });
  return h(
    "td",
    {
      class: `number ratio${middleOf(ratio) > 1.005 ? " slower" : ""}`,
      "data-label": device,
      title: timeWords(ratio),
    },
    rangeText(ratio, (end) => end.toFixed(2)),
  );
}
