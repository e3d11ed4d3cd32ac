// SPDX-License-Identifier: Apache-2.0
// The model as a tree of modules: a line each, equal layers in one line, which opens.

const FIRST_LINES = 24;

class Tree {
  // pick(item): called with the line that was chosen, to show its matmuls.
  constructor(data, pick) {
    Object.assign(this, { data, pick, opened: new Set(), apart: new Set(), match: null });
    this.root = h("div.tree");
    this.openFirst();
    this.render();
  }

  // Opens level by level, as long as everything fits on a screen.
  openFirst() {
    let level = this.tops();
    for (let lines = level.length; level.length;) {
      const inner = level.flatMap((item) => this.innerOf(item));
      lines += inner.length;
      if (lines > FIRST_LINES && this.opened.size) return;
      for (const { path } of level) this.opened.add(path);
      level = inner;
    }
  }

  tops() {
    return childItems([this.data.tree], "");
  }

  innerOf(item) {
    if (item.copies > 1 && this.apart.has(item.path)) return apart(item);
    return childItems(item.nodes, `${item.path}.`);
  }

  // Shows only lines with a row for which match(row) holds; null shows all.
  narrow(match) {
    this.match = match;
    this.render();
  }

  matching(items) {
    return items.filter(({ rows }) => !this.match || rows.some(this.match));
  }

  render() {
    const lines = this.matching(this.tops()).map((item) => this.element(item, 0));
    this.root.replaceChildren(...lines);
    if (!lines.length) this.root.append(h("p.empty", "No module matches."));
  }

  element(item, level) {
    const inner = this.matching(this.innerOf(item));
    const attributes = { "data-path": item.path, style: { "--level": level } };
    if (!inner.length) return h("div.line", { ...attributes, tabindex: -1 }, this.cells(item));
    const onClick = () => this.match || toggleIn(this.opened, item.path);
    return h(
      "details",
      { open: this.match !== null || this.opened.has(item.path) },
      h("summary.line", { ...attributes, onClick }, this.cells(item)),
      inner.map((one) => this.element(one, level + 1)),
    );
  }

  cells(item) {
    const sum = totals(item.rows);
    const isApart = this.apart.has(item.path);
    const toggleApart = () => {
      toggleIn(this.apart, item.path);
      this.opened.add(item.path);
      this.render();
    };
    const onClick = (event) => {
      event.preventDefault();
      event.stopPropagation();
      this.pick(item);
    };
    return [
      h(
        "span.name",
        h("code", item.label),
        item.copies > 1 ? copiesButton(item.copies, isApart, toggleApart) : null,
      ),
      sum.weights ? recipeMeter(sum) : h("span.muted.small", "no weight"),
      h("span.number.muted", sum.weights ? `${sum.taken}/${sum.weights}` : ""),
      h("span.number.muted", sum.saved ? bytesText(sum.saved) : ""),
      h("button.link.go", { "aria-label": `Show the matmuls of ${item.path}`, onClick }, "show"),
    ];
  }

  // Opens the way to a module's line, and goes there; to the line of the equal layers it is one of.
  reveal(path) {
    this.match = null;
    const inside = (item) => item.path.startsWith(`${path}.`);
    let found = null;
    for (let items = this.tops(); ; items = this.innerOf(found)) {
      const next = items.find((item) => holds(item, path)) || (found ? null : items.find(inside));
      if (!next) break;
      if (found) this.opened.add(found.path);
      found = next;
    }
    this.render();
    const lines = [...this.root.querySelectorAll(".line")];
    const line = lines.find(({ dataset }) => dataset.path === found?.path);
    line?.focus({ preventScroll: true });
    line?.scrollIntoView({ block: "center" });
  }
}

// Whether a line stands for the module at ``path``, for what holds it, or for layers it is one of.
function holds(item, path) {
  const inside = (row) => `${row.path.join(".")}.`.startsWith(`${path}.`);
  const depth = item.path.split(".").length;
  return item.rows.some(inside) && depth <= path.split(".").length;
}
