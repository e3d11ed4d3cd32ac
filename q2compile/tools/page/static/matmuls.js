// SPDX-License-Identifier: Apache-2.0
// Every matmul: a table in which equal layers are one line.

// A line is sorted by the largest of its rows' values, or by their sum.
const largestOf = (values) => Math.max(...values);

class Matmuls {
  // links: {module(path), node(row)}: what a click on a module or on "graph" does.
  // onNarrow(match): called with a test for the rows that are shown, null for all.
  constructor(data, links, onNarrow) {
    Object.assign(this, { data, links, onNarrow });
    this.columns = tableColumns(data);
    this.sorted = { column: null, rising: false };
    this.titles = [];
    this.heads = this.columns.map((column) => this.headCell(column));
    this.none = h("caption", "No matmul matches the search.");
    this.table = h("table.matmuls", this.none, h("thead", h("tr", this.heads)));
    byId("table").append(this.table);
    this.show(null);
  }

  // The rows for which match(row) holds; null: all. text: what the search says then.
  narrow(text, match) {
    byId("search").value = text;
    this.show(match);
    byId("matmuls").scrollIntoView();
  }

  show(match) {
    const rows = this.data.rows.filter((row) => !match || match(row));
    const groups = [...Map.groupBy(rows, (row) => row.group).values()];
    const [here, all] = [rows, this.data.rows].map((of) => new Set(of.map((r) => r.layer)).size);
    byId("shown").textContent =
      `${here} of ${countText(all, "matmul")}` +
      (groups.length < rows.length ? `, in ${countText(groups.length, "line")}` : "");
    for (const body of [...this.table.tBodies]) body.remove();
    this.bodies = groups.map((group) => ({ group, body: h("tbody", this.line(group)) }));
    this.order();
    this.none.hidden = rows.length > 0;
    this.onNarrow(match);
  }

  // Puts the lines into the order that was asked for. What is open stays open.
  order() {
    for (const title of this.titles) title.remove();
    this.titles = [];
    for (const [part, title] of Object.entries(PARTS)) {
      const own = this.ordered(this.bodies.filter(({ group }) => group[0].part === part));
      if (own.length && title) {
        this.titles.push(h("tbody", this.wideLine("part", title)));
        this.table.append(this.titles.at(-1));
      }
      this.table.append(...own.map(({ body }) => body));
    }
  }

  wideLine(kind, content) {
    return h(`tr.${kind}`, h("td", { colspan: this.columns.length }, content));
  }

  // Bodies in the order that was asked for; those without a figure last.
  ordered(bodies) {
    const { column, rising } = this.sorted;
    if (!column) return bodies;
    const key = ({ group }) => (columnValue(column, group) ?? NaN) * (rising ? 1 : -1);
    const known = bodies.filter((one) => !Number.isNaN(key(one)));
    const others = bodies.filter((one) => Number.isNaN(key(one)));
    return [...known.sort((one, other) => key(one) - key(other)), ...others];
  }

  // The largest first, at the second click the smallest, at the third in the model's order.
  sortBy(column, head) {
    const again = this.sorted.column === column;
    this.sorted = again && this.sorted.rising ? { column: null } : { column, rising: again };
    for (const other of this.heads) other.removeAttribute("aria-sort");
    if (this.sorted.column) head.setAttribute("aria-sort", again ? "ascending" : "descending");
    this.order();
  }

  headCell(column) {
    const { name, title, id, value } = column;
    if (!value) return h("th", { title }, name);
    const onClick = () => this.sortBy(column, head);
    const head = h("th.number", { title }, h("button.link", { "data-sort": id, onClick }, name));
    return head;
  }

  // The line of a group of rows; a click opens the details of the first.
  line(rows, kind = "") {
    const [first] = rows;
    const several = rows.length > 1;
    const name = h("code", several ? first.groupPath : first.path.join("."));
    const opener = h("button.link.opener", { "aria-expanded": "false" }, name);
    const onClick = ({ target, currentTarget: line }) => {
      if (target.closest(".copies")) return;
      const open = line.classList.toggle("open");
      opener.setAttribute("aria-expanded", String(open));
      if (open) line.after(this.wideLine("detail", details(this.data, first, this.links)));
      else line.nextElementSibling.remove();
    };
    const each = () => rows.map((row) => this.line([row], ".one"));
    return h(
      `tr.row.${first.state.replace(" ", "-")}${kind}`,
      { onClick },
      h("td.module", opener, several ? copiesButton(rows.length, each) : null),
      h("td.mono", first.shapeText),
      h("td", chip(first)),
      this.columns.slice(3, 6).map((column) => figureCell(column, rows)),
      first.taken
        ? this.columns.slice(6).map((column) => figureCell(column, rows))
        : h("td.reason", { colspan: this.data.devices.length }, first.reason),
    );
  }
}

// A test for the matmuls whose names contain all words of a search; null for all.
function searched(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const names = ({ path, groupPath, module, shapeText, spelling, why, state, recipe }) =>
    [path.join("."), groupPath, module, shapeText, spelling, why, state]
      .concat(recipe ? recipe.name : "bf16")
      .join(" ")
      .toLowerCase();
  const matches = (row) => words.every((word) => (row.names ||= names(row)).includes(word));
  return words.length ? matches : null;
}

// [{name, title, id, value(row), of(values), text(value, row), more(row)}]: those with value have a
// figure, and can be sorted by it. row: the first of a line that has the value; more: attributes of
// the cell.
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
      text: bytesText,
    },
    {
      name: "Error, Gaussian = 1",
      title:
        "Relative error divided by that of the same scheme on Gaussian data: the worst operand's, from telemetry, or else the worst GEMM's, from compare",
      id: "error",
      value: (row) => row.error?.ratio ?? null,
      of: largestOf,
      text: (ratio) => ratio.toFixed(2),
      more: errorAttributes,
    },
    {
      name: "Share",
      title: "Share of the gradient's squared error, measured by q2compile compare",
      id: "share",
      value: shareOf,
      of: sumOf,
      text: percentText,
    },
    ...data.devices.map(({ column, name }) => ({
      name: `Time on ${name}, BF16 = 1`,
      title: `Predicted time on ${name} divided by BF16's, for its GEMMs and quantizers only`,
      id: column,
      value: (row) => row.predicted[column]?.ratio ?? null,
      of: largestOf,
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
  const more = value !== null && column.more?.(of);
  const text = value === null ? "" : column.text(value, of);
  return h("td", { class: "number", "data-column": column.id, ...more }, text);
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
