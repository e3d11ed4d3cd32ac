// SPDX-License-Identifier: Apache-2.0
// Every matmul: filters, and a table in which equal layers are one line.

// A line is sorted by the largest of its rows' values, or by their sum.
const largestOf = (values) => Math.max(...values);
const NO_FILTERS = { text: "", module: null, recipe: "", state: "", reason: "" };

class Matmuls {
  // links: {module(path), node(row)}: what a click on a module or on "graph" does.
  // onNarrow(match): called with a test for the rows that the search leaves, null for all.
  constructor(data, links, onNarrow) {
    Object.assign(this, { data, links, onNarrow, opened: new Set(), apart: new Set() });
    this.columns = tableColumns(data);
    this.sorted = { column: null, rising: false };
    this.products = false; // whether matmuls without a weight are shown although others are
    this.filters = { ...NO_FILTERS };
    this.table = h("table.matmuls");
    byId("filters").append(this.controls());
    byId("table").append(this.table);
    this.update();
  }

  // The selects and buttons over the table.
  controls() {
    const { rows, recipes } = this.data;
    const same = (names) => names.map((name) => [name, name]);
    const states = STATES.filter((name) => rows.some((row) => row.state === name));
    const reasons = [...new Set(rows.map((row) => row.reason).filter(Boolean))];
    const select = (key, label, options) => {
      const onChange = ({ target }) => this.change({ [key]: target.value });
      const each = [["", "all"], ...options].map(([value, text]) => h("option", { value }, text));
      const box = h("select", { "data-filter": key, onChange }, each);
      return options.length ? h("label", h("span", label), box) : null;
    };
    this.module = h("button.module-filter", { onClick: () => this.change({ module: null }) });
    this.clear = h("button.quiet", { onClick: () => this.change(NO_FILTERS) }, "Clear");
    return h("div.filter-row", [
      select("state", "Which", same(states)),
      select("recipe", "Recipe", Object.entries(recipes.map(({ name }) => name))),
      select("reason", "Reason", same(reasons)),
      this.module,
      this.clear,
    ]);
  }

  change(values) {
    Object.assign(this.filters, values);
    if (values.text === "") byId("search").value = "";
    this.update();
  }

  // Only these filters, and the search.
  narrow(filters) {
    this.change({ ...NO_FILTERS, text: this.filters.text, ...filters });
  }

  showControls() {
    const { module } = this.filters;
    for (const box of document.querySelectorAll("#filters select"))
      box.value = this.filters[box.dataset.filter];
    this.module.hidden = !module;
    this.module.textContent = module ? `in ${module.path} ✕` : "";
    this.module.setAttribute("aria-label", module ? `Only ${module.path}; show all modules` : "");
    this.clear.hidden = !Object.values(this.filters).some(Boolean);
  }

  matches(row) {
    const { text, module, recipe, state, reason } = this.filters;
    return (
      textMatches(row, text) &&
      (!module || module.rows.has(row)) &&
      (recipe === "" || String(row.recipe?.place) === recipe) &&
      (state === "" || row.state === state) &&
      (reason === "" || row.reason === reason)
    );
  }

  update() {
    this.showControls();
    const { text, state, reason } = this.filters;
    const rows = this.data.rows.filter((row) => this.matches(row));
    const products = rows.filter((row) => !row.has_parameter);
    // Products of activations, as attention has them, are one line while nobody asks for them.
    const folds = !(text || state || reason) && products.length && products.length < rows.length;
    const listed = rows.filter((row) => row.has_parameter || !folds || this.products);
    const groups = [...Map.groupBy(listed, (row) => row.group)];
    const lines = groups.length + (folds && !this.products ? 1 : 0);
    const [here, all] = [rows, this.data.rows].map((of) => new Set(of.map((r) => r.layer)).size);
    byId("shown").textContent =
      `${here} of ${countText(all, "matmul")}` +
      (lines < rows.length ? `, in ${countText(lines, "line")}` : "");
    const parts = PARTS.map((part, i) => {
      const own = groups.filter(([, [row]]) => row.part === part);
      const elements = this.ordered(own).flatMap(([key, of]) => this.groupLines(key, of));
      const title = `The same matmuls, compiled for ${part}`;
      if (i === 0 && folds) elements.push(this.wideLine("products", this.productsButton(products)));
      if (i > 0 && elements.length) elements.unshift(this.wideLine("part", title));
      return h("tbody", elements);
    });
    const head = this.columns.map((column) => this.headCell(column));
    this.table.replaceChildren(h("thead", h("tr", head)), ...parts);
    if (!rows.length) this.table.append(h("caption", "No matmul matches these filters."));
    this.onNarrow(text ? (row) => textMatches(row, text) : null);
  }

  wideLine(kind, content) {
    return h(`tr.${kind}`, h("td", { colspan: this.columns.length }, content));
  }

  productsButton(products) {
    const count = countText(layersOf(products).length, "product");
    const label = `${count} of activations, such as attention's, without a weight`;
    const onClick = () => {
      this.products = !this.products;
      this.update();
      this.table.querySelector(".products button").focus({ preventScroll: true });
    };
    return opener("link", this.products, { onClick }, label);
  }

  // Groups [key, rows] in the order that was asked for; those without a figure last.
  ordered(groups) {
    const { column, rising } = this.sorted;
    if (!column) return groups;
    const key = ([, rows]) => (columnValue(column, rows) ?? NaN) * (rising ? 1 : -1);
    const known = groups.filter((group) => !Number.isNaN(key(group)));
    const others = groups.filter((group) => Number.isNaN(key(group)));
    return [...known.sort((one, other) => key(one) - key(other)), ...others];
  }

  sortBy(column) {
    const again = this.sorted.column === column;
    this.sorted = again && this.sorted.rising ? { column: null } : { column, rising: again };
    this.update();
    this.table.querySelector(`[data-sort="${column.id}"]`).focus({ preventScroll: true });
  }

  headCell(column) {
    const { name, title, id, value } = column;
    if (!value) return h("th", { title }, name);
    const here = this.sorted.column === column;
    const direction = this.sorted.rising ? "ascending" : "descending";
    const mark = here ? (this.sorted.rising ? " ▲" : " ▼") : "";
    const onClick = () => this.sortBy(column);
    const button = h("button.link", { "data-sort": id, onClick }, name + mark);
    return h("th.number", { title, "aria-sort": here ? direction : null }, button);
  }

  groupLines(key, rows) {
    const lines = [this.line(key, rows)];
    if (this.opened.has(key))
      lines.push(this.wideLine("detail", details(this.data, rows[0], this.links)));
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
    const open = this.opened.has(key);
    const onClick = () => this.toggle(this.opened, key);
    const name = h("code", several ? first.groupPath : first.path.join("."));
    const copies = () =>
      copiesButton(rows.length, this.apart.has(key), () => this.toggle(this.apart, key));
    const { devices } = this.data;
    return h(
      `tr.row.${first.state.replace(" ", "-")}${open ? ".open" : ""}`,
      { onClick: (event) => event.target.closest("button") || onClick() },
      h(
        "td.module",
        opener("link.opener", open, { "data-key": key, onClick }, name),
        several ? copies() : null,
      ),
      h("td.mono", { "data-label": "shape" }, first.shapeText),
      h("td", { "data-label": "recipe" }, chip(first)),
      this.columns.slice(3, 6).map((column) => figureCell(column, rows)),
      first.taken
        ? this.columns.slice(6).map((column) => figureCell(column, rows))
        : h("td.reason", { colspan: devices.length }, first.reason),
    );
  }

  toggle(keys, key) {
    toggleIn(keys, key);
    this.update();
    const openers = [...this.table.querySelectorAll(".opener")];
    openers.find((element) => element.dataset.key === key)?.focus({ preventScroll: true });
  }

  search(text) {
    this.filters.text = text.trim().toLowerCase();
    this.update();
  }
}

function opener(kind, open, attributes, label) {
  const twisty = h("span.twisty", { "aria-hidden": "true" }, open ? "▾" : "▸");
  return h(`button.${kind}`, { "aria-expanded": String(open), ...attributes }, twisty, label);
}

// Whether a matmul's names contain all words of a search.
function textMatches(row, text) {
  if (!text) return true;
  const { path, groupPath, module, shapeText, spelling, why, recipe } = row;
  row.searched ||= [path.join("."), groupPath, module, shapeText, spelling, why]
    .concat(recipe ? recipe.name : "bf16")
    .join(" ")
    .toLowerCase();
  return text.split(/\s+/).every((word) => row.searched.includes(word));
}

// [{name, title, label, id, value(row), of(values), text(value, row), more(row, value)}]: those
// with value have a figure, and can be sorted by it. row: the first of a line that has the value;
// more: attributes of the cell.
function tableColumns(data) {
  const ratio = (name, value, more) => ({
    ...{ value, of: largestOf, label: name, text: (number) => number.toFixed(2), more },
  });
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
      label: "saved",
      id: "saved",
      value: (row) => (row.saved_elements ? row.saved_bytes : null),
      of: sumOf,
      text: bytesText,
    },
    {
      ...ratio("error", (row) => row.error?.ratio ?? null, errorAttributes),
      name: "Error, Gaussian = 1",
      title:
        "Relative error divided by that of the same scheme on Gaussian data: the worst operand's, from telemetry, or else the worst GEMM's, from compare",
      id: "error",
    },
    {
      name: "Share",
      title: "Share of the gradient's squared error, measured by q2compile compare",
      label: "share",
      id: "share",
      value: shareOf,
      of: sumOf,
      text: percentText,
    },
    ...data.devices.map(({ column, name }) => ({
      ...ratio(name),
      name: `Time on ${name}, BF16 = 1`,
      title: `Predicted time on ${name} divided by BF16's, for its GEMMs and quantizers only`,
      id: column,
      value: (row) => row.predicted[column]?.ratio ?? null,
      text: (_, row) => row.predicted[column].text,
      more: (row) => ratioAttributes(row.predicted[column]),
    })),
  ];
}

// A line's value, from its rows; null if none has one.
function columnValue(column, rows) {
  const values = rows.map(column.value).filter((value) => value !== null);
  return values.length ? column.of(values) : null;
}

function figureCell(column, rows) {
  const value = columnValue(column, rows);
  const of = rows.find((row, i) => column.value(row, i, rows) === value);
  const more = value !== null && column.more ? column.more(of, value) : { class: "number" };
  return h("td", { "data-label": column.label, ...more }, value === null ? "" : column.text(value, of));
}

function errorAttributes({ module, error: { high, what, error, gaussian, step } }) {
  const at = step === null ? "by compare" : `step ${step}`;
  const title = `${what} of ${module}: ${error.toPrecision(3)}, Gaussian data ${gaussian.toPrecision(3)}, ${at}`;
  return { class: `number error${high ? " slower" : ""}`, title };
}

function ratioAttributes({ slower, words }) {
  return { class: `number ratio${slower ? " slower" : ""}`, title: words };
}

// A module's share, once for several matmuls of it.
function shareOf(row, i, rows) {
  return rows.findIndex(({ module }) => module === row.module) === i ? row.share : null;
}
